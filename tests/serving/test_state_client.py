"""How a client asks its actors, and what it says of those that cannot be asked."""

from __future__ import annotations

import asyncio
import pickle
import pickletools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, cast

import pytest
from ray.actor import ActorHandle

from gym_capture.capture.operations import Begin, Clear, Commit, MarkIncomplete
from gym_capture.capture.records import CallIntent
from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.serving.state import StateClient, start_shards
from gym_capture.serving.state_messages import BeginCall, Resolve, is_commit, packed, unpacked
from gym_capture.stores.log import LogStore
from tests.calls import call


class Unreachable:
    """A handle in a process whose Ray has ended, or of arguments that do not travel."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_: object) -> None:
        raise Exception("Ray has not been started yet")


async def test_nobody_waits_for_an_actor_that_cannot_be_asked() -> None:
    state = StateClient([cast(ActorHandle[Any], Unreachable())])
    intents = (CallIntent(rollout_id="r", model_call_id=f"c{number}", created_at=1.0) for number in range(3))
    async with asyncio.timeout(10):
        answers = await asyncio.gather(
            *(state.write(Begin(intent)) for intent in intents),
            state.freeze("r"),
            state.write(Clear("r")),
            state.stats(),
            return_exceptions=True,
        )
    for answer in answers:
        assert isinstance(answer, StoreUnavailableError)
        assert "Ray has not been started yet" in answer.message


REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


class Watched:
    """A handle that notes in which request's context it is called."""

    def __init__(self) -> None:
        self.called_in: list[str] = []
        self.batch = self

    def remote(self, calls: Sequence[object]) -> asyncio.Future[list[None]]:
        self.called_in.append(REQUEST.get())
        answer: asyncio.Future[list[None]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(answer.set_result, [None] * len(calls))
        return answer


async def test_a_batch_is_no_part_of_the_request_that_sends_it() -> None:
    """Ray cancels what a request has called when its client leaves; a batch carries the calls of others, too."""

    shard = Watched()
    state = StateClient([cast(ActorHandle[Any], shard)])

    async def call(request: str) -> None:
        REQUEST.set(request)
        for _ in range(int(request)):  # so that they do not all leave together
            await asyncio.sleep(0)
        await state.write(MarkIncomplete("r", request, epoch=0))

    async with asyncio.TaskGroup() as requests:
        for number in range(1, 9):
            requests.create_task(call(str(number)))
    assert len(shard.called_in) > 2
    assert set(shard.called_in) == {"none"}


MAX_INLINE_BYTES = 100 * 1024
"""Of one argument: what is larger, Ray puts into its object store first."""


class Packages:
    """A handle that notes what it is called with, in the bytes in which it would travel."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self.batch = self

    def remote(self, *parts: Sequence[tuple[object, ...]]) -> asyncio.Future[list[object]]:
        self.sizes.append([len(pickle.dumps(part)) for part in parts])
        answer: asyncio.Future[list[object]] = asyncio.get_running_loop().create_future()
        answer.set_result([request[1] for part in parts for request in part])
        return answer


async def test_a_batch_travels_with_its_call_and_not_over_the_object_store() -> None:
    shard = Packages()
    state = StateClient([cast(ActorHandle[Any], shard)])
    intent = CallIntent(rollout_id="r", model_call_id="c", created_at=1.0)
    keys = [tuple(f"{number:064}" for number in range(first, first + 100)) for first in range(40)]
    records = [state._send("r", (b"x" * 5_000, number)) for number in range(40)]
    begins = [state._send("r", BeginCall(intent, of_one)) for of_one in keys]
    large = [state._send("r", (b"x" * 300_000, number)) for number in range(2)]
    answers = await asyncio.gather(*records, *large, *begins)
    assert answers == [*range(40), *range(2), *keys]
    (sizes,) = shard.sizes
    assert len([size for size in sizes if size > MAX_INLINE_BYTES]) == len(large)
    assert len(sizes) < 12  # each argument has its price, too


def test_a_commit_is_as_cheap_to_pickle_as_can_be() -> None:
    commit = packed(Commit(call("c", [1], [2]), epoch=7))
    classes = [name for opcode, name, _ in pickletools.genops(pickle.dumps(commit)) if "GLOBAL" in opcode.name]
    assert is_commit(commit)
    assert not classes
    assert unpacked(commit).epoch == 7
    others = BeginCall(CallIntent(rollout_id="r", model_call_id="c", created_at=1.0)), Resolve("r", ())
    assert not any(map(is_commit, others))


@pytest.mark.parametrize("shards", [0, -1, 1.5, "two", None])
def test_a_number_of_shards_that_cannot_be_is_refused(shards: Any) -> None:
    store = f"{LogStore.__module__}:LogStore.open"
    with pytest.raises(ConfigError, match=r"state\.shards: must be a whole number, at least 1"):
        start_shards(namespace="n", shards=shards, store=store, store_kwargs={}, directory="/nowhere")
