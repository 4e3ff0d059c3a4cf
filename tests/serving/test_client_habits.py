"""What clients do besides asking: they look whether a server is there, wait, send halves of emojis, and read errors.

The gateway and the call service are the real ones, over a scripted engine with a real tokenizer and template; the
clients are the real SDKs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from gym_capture.calls import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues
from gym_capture.engines.base import GenerationChunk
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import Script, Step, in_order, saying
from gym_capture.serving import gateway
from tests.serving.replica import PLAIN, STOP, USER, Replica, always, listening

BASES = ("", "/ng-rollout/r1", "/ng-rollout/r1/training-token-capture")


# --- is anybody there? -------------------------------------------------------------------------------------------


async def test_AN_15_whatever_can_be_got_can_be_asked_for_by_its_head(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    await replica.chat(USER)
    paths = [base + path for base in BASES for path in ("", "/", "/api/hello", "/v1/models", "/v1/models/policy")]
    paths += ["/healthz", "/stats", "/openapi.json", "/ng-rollout/r1/token-records"]
    async with listening(replica.app) as http:
        for path in paths:
            head, whole = await http.head(path), await http.get(path)
            assert (path, head.status_code, whole.status_code) == (path, 200, 200)
            assert head.content == b""
        assert (await http.head("/v1/messages")).status_code == 405
        assert (await http.head("/v1/models/other")).status_code == 404
    assert len(replica.engine.calls) == 1


# --- silence -----------------------------------------------------------------------------------------------------


async def test_ST_14_a_client_of_a_silent_engine_hears_enough_to_go_on_waiting(
    template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit is on silence: a third of what it waits here, and ten times what passes between two pings."""
    monkeypatch.setattr(gateway, "_FIRST_BYTE_S", 0.05)

    speaks = asyncio.Event()
    replica = Replica(template, always(saying(template, "21", stop_token=STOP)), keep_alive_s=0.05)
    generate = replica.engine.generate

    async def silent(chunks: AsyncGenerator[GenerationChunk]) -> AsyncGenerator[GenerationChunk]:
        await speaks.wait()
        async for chunk in chunks:
            yield chunk

    def generate_in_silence(**fields: Any) -> Any:
        generation = generate(**fields)
        return replace(generation, chunks=silent(generation.chunks))

    replica.engine.generate = generate_in_silence  # type: ignore[method-assign]
    async with listening(replica.app) as http:
        limits = httpx2.Timeout(30, read=0.5)
        async with httpx2.AsyncClient(timeout=limits, trust_env=False) as patient:
            client = AsyncAnthropic(
                api_key="unused",
                base_url=f"{http.base_url}/ng-rollout/r1",
                http_client=patient,
                timeout=limits,
                max_retries=0,
            )
            asyncio.get_running_loop().call_later(1.5, speaks.set)
            arguments: dict[str, Any] = {"model": "claude-x", "max_tokens": 9, "messages": [USER]}
            seen = [event.type async for event in await client.messages.create(**arguments, stream=True)]
    assert seen[0] == "message_start"
    assert seen[-1] == "message_stop"
    # The SDK keeps them to itself. Claude Code counts what the SDK shows, so its users are told of its limits.
    assert "ping" not in seen
    clients = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    assert all(limit in clients for limit in ("CLAUDE_STREAM_IDLE_TIMEOUT_MS=", "API_TIMEOUT_MS="))
    assert len(replica.engine.calls) == 1


# --- halves of emojis --------------------------------------------------------------------------------------------

HALVES = Script(
    steps=[
        Step(token_ids=[5], events=[ReasoningDelta("hm\ud83d"), TextDelta("a\ud83d")]),
        Step(token_ids=[6], events=[ToolCallStart(0, "c0", "f\udc00"), ToolCallDelta(0, '{"x": "\ud83d"}')]),
        Step(token_ids=[7], events=[]),
    ]
)
ASKING: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "responses": {"input": "hi"},
    "messages": {"messages": [USER], "max_tokens": 9},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ASKING)
async def test_half_an_emoji_that_a_parser_makes_reaches_nobody(
    template: HfChatTemplate, route: str, stream: bool
) -> None:
    replica = Replica(template, always(HALVES))
    body = {"model": "policy", "stream": stream, **ASKING[route]}
    response = await replica.http.post(f"/ng-rollout/r1/v1/{route}", json=body)
    assert response.status_code == 200
    assert "a\ufffd" in response.text
    assert "f\ufffd" in response.text
    (entry,) = await replica.state.entries()
    assert entry.reply.finish_reason == "stop"
    assert "a\ufffd" in json.dumps(entry.reply.output_items, ensure_ascii=False)
    assert (await replica.state.snapshot()).incomplete == ()


async def test_a_turn_with_half_an_emoji_is_continued_when_it_is_echoed(template: HfChatTemplate) -> None:
    replica = Replica(template, always(HALVES))
    first = (await replica.chat(USER)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "\ufffd"}
    assert (await replica.chat(USER, first, result)).status_code == 200
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cumulative_ids().size)


# --- a context that overflows ------------------------------------------------------------------------------------

LONG: dict[str, Any] = {"role": "user", "content": "word " * 100}


async def by_chat(client: AsyncOpenAI, stream: bool) -> object:
    return await client.chat.completions.create(model="m", messages=[LONG], stream=stream)


async def by_responses(client: AsyncOpenAI, stream: bool) -> object:
    return await client.responses.create(model="m", input=LONG["content"], stream=stream)


