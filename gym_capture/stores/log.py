"""A store on a write-ahead log: the one that a state actor hosts.

Invariant: what was acknowledged is on disk, and `LogStore.open` after a crash at any moment knows exactly the
acknowledged writes, plus possibly some that were under way. What cannot be read any more masks the rollouts that it
may have belonged to. Memory holds a digest and a location for each call, never a record.

Flow: a write is decided and made durable by `group_commit` -> `apply` notes where it stands -> `freeze` reads the
rollout back. What retires a rollout leaves dead bytes behind; when most of a closed segment is dead, what is alive in
it is copied to the end of the log and the segment is deleted. As records are facts whose order does not matter
(`rollout_state`), a crash in the middle of that only leaves copies.

The format is described in docs/log-format.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gym_capture.capture.operations import Clear, Close, Drop, MarkIncomplete, Operation, Replay
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.capture.rollout_state import Frozen, RolloutStatus
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.stores.base import CountedStore, EncodedStore, ListedStore, MeasuredStore, StoreFactory, StoreStats
from gym_capture.stores.compaction import Compactor
from gym_capture.stores.frames import check_key
from gym_capture.stores.group_commit import GroupCommit, Write
from gym_capture.stores.log_index import LogIndex
from gym_capture.stores.mirror import Mirror
from gym_capture.stores.reading import read_snapshot
from gym_capture.stores.recovery import Recovery, recover
from gym_capture.stores.rollout_states import prepared
from gym_capture.stores.segments import (
    Disk,
    Location,
    ReadThread,
    SegmentWriter,
    lock_directory,
    make_directory,
)

__all__ = ["LogStore", "open_log"]

_DISK: Final = Disk()


class LogStore(EncodedStore, ListedStore, CountedStore, MeasuredStore):
    """A `RecordStore` on one directory. Made by `open`; lives on one event loop."""

    def __init__(
        self,
        *,
        directory: Path,
        lock: int,
        index: LogIndex,
        writer: SegmentWriter,
        recovery: Recovery,
        tombstone_ttl_s: float,
        mirror: Mirror | None,
    ) -> None:
        self.recovery = recovery
        """Findings of the directory's opening."""
        self._directory = directory
        self._lock = lock
        self._index = index
        self._reads = ReadThread(directory)
        self._commits = GroupCommit(writer, index)
        self._compactor = Compactor(
            directory=directory,
            index=index,
            commits=self._commits,
            reads=self._reads,
            tombstone_ttl_s=tombstone_ttl_s,
            copy=mirror,
        )
        self._mirror = mirror
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        directory: str | Path,
        *,
        segment_bytes: int = 64 << 20,
        fsync: bool = True,
        keep_records: bool = False,
        tombstone_ttl_s: float = 86_400.0,
        disk: Disk = _DISK,
        mirror: Mirror | None = None,
    ) -> LogStore:
        """Opens a log directory, making it if it does not exist, and reads it from end to end.

        segment_bytes: a segment that has reached this size is closed; compaction works on closed ones.
        fsync: without it an acknowledged write survives the process, but not the machine.
        keep_records: what a `Drop` consumes stays on disk, readable through `gym_capture.stores.inspect`.
        tombstone_ttl_s: how long, at least, a rollout that was dropped or closed refuses late calls.
        mirror: where the log is kept a second time, and is taken from if its own directory was lost.

        Raises `StoreUnavailableError` if another process holds the directory or the disk does not let it be read and
        repaired, `CorruptLogError` if a newer version wrote it. Damage inside is not an error: see `recovery`.
        """

        def read() -> LogStore:
            path = make_directory(directory)
            lock = lock_directory(path)
            try:
                if mirror is not None:
                    mirror.restore(path)
                writer = SegmentWriter(path, segment_bytes=segment_bytes, fsync=fsync, disk=disk, copy=mirror)
                index, recovery = recover(path, writer, keep_records=keep_records)
                if mirror is not None:
                    mirror.attach(path)
            except BaseException:
                os.close(lock)
                raise
            return cls(
                directory=path,
                lock=lock,
                index=index,
                writer=writer,
                recovery=recovery,
                tombstone_ttl_s=tombstone_ttl_s,
                mirror=mirror,
            )

        try:
            return await asyncio.to_thread(read)
        except OSError as error:
            raise StoreUnavailableError(f"the log directory {directory} cannot be opened: {error}") from error

    # writing

    async def write(self, operation: Operation) -> int:
        (answer,) = await self.write_many([operation])
        if isinstance(answer, GymCaptureError):
            raise answer
        return answer

    async def write_many(self, operations: Sequence[Operation]) -> list[int | GymCaptureError]:
        """`write` on behalf of many callers: one wait for all. To each, in its place, the answer or the error."""
        answers: list[int | GymCaptureError] = [0] * len(operations)
        places: list[int] = []
        writes: list[Write] = []
        for place, operation in enumerate(operations):
            try:
                writes.append(self._queueable(operation))
                places.append(place)
            except GymCaptureError as error:
                answers[place] = error
        for place, answer in zip(places, await self._commits.submit(writes), strict=True):
            answers[place] = answer
        if any(isinstance(operation, Drop | Clear | Close) for operation in operations):
            self._compactor.trigger()
        return answers

    # reading

    async def freeze(self, rollout_id: str) -> Snapshot:
        frozen, entries = self._frozen(rollout_id)
        return await self._reads.run(lambda reader: decode_snapshot(read_snapshot(reader, frozen, entries)))

    async def freeze_encoded(self, rollout_id: str) -> bytes:
        """`freeze` for shipping: bytes for `snapshot_codec.decode_snapshot`, without decoding the records here."""
        frozen, entries = self._frozen(rollout_id)
        return await self._reads.run(lambda reader: read_snapshot(reader, frozen, entries))

    async def rollout_ids(self) -> Sequence[str]:
        self._check_open()
        return self._index.states.live_ids()

    async def standings(self) -> Sequence[Standing]:
        self._check_open()
        return self._index.states.standings()

    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]:
        self._check_open()
        return [self._index.states.counts(rollout_id) for rollout_id in rollout_ids]

    async def status(self, rollout_id: str) -> RolloutStatus:
        self._check_open()
        return self._index.states.status(rollout_id)

    async def compact(self) -> None:
        """Gives back what disk space it can now, instead of when it happens to be looked for after a `Drop`."""
        self._check_open()
        self._compactor.trigger()
        await self._compactor.finished()

    def stats(self) -> StoreStats:
        sizes = self._index.sizes
        return StoreStats(
            live_rollouts=self._index.states.known_rollouts,
            segments=len(sizes),
            total_bytes=sum(sizes.values()),
            live_bytes=sum(self._index.live_bytes(number) for number in sizes),
            queued_writes=self._commits.queued,
            has_lost_mirror=self._mirror is not None and not self._mirror.is_attached,
            commits=self._commits.counts,
        )

    async def close(self) -> None:
        """Makes what was submitted durable, then lets go of the directory. Repeating it is a no-op."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._compactor.close()
        await self._commits.close()
        await self._reads.close()
        os.close(self._lock)

    def _queueable(self, operation: Operation) -> Write:
        """Raises `RecordError` or `InvalidRolloutIdError`, which concern nobody else."""
        write, subject = prepared(operation), _subject(operation)
        check_key(operation.rollout_id, subject or "")
        return Write(operation.rollout_id, subject, partial(self._index.states.decide, write), write.encoded)

    def _frozen(self, rollout_id: str) -> tuple[Frozen, list[tuple[str, Location]]]:
        self._check_open()
        return self._index.states.freeze(rollout_id), self._index.entries(rollout_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("this store is closed")


def _subject(operation: Operation) -> str | None:
    """The part of its rollout that an operation is about (`Write.subject`)."""
    match operation:
        case Drop() | Clear():
            return None
        case MarkIncomplete(_, reason):
            return f"\0reason {reason}"
        case Replay(_, _, recorded):
            return f"\0recorded {recorded}"
        case _:
            return operation.call_id


open_log: Final = StoreFactory(LogStore.open, takes_mirror=True)
"""The default of `state.store`."""
