"""What the policy reads of a client's order: that of schemas and arguments as it was sent, that of results by call."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from gym_capture.calls import ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step
from tests.made_templates import on_made_tokenizer_once
from tests.serving.replica import Replica

SCHEMA: Final = {
    "type": "object",
    "properties": {"z_reason": {"type": "string"}, "a_answer": {"type": "string"}},
    "required": ["z_reason", "a_answer"],
}
REORDERED: Final = {
    "required": ["z_reason", "a_answer"],
    "properties": {"a_answer": {"type": "string"}, "z_reason": {"type": "string"}},
    "type": "object",
}
ARGUMENTS: Final = ('{"z_reason": "far", "a_answer": "A"}', '{"z_reason": "near", "a_answer": "B"}')
VALUES: Final = ("value-A", "value-B")
ASK: Final = "Look both up."
PATHS: Final = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


def scripter(call: EngineCall) -> Script:
    turns = sum(type(item).__name__ == "AssistantTurn" for item in call.request.conversation.items)
    if turns:
        return Script(steps=[Step(token_ids=[90 + turns, 2], text="Done.")])
    events = [
        event
        for n, arguments in enumerate(ARGUMENTS)
        for event in (ToolCallStart(n, f"call0000{n}", "look"), ToolCallDelta(n, arguments))
    ]
    return Script(steps=[Step(token_ids=[50, 51, 2], events=events)])


def body(dialect: str, order: tuple[int, ...] | None, schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    """The first request, or the second with results in an order."""
    ids = [f"call0000{n}" for n in range(2)]
    said: list[dict[str, Any]] = [{"role": "user", "content": ASK}]
    match dialect:
        case "chat":
            if order is not None:
                calls = [
                    {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}
                    for id, arguments in zip(ids, ARGUMENTS, strict=True)
                ]
                said.append({"role": "assistant", "content": None, "tool_calls": calls})
                said += [{"role": "tool", "tool_call_id": ids[n], "content": VALUES[n]} for n in order]
            tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
            return {"model": "policy", "messages": said, "tools": [tool]}
        case "responses":
            if order is not None:
                said += [
                    {"type": "function_call", "call_id": id, "name": "look", "arguments": arguments}
                    for id, arguments in zip(ids, ARGUMENTS, strict=True)
                ]
                said += [{"type": "function_call_output", "call_id": ids[n], "output": VALUES[n]} for n in order]
            tool = {"type": "function", "name": "look", "parameters": schema}
            return {"model": "policy", "input": said, "tools": [tool]}
        case _:
            if order is not None:
                uses = [
                    {"type": "tool_use", "id": id, "name": "look", "input": json.loads(arguments)}
                    for id, arguments in zip(ids, ARGUMENTS, strict=True)
                ]
                results = [{"type": "tool_result", "tool_use_id": ids[n], "content": VALUES[n]} for n in order]
                said += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
            tool = {"name": "look", "input_schema": schema}
            return {"model": "policy", "max_tokens": 64, "messages": said, "tools": [tool]}


async def ask(replica: Replica, dialect: str, rollout_id: str, sent: dict[str, Any]) -> None:
    response = await replica.http.post(f"/ng-rollout/{rollout_id}/v1/{PATHS[dialect]}", json=sent)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("prefix_supply", [True, False], ids=["spliced", "rendered"])
@pytest.mark.parametrize("dialect", PATHS)
async def test_CH_09_results_in_either_order_are_one_conversation(
    template: HfChatTemplate, dialect: str, prefix_supply: bool
) -> None:
    replica = Replica(template, scripter, prefix_supply=prefix_supply)
    second = {}
    for name, order in (("called", (0, 1)), ("completed", (1, 0))):
        await ask(replica, dialect, name, body(dialect, None))
        await ask(replica, dialect, name, body(dialect, order))
        first, second[name] = await replica.state.entries(name)
        prompt = template.decode(second[name].prompt_token_ids)
        assert prompt.index("value-A") < prompt.index("value-B")
        if prefix_supply:
            assert second[name].parent == Continues(first.model_call_id, first.cum_len)
    assert second["called"].digest == second["completed"].digest
    assert second["called"].keys.turn_key == second["completed"].keys.turn_key
    assert [second[name].request.normalized for name in second] == [(), ("results_in_call_order",)]


@pytest.mark.parametrize("dialect", PATHS)
async def test_CH_09_where_ids_are_written_the_orders_are_two_conversations(dialect: str) -> None:
    template = on_made_tokenizer_once("writes_ids")

    replica = Replica(template, scripter)
    second = {}
    for name, order in (("called", (0, 1)), ("completed", (1, 0))):
        await ask(replica, dialect, name, body(dialect, None))
        await ask(replica, dialect, name, body(dialect, order))
        _, second[name] = await replica.state.entries(name)
        prompt = template.decode(second[name].prompt_token_ids)
        assert (prompt.index("value-A") < prompt.index("value-B")) is (name == "called")
        assert second[name].prefix.supplied
        assert second[name].request.normalized == ()
    assert second["called"].keys.turn_key != second["completed"].keys.turn_key


@pytest.mark.parametrize("dialect", PATHS)
async def test_schemas_and_arguments_keep_the_clients_order_and_lineage_compares_without_it(
    template: HfChatTemplate, dialect: str
) -> None:
    replica = Replica(template, scripter)
    await ask(replica, dialect, "r1", body(dialect, None))
    await ask(replica, dialect, "r1", body(dialect, (0, 1), REORDERED))
    await ask(replica, dialect, "other", body(dialect, (0, 1)))
    first, second = await replica.state.entries("r1")
    assert second.parent == Continues(first.model_call_id, first.cum_len)
    (whole,) = await replica.state.entries("other")
    for entry in (first, whole):
        prompt = template.decode(entry.prompt_token_ids)
        assert '"parameters": ' + json.dumps(SCHEMA) in prompt, "as the template writes what the client sent"
    echoed = template.decode(whole.prompt_token_ids).partition(ASK)[2]
    assert echoed.index("z_reason") < echoed.index("a_answer")
    arguments = [item["arguments"] for item in first.reply.output_items if item["type"] == "function_call"]
    assert arguments == list(ARGUMENTS)
