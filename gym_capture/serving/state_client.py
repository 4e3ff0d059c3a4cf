"""How a process reaches the state actors.

Invariant: an operation that returns was acknowledged by the shard of its rollout; one that raises
`StoreUnavailableError` may be repeated, like every operation here.

Flow: the shard is picked by a stable hash of the rollout id -> operations that come up while others of the same shard
are under way leave together -> each caller gets its own answer, or its own error.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextvars import Context
from typing import Any, Final, cast

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from gym_capture.capture.operations import Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.protocols import Resolution
from gym_capture.capture.records import CallIntent, Snapshot
from gym_capture.capture.rollout_state import RolloutStatus
from gym_capture.capture.sinks import BegunCall, TokenSink
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.serving.state_messages import (
    BeginCall,
    Begun,
    IsOutgrown,
    ReadCounts,
    ReadStatus,
    Request,
    Resolve,
    TooLong,
    packed,
)
from gym_capture.serving.stats import ShardStats, total
from gym_capture.stores.base import CountedStore, ListedStore

ANSWER_WITHIN_S: Final = 60.0
"""Ray notices after 15 s that a node is lost; then a shard of it starts elsewhere and reads its log back."""
_BATCHES_IN_FLIGHT: Final = 2
_PART_BYTES: Final = 80_000
"""Ray sends an argument of less than 100 KiB along with its call; a larger one takes the way over the object store,
which costs both sides as much processor time as the rest of the call. So a batch is several arguments."""
_BYTES_OF_A_REQUEST: Final = 1_000
"""At most, about, beside its records and keys."""


class StateClient(ListedStore, CountedStore):
    """Reaches the shard of a rollout. One object for all rollouts; a `RecordStore` and a `LineageStore`."""

    def __init__(self, shards: Sequence[ActorHandle[Any]]) -> None:
        self.shards = tuple(shards)
        self._outboxes = [_Outbox(shard) for shard in self.shards]

    def _index(self, rollout_id: str) -> int:
        return zlib.crc32(rollout_id.encode()) % len(self.shards)

    async def _send(self, rollout_id: str, request: Request) -> object:
        return await self._outboxes[self._index(rollout_id)].send(request, rollout_id)

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str] = ()) -> BegunCall:
        """Begins a call and resolves what it continues, in one round trip."""
        request = BeginCall(intent, tuple(turn_keys), tuple(asked_keys))
        begun = cast(Begun, await self._send(intent.rollout_id, request))
        sink = TokenSink(self, intent.rollout_id, begun.epoch)
        return BegunCall(sink, begun.resolution, begun.may_be_retry, begun.went_on)

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        return cast(Resolution, await self._send(rollout_id, Resolve(rollout_id, tuple(turn_keys))))

    async def too_long(self, rollout_id: str) -> None:
        await self._send(rollout_id, TooLong(rollout_id))

    async def is_outgrown(self, rollout_id: str) -> bool:
        return cast(bool, await self._send(rollout_id, IsOutgrown(rollout_id)))

    async def write(self, operation: Operation) -> int:
        return cast(int, await self._send(operation.rollout_id, packed(operation)))

    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]:
        """One request to each shard that has some of them."""
        places: dict[int, list[int]] = {}
        for place, rollout_id in enumerate(rollout_ids):
            places.setdefault(self._index(rollout_id), []).append(place)
        asked = [tuple(rollout_ids[place] for place in there) for there in places.values()]
        answers = await asyncio.gather(*(self._send(ids[0], ReadCounts(ids)) for ids in asked))
        found = [RolloutCounts()] * len(rollout_ids)
        for there, answer in zip(places.values(), answers, strict=True):
            for place, counts in zip(there, cast(Sequence[RolloutCounts], answer), strict=True):
                found[place] = counts
        return found

    async def status(self, rollout_id: str) -> RolloutStatus:
        return cast(RolloutStatus, await self._send(rollout_id, ReadStatus(rollout_id)))

    async def freeze(self, rollout_id: str) -> Snapshot:
        shard = self.shards[self._index(rollout_id)]
        return decode_snapshot(cast(bytes, await _ask(shard.freeze, rollout_id, about=rollout_id)))

    async def rollout_ids(self) -> Sequence[str]:
        answers = await asyncio.gather(*(_ask(shard.rollout_ids) for shard in self.shards))
        return sorted(rollout_id for answer in answers for rollout_id in answer)

    async def standings(self) -> Sequence[Standing]:
        answers = await asyncio.gather(*(_ask(shard.standings) for shard in self.shards))
        return sorted((each for answer in answers for each in answer), key=lambda each: each.rollout_id)

    async def stats(self) -> ShardStats:
        """Counts of all shards, together."""
        return total(await asyncio.gather(*(_ask(shard.stats) for shard in self.shards)))

    async def close(self) -> None:
        """The actors stay: they belong to the cluster."""


class _Outbox:
    """Requests of one process to one shard: what comes up while others are under way leaves together.

    An actor call costs about a millisecond of processor time on both sides, whatever it carries; under load that is
    most of what capture costs. Alone, a call leaves at once.
    """

    def __init__(self, shard: ActorHandle[Any]) -> None:
        self._shard = shard
        self._waiting: list[tuple[Request, asyncio.Future[object]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, request: Request, rollout_id: str) -> object:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._sending) < _BATCHES_IN_FLIGHT:
            self._start()
        result = await answer
        if isinstance(result, GymCaptureError):
            if result.rollout_id is None:
                result.rollout_id = rollout_id
            raise result
        return result

    def _start(self) -> None:
        # In no request's context: Ray would take the batch for a part of the request that happened to be there, and
        # when its client leaves, cancel it, with all that it carries of others.
        task = asyncio.get_running_loop().create_task(self._send_batch(), context=Context())
        self._sending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if self._waiting:
            self._start()

    async def _send_batch(self) -> None:
        # A task begins in the next turn of the loop: whatever was ready in the turn that made it comes along.
        batch, self._waiting = self._waiting, []
        if not batch:
            return
        answers: Sequence[object]
        try:
            answers = await _ask(self._shard.batch, *_parts([request for request, _ in batch]))
        except GymCaptureError as error:
            answers = [StoreUnavailableError(error.message) for _ in batch]
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():  # else its caller has been cancelled
                future.set_result(answer)


def _parts(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests, in order, in parts that are small enough; one that is larger alone is a part of its own."""
    parts: list[list[Request]] = []
    room = 0
    for request in requests:
        size = _BYTES_OF_A_REQUEST + _size_bytes(request)
        if size > room:
            parts.append([])
            room = _PART_BYTES
        parts[-1].append(request)
        room -= size
    return parts


def _size_bytes(sent: object) -> int:
    """About what something takes up when it travels: records and keys are what can be large."""
    match sent:
        case bytes() | str():
            return len(sent)
        case tuple():
            return sum(map(_size_bytes, sent))
        case _:
            return 0


async def _ask(method: Any, *args: object, about: str | None = None) -> Any:
    """An actor's answer. Ray repeats a call over a restart; every call is idempotent, so that is safe.

    Whatever comes of it is a typed error. `about`: the rollout.
    """
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await method.remote(*args)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GymCaptureError):
            raise cause from None
        raise StoreUnavailableError(f"the state actor failed: {cause!r}", rollout_id=about) from error
    except (RayActorError, TimeoutError) as error:
        raise StoreUnavailableError("the state actor does not answer", rollout_id=about) from error
    except Exception as error:  # where Ray has ended, or takes no such argument, it raises bare ones
        raise StoreUnavailableError(f"the state actor cannot be asked: {error!r}", rollout_id=about) from error
