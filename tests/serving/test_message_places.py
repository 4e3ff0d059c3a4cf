"""A message that the template has no place for, from the request to the record: arrived, named - or refused."""

from __future__ import annotations

from typing import Any, Final

import pytest

from gym_capture.capture.records import Continues
from gym_capture.engines.scripted import EngineCall, Script, Step
from tests.made_templates import on_made_tokenizer_once
from tests.serving.replica import Replica

PATHS: Final = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
SAID: Final = "Fine."
RESULT: Final = {
    "chat": [
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "hi"},
    ],
    "responses": [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "hi"},
    ],
    "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "hi"}]},
    ],
}


def body(dialect: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 9, "input" if dialect == "responses" else "messages": messages}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("name", "first", "rules"),
    [
        ("gemma", ("system_in_user",), ("system_in_user", "late_system_in_user")),
        ("cohere", (), ("late_system_in_user",)),
        ("deepseek_r1_distill", (), ("late_system_as_user",)),
        ("qwen3_vl", (), ("late_system_as_user",)),
        ("gptoss", (), ("late_system_as_user",)),
        ("qwen3", (), ()),
    ],
)
@pytest.mark.parametrize("dialect", PATHS)
async def test_late_messages_reach_the_policy_by_rules_that_are_on_record(
    dialect: str, name: str, first: tuple[str, ...], rules: tuple[str, ...]
) -> None:
    template = on_made_tokenizer_once(name)
    ids = template.encode_plain(SAID).tolist()
    late = "system" if dialect == "messages" else "developer"

    def scripter(call: EngineCall) -> Script:
        return Script(steps=[Step(token_ids=ids, text=SAID)])

    replica = Replica(template, scripter)
    history = [said("system", "Rule one."), said("user", "hi")]
    for more in ([], [said("assistant", SAID), said("user", "on"), said(late, "Rule two.")]):
        history += more
        response = await replica.http.post(f"/ng-rollout/r1/v1/{PATHS[dialect]}", json=body(dialect, *history))
        assert response.status_code == 200, response.text
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)
    prompt = template.decode(two.prompt_token_ids)
    assert prompt.index("Rule one.") < prompt.index(SAID) < prompt.index("Rule two.")
    assert one.request.normalized == first
    assert [rule for rule in two.request.normalized if rule != "developer_as_system"] == list(rules)
    assert ("developer_as_system" in two.request.normalized) is (late == "developer")


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_result_that_the_template_does_not_write_is_a_400(dialect: str) -> None:
    template = on_made_tokenizer_once("phi3")

    replica = Replica(template, lambda call: Script(steps=[Step(token_ids=[5], text="x")]))
    sent = body(dialect, said("user", "hi"), *RESULT[dialect])
    response = await replica.http.post(f"/ng-rollout/r1/v1/{PATHS[dialect]}", json=sent)
    assert response.status_code == 400
    assert "does not write tool results" in response.json()["error"]["message"]
    snapshot = await replica.state.snapshot()
    assert (snapshot.entries, snapshot.incomplete) == ((), ())
    assert replica.engine.calls == []
