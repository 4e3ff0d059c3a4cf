"""The whole graph: Ray Serve, a real vLLM engine, state actors with logs on disk, and the real OpenAI SDK.

The model is small and random, so what it says is noise - broken characters and all - and every turn of it has to
come back as the prefix of the next.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from gym_capture.capture.records import Continues, Root, TokenEntry, digest_ids
from gym_capture.engines.hf_template import HfChatTemplate
from tests.serving.graph import Graph, whole

pytestmark = pytest.mark.engine

WORDS = 49_152
"""Of SmolLM2's tokenizer, which the tiny model has."""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is like.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def without_blanks(template: HfChatTemplate) -> dict[str, float]:
    """A bias against ids of white space alone: a random model would write all that JSON allows, up to its limit."""
    texts = ((number, template.decode(np.array([number], dtype=np.int32))) for number in range(WORDS))
    return {str(number): -100.0 for number, text in texts if text.isspace()}


async def ask(client: AsyncOpenAI, messages: list[dict[str, Any]], *, stream: bool, **fields: Any) -> dict[str, Any]:
    """One call. Returns the assistant's message, as an agent appends it, with the finish reason and the usage."""
    create: Any = client.chat.completions.create
    fields = {"model": "policy", "messages": messages, "max_tokens": 24, **fields}
    if not stream:
        reply = await create(**fields)
        (choice,) = reply.choices
        return {
            "message": choice.message.model_dump(exclude_none=True),
            "finish_reason": choice.finish_reason,
            "usage": reply.usage,
            "id": reply.id,
        }
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason = usage = call_id = None
    async for chunk in await create(**fields, stream=True, stream_options={"include_usage": True}):
        usage, call_id = chunk.usage, chunk.id
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            message["content"] += choice.delta.content or ""
            for delta in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    delta.index, {"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["function"]["name"] += delta.function.name or ""
                call["function"]["arguments"] += delta.function.arguments or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    return {"message": message, "finish_reason": finish_reason, "usage": usage, "id": call_id}


def check_chain(entries: list[TokenEntry]) -> None:
    """Every call continues the one before, from its very ids, and every record is whole."""
    for position, entry in enumerate(entries):
        before = entries[position - 1] if position else None
        assert entry.parent == (Root() if before is None else Continues(before.model_call_id, before.cum_len))
        if before is not None:
            np.testing.assert_array_equal(entry.prompt_token_ids[: before.cum_len], before.cumulative_ids())
            assert entry.prompt_len > before.cum_len
        assert entry.prefix.supplied == entry.prefix.requested == (before is not None)
        assert entry.digest == digest_ids(entry.cumulative_ids())
        assert entry.generation_token_ids.size > 0
        assert np.all(entry.generation_log_probs <= 0)
        assert (entry.request.sampling["temperature"], entry.request.sampling["top_p"]) == (1.0, 1.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_turns_with_tools_are_one_chain_of_ids(graph: Graph, template: HfChatTemplate, stream: bool) -> None:
    no_blanks = without_blanks(template)

    rollout_id = f"tools-{stream}"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "What is the weather?"},
    ]
    replies = []
    async with graph.client(rollout_id) as client:
        for turn in range(5):
            choice = ("required", "none", {"type": "function", "function": {"name": "get_weather"}})[turn % 3]
            reply = await ask(
                client,
                messages,
                stream=stream,
                tools=[WEATHER],
                tool_choice=choice,
                max_tokens=256,
                temperature=0.2,
                logit_bias=no_blanks,
            )
            replies.append(reply)
            calls = reply["message"].get("tool_calls", ())
            # How many calls a list has is the model's choice, so one may be cut off; a named one is always whole.
            assert bool(calls) == (choice != "none") or (choice == "required" and reply["finish_reason"] == "length")
            messages.append(reply["message"])
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
            messages.append({"role": "user", "content": "And now?"})
    snapshot = await graph.snapshot(rollout_id)
    assert (snapshot.incomplete, snapshot.problems) == ((), ())
    entries = whole(snapshot)
    assert [entry.model_call_id for entry in entries] == [reply["id"] for reply in replies]
    check_chain(entries)
    for entry, reply in zip(entries, replies, strict=True):
        usage = reply["usage"]
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            entry.prompt_len,
            entry.generation_token_ids.size,
        )
        arguments = [item["arguments"] for item in entry.reply.output_items if item["type"] == "function_call"]
        calls = reply["message"].get("tool_calls", ())
        assert arguments == [call["function"]["arguments"] for call in calls]
        assert entry.request.has_tools


async def test_rollouts_at_the_same_time_do_not_mix(graph: Graph, template: HfChatTemplate) -> None:
    async def attempt(number: int) -> None:
        messages = [{"role": "user", "content": f"I am number {number}."}]
        async with graph.client(f"many-{number}") as client:
            for _ in range(3):
                reply = await ask(client, messages, stream=number % 2 == 0)
                messages += [reply["message"], {"role": "user", "content": f"Still number {number}."}]

    await asyncio.gather(*(attempt(number) for number in range(16)))
    for number in range(16):
        entries = whole(await graph.snapshot(f"many-{number}"))
        assert len(entries) == 3
        check_chain(entries)
        text = template.decode(entries[-1].prompt_token_ids)
        assert text.count(f"I am number {number}.") == 1
        assert text.count(f"Still number {number}.") == 2
        assert text.count("I am number ") == 1


async def test_killed_state_actors_lose_nothing(graph: Graph) -> None:
    messages = [{"role": "user", "content": "Remember this."}]
    async with graph.client("killed") as client:
        reply = await ask(client, messages, stream=False)
        messages += [reply["message"], {"role": "user", "content": "Go on."}]
        assert graph.kill_state_actors() == 2
        again = await ask(client, messages, stream=True)
        messages += [again["message"], {"role": "user", "content": "And on."}]
        await ask(client, messages, stream=False)
    snapshot = await graph.snapshot("killed")
    assert (snapshot.incomplete, snapshot.problems) == ((), ())
    entries = whole(snapshot)
    assert len(entries) == 3
    check_chain(entries)


async def test_clients_that_go_away_leave_aborted_calls_and_a_free_engine(graph: Graph) -> None:
    limit = 3000

    async def leave(number: int) -> None:
        async with graph.client(f"gone-{number}") as client:
            create: Any = client.chat.completions.create
            messages = [{"role": "user", "content": "Talk."}]
            reply = await create(model="policy", messages=messages, max_tokens=limit, stream=True)
            await anext(aiter(reply))
            await reply.close()

    await asyncio.gather(*(leave(number) for number in range(8)))
    for number in range(8):
        (entry,) = whole(await graph.snapshot(f"gone-{number}"))
        assert entry.reply.finish_reason == "abort"
        assert 0 < entry.generation_token_ids.size < limit


async def test_log_probs_are_of_the_sampled_ids(graph: Graph) -> None:
    async with graph.client("shown") as client:
        reply: Any = await client.chat.completions.create(
            model="any-name",
            messages=[{"role": "user", "content": "Say something."}],
            max_tokens=8,
            logprobs=True,
            top_logprobs=3,
        )
    (entry,) = whole(await graph.snapshot("shown"))
    shown = reply.choices[0].logprobs.content
    assert [token.logprob for token in shown] == pytest.approx(entry.generation_log_probs.tolist(), abs=1e-6)
    assert all(len(token.top_logprobs) == 3 for token in shown)
    assert (entry.policy.model, entry.request.requested_model, reply.model) == ("policy", "any-name", "any-name")
