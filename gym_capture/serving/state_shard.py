"""A state actor: the store and the lineage of its share of the rollouts.

Invariant: a `Commit` is acknowledged only when it is durable in the shard's store *and* its lineage would find it, so a
`resolve` from any replica that starts after the acknowledgement sees it. An actor that restarts opens its store before
it answers anything. Store and lineage live in one actor on purpose: one round trip registers a call's intent and
resolves its parent, one commits it, and there is no moment at which the store has a record that lineage lacks.

Flow: a client's `batch` -> `BeginCall` -> `Commit` -> ... `freeze` -> `Drop`. The commits of a batch take one way
together, since there are as many as the cluster generates calls: each record is decoded once, for store and lineage,
and all wait for one answer of the store. Records that wait for a slow disk are bounded by turning new calls away,
before they cost any compute; a call that has generated is always taken.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from gym_capture.capture.operations import (
    Abandon,
    Begin,
    Clear,
    Close,
    Commit,
    Complete,
    Drop,
    GoOn,
    HandOn,
    MarkDelivery,
    MarkIncomplete,
    Operation,
    Register,
)
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.protocols import RecordStore
from gym_capture.capture.snapshot_codec import decode_stored, encode_snapshot
from gym_capture.capture.suffixes import StoredRollout, stored_form
from gym_capture.cluster.metrics import PUBLISH_EVERY_S
from gym_capture.errors import GymCaptureError, RecordError, StaleSnapshotError, StoreError, StoreOverloadedError
from gym_capture.lineage.cache import LineageCache
from gym_capture.reasons import lineage_mark
from gym_capture.serving.idle import IdleTimes
from gym_capture.serving.metrics import ShardMetrics
from gym_capture.serving.mirror import mirror_of
from gym_capture.serving.outgrown import Outgrown
from gym_capture.serving.state_messages import (
    BeginCall,
    Begun,
    CommitBytes,
    IsOutgrown,
    ReadCounts,
    ReadStatus,
    Request,
    Resolve,
    TooLong,
    is_commit,
    unpacked,
)
from gym_capture.serving.stats import ShardStats, Tally
from gym_capture.stores.base import EncodedStore, MeasuredStore, StoreFactory, counts_of, standings_of, status_of

logger = logging.getLogger(__name__)

LINEAGE_BYTES: Final = 512 << 20
WAITING_BYTES: Final = 256 << 20
_LOOK_FOR_IDLE_EVERY_S: Final = 60.0


class StateShard:
    """One state actor.

    lineage_bytes: memory for lineage; rollouts that were not used lately are read from the store again when they are.
    waiting_bytes: while records of this size wait to become durable, no call begins.
    max_idle_s: a live rollout that nothing was written to or read from for so long is retired, its records are given
    up. None: never.
    replicas: 2 keeps a second copy of the log on another node (`mirror`).
    namespace: the Ray namespace that the actor runs in. None: it is no actor, and exports no metrics.
    """

    def __init__(
        self,
        *,
        index: int,
        shards: int,
        store: str,
        store_kwargs: Mapping[str, Any],
        directory: str,
        lineage_bytes: int = LINEAGE_BYTES,
        waiting_bytes: int = WAITING_BYTES,
        max_idle_s: float | None = None,
        replicas: int = 1,
        namespace: str | None = None,
    ) -> None:
        self._index = index
        self._shards = shards
        self._store_path = store
        self._store_kwargs = dict(store_kwargs)
        self._root = Path(directory).expanduser()
        self._lineage_bytes = lineage_bytes
        self._waiting_bytes = waiting_bytes
        self._max_idle_s = max_idle_s
        self._replicas = replicas
        self._namespace = namespace
        self._tasks: list[asyncio.Task[None]] = []
        self._tally = Tally()
        self._hosted: _Hosted | None = None
        self._opening = asyncio.Lock()

    async def _opened(self) -> _Hosted:
        """The shard's store and lineage, opened on first use: an actor's constructor cannot await."""
        if self._hosted is None:
            async with self._opening:
                if self._hosted is None:
                    store = await self._open_store()
                    lineage = LineageCache(_reader(store), max_bytes=self._lineage_bytes)
                    live = await store.rollout_ids()
                    lineage.expect(live)
                    metrics = None
                    if self._namespace is not None:
                        metrics = ShardMetrics(namespace=self._namespace, index=self._index)
                    self._hosted = _Hosted(
                        store,
                        lineage,
                        IdleTimes(live),
                        self._tally,
                        metrics,
                        self._waiting_bytes,
                        encoded=store if isinstance(store, EncodedStore) else None,
                        measured=store if isinstance(store, MeasuredStore) else None,
                        outgrown=Outgrown(),
                    )
                    if metrics is not None:
                        # What the process has made by now it keeps: looking through all of it again and again for
                        # garbage would cost every put a tenth of its processor time.
                        gc.collect()
                        gc.freeze()
                        self._tasks.append(asyncio.create_task(_publish(metrics, self._hosted)))
                    if self._max_idle_s is not None:
                        self._tasks.append(asyncio.create_task(self._retire_idle_ones(self._max_idle_s)))
        return self._hosted

    async def _open_store(self) -> RecordStore:
        kwargs = dict(self._store_kwargs)
        if self._replicas > 1 and self._namespace is not None:
            kwargs["mirror"] = mirror_of(index=self._index, directory=self._root, namespace=self._namespace)
        factory = StoreFactory.at(self._store_path)
        return await factory.open(directory=self._root / f"shard-{self._index:04d}", **kwargs)

    async def describe(self) -> int:
        """How many shards share the rollouts. Answering means: the store is open and read back."""
        await self._opened()
        return self._shards

    async def setup(self) -> Mapping[str, object]:
        """Its arguments, by the names of the graph's `state` arguments. Needs no open store."""
        return {
            "shards": self._shards,
            "store": self._store_path,
            "store_kwargs": self._store_kwargs,
            "directory": str(self._root),
            "replicas": self._replicas,
            "lineage_bytes": self._lineage_bytes,
            "waiting_bytes": self._waiting_bytes,
            "max_idle_s": self._max_idle_s,
        }

    async def batch(self, *parts: Sequence[Request]) -> list[object]:
        """Answers requests at the same time, so that one group commit covers them.

        An answer, or the error, for each: callers in other places share a batch, and one must not hear of another's
        fault. It comes in parts for the sake of how Ray ships arguments (`state_client`).
        """
        hosted = await self._opened()
        requests = [request for part in parts for request in part]
        commits = [request for request in requests if is_commit(request)]
        others = [request for request in requests if not is_commit(request)]
        if not others:
            return await hosted.commit_all(commits)
        of_commits, of_others = await asyncio.gather(
            hosted.commit_all(commits), asyncio.gather(*(_answer(hosted.answer, request) for request in others))
        )
        answers = iter(of_commits), iter(of_others)
        return [next(answers[not is_commit(request)]) for request in requests]

    async def freeze(self, rollout_id: str) -> bytes:
        self._tally.counts["freezes"] += 1
        hosted = await self._opened()
        hosted.idle.read(rollout_id)
        return await hosted.freeze(rollout_id)

    async def rollout_ids(self) -> Sequence[str]:
        return await (await self._opened()).store.rollout_ids()

    async def standings(self) -> Sequence[Standing]:
        return await standings_of((await self._opened()).store)

    async def retire_idle(self, max_idle_s: float) -> list[str]:
        """Retires the rollouts that were left alone for so long, as their consumer would. Returns their ids.

        One that is written to meanwhile is kept.
        """
        hosted = await self._opened()
        retired = []
        for rollout_id in hosted.idle.idle(max_idle_s):
            snapshot = await hosted.store.freeze(rollout_id)
            try:
                await hosted.store.write(Drop(rollout_id, snapshot.snapshot_id, snapshot.version))
            except StaleSnapshotError:
                continue
            hosted.forget(rollout_id)
            self._tally.counts["idle_retired"] += 1
            logger.warning("retired rollout %s: nobody used it for %.0f s", rollout_id, max_idle_s)
            retired.append(rollout_id)
        return retired

    async def stats(self) -> ShardStats:
        return _stats(await self._opened())

    async def close(self) -> None:
        """Lets go of the store, for whoever opens it next. An actor needs no such end: its process has one."""
        hosted = await self._opened()
        for task in self._tasks:
            task.cancel()
        await hosted.store.close()

    async def _retire_idle_ones(self, max_idle_s: float) -> None:
        while True:
            await asyncio.sleep(min(max_idle_s / 4, _LOOK_FOR_IDLE_EVERY_S))
            try:
                await self.retire_idle(max_idle_s)
            except StoreError as error:  # the disk; the next look may do better
                logger.error("idle rollouts cannot be retired: %s", error)


