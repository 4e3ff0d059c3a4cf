"""Calls of an attempt that goes on from another one: answered from its records, or generated.

The gateway, the call service and the store are the real ones; the engine is scripted, and counts.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gym_capture.calls import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.operations import Close, GoOn, HandOn, Replay
from gym_capture.capture.records import Continues, TokenEntry, WeightSpan
from gym_capture.conversation import AssistantTurn, ToolCall
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step, saying
from gym_capture.errors import StoreUnavailableError
from gym_capture.output_items import output_items, turn_of
from tests.serving.replica import STOP, USER, Replica, streamed_text

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
GO_ON = {"role": "user", "content": "go on"}


def counting(template: HfChatTemplate) -> Replica:
    """Its policy says how often it was asked, under weights of that number."""

    def script(call: EngineCall) -> Script:
        number = len(replica.engine.calls)
        said = saying(template, f"reply {number}", stop_token=STOP)
        size = sum(len(step.token_ids) for step in said.steps)
        return replace(said, weight_versions=(WeightSpan(0, size, str(number)),))

    replica = Replica(template, script)
    return replica


async def said(replica: Replica, rollout_id: str, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = await replica.chat(*(messages or (USER,)), rollout_id=rollout_id, **fields)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return {"role": "assistant", **{key: value for key, value in message.items() if value is not None}}


async def conversation(replica: Replica, rollout_id: str, calls: int, **fields: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [USER]
    for _ in range(calls):
        messages += [await said(replica, rollout_id, *messages, **fields), GO_ON]
    return messages


async def go_on(replica: Replica, rollout_id: str, *sources: str) -> None:
    for source in sources:
        await replica.state.write(HandOn(source))
        await replica.state.write(GoOn(rollout_id, source))


def same_generation(record: TokenEntry, of: TokenEntry) -> None:
    assert record.prompt_token_ids.tolist() == of.prompt_token_ids.tolist()
    assert record.generation_token_ids.tolist() == of.generation_token_ids.tolist()
    assert record.generation_log_probs.tobytes() == of.generation_log_probs.tobytes()
    assert (record.reply, record.request.sampling) == (of.reply, of.request.sampling)
    assert record.policy.weight_versions == of.policy.weight_versions
    assert record.keys == of.keys


async def test_equal_calls_are_answered_from_the_record_and_the_first_new_one_is_generated(
    template: HfChatTemplate,
) -> None:
    replica = counting(template)
    before = await conversation(replica, "a1", 2)
    first = await replica.state.entries("a1")
    await go_on(replica, "a2", "a1")
    after = await conversation(replica, "a2", 3)
    assert after[: len(before)] == before
    assert [call.call_id for call in replica.engine.calls[2:]] == [(await replica.state.entries("a2"))[2].model_call_id]
    second = await replica.state.entries("a2")
    for record, of in zip(second[:2], first, strict=True):
        same_generation(record, of)
        assert record.policy.replayed_from == of.model_call_id != record.model_call_id
    live = second[2]
    assert live.policy.replayed_from is None
    assert live.policy.weight_versions[0].version == "3"
    # What is generated continues what was replayed, as it would have continued what was recorded.
    assert live.parent == Continues(second[1].model_call_id, second[1].cum_len)
    # The one that handed on takes nothing more.
    late = await replica.chat(USER, rollout_id="a1")
    assert late.status_code == 409


async def test_streamed_or_whole_is_the_same_reply(template: HfChatTemplate) -> None:
    replica = counting(template)
    whole = await said(replica, "a1")
    await go_on(replica, "a2", "a1")
    streamed = await replica.chat(USER, rollout_id="a2", stream=True)
    assert streamed_text(streamed) == whole["content"]
    assert len(replica.engine.calls) == 1


async def test_thinking_and_tool_calls_come_back_as_they_were_read(template: HfChatTemplate) -> None:
    events = (
        ReasoningDelta("hm"),
        TextDelta("so"),
        ToolCallStart(0, "call_1", "add"),
        ToolCallDelta(0, '{"number": 1'),
        ToolCallDelta(0, "}"),
        ToolCallStart(1, "call_2", "add"),
    )
    replica = Replica(template, lambda _: Script(steps=[Step(token_ids=[5, 6], text="x", events=events)]))
    before = await said(replica, "a1", tools=[TOOL])
    await go_on(replica, "a2", "a1")
    assert await said(replica, "a2", tools=[TOOL]) == before
    assert [call["id"] for call in before["tool_calls"]] == ["call_1", "call_2"]
    assert len(replica.engine.calls) == 1


Other = dict[str, Any]


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.5},
        {"max_tokens": 9},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
        {"seed": 2},
        {"logprobs": True},
        {"messages": [{"role": "user", "content": "hi!"}]},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_who_asks_for_something_else_gets_something_else(template: HfChatTemplate, other: Other) -> None:
    replica = counting(template)
    asked = {"tools": [TOOL], "temperature": 1.0, "max_tokens": 8, "seed": 1}
    await said(replica, "a1", **asked)
    await go_on(replica, "a2", "a1")
    await said(replica, "a2", **{**asked, **other})
    assert len(replica.engine.calls) == 2
    # It is still there for who asks for the same, afterwards.
    await said(replica, "a2", **asked)
    assert len(replica.engine.calls) == 2


async def test_a_pin_that_was_changed_is_another_policy(template: HfChatTemplate) -> None:
    replica = counting(template)
    await said(replica, "a1")
    await go_on(replica, "a2", "a1")
    replica.service._pin = {"temperature": 0.25}
    await said(replica, "a2")
    assert len(replica.engine.calls) == 2


async def test_each_record_answers_one_call(template: HfChatTemplate) -> None:
    replica = counting(template)
    samples = [(await said(replica, "a1"))["content"] for _ in range(2)]
    await go_on(replica, "a2", "a1")
    together = await asyncio.gather(*(said(replica, "a2") for _ in range(3)))
    assert sorted(message["content"] for message in together) == [*samples, "reply 3"]
    replays = [entry.policy.replayed_from for entry in await replica.state.entries("a2")]
    assert len(set(replays)) == 3


async def test_a_record_that_answers_a_call_of_another_replica_answers_none_here(template: HfChatTemplate) -> None:
    replica = counting(template)
    await said(replica, "a1")
    await go_on(replica, "a2", "a1")
    (entry,) = await replica.state.entries("a1")
    epoch = await replica.state.write(GoOn("a2", "a1"))
    await replica.state.write(Replay("a2", "elsewhere", entry.model_call_id, epoch=epoch))
    assert (await said(replica, "a2"))["content"] == "reply 2"


async def test_what_was_cut_off_is_generated_anew(template: HfChatTemplate) -> None:
    scripts = iter([Script(steps=[Step(token_ids=[5], text="He")], finish_reason="abort")])
    replica = Replica(template, lambda _: next(scripts, saying(template, "whole", stop_token=STOP)))
    assert (await replica.chat(USER, rollout_id="a1")).status_code == 503
    assert [entry.reply.finish_reason for entry in await replica.state.entries("a1")] == ["abort"]
    await go_on(replica, "a2", "a1")
    assert (await said(replica, "a2"))["content"] == "whole"


async def test_a_generation_that_filled_the_context_is_replayed_where_there_is_as_much_room(
    template: HfChatTemplate,
) -> None:
    def fills(call: EngineCall) -> Script:
        return Script(steps=[Step(token_ids=[5] * call.max_tokens, text="x")], finish_reason="length")

    replica = Replica(template, fills, max_model_len=100)
    await said(replica, "a1")
    await go_on(replica, "a2", "a1")
    await said(replica, "a2")
    assert len(replica.engine.calls) == 1
    await go_on(replica, "a3", "a1")
    replica.engine._model = replace(replica.engine.model, max_model_len=101)
    await said(replica, "a3")
    assert len(replica.engine.calls) == 2


async def test_an_attempt_goes_on_from_several(template: HfChatTemplate) -> None:
    """The second one repeated one call of the first, and was cut."""
    replica = counting(template)
    whole = await conversation(replica, "a1", 3)
    await go_on(replica, "a2", "a1")
    await conversation(replica, "a2", 1)
    await go_on(replica, "a3", "a1", "a2")
    assert await conversation(replica, "a3", 3) == whole
    assert len(replica.engine.calls) == 3


async def test_records_that_cannot_be_read_now_are_no_reason_to_generate(
    template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told to come again, and its call left nothing behind."""
    replica = counting(template)
    await said(replica, "a1")
    await go_on(replica, "a2", "a1")
    write = replica.state.store.write

    async def down(operation: Any) -> int:
        if isinstance(operation, Replay):
            raise StoreUnavailableError("down")
        return await write(operation)

    monkeypatch.setattr(replica.state.store, "write", down)
    assert (await replica.chat(USER, rollout_id="a2")).status_code == 503
    monkeypatch.undo()
    assert (await said(replica, "a2"))["content"] == "reply 1"
    assert (await replica.state.snapshot("a2")).incomplete == ()
    assert len(replica.engine.calls) == 1


