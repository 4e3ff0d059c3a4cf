"""A replica that dies in the middle of a call: when the client's retry makes the rollout whole again, and when not.

The lost call is begun as a gateway begins one, and then nothing more is heard of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from ray.actor import ActorHandle

from gym_capture.build.builder import BuiltRollout, build
from gym_capture.capture.operations import MarkDelivery, Operation
from gym_capture.dialects.chat import ChatDialect
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, ScriptedEngine, saying
from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.serving.call_service import CallService
from gym_capture.serving.state import StateClient
from tests.serving.replica import STOP, USER, chat_body, chat_path, gateway_over, listening
from tests.serving.shards import LocalActor, shard

NEXT = {"role": "user", "content": "and then?"}


class Watched(StateClient):
    """Shows when it is recorded that a reply was delivered: after it has left."""

    def __init__(self, actor: LocalActor) -> None:
        super().__init__([cast(ActorHandle[Any], actor)])
        self.marked = asyncio.Event()

    async def write(self, operation: Operation) -> int:
        epoch = await super().write(operation)
        if isinstance(operation, MarkDelivery) and operation.delivered:
            self.marked.set()
        return epoch


@dataclass
class Graph:
    """One replica and one state actor."""

    http: httpx.AsyncClient
    service: CallService
    actor: LocalActor
    state: Watched

    async def lose(self, *messages: Mapping[str, Any]) -> str:
        """A call that begins and is never heard of again; its id."""
        body = encoded(*messages)
        call_id = f"lost-{len(messages)}"
        await self.service.begin(
            ChatDialect().parse(body),
            rollout_id="r1",
            call_id=call_id,
            request_digest=hashlib.sha256(body).hexdigest(),
        )
        return call_id

    async def chat(self, *messages: Mapping[str, Any], **fields: Any) -> Mapping[str, Any]:
        """The assistant's message."""
        response = await self.http.post(chat_path("r1"), content=encoded(*messages, **fields))
        assert response.status_code == 200, response.text
        message: Mapping[str, Any] = response.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    async def built(self) -> BuiltRollout:
        """What a build makes of the rollout: the same before and after a restart of the state."""
        found = build(await self.state.freeze("r1"))
        await self.actor.restart()
        again = build(await self.state.freeze("r1"))
        assert (again.mask_reasons, again.excluded) == (found.mask_reasons, found.excluded)
        return found


def encoded(*messages: Mapping[str, Any], **fields: Any) -> bytes:
    return json.dumps(chat_body(*messages, **fields)).encode()


@asynccontextmanager
async def graph(template: HfChatTemplate, directory: Path) -> AsyncIterator[Graph]:
    actor = LocalActor(lambda: shard(directory))
    state = Watched(actor)

    def says_its_id(call: EngineCall) -> Script:
        return saying(template, f"I am {call.call_id}", stop_token=STOP)

    service = CallService(
        ScriptedEngine(template, says_its_id, max_model_len=4096),
        state=state,
        fingerprinter=Fingerprinter(),
        prefix_supply=True,
        sampling_pin={},
        session_cache=16,
    )
    async with listening(gateway_over(service)) as http:
        yield Graph(http, service, actor, state)
    await service.close()
    await actor.shard.close()


async def test_a_lost_call_whose_retry_the_agent_went_on_from_masks_nothing(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    async with graph(template, tmp_path) as played:
        lost = await played.lose(USER)
        first = await played.chat(USER)
        await played.chat(USER, first, NEXT)
        built = await played.built()
        assert built.mask_reasons == ()
        assert [(call.call_id, call.reason) for call in built.excluded] == [(lost, "lost_try")]
        (trajectory,) = built.trajectories
        assert len(trajectory.call_ids) == 2
        assert (built.counts.lost_tries, built.counts.delivered_fraction) == (1, 1.0)


def test_the_retry_of_a_lost_final_call_masks_nothing_once_it_was_delivered(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    """That it may be a retry is known although what it repeats has no record, also after a restart of the state."""

    async def run(*, restart: bool) -> None:
        async with graph(template, tmp_path / str(restart)) as played:
            first = await played.chat(USER)
            await played.lose(USER, first, NEXT)
            if restart:
                await played.actor.restart()
            await played.chat(USER, first, NEXT)
            await played.state.marked.wait()
            built = await played.built()
            assert (built.mask_reasons, built.counts.lost_tries, built.counts.n_calls) == ((), 1, 2)

    asyncio.run(run(restart=False))
    asyncio.run(run(restart=True))


async def test_a_lost_call_that_was_not_tried_again_masks(template: HfChatTemplate, tmp_path: Path) -> None:
    async with graph(template, tmp_path) as played:
        first = await played.chat(USER)
        lost = await played.lose(USER, first, NEXT)
        await played.chat(USER, first, NEXT, temperature=0.5)
        assert (await played.built()).mask_reasons == (f"dangling_intent:{lost}",)


async def test_a_request_that_goes_on_from_what_the_lost_call_said_masks(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    """The agent sampled twice, and used both: one reply was served although nothing could be recorded of it."""

    async with graph(template, tmp_path) as played:
        lost = await played.lose(USER)
        first = await played.chat(USER)
        await played.chat(USER, first, NEXT)
        await played.chat(USER, {"role": "assistant", "content": f"I am {lost}"}, NEXT)
        assert (await played.built()).mask_reasons == (f"dangling_intent:{lost}",)
