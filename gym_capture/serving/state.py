"""State actors: token sink, token source and lineage index of their share of the rollouts.

Invariant: a `put` is acknowledged only when it is durable in the shard's store *and* in its lineage index, so a
`resolve` from any replica that starts after the acknowledgement sees it. An actor that restarts reads its store before
it answers anything. Both live in one actor on purpose: one round trip registers a call's intent and resolves its
parent, one commits it, and there is no moment at which the sink has a record that the index lacks.

Flow: a replica's `StateClient` picks the shard by a stable hash of the rollout id -> `begin` -> `put`, both batched
with what other calls have ready. A data job `connect`s to the same actors and freezes rollouts through them.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from gym_capture.codec import decode_entry, decode_snapshot, encode_entry, encode_snapshot
from gym_capture.errors import ConfigError, GymCaptureError, StoreError, StoreUnavailableError
from gym_capture.imports import load
from gym_capture.lineage import LineageIndex
from gym_capture.protocols import Resolution
from gym_capture.records import CallIntent, Snapshot, TokenEntry

_T = TypeVar("_T")
_RETRY_FOR_S: Final = 30.0
_BATCHES_IN_FLIGHT: Final = 2


class RecordStore(Protocol):
    """What a shard hosts: a sink and a source that can be read back when the actor restarts."""

    async def begin_call(self, intent: CallIntent) -> int: ...
    async def put(self, entry: TokenEntry, *, epoch: int) -> None: ...
    async def abandon_call(self, rollout_id: str, call_id: str, *, epoch: int) -> None: ...
    async def mark_incomplete(self, rollout_id: str, reason: str, *, epoch: int) -> None: ...
    async def mark_delivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None: ...
    async def mark_undelivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None: ...
    async def freeze(self, rollout_id: str) -> Snapshot: ...
    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None: ...
    async def clear(self, rollout_id: str) -> None: ...
    async def rollout_ids(self) -> Sequence[str]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer to `begin`: the epoch that the call's writes carry, and what it continues."""

    epoch: int
    resolution: Resolution
    may_be_retry: bool = False
    """Another call may have been recorded for the same request: whether this one's reply is delivered will matter."""


class StateShard:
    """One state actor."""

    def __init__(self, *, index: int, shards: int, store: str, store_kwargs: Mapping[str, Any], directory: str) -> None:
        self._shards = shards
        self._store_path = store
        self._store_kwargs = dict(store_kwargs)
        self._directory = Path(directory).expanduser() / f"shard-{index:04d}"
        self._store: RecordStore | None = None
        self._lineage = LineageIndex()
        self._opening = asyncio.Lock()

    async def _opened(self) -> RecordStore:
        """The store, read back on first use: an actor's constructor cannot await."""
        if self._store is None:
            async with self._opening:
                if self._store is None:
                    factory = load(self._store_path)
                    store: RecordStore = await factory(directory=self._directory, **self._store_kwargs)
                    for rollout_id in await store.rollout_ids():
                        self._lineage.rebuild((await store.freeze(rollout_id)).entries)
                    self._store = store
        return self._store

    async def describe(self) -> int:
        """How many shards share the rollouts. Answering means: the store is open and read back."""
        await self._opened()
        return self._shards

    async def batch(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[object]:
        """Runs calls of the methods below at the same time, so that one group commit covers them.

        An answer, or the error, for each; an error that this package does not know fails the whole batch.
        """
        await self._opened()
        return list(await asyncio.gather(*(self._one(method, args) for method, args in calls)))

    async def _one(self, method: str, args: tuple[Any, ...]) -> object:
        try:
            return await _BATCHED[method](self, *args)
        except GymCaptureError as error:
            return error

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str]) -> Begun:
        store = await self._opened()
        epoch = await store.begin_call(intent)
        resolution = self._lineage.resolve(intent.rollout_id, turn_keys)
        return Begun(epoch, resolution, self._lineage.may_be_retry(intent.rollout_id, resolution))

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        """`begin` without an intent: for a request that is only measured."""
        await self._opened()
        return self._lineage.resolve(rollout_id, turn_keys)

    async def put(self, data: bytes, epoch: int) -> None:
        store = await self._opened()
        entry = decode_entry(data)
        await store.put(entry, epoch=epoch)
        for problem in self._lineage.add(entry):
            reason = f"lineage_{problem.reason}:{entry.model_call_id}"
            await store.mark_incomplete(entry.rollout_id, reason, epoch=epoch)

    async def abandon_call(self, rollout_id: str, call_id: str, epoch: int) -> None:
        await (await self._opened()).abandon_call(rollout_id, call_id, epoch=epoch)

    async def mark_incomplete(self, rollout_id: str, reason: str, epoch: int) -> None:
        await (await self._opened()).mark_incomplete(rollout_id, reason, epoch=epoch)

    async def mark_delivered(self, rollout_id: str, call_id: str, epoch: int) -> None:
        await (await self._opened()).mark_delivered(rollout_id, call_id, epoch=epoch)
        self._lineage.mark_delivery(rollout_id, call_id, delivered=True)

    async def mark_undelivered(self, rollout_id: str, call_id: str, epoch: int) -> None:
        await (await self._opened()).mark_undelivered(rollout_id, call_id, epoch=epoch)
        self._lineage.mark_delivery(rollout_id, call_id, delivered=False)

    async def freeze(self, rollout_id: str) -> bytes:
        return encode_snapshot(await (await self._opened()).freeze(rollout_id))

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        await (await self._opened()).drop(rollout_id, snapshot_id, version)
        self._lineage.forget(rollout_id)

    async def clear(self, rollout_id: str) -> None:
        await (await self._opened()).clear(rollout_id)
        self._lineage.forget(rollout_id)

    async def rollout_ids(self) -> Sequence[str]:
        return await (await self._opened()).rollout_ids()

    async def close(self) -> None:
        """Lets go of the store, for whoever opens it next. An actor needs no such end: its process has one."""
        await (await self._opened()).close()