async def test_records_that_were_closed_meanwhile_answer_nothing(template: HfChatTemplate) -> None:
    replica = counting(template)
    await said(replica, "a1")
    await go_on(replica, "a2", "a1")
    await replica.state.write(Close("a1"))
    assert (await said(replica, "a2"))["content"] == "reply 2"


@pytest.mark.parametrize(
    "turn",
    [
        AssistantTurn(),
        AssistantTurn(text="so", reasoning="hm"),
        AssistantTurn(reasoning="hm"),
        AssistantTurn(tool_calls=(ToolCall("1", "add", "{}"), ToolCall("2", "add", "not json"))),
        AssistantTurn(text="so", reasoning="hm", tool_calls=(ToolCall("1", "add", ""),)),
    ],
)
def test_a_turn_is_read_from_its_items(turn: AssistantTurn) -> None:
    assert turn_of(output_items(turn)[0]) == turn


@pytest.mark.parametrize(
    "items",
    [
        ({"type": "web_search_call", "id": "1"},),
        (),
        ({"type": "message", "role": "assistant", "content": []},),
        (
            *output_items(AssistantTurn(tool_calls=(ToolCall("1", "add", "{}"),)))[0],
            *output_items(AssistantTurn("x"))[0],
        ),
    ],
)
def test_items_that_no_turn_has_are_refused(items: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(ValueError, match="no turn of a graph"):
        turn_of(items)
