"""One conversation means the same in every dialect: the same ids, and a parent for whoever goes on in another one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx
import httpx2
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gym_capture.calls import ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues, Root
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step
from tests.serving.replica import Replica

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION: Final = "How warm is it in Paris and in Rome?"
SYSTEM: Final = "You are brief."


class Turn(NamedTuple):
    """What the policy says in one turn, and what comes back for it."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments."""
    answers: tuple[str, ...]


TURNS: Final = (
    Turn("Let me see.", (("weather", '{"city":  "Paris"}'), ("weather", '{"city": "Rome"}')), ("21", "27")),
    Turn("", (("weather", '{"city": "Oslo"}'),), ("<|im_end|>12",)),
    Turn("Paris 21, Rome 27.", (), ()),
)


def said(number: int) -> Script:
    turn = TURNS[number]
    events: list[ReplyEvent] = [TextDelta(turn.text)] if turn.text else []
    for position, (name, arguments) in enumerate(turn.calls):
        events += [
            ToolCallStart(position, f"call_{number}_{position}", name),
            ToolCallDelta(position, arguments[:7]),
            ToolCallDelta(position, arguments[7:]),
        ]
    ids = [100 + number, *range(200, 205), 2]
    return Script(steps=[Step(token_ids=ids, events=events)])


def scripter(call: EngineCall) -> Script:
    """The turn that the conversation has come to."""
    return said(sum(type(item).__name__ == "AssistantTurn" for item in call.request.conversation.items))


def chat_body(past: Sequence[tuple[int, list[str]]]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    for number, ids in past:
        turn = TURNS[number]
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, (name, arguments) in zip(ids, turn.calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": turn.text or None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": id, "content": answer}
            for id, answer in zip(ids, turn.answers, strict=True)
        ]
    tool = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
    return {"model": "policy", "messages": messages, "tools": [tool]}


def responses_body(past: Sequence[tuple[int, list[str]]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for number, ids in past:
        turn = TURNS[number]
        if turn.text:
            content = [{"type": "output_text", "text": turn.text, "annotations": []}]
            items.append({"type": "message", "role": "assistant", "content": content})
        items += [
            {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
            for id, (name, arguments) in zip(ids, turn.calls, strict=True)
        ]
        items += [
            {"type": "function_call_output", "call_id": id, "output": answer}
            for id, answer in zip(ids, turn.answers, strict=True)
        ]
    tool = {"type": "function", "name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": False}
    return {"model": "policy", "instructions": SYSTEM, "input": items, "tools": [tool]}


def messages_body(past: Sequence[tuple[int, list[str]]]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for number, ids in past:
        turn = TURNS[number]
        blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
        blocks += [
            {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
            for id, (name, arguments) in zip(ids, turn.calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": answer}]}
            for id, answer in zip(ids, turn.answers, strict=True)
        ]
        results[-1]["cache_control"] = {"type": "ephemeral"}
        messages.append({"role": "user", "content": results})
    tool = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    return {"model": "policy", "max_tokens": 64, "system": system, "messages": messages, "tools": [tool]}


def chat_ids(reply: Mapping[str, Any]) -> list[str]:
    return [call["id"] for call in reply["choices"][0]["message"].get("tool_calls") or ()]


def responses_ids(reply: Mapping[str, Any]) -> list[str]:
    return [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]


def messages_ids(reply: Mapping[str, Any]) -> list[str]:
    return [block["id"] for block in reply["content"] if block["type"] == "tool_use"]


class Api(NamedTuple):
    """How an agent speaks one dialect."""

    path: str
    body: Callable[[Sequence[tuple[int, list[str]]]], dict[str, Any]]
    call_ids: Callable[[Mapping[str, Any]], list[str]]
    """The ids of a reply's tool calls."""


APIS: Final = {
    "chat": Api("chat/completions", chat_body, chat_ids),
    "responses": Api("responses", responses_body, responses_ids),
    "messages": Api("messages", messages_body, messages_ids),
}


async def converse(replica: Replica, apis: Sequence[Api], *, rollout_id: str) -> None:
    """Three turns, each asked for in the given dialect."""
    past: list[tuple[int, list[str]]] = []
    for number, api in enumerate(apis):
        url = f"/ng-rollout/{rollout_id}/v1/{api.path}"
        response: httpx.Response = await replica.http.post(url, json=api.body(past))
        assert response.status_code == 200, response.text
        past.append((number, api.call_ids(response.json())))
        assert len(past[-1][1]) == len(TURNS[number].calls)


@pytest.mark.parametrize("names", list(itertools.product(APIS, repeat=3)), ids="-".join)
async def test_a_conversation_goes_on_in_any_dialect(template: HfChatTemplate, names: tuple[str, ...]) -> None:
    replica = Replica(template, scripter)
    await converse(replica, [APIS[name] for name in names], rollout_id="r1")
    one, two, three = await replica.state.entries()
    assert [entry.parent for entry in (one, two, three)] == [
        Root(),
        Continues(one.model_call_id, one.cum_len),
        Continues(two.model_call_id, two.cum_len),
    ]
    assert [entry.prefix.supplied for entry in (one, two, three)] == [False, True, True]
    np.testing.assert_array_equal(three.prompt_token_ids[: two.cum_len], two.cumulative_ids())


@pytest.mark.parametrize("prefix_supply", [True, False])
async def test_every_dialect_gives_the_same_ids(template: HfChatTemplate, prefix_supply: bool) -> None:
    replica = Replica(template, scripter, prefix_supply=prefix_supply)
    for name, api in APIS.items():
        await converse(replica, [api] * 3, rollout_id=name)
    played = [await replica.state.entries(name) for name in APIS]
    for alike in zip(*played, strict=True):
        assert len({entry.digest for entry in alike}) == 1
        assert len({entry.keys.turn_key for entry in alike}) == 1


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_counted_tokens_are_those_of_the_prompt(template: HfChatTemplate, turns: int) -> None:
    replica = Replica(template, scripter)
    await converse(replica, [APIS["chat"]] * turns, rollout_id="r1")
    past = [(number, [f"call_{number}_{n}" for n in range(len(TURNS[number].calls))]) for number in range(turns)]
    body = messages_body(past)
    before = (await replica.state.snapshot()).snapshot_id
    counted = await replica.http.post("/ng-rollout/r1/v1/messages/count_tokens", json=body)
    assert (await replica.state.snapshot()).snapshot_id == before
    reply = await replica.http.post("/ng-rollout/r1/v1/messages", json=body)
    last = (await replica.state.entries())[-1]
    assert counted.json() == {"input_tokens": last.prompt_token_ids.size}
    assert reply.status_code == 200
    assert last.prefix.supplied is (turns > 0)


async def test_models_are_listed_for_either_library(template: HfChatTemplate) -> None:
    replica = Replica(template, scripter)
    http, transport = replica.http, httpx2.ASGITransport(replica.app)
    for base in ("http://gateway", "http://gateway/ng-rollout/r1"):
        openai = AsyncOpenAI(base_url=f"{base}/v1", api_key="x", http_client=http)
        assert [model.id for model in (await openai.models.list()).data] == ["policy"]
        assert (await openai.models.retrieve("policy")).owned_by == "gym-capture"
        other_http = httpx2.AsyncClient(transport=transport, base_url=base, trust_env=False)
        anthropic = AsyncAnthropic(base_url=base, api_key="x", http_client=other_http)
        assert [model.display_name async for model in anthropic.models.list()] == ["policy"]
        assert (await http.head(base)).status_code == 200
    assert (await http.get("/v1/models/gpt-9")).status_code == 404
