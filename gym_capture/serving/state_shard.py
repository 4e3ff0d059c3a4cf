"""A state actor: token sink, token source and lineage of its share of the rollouts.

Invariant: a `put` is acknowledged only when it is durable in the shard's store *and* its lineage would find it, so a
`resolve` from any replica that starts after the acknowledgement sees it. An actor that restarts opens its store before
it answers anything. Sink and lineage live in one actor on purpose: one round trip registers a call's intent and
resolves its parent, one commits it, and there is no moment at which the sink has a record that lineage lacks.

Flow: a client's `batch` -> `begin` -> `put` -> ... `freeze` -> `drop`. The puts of a batch take one way together, since
there are as many as the cluster generates calls: each record is decoded once, for store and lineage, and all wait for
one answer of the store. Puts that wait for a slow disk are bounded by turning new calls away, before they cost any
compute; a call that has generated is always taken.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from gym_capture.codec import decode_entry, decode_stored, encode_snapshot
from gym_capture.errors import GymCaptureError, StaleSnapshotError, StoreError, StoreOverloadedError
from gym_capture.lineage_cache import LineageCache
from gym_capture.protocols import EncodedPut, Resolution
from gym_capture.reasons import lineage_mark
from gym_capture.records import CallIntent
from gym_capture.serving.idle import IdleTimes
from gym_capture.serving.metrics import PUBLISH_EVERY_S, ShardMetrics
from gym_capture.serving.mirror import mirror_of
from gym_capture.serving.stats import ShardStats, Tally
from gym_capture.stores.base import EncodedStore, MeasuredStore, RecordStore, StoreFactory
from gym_capture.suffixes import StoredRollout, stored_form

logger = logging.getLogger(__name__)

LINEAGE_BYTES: Final = 512 << 20
WAITING_BYTES: Final = 256 << 20
_LOOK_FOR_IDLE_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer to `begin`: the epoch that the call's writes carry, and what it continues."""

    epoch: int
    resolution: Resolution
    may_be_retry: bool = False
    """Another call may have been recorded for the same request: whether this one's reply is delivered will matter."""


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
        """What the shard hosts, opened on first use: an actor's constructor cannot await."""
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
                        encoded=store if isinstance(store, EncodedStore) else None,
                        measured=store if isinstance(store, MeasuredStore) else None,
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
        """What it was started with, by the names of the graph's `state` arguments. Needs no open store."""
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

    async def batch(self, *parts: Sequence[tuple[str, tuple[Any, ...]]]) -> list[object]:
        """Runs puts, and calls of the methods below, at the same time, so that one group commit covers them.

        An answer, or the error, for each: callers in other places share a batch, and one must not hear of another's
        fault. It comes in parts for the sake of how Ray ships arguments (`state_client`).
        """
        hosted = await self._opened()
        calls = [call for part in parts for call in part]
        puts = [args for method, args in calls if method == "put"]
        others = [call for call in calls if call[0] != "put"]
        if not others:
            return await hosted.put_all(puts)
        put_answers, other_answers = await asyncio.gather(
            hosted.put_all(puts),
            asyncio.gather(*(_answer(method, self._call, method, args) for method, args in others)),
        )
        of_puts, of_others = iter(put_answers), iter(other_answers)
        return [next(of_puts if method == "put" else of_others) for method, _ in calls]

    async def _call(self, method: str, args: tuple[Any, ...]) -> object:
        return await _BATCHED[method](self, *args)

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str] = ()) -> Begun:
        hosted = await self._opened()
        if self._tally.waiting_bytes > self._waiting_bytes:
            self._tally.counts["begins_refused"] += 1
            raise StoreOverloadedError(
                f"{self._tally.waiting_puts} records wait for the disk; try again later",
                rollout_id=intent.rollout_id,
                call_id=intent.model_call_id,
            )
        epoch = await hosted.store.begin_call(intent)
        hosted.idle.wrote(intent.rollout_id)
        try:
            resolution, may_be_retry = await hosted.lineage.begin(intent, turn_keys, asked_keys)
        except StoreError:
            # The caller is told that its call has not begun, so its intent must not be missed.
            await hosted.store.abandon_call(intent.rollout_id, intent.model_call_id, epoch=epoch)
            raise
        self._tally.begun(resolution)
        return Begun(epoch, resolution, may_be_retry)

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        """`begin` without an intent: for a request that is only measured."""
        hosted = await self._opened()
        hosted.idle.read(rollout_id)
        resolution, _ = await hosted.lineage.resolve(rollout_id, turn_keys)
        return resolution

    async def abandon_call(self, rollout_id: str, call_id: str, epoch: int) -> None:
        hosted = await self._opened()
        await hosted.store.abandon_call(rollout_id, call_id, epoch=epoch)
        hosted.lineage.end(rollout_id, call_id)

    async def mark_incomplete(self, rollout_id: str, reason: str, epoch: int) -> None:
        await (await self._opened()).mark_incomplete(rollout_id, reason, epoch)

    async def mark_delivered(self, rollout_id: str, call_id: str, epoch: int) -> None:
        hosted = await self._opened()
        await hosted.store.mark_delivered(rollout_id, call_id, epoch=epoch)
        await hosted.lineage.mark_delivery(rollout_id, call_id, delivered=True)
        self._tally.counts["delivered_marks"] += 1

    async def mark_undelivered(self, rollout_id: str, call_id: str, epoch: int) -> None:
        hosted = await self._opened()
        await hosted.store.mark_undelivered(rollout_id, call_id, epoch=epoch)
        await hosted.lineage.mark_delivery(rollout_id, call_id, delivered=False)
        self._tally.counts["undelivered_marks"] += 1

    async def freeze(self, rollout_id: str) -> bytes:
        self._tally.counts["freezes"] += 1
        hosted = await self._opened()
        hosted.idle.read(rollout_id)
        return await hosted.freeze(rollout_id)

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        hosted = await self._opened()
        await hosted.store.drop(rollout_id, snapshot_id, version)
        hosted.forget(rollout_id)
        self._tally.counts["drops"] += 1

    async def clear(self, rollout_id: str) -> None:
        hosted = await self._opened()
        await hosted.store.clear(rollout_id)
        hosted.forget(rollout_id)

    async def rollout_ids(self) -> Sequence[str]:
        return await (await self._opened()).store.rollout_ids()

    async def retire_idle(self, max_idle_s: float) -> list[str]:
        """Retires the rollouts that were left alone for so long, as their consumer would. Returns their ids.

        One that is written to meanwhile is kept.
        """
        hosted = await self._opened()
        retired = []
        for rollout_id in hosted.idle.idle(max_idle_s):
            snapshot = await hosted.store.freeze(rollout_id)
            try:
                await hosted.store.drop(rollout_id, snapshot.snapshot_id, snapshot.version)
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


