"""Agents that nobody dispatches register their rollouts, play them and say how they ended: late, twice, otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, ConflictError

from gym_capture.auth import Keyring
from gym_capture.capture.operations import Clear, Drop
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import saying
from gym_capture.errors import StoreUnavailableError
from tests.serving.replica import USER, Replica

KEYS = Keyring(b"0123456789abcdef0123456789abcdef")
ADMIN = {"authorization": f"Bearer {KEYS.admin_token()}"}
READ = {"x-api-key": KEYS.read_token()}
REGISTRATION = {"rollout_id": "r1", "group_id": "count-3", "sample": 0, "task": {"target": 3}, "agent_completes": True}


def replica_of(template: HfChatTemplate, **options: Any) -> Replica:
    return Replica(template, lambda _: saying(template, "one", stop_token="<|im_end|>"), **options)


async def register(replica: Replica, **fields: Any) -> httpx.Response:
    return await replica.http.post("/rollouts", json={**REGISTRATION, **fields})


async def complete(replica: Replica, rollout_id: str = "r1", **outcome: Any) -> httpx.Response:
    return await replica.http.post(f"/rollouts/{rollout_id}/complete", json=outcome)


async def look(replica: Replica, rollout_id: str = "r1") -> Any:
    response = await replica.http.get(f"/rollouts/{rollout_id}")
    assert response.status_code == 200
    return response.json()


def told(response: httpx.Response) -> tuple[int, str]:
    """Of an error: its status and what it says, in OpenAI's shape."""
    return response.status_code, response.json()["error"]["message"]


async def test_a_rollout_from_its_registration_to_its_outcome(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    answer = (await register(replica)).json()
    base = "http://gateway/ng-rollout/r1"
    assert answer == {
        **REGISTRATION,
        "token": None,
        "base_urls": {"chat_completions": f"{base}/v1", "responses": f"{base}/v1", "messages": base},
    }
    links = {"eligible_links": 0, "contiguous_links": 0}
    nothing = {"calls": 0, "generated_tokens": 0, **links, "calls_under_way": 0}
    nothing |= {"incomplete": [], "problems": [], "outcome": None}
    assert await look(replica) == {**REGISTRATION, "state": "open", **nothing}

    client = AsyncOpenAI(base_url=answer["base_urls"]["responses"], api_key="none", http_client=replica.http)
    await client.responses.create(model="policy", input="hi")
    message = {"model": "policy", "max_tokens": 9, "messages": [USER]}
    said = await replica.http.post(answer["base_urls"]["messages"] + "/v1/messages", json=message)
    assert said.status_code == 200

    outcome = {"reward": 0.5, "reward_components": {"b": 1, "a": -0.5}, "answer": "3"}
    ended = await complete(replica, **outcome)
    assert ended.status_code == 200
    kept = {"reward": 0.5, "reward_components": {"a": -0.5, "b": 1.0}, "failure": None, "answer": "3"}
    assert ended.json() == {"rollout_id": "r1", "state": "complete", "outcome": kept}
    counts = {"calls": 2, "generated_tokens": 4}
    assert await look(replica) == {**REGISTRATION, **nothing, **counts, "state": "complete", "outcome": kept}


async def test_the_same_again_gets_the_same_answer_and_anything_else_is_refused(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    first = await register(replica, task={"b": 1, "a": [2]})
    again = await register(replica, task={"a": [2], "b": 1})
    assert (first.status_code, first.json()) == (again.status_code, again.json()) == (200, first.json())
    for other in ({"agent_completes": False}, {"group_id": "count-4"}, {"sample": 1}, {"sample": None}, {"task": None}):
        status, why = told(await register(replica, **other))
        assert status == 409
        assert "registered already" in why
        assert "count-3" in why

    await complete(replica, reward=1)
    assert (await complete(replica, reward=1.0)).status_code == 200
    for outcome in ({"reward": 0.0}, {}, {"reward": 1.0, "answer": "x"}, {"failure": "crashed"}):
        status, why = told(await complete(replica, **outcome))
        assert status == 409
        assert "'reward': 1.0" in why
    assert (await look(replica))["outcome"]["reward"] == 1.0
    assert (await register(replica, task={"a": [2], "b": 1})).json() == first.json()


async def test_an_id_is_made_for_who_has_none(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    one, other = [(await register(replica, rollout_id=None, group_id="g")).json()["rollout_id"] for _ in range(2)]
    assert one != other
    assert await replica.state.store.rollout_ids() == sorted((one, other))


@pytest.mark.parametrize("stream", [False, True])
async def test_no_call_begins_after_the_outcome(template: HfChatTemplate, stream: bool) -> None:
    replica = replica_of(template)
    await register(replica)
    await replica.chat(USER)
    await complete(replica, reward=1.0)
    client = AsyncOpenAI(
        base_url="http://gateway/ng-rollout/r1/v1", api_key="x", max_retries=0, http_client=replica.http
    )
    with pytest.raises(ConflictError) as caught:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "more"}], stream=stream
        )
    assert caught.value.code == "conflict"
    assert "no call of it begins any more" in caught.value.message
    assert "1.0" not in caught.value.message
    late = {"model": "policy", "max_tokens": 9, "messages": [USER]}
    refused = await replica.http.post("/ng-rollout/r1/v1/messages", json=late)
    assert (refused.status_code, refused.json()["type"]) == (409, "error")
    assert len(replica.engine.calls) == 1
    assert (await look(replica))["calls"] == 1


