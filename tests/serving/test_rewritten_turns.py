"""Clients that give a turn back otherwise than they got it: what is accepted, and what the reason says of the rest."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from gym_capture.calls import ModelRequest
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step
from gym_capture.records import Continues, Parent, Unresolved
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
    if last.prefix_supplied:
        assert last.parent == Continues(before.model_call_id, before.cum_len)
        assert last.prompt_token_ids[: before.cum_len].tolist() == before.cumulative_ids().tolist()
    return last.parent, last.normalized, template.decode(last.prompt_token_ids)


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


def test_a_stop_string_put_back_in_every_turn_is_one_chain(template: HfChatTemplate) -> None:
    parent, rules, prompt = asyncio.run(played(template, "chat", *[SAID + "</code>"] * 3))
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
def test_a_rewritten_turn_is_unresolved_and_says_so(template: HfChatTemplate, turn: str) -> None:
    parent, rules, _ = asyncio.run(played(template, "chat", turn))
    assert parent == Unresolved("rewritten_turn")
    assert rules == ()


def test_another_history_is_no_rewritten_turn(template: HfChatTemplate) -> None:
    async def run() -> Parent | None:
        replica = Replica(template, lambda call: stopped(template, call.request))
        await replica.chat()
        await replica.chat(
            {"role": "user", "content": "else"},
            {"role": "assistant", "content": SAID},
            {"role": "user", "content": SEEN},
        )
        return (await replica.state.entries())[-1].parent

    assert asyncio.run(run()) == Unresolved("no_match")
