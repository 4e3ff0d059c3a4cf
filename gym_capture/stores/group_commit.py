"""Group commit: many writers, one sync.

Invariant: a write is decided on against durable state only, answered only after everything it was decided on is
durable, and shows in memory only then. A write that fails leaves nothing to undo.

Flow: `submit` queues -> when the disk is idle, everything queued is decided in order and becomes one batch -> a
thread appends and syncs it -> its events are applied, its writers answered; meanwhile the next batch gathers. Two
writes about the same call never share a batch, so the second is decided when the first is durable; nor does a write
about a whole rollout with any other write about that rollout.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gym_capture.capture.facts import Event
from gym_capture.capture.rollout_state import Decision
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.stores.base import CommitCounts
from gym_capture.stores.frames import Draft, frame_size
from gym_capture.stores.log_records import draft_of
from gym_capture.stores.segments import Location, SegmentWriter

_BATCH_BYTES: Final = 8 << 20
"""A batch is closed at this size, so that one huge write does not hold up the answers to many small ones."""


@dataclass(slots=True, eq=False)
class Write:
    """One operation of one caller."""

    rollout_id: str
    subject: str | None
    """The part of the rollout that it is about, e.g. a call id; None: all of it."""
    decide: Callable[[], Decision]
    """May raise what this caller is told, e.g. of a wrong type: it concerns nobody else."""
    encoded: bytes = b""
    """The intent or the entry, encoded by the caller, so that what cannot be encoded fails that caller alone."""


class Ledger(Protocol):
    """The index that a group commit keeps up to date."""

    def epoch_floor(self) -> int:
        """A number above every epoch that was given out so far."""
        ...

    def apply(self, write: Write, event: Event, location: Location) -> None:
        """The event of `write` is durable at `location`."""
        ...

    def give_up(self, write: Write) -> None:
        """The event of `write` could not be made durable."""
        ...


@dataclass(slots=True)
class _Batch:
    """Decided writes with their events and answers, and which rollouts and calls they are about."""

    writes: list[tuple[_Queued, Event, int | GymCaptureError]] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    size_bytes: int = 0
    _rollouts: set[str] = field(default_factory=set)
    _subjects: set[tuple[str, str | None]] = field(default_factory=set)

    def excludes(self, write: Write) -> bool:
        if write.subject is None:
            return write.rollout_id in self._rollouts
        return (write.rollout_id, write.subject) in self._subjects or (write.rollout_id, None) in self._subjects

    def add(self, queued: _Queued, event: Event, answer: int | GymCaptureError) -> None:
        write = queued.write
        draft = draft_of(write.rollout_id, event, write.encoded)
        self.writes.append((queued, event, answer))
        self.drafts.append(draft)
        self.size_bytes += frame_size(draft)
        self._rollouts.add(write.rollout_id)
        self._subjects.add((write.rollout_id, write.subject))


@dataclass(slots=True, eq=False)
class _Submission:
    """Writes that were submitted together, and are answered when all of them are settled."""

    answers: list[int | GymCaptureError]
    unsettled: int
    answer: asyncio.Future[list[int | GymCaptureError]]

    def settle(self, place: int, answer: int | GymCaptureError) -> None:
        self.answers[place] = answer
        self.unsettled -= 1
        # A caller that has gone away cancelled its answer; its writes count all the same.
        if not self.unsettled and not self.answer.done():
            self.answer.set_result(self.answers)


@dataclass(slots=True, eq=False)
class _Queued:
    write: Write
    submission: _Submission
    place: int

    def settle(self, answer: int | GymCaptureError) -> None:
        self.submission.settle(self.place, answer)


class GroupCommit:
    """Makes writes durable in batches. Lives on one event loop."""

    def __init__(self, writer: SegmentWriter, ledger: Ledger) -> None:
        self._writer = writer
        self._ledger = ledger
        self._queue: deque[_Queued] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gym-capture-log-writer")
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self.counts = CommitCounts()

    @property
    def queued(self) -> int:
        """Writes that no batch has taken yet."""
        return len(self._queue)

    async def submit(self, writes: Sequence[Write]) -> list[int | GymCaptureError]:
        """Queues writes and waits for all of them. To each, in its place: its epoch once it is durable, or why not."""
        if self._is_closed:
            raise StoreUnavailableError("this store is closed")
        if not writes:
            return []
        loop = asyncio.get_running_loop()
        submission = _Submission([0] * len(writes), len(writes), loop.create_future())
        self._queue.extend(_Queued(write, submission, place) for place, write in enumerate(writes))
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return await submission.answer

    async def write(self, writes: Sequence[Write]) -> None:
        """Submits writes and waits for all of them; raises what the first that failed is told."""
        for answer in await self.submit(writes):
            if isinstance(answer, GymCaptureError):
                raise answer

    async def close(self) -> None:
        """Makes what is queued durable, then closes the segment."""
        self._is_closed = True
        if self._running is not None:
            await self._running
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
        self._thread.shutdown()

    async def _run(self) -> None:
        try:
            while self._queue:
                floor = self._ledger.epoch_floor()
                batch = self._next_batch()
                if batch.writes:
                    await self._commit(batch, epoch_floor=floor)
        finally:
            # Left over only if the event loop is shutting down, or by a defect: nobody may wait for ever.
            for queued in self._queue:
                queued.settle(StoreUnavailableError("the writer of the log has stopped"))
            self._queue.clear()

    def _next_batch(self) -> _Batch:
        batch = _Batch()
        deferred: list[_Queued] = []
        while self._queue and batch.size_bytes < _BATCH_BYTES:
            queued = self._queue.popleft()
            if batch.excludes(queued.write):
                deferred.append(queued)
                continue
            try:
                event, error, epoch = queued.write.decide()
            except GymCaptureError as refused:
                queued.settle(refused)
                continue
            answer = epoch if error is None else error
            if event is None:
                queued.settle(answer)
            else:
                batch.add(queued, event, answer)
        self._queue.extendleft(reversed(deferred))
        return batch

    async def _commit(self, batch: _Batch, *, epoch_floor: int) -> None:
        failure = "the writer of the log has stopped"
        locations: list[Location] | None = None
        try:
            locations = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._writer.append(batch.drafts, epoch_floor=epoch_floor)
            )
        except OSError as error:
            failure = f"the log cannot be written: {error}"
        finally:
            self._settle(batch, locations, failure)

    def _settle(self, batch: _Batch, locations: list[Location] | None, failure: str) -> None:
        counts = self.counts
        if locations is None:
            self.counts = replace(counts, failed_batches=counts.failed_batches + 1)
            for queued, _, _ in batch.writes:
                self._ledger.give_up(queued.write)
                queued.settle(StoreUnavailableError(failure, rollout_id=queued.write.rollout_id))
            return
        self.counts = replace(
            counts,
            records=counts.records + len(locations),
            batches=counts.batches + 1,
            bytes_written=counts.bytes_written + batch.size_bytes,
        )
        for (queued, event, answer), location in zip(batch.writes, locations, strict=True):
            self._ledger.apply(queued.write, event, location)
            queued.settle(answer)