async def _answer(work: Callable[..., Awaitable[object]], request: object) -> object:
    """One caller's answer, or error."""
    try:
        return await work(request)
    except GymCaptureError as error:
        return error
    except Exception as error:  # the boundary between callers: one's may be of a kind that does not even travel
        name = type(request).__name__
        logger.error("%s failed", name, exc_info=error)
        return StoreError(f"the state actor failed in {name}: {error!r}")


@dataclass(frozen=True, slots=True)
class _Hosted:
    """An open store and the lineage over it: what requests are answered from.

    They are answered here and not in the actor's class, of which Ray wraps every method, private ones included.
    """

    store: RecordStore
    lineage: LineageCache
    idle: IdleTimes
    tally: Tally
    metrics: ShardMetrics | None
    max_waiting_bytes: int
    """While records of this size wait to become durable, no call begins."""
    encoded: EncodedStore | None
    """The store, if it keeps the bytes that a producer has encoded: then nothing is encoded twice."""
    measured: MeasuredStore | None
    """The store, if it says how its log is doing."""
    outgrown: Outgrown

    async def answer(self, request: Request) -> object:
        """Answers anything but a `CommitBytes`, of which many are answered together (`commit_all`)."""
        match request:
            case BeginCall():
                return await self.begin(request)
            case Resolve(rollout_id, turn_keys):
                self.idle.read(rollout_id)
                resolution, _ = await self.lineage.resolve(rollout_id, turn_keys)
                return resolution
            case TooLong(rollout_id):
                self.outgrown.refused(rollout_id)
                return None
            case IsOutgrown(rollout_id):
                return rollout_id in self.outgrown
            case ReadCounts(rollout_ids):
                counted = await counts_of(self.store, rollout_ids)
                return [self.tally.timed(*each) for each in zip(rollout_ids, counted, strict=True)]
            case ReadStatus(rollout_id):
                self.idle.read(rollout_id)
                return await status_of(self.store, rollout_id)
            case Begin(intent):
                return (await self.begin(BeginCall(intent))).epoch
            case Commit() | tuple():
                raise RecordError("a record travels as bytes, to `commit_all`", field="entry")
            case _:
                return await self.write(request)

    async def begin(self, request: BeginCall) -> Begun:
        intent, turn_keys, asked_keys = request
        if self.tally.waiting_bytes > self.max_waiting_bytes:
            self.tally.counts["begins_refused"] += 1
            raise StoreOverloadedError(
                f"{self.tally.waiting_puts} records wait for the disk; try again later",
                rollout_id=intent.rollout_id,
                call_id=intent.model_call_id,
            )
        epoch = await self.store.write(Begin(intent))
        self.idle.wrote(intent.rollout_id)
        try:
            resolution, may_be_retry = await self.lineage.begin(intent, turn_keys, asked_keys)
        except StoreError:
            # The caller is told that its call has not begun, so its intent must not be missed.
            await self.store.write(Abandon(intent.rollout_id, intent.model_call_id, epoch=epoch))
            raise
        self.tally.begun(resolution)
        return Begun(epoch, resolution, may_be_retry, self.lineage.went_on(intent.rollout_id))

    async def write(self, operation: Operation) -> int:
        """Makes it durable, then lets lineage and the counts know of it."""
        epoch = await self.store.write(operation)
        match operation:
            case Abandon(rollout_id, call_id):
                self.lineage.end(rollout_id, call_id)
            case MarkIncomplete(rollout_id, reason):
                self.idle.wrote(rollout_id)
                self.tally.marked_incomplete(reason)
            case MarkDelivery(rollout_id, call_id):
                await self.lineage.mark_delivery(rollout_id, call_id, delivered=operation.delivered)
                self.tally.counts["delivered_marks" if operation.delivered else "undelivered_marks"] += 1
            case Drop(rollout_id):
                self.forget(rollout_id)
                self.tally.counts["drops"] += 1
            case Clear(rollout_id) | Close(rollout_id):
                self.forget(rollout_id)
            case GoOn(rollout_id, source):
                self.idle.wrote(rollout_id)
                self.lineage.go_on(rollout_id, source)
            case Register(rollout_id) | Complete(rollout_id) | HandOn(rollout_id):
                self.idle.wrote(rollout_id)
                self.tally.counts["registrations" if isinstance(operation, Register) else "completions"] += 1
        return epoch

    async def commit_all(self, sent: Sequence[CommitBytes]) -> list[object]:
        """Commits, as if each came alone: the answer to each, or its error, in its place."""
        began = time.perf_counter()
        arrived = [await _answer(_unpacked, each) for each in sent]
        commits = [each for each in arrived if isinstance(each, Commit)]
        size_bytes = sum(map(_size_bytes, commits))
        self.tally.waiting_puts += len(commits)
        self.tally.waiting_bytes += size_bytes
        try:
            stored = iter(await self._store_all(commits))
        finally:
            self.tally.waiting_puts -= len(commits)
            self.tally.waiting_bytes -= size_bytes
        took_s = time.perf_counter() - began
        answers = []
        for each in arrived:
            answer = next(stored) if isinstance(each, Commit) else each
            if isinstance(each, Commit) and isinstance(answer, int):
                not_shown = await _answer(partial(self._show, took_s=took_s), each)
                answers.append(answer if not_shown is None else not_shown)
            else:
                self.tally.counts["put_failures"] += 1
                answers.append(answer)
        return answers

    async def _store_all(self, commits: Sequence[Commit]) -> Sequence[object]:
        """To each, in its place: its epoch when it is durable, or why it is not."""
        if not commits:
            return []
        if self.encoded is None:
            return await asyncio.gather(*(_answer(self.store.write, commit) for commit in commits))
        found = await _answer(self.encoded.write_many, commits)
        return [copy(found) for _ in commits] if isinstance(found, GymCaptureError) else cast(Sequence[object], found)

    async def _show(self, commit: Commit, *, took_s: float) -> None:
        """Lets lineage find a record that is durable."""
        entry = commit.entry
        self.idle.wrote(entry.rollout_id)
        self.outgrown.forget(entry.rollout_id)
        self.tally.put(entry, size_bytes=_size_bytes(commit), took_s=took_s)
        if self.metrics is not None:
            self.metrics.observe_put(took_s)
        for problem in await self.lineage.add(entry):
            reason = lineage_mark(problem.reason, entry.model_call_id)
            await self.write(MarkIncomplete(entry.rollout_id, reason, epoch=commit.epoch))

    def forget(self, rollout_id: str) -> None:
        """Nothing is recorded of it any more."""
        self.lineage.forget(rollout_id)
        self.idle.forget(rollout_id)
        self.outgrown.forget(rollout_id)
        self.tally.forget(rollout_id)

    async def freeze(self, rollout_id: str) -> bytes:
        if self.encoded is not None:
            return await self.encoded.freeze_encoded(rollout_id)
        return encode_snapshot(await self.store.freeze(rollout_id))