async def test_a_call_that_is_under_way_ends_as_ever(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    await register(replica)
    replica.state.gate.clear()
    calling = asyncio.ensure_future(replica.chat(USER))
    await replica.state.put_begins.wait()
    assert (await complete(replica, reward=1.0)).status_code == 200
    standing = await look(replica)
    assert (standing["state"], standing["calls"], standing["calls_under_way"]) == ("complete", 0, 1)
    replica.state.gate.set()
    assert (await calling).status_code == 200
    standing = await look(replica)
    assert (standing["calls"], standing["calls_under_way"], standing["incomplete"]) == (1, 0, [])


async def test_what_is_not_there_has_no_outcome(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    assert told(await complete(replica, reward=1.0))[0] == 404
    assert (await replica.http.get("/rollouts/r1")).status_code == 404
    await register(replica)
    snapshot = await replica.state.snapshot()
    await replica.state.store.write(Drop("r1", snapshot.snapshot_id, snapshot.version))
    assert told(await complete(replica, reward=1.0))[0] == 410
    assert told(await register(replica))[0] == 410
    await replica.state.store.write(Clear("r1"))
    assert told(await complete(replica, reward=1.0))[0] == 404
    assert (await register(replica)).status_code == 200
    assert told(await register(replica_of(template, capture=False)))[0] == 404


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"reward": NaN}', "JSON"),
        (b'{"reward": -Infinity}', "JSON"),
        (b'{"reward": 1e400}', "reward"),
        (b'{"reward": true}', "reward"),
        (b'{"reward": "1"}', "reward"),
        (b'{"rewards": 1}', "no such field: 'rewards'"),
        (b'{"reward_components": {"a": null}}', "a must be a number"),
        (b'{"reward_components": []}', "reward_components"),
        (b'{"failure": ""}', "failure"),
        (b'{"answer": 3}', "answer"),
        (b"[]", "must be a JSON object"),
        (b'{"reward": 1', "JSON"),
    ],
)
async def test_what_is_no_outcome_is_a_400_that_says_so(template: HfChatTemplate, body: bytes, named: str) -> None:
    replica = replica_of(template)
    await register(replica)
    status, why = told(await replica.http.post("/rollouts/r1/complete", content=body))
    assert status == 400
    assert named in why
    assert (await look(replica))["state"] == "open"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"rollout_id": "r1"}', "group_id"),
        (b'{"group_id": ""}', "group_id"),
        (b'{"group_id": 7}', "group_id"),
        (b'{"group_id": "g", "rollout_id": "../r1"}', "invalid rollout id"),
        (b'{"group_id": "g", "rollout_id": 3}', "rollout_id"),
        (b'{"group_id": "g", "sample": -1}', "sample"),
        (b'{"group_id": "g", "sample": true}', "sample"),
        (b'{"group_id": "g", "agent_completes": 0}', "agent_completes"),
        (b'{"group_id": "g", "task": 1e400}', "task"),
        (b'{"group_id": "g", "group": "g"}', "no such field: 'group'"),
        (b'{"group_id": "g", "task": "' + b"x" * 20_000 + b'"}', "task is longer"),
        (b'{"group_id": "g", "task": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", ""),
    ],
)
async def test_what_is_no_registration_is_a_400_that_says_so(template: HfChatTemplate, body: bytes, named: str) -> None:
    replica = replica_of(template)
    status, why = told(await replica.http.post("/rollouts", content=body))
    assert status == 400
    assert named in why
    assert await replica.state.store.rollout_ids() == []


