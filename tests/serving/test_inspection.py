"""The inspector as a route of the graph: behind the read token, over what the state has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gym_capture.auth import Keyring
from gym_capture.capture.outcomes import Standing
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from gym_capture.serving.inspection import add_inspector
from gym_capture.stores.base import standings_of
from tests.serving.replica import USER, LocalState, Replica, listening, says


class State(LocalState):
    async def standings(self) -> Sequence[Standing]:
        return await standings_of(self.store)


async def since(client: httpx.AsyncClient, cursor: str) -> dict[str, Any]:
    answer = await client.get("/inspect/api/rollouts/r1", params={"since": cursor})
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_rollout_is_looked_into_while_it_plays(template: HfChatTemplate, is_open: bool) -> None:
    keyring = None if is_open else Keyring(b"0123456789abcdef")
    replica = Replica(template, says(template, "Hello", "<b>Bye</b>"))
    state = State()
    state.store = replica.state.store
    add_inspector(
        replica.app,
        state,
        model=str(tiny_dir()),
        model_name="policy",
        keyring=keyring,
        loop=asyncio.get_running_loop(),
    )
    await replica.chat(USER)
    async with listening(replica.app) as client:
        assert (await client.get("/inspect/")).status_code == 200
        refused = await client.get("/inspect/api/source")
        assert refused.status_code == (200 if is_open else 401)
        if keyring is not None:
            as_rollout = {"authorization": f"Bearer {keyring.rollout_token('r1')}"}
            assert (await client.get("/inspect/api/rollouts", headers=as_rollout)).status_code == 403
            client.headers["authorization"] = f"Bearer {keyring.read_token()}"
        source = (await client.get("/inspect/api/source")).json()
        assert (source["kind"], source["live"], source["shows"]["annotations"]) == ("graph", True, False)
        columns = (await client.get("/inspect/api/rollouts")).json()["columns"]
        assert (columns["rollout"], columns["calls"], columns["state"]) == (["r1"], [1], ["live"])
        found = (await client.get("/inspect/api/rollouts/r1")).json()
        (call,) = found["calls"]
        assert (call["role"], call["preview"]) == ("only", "Hello")
        await replica.chat(USER, {"role": "assistant", "content": "Hello"}, USER)
        cursor = found["cursor"]
        async with asyncio.timeout(60):
            while "calls" not in (found := await since(client, cursor)):  # noqa: ASYNC110 - as the page does
                await asyncio.sleep(0.05)
        assert [each["link"]["kind"] for each in found["calls"]] == ["none", "exact"]
        shown = (await client.get(f"/inspect/api/rollouts/r1/calls/{found['calls'][1]['call']}")).json()
        said = [(each["role"], each["text"]) for each in shown["messages"]]
        assert said == [("user", "hi"), ("assistant", "Hello"), ("user", "hi")]
        tokens = (await client.get("/inspect/api/rollouts/r1/trajectories/0/tokens")).json()
        assert "".join(tokens["texts"]).endswith("<b>Bye</b><|im_end|>")
        answer = await client.post(
            "/inspect/api/annotations", json={"rollout": "r1", "call": "c", "name": "n", "value": 1}
        )
        assert answer.status_code == 400
        assert (await client.get("/inspect/api/rollouts/nobody")).status_code == 404
        assert (await client.get("/healthz")).status_code == 200
