"""Responses and Messages on the whole graph: Ray Serve, a real vLLM engine, the two real SDKs.

What the random model says is noise, and a forced call may be cut off in the middle of its arguments: whatever the SDK
makes of it and sends back has to be continued from the ids that were sampled.
"""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.serving.graph import Graph, whole
from tests.serving.test_graph_e2e import check_chain

pytestmark = pytest.mark.engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TURNS = 4


def anthropic_client(graph: Graph, rollout_id: str) -> AsyncAnthropic:
    base_url = f"{graph.url}/ng-rollout/{rollout_id}"
    return AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120)


async def messages_turn(
    client: AsyncAnthropic, history: list[dict[str, Any]], *, stream: bool, forced: bool
) -> tuple[int, int]:
    """One turn, taken down in `history`. Returns the counted and the reported length of its prompt."""
    fields: dict[str, Any] = {
        "model": "claude-haiku",
        "system": [{"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}}],
        "messages": history,
        "tools": [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "get_weather"} if forced else {"type": "none"},
    }
    counted = await client.messages.count_tokens(**fields)
    if stream:
        async with client.messages.stream(**fields, max_tokens=32) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.messages.create(**fields, max_tokens=32)
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")
    history.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}
        for block in message.content
        if block.type == "tool_use"
    ]
    # A call that the limit cut is none that could be run: no block of a whole reply, and an unfinished one of a stream.
    assert forced or not results
    assert results or not forced or message.stop_reason == "max_tokens"
    history.append({"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]})
    return counted.input_tokens, message.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_messages_turns_are_one_chain_of_ids(graph: Graph, stream: bool) -> None:
    rollout_id = f"messages-{stream}"
    history: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
    async with anthropic_client(graph, rollout_id) as client:
        lengths = [await messages_turn(client, history, stream=stream, forced=turn % 2 == 0) for turn in range(TURNS)]
    snapshot = await graph.snapshot(rollout_id)
    assert (snapshot.incomplete, snapshot.problems) == ((), ())
    entries = whole(snapshot)
    assert len(entries) == TURNS
    check_chain(entries)
    assert lengths == [(entry.prompt_len, entry.prompt_len) for entry in entries]
    assert {entry.request.requested_model for entry in entries} == {"claude-haiku"}


async def responses_turn(client: AsyncOpenAI, history: list[dict[str, Any]], *, stream: bool, forced: bool) -> None:
    """One turn, taken down in `history`."""
    fields: dict[str, Any] = {
        "model": "gpt-5",
        "instructions": "You are terse.",
        "input": history,
        "max_output_tokens": 32,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "get_weather", "description": "Weather.", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "get_weather"} if forced else "none",
    }
    response: Any = None
    if stream:
        numbers = []
        async for event in await client.responses.create(**fields, stream=True):
            numbers.append(event.sequence_number)
            if event.type in ("response.completed", "response.incomplete"):
                response = event.response
        assert numbers == list(range(len(numbers)))
    else:
        response = await client.responses.create(**fields)
    assert response.status in ("completed", "incomplete")
    history += [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    assert bool(calls) is forced
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."} for call in calls]
    history.append({"role": "user", "content": "And now?"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_responses_turns_are_one_chain_of_ids(graph: Graph, stream: bool) -> None:
    rollout_id = f"responses-{stream}"
    history: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]
    async with graph.client(rollout_id) as client:
        for turn in range(TURNS):
            await responses_turn(client, history, stream=stream, forced=turn % 2 == 0)
    snapshot = await graph.snapshot(rollout_id)
    assert (snapshot.incomplete, snapshot.problems) == ((), ())
    entries = whole(snapshot)
    assert len(entries) == TURNS
    check_chain(entries)


async def test_completions_go_on_from_text_as_it_is(graph: Graph) -> None:
    async with graph.client("completions") as client:
        reply = await client.completions.create(model="policy", prompt="Once <|im_end|> upon", max_tokens=8)
        assert reply.usage is not None
    (entry,) = whole(await graph.snapshot("completions"))
    assert entry.prompt_len == reply.usage.prompt_tokens
    # The control token's spelling stays text.
    assert 2 not in entry.prompt_token_ids


async def test_a_client_that_leaves_ends_its_call(graph: Graph) -> None:
    async with graph.client("leaver") as client:
        fields: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Go on."}]}
        stream = await client.chat.completions.create(**fields, stream=True, max_tokens=3000)
        async for _ in stream:
            break
        await stream.close()
    snapshot = await graph.snapshot("leaver")
    (entry,) = snapshot.entries
    assert entry.reply.finish_reason == "abort"
    # Not what the limit allowed: half a minute of generation, or more.
    assert entry.generation_token_ids.size < 1500
