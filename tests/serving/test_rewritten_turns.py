"""Clients that give a turn back otherwise than they got it: what is accepted, and what the reason says of the rest."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx2
import pytest
from anthropic import AsyncAnthropic

from gym_capture.calls import ModelRequest, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues, Parent, Unresolved
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step
from tests.serving.replica import Replica

SAID: Final = "Thought: compute.\n<code>\nprint(4)\n"
STOPS: Final = ["Observation:", "Calling tools:", "</code>"]
ASK: Final = "What is 2 + 2?"
SEEN: Final = "Observation:\n4"
PATHS: Final = {"chat": "chat/completions", "messages": "messages", "completions of chat, streamed": "chat/completions"}


def stopped(template: HfChatTemplate, request: ModelRequest) -> Script:
    """What the engine does at a stop string: it samples it, and leaves it out of the text."""
    ids = template.encode_plain(SAID + "</code>").tolist()
    return Script(steps=[Step(token_ids=ids, text=SAID)], stop_reason="</code>")


def body(dialect: str, turns: list[str], *, stop: bool = True) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASK}]
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": SEEN}]
    sent = {"model": "policy", "max_tokens": 64, "messages": messages, "stream": "streamed" in dialect}
    return sent | ({"stop_sequences" if dialect == "messages" else "stop": STOPS} if stop else {})


async def played(template: HfChatTemplate, dialect: str, *turns: str, stop: bool = True) -> tuple[Parent, Any, str]:
    """Two calls, the second with these turns for the first's: its parent, the rules, and its prompt."""

    def scripter(call: EngineCall) -> Script:
        return stopped(template, call.request)

    replica = Replica(template, scripter)
    for number in range(len(turns) + 1):
        sent = body(dialect, list(turns[:number]), stop=stop or number == 0)
        response = await replica.http.post(f"/ng-rollout/r1/v1/{PATHS[dialect]}", json=sent)
        assert response.status_code == 200, response.text
    *_, before, last = await replica.state.entries()
    if last.prefix.supplied:
        assert last.parent == Continues(before.model_call_id, before.cum_len)
        assert last.prompt_token_ids[: before.cum_len].tolist() == before.cumulative_ids().tolist()
    return last.parent, last.request.normalized, template.decode(last.prompt_token_ids)


@pytest.mark.parametrize("stop", [True, False], ids=["asked again", "asked once"])
@pytest.mark.parametrize("dialect", PATHS)
def test_a_stop_string_put_back_is_the_turn_that_it_ended(template: HfChatTemplate, dialect: str, stop: bool) -> None:
    parent, rules, prompt = asyncio.run(played(template, dialect, SAID + "</code>", stop=stop))
    assert isinstance(parent, Continues)
    assert rules == ("stop_string_put_back",)
    assert prompt.count("</code>") == 1, "as it was sampled, and not once more"
    parent, rules, prompt = asyncio.run(played(template, dialect, SAID, stop=stop))
    assert isinstance(parent, Continues)
    assert rules == ()
    assert prompt.count("</code>") == 1


async def test_a_stop_string_put_back_in_every_turn_is_one_chain(template: HfChatTemplate) -> None:
    parent, rules, prompt = await played(template, "chat", *[SAID + "</code>"] * 3)
    assert isinstance(parent, Continues)
    assert rules == ("stop_string_put_back",)
    assert prompt.count("</code>") == 3


@pytest.mark.parametrize(
    "turn",
    [
        SAID + "Observation:",
        SAID + "</code></code>",
        SAID.strip() + "</code>",
        SAID + "</code>\nCalling tools:\n[{'id': 'call_1'}]",
        "Thought: something else.",
    ],
    ids=["another stop string", "twice", "inner whitespace", "more than that", "other words"],
)
async def test_a_rewritten_turn_is_unresolved_and_says_so(template: HfChatTemplate, turn: str) -> None:
    parent, rules, _ = await played(template, "chat", turn)
    assert parent == Unresolved("rewritten_turn")
    assert rules == ()


async def test_another_history_is_no_rewritten_turn(template: HfChatTemplate) -> None:
    async def run() -> Parent | None:
        replica = Replica(template, lambda call: stopped(template, call.request))
        await replica.chat()
        await replica.chat(
            {"role": "user", "content": "else"},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": SEEN},
        )
        return (await replica.state.entries())[-1].parent

    assert await run() == Unresolved("no_match")


# --- calls that a limit cut ------------------------------------------------------------------------------------------

BEGUN: Final = '{"city": "Ro'


def cut(template: HfChatTemplate, text: str = "") -> Script:
    """A call whose arguments end in the middle."""
    ids = template.encode_plain(f'{text}<tool_call>{{"name": "look", "arguments": {BEGUN}').tolist()
    call = ToolCallStart(0, "c1", "look"), ToolCallDelta(0, BEGUN)
    prose = (TextDelta(text),) if text else ()
    return Script(steps=[Step(token_ids=ids, events=(*prose, *call))], finish_reason="length")


@pytest.mark.parametrize("text", ["", "Let me look."])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_anthropic_s_library_makes_of_a_cut_call_is_that_call(
    template: HfChatTemplate, stream: bool, text: str
) -> None:
    replica = Replica(template, lambda _: cut(template, text))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(replica.app), trust_env=False)
    client = AsyncAnthropic(api_key="none", base_url="http://gateway/ng-rollout/r1", http_client=http, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(2):
        fields: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": messages}
        if stream:
            async with client.messages.stream(**fields) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**fields)
        assert reply.stop_reason == "max_tokens"
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert len(calls) == int(stream), "nobody is handed a call that he could run"
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "cut"} for call in calls]
        messages += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
        ]
    first, second = await replica.state.entries()
    assert second.parent == Continues(first.model_call_id, first.cum_len)
    assert second.request.normalized == ("cut_call_closed" if stream else "cut_call_left_out",)
    assert second.prompt_token_ids[: first.cum_len].tolist() == first.cumulative_ids().tolist()


@pytest.mark.parametrize("arguments", ['{"city": "Ro"}', '{"city": "Rome"}'], ids=["closed by hand", "completed"])
async def test_a_cut_call_that_a_client_made_whole_is_another_call(template: HfChatTemplate, arguments: str) -> None:
    replica = Replica(template, lambda _: cut(template, "Let me look."))
    await replica.chat(max_tokens=9)
    made = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    await replica.chat(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    )
    *_, last = await replica.state.entries()
    assert last.parent == Unresolved("rewritten_turn")