def _reader(store: RecordStore) -> Callable[[str], Awaitable[StoredRollout]]:
    """Reads a rollout for lineage."""

    async def read(rollout_id: str) -> StoredRollout:
        if isinstance(store, EncodedStore):
            return await asyncio.to_thread(decode_stored, await store.freeze_encoded(rollout_id))
        snapshot = await store.freeze(rollout_id)
        return StoredRollout(stored_form(snapshot), snapshot.incomplete, snapshot.went_on)

    return read


async def _unpacked(sent: CommitBytes) -> Commit:
    return unpacked(sent)


def _size_bytes(commit: Commit) -> int:
    return len(commit.encoded or b"")


async def _publish(metrics: ShardMetrics, hosted: _Hosted) -> None:
    while True:
        metrics.publish(_stats(hosted))
        await asyncio.sleep(PUBLISH_EVERY_S)


def _stats(hosted: _Hosted) -> ShardStats:
    log, tally = ShardStats(), hosted.tally
    if hosted.measured is not None:
        found = hosted.measured.stats()
        log = ShardStats(
            live_rollouts=found.live_rollouts,
            log_bytes=found.total_bytes,
            log_live_bytes=found.live_bytes,
            log_segments=found.segments,
            lost_mirrors=int(found.has_lost_mirror),
            queued_writes=found.queued_writes,
            commit_batches=found.commits.batches,
            commit_failures=found.commits.failed_batches,
            commit_records=found.commits.records,
        )
    return replace(
        log,
        **{str(name): count for name, count in tally.counts.items()},
        put_seconds=tally.put_seconds,
        resolutions=dict(tally.resolutions),
        incomplete=dict(tally.incomplete),
        rules=dict(tally.rules),
        lineage_reads=hosted.lineage.reads,
        lineage_evictions=hosted.lineage.evictions,
        lineage_rollouts=hosted.lineage.in_memory,
        lineage_bytes=hosted.lineage.nbytes,
        longest_idle_s=hosted.idle.longest_s(),
        waiting_puts=tally.waiting_puts,
        waiting_bytes=tally.waiting_bytes,
    )
