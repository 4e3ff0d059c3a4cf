"""A client whose actors cannot be asked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from ray.actor import ActorHandle

from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.records import CallIntent
from gym_capture.serving.state import StateClient, start_shards
from gym_capture.stores.log import LogStore


class Unreachable:
    """A handle in a process whose Ray has ended, or of arguments that do not travel."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_: object) -> None:
        raise Exception("Ray has not been started yet")


def test_nobody_waits_for_an_actor_that_cannot_be_asked() -> None:
    async def run() -> None:
        state = StateClient([cast(ActorHandle[Any], Unreachable())])
        intents = (CallIntent(rollout_id="r", model_call_id=f"c{number}", created_at=1.0) for number in range(3))
        async with asyncio.timeout(10):
            answers = await asyncio.gather(
                *map(state.begin_call, intents),
                state.freeze("r"),
                state.clear("r"),
                state.stats(),
                return_exceptions=True,
            )
        for answer in answers:
            assert isinstance(answer, StoreUnavailableError)
            assert "Ray has not been started yet" in answer.message

    asyncio.run(run())


@pytest.mark.parametrize("shards", [0, -1, 1.5, "two", None])
def test_a_number_of_shards_that_cannot_be_is_refused(shards: Any) -> None:
    store = f"{LogStore.__module__}:LogStore.open"
    with pytest.raises(ConfigError, match=r"state\.shards: must be a whole number, at least 1"):
        start_shards(namespace="n", shards=shards, store=store, store_kwargs={}, directory="/nowhere")