async def by_completions(client: AsyncOpenAI, stream: bool) -> object:
    return await client.completions.create(model="m", prompt=LONG["content"], stream=stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("ask", "param"), [(by_chat, "messages"), (by_responses, "input"), (by_completions, "prompt")])
async def test_openai_clients_are_told_of_an_overflow_in_words_that_they_look_for(
    template: HfChatTemplate, ask: Callable[[AsyncOpenAI, bool], Awaitable[object]], param: str, stream: bool
) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64)
    url = "http://gateway/ng-rollout/r1/v1"
    client = AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, http_client=replica.http)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    assert "Input tokens exceed the configured limit of 63 tokens." in caught.value.message
    assert "This model's maximum context length is 64 tokens" in caught.value.message


@pytest.mark.parametrize("stream", [True, False])
async def test_anthropic_clients_are_told_by_how_much_a_prompt_is_too_long(
    template: HfChatTemplate, stream: bool
) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(replica.app), trust_env=False)
    client = AsyncAnthropic(api_key="unused", base_url="http://gateway/ng-rollout/r1", http_client=http, max_retries=0)
    arguments: dict[str, Any] = {"model": "claude-x", "messages": [LONG]}
    counted = await client.messages.count_tokens(**arguments)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(**arguments, max_tokens=9, stream=stream)
    assert f"prompt is too long: {counted.input_tokens} tokens > 63 maximum" in caught.value.message


# --- what the policy is shown ------------------------------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
MORE = {"role": "user", "content": "again"}


@pytest.mark.parametrize("arguments", ['{"city": "Par', '["Paris"]'], ids=["cut", "no object"])
async def test_CH_01_a_call_that_is_no_object_ends_no_conversation_and_stays_as_it_was_generated(
    template: HfChatTemplate, arguments: str
) -> None:
    calling = Step(token_ids=[50, 51], events=[ToolCallStart(0, "c1", "get_weather"), ToolCallDelta(0, arguments)])
    replica = Replica(template, in_order([Script(steps=[calling]), PLAIN, PLAIN]))
    first = (await replica.chat(USER, tools=[WEATHER])).json()["choices"][0]["message"]
    refusal = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "error: bad arguments"}
    history = [USER, first, refusal, MORE]
    assert (await replica.chat(*history, tools=[WEATHER])).status_code == 200
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)
    np.testing.assert_array_equal(two.prompt_token_ids[: one.cum_len], one.cumulative_ids())
    # Where nothing of it is on record, the template gets the object that it wants.
    assert (await replica.chat(*history, rollout_id="r2", tools=[WEATHER])).status_code == 200
    (whole,) = await replica.state.entries("r2")
    assert '{"name": "get_weather", "arguments": {}}' in template.decode(whole.prompt_token_ids)


async def test_CH_03_reasoning_under_either_of_its_names_is_one_prompt(template: HfChatTemplate) -> None:
    thinking = Script(steps=[Step(token_ids=[50], events=[ReasoningDelta("R"), TextDelta("a")])])
    replica = Replica(template, always(thinking))
    spliced, rendered = [], []
    for name in ("reasoning_content", "reasoning"):
        history = [USER, {"role": "assistant", "content": "a", name: "R"}, MORE]
        await replica.chat(USER, rollout_id=name)
        await replica.chat(*history, rollout_id=name)
        await replica.chat(*history, rollout_id=f"{name}-alone")
        one, two = await replica.state.entries(name)
        assert two.parent == Continues(one.model_call_id, one.cum_len)
        spliced.append(two.prompt_token_ids.tolist())
        (whole,) = await replica.state.entries(f"{name}-alone")
        rendered.append(template.decode(whole.prompt_token_ids))
    assert spliced[0] == spliced[1]
    assert rendered[0] == rendered[1]
    assert "<think>\nR\n</think>\na" in rendered[0]


async def test_AN_14_documents_are_in_the_prompt_and_counted_with_it(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    words = {"type": "text", "media_type": "text/plain", "data": "plain words"}
    found = {"type": "search_result", "source": "http://x", "title": "t"}
    content = [
        {"type": "document", "title": "a.txt", "source": words},
        {**found, "content": [{"type": "text", "text": "more words"}]},
        {"type": "tool_reference", "tool_name": "Grep"},
    ]
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": "policy", "messages": messages}
    counted = (await replica.http.post("/ng-rollout/r1/v1/messages/count_tokens", json=body)).json()
    reply = await replica.http.post("/ng-rollout/r1/v1/messages", json={**body, "max_tokens": 9})
    assert reply.status_code == 200
    prompt = template.decode(replica.engine.calls[0].prompt_ids)
    for part in ("a.txt", "plain words", "http://x", "<title>t</title>", "more words", "Grep"):
        assert part in prompt
    assert counted["input_tokens"] == reply.json()["usage"]["input_tokens"] == replica.engine.calls[0].prompt_ids.size


async def test_tools_that_were_left_out_are_on_record(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": "policy", "max_tokens": 9, "messages": [USER], "tools": [search]}
    assert (await replica.http.post("/ng-rollout/r1/v1/messages", json=body)).status_code == 200
    body = {"model": "policy", "input": "hi", "tools": [{"type": "file_search"}]}
    assert (await replica.http.post("/ng-rollout/r1/v1/responses", json=body)).status_code == 200
    one, two = await replica.state.entries()
    assert one.request.normalized == ("tool_left_out:web_search",)
    assert two.request.normalized == ("tool_left_out:file_search",)
    assert not one.request.has_tools