_BATCHED: Final[Mapping[str, Callable[..., Awaitable[object]]]] = {
    "begin": StateShard.begin,
    "resolve": StateShard.resolve,
    "put": StateShard.put,
    "abandon_call": StateShard.abandon_call,
    "mark_incomplete": StateShard.mark_incomplete,
    "mark_delivered": StateShard.mark_delivered,
    "mark_undelivered": StateShard.mark_undelivered,
}


def start_shards(*, namespace: str, shards: int, store: str, store_kwargs: Mapping[str, Any], directory: str) -> None:
    """Makes sure that the state actors of `namespace` run; those that do are kept, with their records.

    Raises `ConfigError` if they run with another number of shards.
    """
    actor_cls = ray.remote(StateShard)
    for index in range(shards):
        actor_cls.options(
            name=_actor_name(index),
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=10_000,
        ).remote(index=index, shards=shards, store=store, store_kwargs=store_kwargs, directory=directory)
    running = ray.get(ray.get_actor(_actor_name(0), namespace=namespace).describe.remote())
    if running != shards:
        raise ConfigError(
            f"state.shards: namespace {namespace!r} already runs {running} state actors, not {shards}; "
            "use that number, or another namespace"
        )


class StateClient:
    """Reaches the shard of a rollout. One object for all rollouts; a `TokenSink`, a `TokenSource`, a `LineageStore`."""

    def __init__(self, shards: Sequence[ActorHandle[Any]]) -> None:
        self._shards = list(shards)
        self._lanes = [_Lane(shard) for shard in self._shards]

    def _index(self, rollout_id: str) -> int:
        return zlib.crc32(rollout_id.encode()) % len(self._shards)

    def _shard(self, rollout_id: str) -> ActorHandle[Any]:
        return self._shards[self._index(rollout_id)]

    async def _batched(self, rollout_id: str, method: str, *args: object) -> object:
        return await self._lanes[self._index(rollout_id)].call(method, args, rollout_id)

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str]) -> Begun:
        return cast(Begun, await self._batched(intent.rollout_id, "begin", intent, tuple(turn_keys)))

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        return cast(Resolution, await self._batched(rollout_id, "resolve", rollout_id, tuple(turn_keys)))

    async def begin_call(self, intent: CallIntent) -> int:
        return (await self.begin(intent, ())).epoch

    async def put(self, entry: TokenEntry, *, epoch: int) -> None:
        await self._batched(entry.rollout_id, "put", encode_entry(entry.as_delta()), epoch)

    async def abandon_call(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        await self._batched(rollout_id, "abandon_call", rollout_id, call_id, epoch)

    async def mark_incomplete(self, rollout_id: str, reason: str, *, epoch: int) -> None:
        await self._batched(rollout_id, "mark_incomplete", rollout_id, reason, epoch)

    async def mark_delivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        await self._batched(rollout_id, "mark_delivered", rollout_id, call_id, epoch)

    async def mark_undelivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        await self._batched(rollout_id, "mark_undelivered", rollout_id, call_id, epoch)

    async def freeze(self, rollout_id: str) -> Snapshot:
        return decode_snapshot(
            cast(bytes, await _answer(self._shard(rollout_id).freeze.remote(rollout_id), rollout_id))
        )

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        await _answer(self._shard(rollout_id).drop.remote(rollout_id, snapshot_id, version), rollout_id)

    async def clear(self, rollout_id: str) -> None:
        await _answer(self._shard(rollout_id).clear.remote(rollout_id), rollout_id)

    async def rollout_ids(self) -> Sequence[str]:
        answers = await asyncio.gather(*(_answer(shard.rollout_ids.remote(), None) for shard in self._shards))
        return sorted(rollout_id for answer in answers for rollout_id in answer)

    async def close(self) -> None:
        """The actors stay: they belong to the cluster."""


class _Lane:
    """Calls of one process to one shard: what comes up while others are under way leaves together.

    An actor call costs about a millisecond of processor time on both sides, whatever it carries; under load that is
    most of what capture costs. Alone, a call leaves at once.
    """

    def __init__(self, shard: ActorHandle[Any]) -> None:
        self._shard = shard
        self._waiting: list[tuple[str, tuple[object, ...], asyncio.Future[object]]] = []
        self._flying: set[asyncio.Task[None]] = set()

    async def call(self, method: str, args: tuple[object, ...], rollout_id: str) -> object:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.append((method, args, answer))
        if len(self._flying) < _BATCHES_IN_FLIGHT:
            self._send()
        result = await answer
        if isinstance(result, GymCaptureError):
            if result.rollout_id is None:
                result.rollout_id = rollout_id
            raise result
        return result

    def _send(self) -> None:
        task = asyncio.ensure_future(self._fly())
        self._flying.add(task)
        task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        if self._waiting:
            self._send()

    async def _fly(self) -> None:
        await asyncio.sleep(0)  # whatever is ready in this turn of the loop comes along
        batch, self._waiting = self._waiting, []
        if not batch:
            return
        answers: Sequence[object]
        try:
            answers = await _answer(self._shard.batch.remote([(method, args) for method, args, _ in batch]), None)
        except StoreError as error:
            answers = [StoreUnavailableError(error.message) for _ in batch]
        for (_, _, future), answer in zip(batch, answers, strict=True):
            if not future.done():  # else its caller has been cancelled
                future.set_result(answer)


def connect(*, namespace: str = "gym-capture") -> StateClient:
    """A client of the state actors of `namespace`, from anywhere in the cluster.

    Raises `StoreUnavailableError` if there are none.
    """
    try:
        first = ray.get_actor(_actor_name(0), namespace=namespace)
        shards = ray.get(first.describe.remote(), timeout=_RETRY_FOR_S)
        return StateClient([ray.get_actor(_actor_name(index), namespace=namespace) for index in range(shards)])
    except ValueError as error:
        raise StoreUnavailableError(
            f"no state actors in Ray namespace {namespace!r}: is the graph running on this cluster?"
        ) from error


def _actor_name(index: int) -> str:
    return f"state-{index}"


async def _answer(reply: Awaitable[_T], rollout_id: str | None) -> _T:
    """Awaits an actor's answer. Ray repeats a call over a restart; every call is idempotent, so that is safe."""
    try:
        return await asyncio.wait_for(_as_coroutine(reply), _RETRY_FOR_S)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GymCaptureError):
            raise cause from None
        raise StoreUnavailableError(f"the state actor failed: {cause!r}", rollout_id=rollout_id) from error
    except (RayActorError, TimeoutError) as error:
        raise StoreUnavailableError("the state actor does not answer", rollout_id=rollout_id) from error


async def _as_coroutine(reply: Awaitable[_T]) -> _T:
    return await reply