# "put" stands beside these: `_Hosted.put_all`.
_BATCHED: Final[Mapping[str, Callable[..., Awaitable[object]]]] = {
    "begin": StateShard.begin,
    "resolve": StateShard.resolve,
    "abandon_call": StateShard.abandon_call,
    "mark_incomplete": StateShard.mark_incomplete,
    "mark_delivered": StateShard.mark_delivered,
    "mark_undelivered": StateShard.mark_undelivered,
}


async def _answer(method: str, work: Callable[..., Awaitable[object]], *args: object) -> object:
    """What one caller is told: the answer, or the error."""
    try:
        return await work(*args)
    except GymCaptureError as error:
        return error
    except Exception as error:  # the boundary between callers: one's may be of a kind that does not even travel
        logger.error("%s failed", method, exc_info=error)
        return StoreError(f"the state actor failed in {method}: {error!r}")


@dataclass(frozen=True, slots=True)
class _Hosted:
    """An open store and the lineage over it.

    Puts are taken here and not in the actor's class, of which Ray wraps every method, private ones included.
    """

    store: RecordStore
    lineage: LineageCache
    idle: IdleTimes
    tally: Tally
    metrics: ShardMetrics | None
    encoded: EncodedStore | None
    """The store, if it keeps the bytes that a producer has encoded: then nothing is encoded twice."""
    measured: MeasuredStore | None
    """The store, if it says how its log is doing."""

    async def put_all(self, calls: Sequence[tuple[Any, ...]]) -> list[object]:
        """Puts, each `(data, epoch)`, as if each came alone: the answer to each, or its error, in its place."""
        began = time.perf_counter()
        arrived = [await _answer("put", _decoded, *args) for args in calls]
        puts = [each for each in arrived if isinstance(each, EncodedPut)]
        size_bytes = sum(len(put.data) for put in puts)
        self.tally.waiting_puts += len(puts)
        self.tally.waiting_bytes += size_bytes
        try:
            stored = iter(await self._store_all(puts))
        finally:
            self.tally.waiting_puts -= len(puts)
            self.tally.waiting_bytes -= size_bytes
        took_s = time.perf_counter() - began
        answers = []
        for each in arrived:
            error = next(stored) if isinstance(each, EncodedPut) else each
            if error is not None:
                self.tally.counts["put_failures"] += 1
            answers.append(error or await _answer("put", self._show, each, took_s))
        return answers

    async def _store_all(self, puts: Sequence[EncodedPut]) -> Sequence[object]:
        """To each, in its place: None when it is durable, or why it is not."""
        if not puts:
            return []
        if self.encoded is None:
            return await asyncio.gather(*(_answer("put", self._store, put) for put in puts))
        found = await _answer("put", self.encoded.put_many, puts)
        return [copy(found) for _ in puts] if isinstance(found, GymCaptureError) else cast(Sequence[object], found)

    async def _store(self, put: EncodedPut) -> None:
        await self.store.put(put.entry, epoch=put.epoch)

    async def _show(self, put: EncodedPut, took_s: float) -> None:
        """Lets lineage find a record that is durable."""
        entry = put.entry
        self.idle.wrote(entry.rollout_id)
        self.tally.put(entry, size_bytes=len(put.data), took_s=took_s)
        if self.metrics is not None:
            self.metrics.observe_put(took_s)
        for problem in await self.lineage.add(entry):
            reason = lineage_mark(problem.reason, entry.model_call_id)
            await self.mark_incomplete(entry.rollout_id, reason, put.epoch)

    async def mark_incomplete(self, rollout_id: str, reason: str, epoch: int) -> None:
        await self.store.mark_incomplete(rollout_id, reason, epoch=epoch)
        self.idle.wrote(rollout_id)
        self.tally.marked_incomplete(reason)

    def forget(self, rollout_id: str) -> None:
        """Nothing is recorded of it any more."""
        self.lineage.forget(rollout_id)
        self.idle.forget(rollout_id)

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
        return StoredRollout(stored_form(snapshot), snapshot.incomplete)

    return read


async def _decoded(data: bytes, epoch: int) -> EncodedPut:
    return EncodedPut(decode_entry(data), data, epoch)


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
