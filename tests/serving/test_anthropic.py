"""Anthropic Messages over HTTP with the real SDK: agents run as they are, and every turn continues the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, ToolUseBlock

from gym_capture.calls import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues, Root
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step, in_order
from gym_capture.errors import EngineError, EngineOverloadedError
from tests.serving.replica import Replica

USER = {"role": "user", "content": "How warm is it?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CACHED = {"type": "ephemeral"}
WEATHER = {"name": "get_weather", "description": "Says it.", "input_schema": SCHEMA}
STOP_ID = 2
CALLING = Script(
    steps=[
        Step(token_ids=[100], events=[ReasoningDelta("Two "), ReasoningDelta("cities.")]),
        Step(token_ids=[101], events=[TextDelta("\n\n")]),
        Step(token_ids=[102], events=[TextDelta("Let me see.")]),
        Step(token_ids=[103], events=[ToolCallStart(0, "c0", "get_weather"), ToolCallDelta(0, '{"city":')]),
        Step(token_ids=[104], events=[ToolCallDelta(0, '  "Paris"}'), TextDelta("\n")]),
        Step(token_ids=[105], events=[ToolCallStart(1, "c1", "get_weather"), ToolCallDelta(1, '{"city": Rome}')]),
        Step(token_ids=[106, STOP_ID], events=[]),
    ]
)
SAYING = Script(
    steps=[Step(token_ids=[110], text="21 "), Step(token_ids=[111], text="degrees."), Step(token_ids=[STOP_ID])]
)
FAILING = Script(steps=[Step(token_ids=[110], text="par")], raises=EngineError("the engine broke"))


def sdk(replica: Replica, rollout_id: str | None = "r1") -> AsyncAnthropic:
    """A client that does not repeat what fails."""
    prefix = "" if rollout_id is None else f"/ng-rollout/{rollout_id}"
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(replica.app), trust_env=False)
    return AsyncAnthropic(api_key="dummy", base_url=f"http://gateway{prefix}", http_client=http, max_retries=0)


async def ask(client: AsyncAnthropic, messages: list[Any], *, stream: bool, **fields: Any) -> Message:
    arguments: dict[str, Any] = {"model": "claude-x", "max_tokens": 50, "messages": messages, **fields}
    message: Message
    if stream:
        async with client.messages.stream(**arguments) as reply:
            message = await reply.get_final_message()
    else:
        message = await client.messages.create(**arguments)
    return message


def answered(message: Message) -> list[dict[str, Any]]:
    """What an agent adds to the conversation: the reply, and what its tools said."""
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": "no such input" if "INVALID_JSON" in block.input else [{"type": "text", "text": "21"}],
            "is_error": "INVALID_JSON" in block.input,
        }
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    echo = [block.model_dump(exclude_none=True) for block in message.content]
    return [{"role": "assistant", "content": echo}, {"role": "user", "content": results}]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_agent_s_next_call_continues_the_exact_ids_of_its_last(template: HfChatTemplate, stream: bool) -> None:
    replica = Replica(template, in_order([CALLING, SAYING]))
    client = sdk(replica)
    fields: dict[str, Any] = {"tools": [WEATHER], "system": [{"type": "text", "text": "Be brief."}]}
    calling = await ask(client, [USER], stream=stream, **fields)
    assert [block.type for block in calling.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in calling.content if isinstance(block, ToolUseBlock)] == [
        {"city": "Paris"},
        {"INVALID_JSON": '{"city": Rome}'},
    ]
    assert calling.stop_reason == "tool_use"
    saying = await ask(client, [USER, *answered(calling)], stream=stream, **fields)
    assert [block.text for block in saying.content if block.type == "text"] == ["21 degrees."]
    assert saying.stop_reason == "end_turn"

    one, two = await replica.state.entries()
    assert (one.model_call_id, two.model_call_id) == (calling.id, saying.id)
    assert calling.id.startswith("msg_")
    assert (one.request.requested_model, one.request.has_tools, one.parent) == ("claude-x", True, Root())
    assert [item["arguments"] for item in one.reply.output_items if item["type"] == "function_call"] == [
        '{"city":  "Paris"}',
        '{"city": Rome}',
    ]
    cumulative = one.cumulative_ids()
    assert cumulative.tolist()[-8:] == [100, 101, 102, 103, 104, 105, 106, STOP_ID]
    assert (two.parent, two.prefix.supplied) == (Continues(one.model_call_id, cumulative.size), True)
    np.testing.assert_array_equal(two.prompt_token_ids[: cumulative.size], cumulative)
    for message, entry in ((calling, one), (saying, two)):
        assert message.usage.input_tokens == entry.prompt_token_ids.size
        assert message.usage.output_tokens == entry.generation_token_ids.size


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_whose_arguments_come_in_turns_are_told_one_after_the_other(
    template: HfChatTemplate, stream: bool
) -> None:
    calling = Script(
        steps=[
            Step(token_ids=[100], events=[ToolCallStart(0, "c0", "weather"), ToolCallDelta(0, '{"city":')]),
            Step(token_ids=[101], events=[ToolCallStart(1, "c1", "weather"), ToolCallDelta(1, '{"city":')]),
            Step(
                token_ids=[102], events=[TextDelta("Asking."), ToolCallDelta(0, '"Rome"}'), ToolCallDelta(1, '"Bari"}')]
            ),
        ]
    )

    replica = Replica(template, in_order([calling, SAYING]))
    client = sdk(replica)
    message = await ask(client, [USER], stream=stream, tools=[WEATHER])
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert [(call.id, call.input) for call in calls] == [("c0", {"city": "Rome"}), ("c1", {"city": "Bari"})]
    assert [block.text for block in message.content if block.type == "text"] == ["Asking."]
    await ask(client, [USER, *answered(message)], stream=stream, tools=[WEATHER])
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)


async def test_AN_01_a_new_system_message_at_the_end_does_not_move_what_came_before(template: HfChatTemplate) -> None:
    replica = Replica(template, in_order([SAYING, SAYING]))
    client = sdk(replica)
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"},
        {"type": "text", "text": "S"},
    ]
    told: list[Any] = [USER, {"role": "system", "content": "Agents: a, b"}]
    first = await ask(client, told, stream=False, system=system, tools=[WEATHER])
    system[0]["text"] = "x-anthropic-billing-header: cc_version=2.1; cch=2;"
    more = [
        *told,
        *answered(first)[:1],
        {"role": "user", "content": "go"},
        {"role": "system", "content": "100 left"},
    ]
    await ask(client, more, stream=False, system=system, tools=[WEATHER])
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cumulative_ids().size)
    assert one.request.requested_model == "claude-x"
    rendered = template.decode(two.prompt_token_ids)
    for text in ("S", "Agents: a, b", "100 left"):
        assert text in rendered
    assert "billing" not in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


async def test_AN_03_count_tokens_says_what_the_call_will_say_and_leaves_no_trace(template: HfChatTemplate) -> None:
    replica = Replica(template, in_order([CALLING, SAYING]))
    client = sdk(replica)
    arguments: dict[str, Any] = {"model": "claude-x", "tools": [WEATHER], "system": "S " * 50}
    messages: list[Any] = [USER]
    for _ in range(2):
        counted = await client.beta.messages.count_tokens(messages=messages, **arguments)
        message = await client.messages.create(messages=messages, max_tokens=50, **arguments)
        assert counted.input_tokens == message.usage.input_tokens
        messages += answered(message)
    assert len(await replica.state.entries()) == 2
    snapshot = await replica.state.snapshot()
    assert (snapshot.incomplete, snapshot.problems) == ((), ())


async def test_AN_09_what_claude_code_sends_is_taken(template: HfChatTemplate) -> None:
    replica = Replica(template, in_order([SAYING]))
    arguments: dict[str, Any] = {
        "model": "claude-haiku",
        "max_tokens": 32_000,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": CACHED}]}],
        "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "betas": ["a-2025-01-01", "b-2026-02-02"],
    }
    async with sdk(replica).beta.messages.stream(**arguments) as reply:
        message = await reply.get_final_message()
    assert message.type == "message"
    (call,) = replica.engine.calls
    assert [tool.name for tool in call.request.conversation.tools] == ["get_weather"]
    assert call.max_tokens == 4096 - call.prompt_ids.size
    (entry,) = await replica.state.entries()
    assert (entry.request.has_tools, entry.request.requested_model) == (True, "claude-haiku")


async def test_AN_11_a_request_for_no_tokens_leaves_no_record(template: HfChatTemplate) -> None:
    replica = Replica(template, in_order([]))
    with pytest.raises(anthropic.BadRequestError):
        await ask(sdk(replica), [USER], stream=False, max_tokens=0)
    assert await replica.state.entries() == ()


@pytest.mark.parametrize("script", [SAYING, Script(steps=[Step(token_ids=[STOP_ID])])], ids=["text", "nothing to say"])
async def test_ST_11_a_stream_begins_with_the_length_of_its_prompt(template: HfChatTemplate, script: Script) -> None:
    replica = Replica(template, in_order([script]))
    arguments: dict[str, Any] = {"model": "claude-x", "max_tokens": 9, "messages": [USER]}
    first, *_ = [event async for event in await sdk(replica).messages.create(**arguments, stream=True)]
    assert first.type == "message_start"
    assert first.message.usage.input_tokens == replica.engine.calls[0].prompt_ids.size


async def test_a_stop_sequence_is_named(template: HfChatTemplate) -> None:
    script = Script(steps=SAYING.steps, stop_reason="END")
    replica = Replica(template, in_order([script, script]))
    for stream in (True, False):
        message = await ask(sdk(replica), [USER], stream=stream, stop_sequences=["END"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def overloaded(_: EngineCall) -> Script:
    raise EngineOverloadedError("no capacity")


@pytest.mark.parametrize(
    ("scripter", "rollout_id", "fields", "status", "kind", "said"),
    [
        (in_order([]), "r1", {"messages": []}, 400, "invalid_request_error", "messages must not be empty"),
        (in_order([]), None, {}, 404, "not_found_error", "claude-x"),
        (in_order([]), "r1", {"system": "long " * 5000}, 400, "invalid_request_error", "prompt is too long: "),
        (overloaded, "r1", {}, 529, "overloaded_error", "no capacity"),
    ],
    ids=["invalid", "unknown model", "too long", "overloaded"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_arrive_as_the_sdk_s_own(
    template: HfChatTemplate,
    scripter: Callable[[EngineCall], Script],
    rollout_id: str | None,
    fields: dict[str, Any],
    status: int,
    kind: str,
    said: str,
    stream: bool,
) -> None:
    arguments: dict[str, Any] = {"messages": [USER], **fields}
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(sdk(Replica(template, scripter), rollout_id), stream=stream, **arguments)
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind
    assert said in caught.value.body["error"]["message"]


async def test_ST_08_a_stream_that_breaks_ends_in_an_error_and_not_in_a_stop(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: FAILING)
    for stream in (True, False):
        with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
            await ask(sdk(replica), [USER], stream=stream)
    body = {"model": "m", "max_tokens": 9, "messages": [USER], "stream": True}
    response = await replica.http.post("/ng-rollout/r1/v1/messages?beta=true", json=body)
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    name, data = last.split("\n")
    assert (name, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "api_error")
    assert "message_stop" not in response.text
    assert {entry.reply.finish_reason for entry in await replica.state.entries()} == {"abort"}


async def test_no_route_is_said_in_the_client_s_own_shape(template: HfChatTemplate) -> None:
    response = await Replica(template, in_order([])).http.post("/v1/messages/batches", json={})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