async def test_half_an_emoji_in_a_task_is_answered(template: HfChatTemplate) -> None:
    replica = replica_of(template)
    answer = await replica.http.post("/rollouts", content=rb'{"group_id": "g", "rollout_id": "r1", "task": "\ud83d"}')
    assert answer.json()["task"] == (await look(replica))["task"] == "\ufffd"


async def test_each_step_takes_its_token(template: HfChatTemplate) -> None:
    replica = replica_of(template, keyring=KEYS)
    mine, others = ({"authorization": f"Bearer {KEYS.rollout_token(name)}"} for name in ("r1", "r2"))
    for headers, status in (({}, 401), (mine, 403), (READ, 403), (ADMIN, 200)):
        registered = await replica.http.post("/rollouts", json=REGISTRATION, headers=headers)
        assert registered.status_code == status
    assert registered.json()["token"] == KEYS.rollout_token("r1")
    for headers, status in (({}, 401), (mine, 403), (ADMIN, 403), (READ, 200)):
        assert (await replica.http.get("/rollouts/r1", headers=headers)).status_code == status
    for headers, status in (({}, 401), (others, 403), (READ, 403), (mine, 200), (ADMIN, 200)):
        ended = await replica.http.post("/rollouts/r1/complete", json={"reward": 1.0}, headers=headers)
        assert ended.status_code == status


@pytest.mark.parametrize("registered", [False, True])
async def test_an_agent_that_somebody_else_scores_does_not_score_itself(
    template: HfChatTemplate, registered: bool
) -> None:
    replica = replica_of(template, keyring=KEYS)
    if registered:
        said = {"rollout_id": "r2", "group_id": "g", "agent_completes": False}
        assert (await replica.http.post("/rollouts", json=said, headers=ADMIN)).status_code == 200
    mine = {"authorization": f"Bearer {KEYS.rollout_token('r2')}"}
    body = {"model": "policy", "messages": [USER]}
    await replica.http.post("/ng-rollout/r2/v1/chat/completions", json=body, headers=mine)
    refused = await replica.http.post("/rollouts/r2/complete", json={"reward": 1.0}, headers=mine)
    assert told(refused) == (403, refused.json()["error"]["message"])
    assert "--admin" in refused.json()["error"]["message"]
    assert (await replica.state.snapshot("r2")).outcome is None
    assert (await replica.http.post("/rollouts/r2/complete", json={"reward": 1.0}, headers=ADMIN)).status_code == 200


async def test_a_state_that_restarts_is_asked_again(template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = replica_of(template)

    async def down(_: object) -> int:
        raise StoreUnavailableError("restarting")

    with monkeypatch.context() as patched:
        patched.setattr(replica.state, "write", down)
        refused = await register(replica)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert (await register(replica)).status_code == 200
