"""Messages that a template has no place for reach the policy, and stay as they are when the conversation goes on."""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, ToolCall, ToolResult
from gym_capture.engines.hf_messages import in_call_order
from gym_capture.splice.splicer import Spliced, full_prompt, splice
from gym_capture.splice.template import TemplateError
from tests.made_templates import TEMPLATES, TOOL, on_made_tokenizer_once

SYSTEM, LATE = Message("system", "First of all."), Message("system", "By the way.")
DEVELOPER, LATE_DEVELOPER = Message("developer", "Mind this."), Message("developer", "And that.")
ASK, TURN, MORE = Message("user", "A question?"), AssistantTurn("The reply"), Message("user", "Another question?")
CALL, RESULT = AssistantTurn("", (ToolCall("call00001", "get_weather", "{}"),)), ToolResult("call00001", "Rainfall.")

SHAPES: dict[str, tuple[Item, ...]] = {
    "system first": (SYSTEM, ASK),
    "developer first": (DEVELOPER, ASK),
    "both first": (SYSTEM, DEVELOPER, ASK),
    "both first, the other way round": (DEVELOPER, SYSTEM, ASK),
    "two systems first": (SYSTEM, LATE, ASK),
    "system behind the question": (SYSTEM, ASK, LATE),
    "no system but later": (ASK, LATE),
    "system between": (SYSTEM, ASK, TURN, LATE, MORE),
    "system between, none first": (ASK, TURN, LATE, MORE),
    "system at the end": (SYSTEM, ASK, TURN, MORE, LATE),
    "system alone in its place": (SYSTEM, ASK, TURN, LATE),
    "two later": (SYSTEM, ASK, TURN, LATE, LATE_DEVELOPER, MORE),
    "developer between": (DEVELOPER, ASK, TURN, LATE_DEVELOPER, MORE),
    "behind a result": (SYSTEM, ASK, CALL, RESULT, LATE),
}


def conversation(items: tuple[Item, ...]) -> Conversation:
    return Conversation(items, (TOOL,) if CALL in items else ())


def takes_results(name: str) -> bool:
    return renders(name, ASK, CALL, RESULT)


def takes_two_calls(name: str) -> bool:
    return renders(
        name, ASK, AssistantTurn("", (*CALL.tool_calls, CALL.tool_calls[0]._replace(id="call00002"))), RESULT
    )


def renders(name: str, *items: Item) -> bool:
    try:
        full_prompt(on_made_tokenizer_once(name), Conversation(items, (TOOL,)))
    except TemplateError:
        return False
    return True


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_arrives_once_in_order_and_stays_as_it_is_when_the_conversation_goes_on(name: str) -> None:
    template = on_made_tokenizer_once(name)

    def rendering(items: tuple[Item, ...]) -> str:
        return template.render(conversation(items), add_generation_prompt=True)

    for title, items in SHAPES.items():
        if CALL in items and not takes_results(name):
            continue
        full_prompt(template, conversation(items))
        text = rendering(items)
        places = [text.find(item.text) for item in items if item.text]
        assert -1 not in places, title
        assert places == sorted(places), title
        assert all(text.count(item.text) == 1 for item in items if item.text), title
        reply = AssistantTurn("Something new")
        before = rendering((*items, reply, MORE)).partition(reply.text)[0]
        for later in ((LATE, MORE), (MORE, LATE)):
            assert rendering((*items, reply, *later)).partition(reply.text)[0] == before, title


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_continued_with_a_late_message_behind_it(name: str) -> None:
    template = on_made_tokenizer_once(name)
    opening = full_prompt(template, Conversation((SYSTEM, ASK)))
    parent_ids = np.append(opening, template.encode(TURN.text)).astype(np.int32)
    for items in ((SYSTEM, ASK, TURN, LATE, MORE), (SYSTEM, ASK, TURN, MORE, LATE_DEVELOPER)):
        result = splice(template, Conversation(items), turn=0, parent_ids=parent_ids)
        assert isinstance(result, Spliced)
        tail = template.decode(result.ids[parent_ids.size :])
        assert all(item.text in tail for item in items[3:])


@pytest.mark.parametrize(
    ("name", "items", "rules", "written"),
    [
        ("gemma", (SYSTEM, ASK), ("system_in_user",), "<start_of_turn>user\nFirst of all.\n\nA question?<end_of_turn>"),
        (
            "gemma",
            (SYSTEM, DEVELOPER, ASK, LATE),
            ("developer_as_system", "system_joined", "system_in_user", "late_system_in_user"),
            "<start_of_turn>user\nFirst of all.\n\nMind this.\n\nA question?\n\nBy the way.<end_of_turn>",
        ),
        (
            "cohere",
            (ASK, TURN, LATE, MORE),
            ("late_system_in_user",),
            "<|USER_TOKEN|>By the way.\n\nAnother question?<|END_OF_TURN_TOKEN|>",
        ),
        ("deepseek_r1_distill", (ASK, TURN, LATE, MORE), ("late_system_as_user",), "<｜User｜>By the way.<｜User｜>"),
        ("deepseek_r1_distill", (SYSTEM, LATE, ASK), ("system_joined",), "First of all.\n\nBy the way.<｜User｜>"),
        ("qwen3_vl", (SYSTEM, ASK, LATE), ("late_system_as_user",), "<|im_start|>user\nBy the way.<|im_end|>"),
        ("gptoss", (DEVELOPER, ASK), (), "<|start|>developer<|message|># Instructions\n\nMind this."),
        (
            "gptoss",
            (ASK, LATE_DEVELOPER),
            ("developer_as_system", "late_system_as_user"),
            "user<|message|>And that.<|end|>",
        ),
        ("qwen3", (ASK, TURN, DEVELOPER, MORE), ("developer_as_system",), "<|im_start|>system\nMind this.<|im_end|>"),
        ("qwen3", (SYSTEM, ASK, TURN, LATE, MORE), (), "<|im_start|>system\nBy the way.<|im_end|>"),
        ("chatml_tools", (DEVELOPER, ASK, LATE_DEVELOPER), (), "<|im_start|>system\nAnd that.<|im_end|>"),
    ],
)
def test_the_rules_have_names(name: str, items: tuple[Item, ...], rules: tuple[str, ...], written: str) -> None:
    template = on_made_tokenizer_once(name)
    assert template.adapt(Conversation(items)).rules == rules
    assert written in template.render(Conversation(items), add_generation_prompt=True)


@pytest.mark.parametrize("name", ["phi3", "idefics3", "cohere2", "smolvlm"])
def test_what_a_template_would_lose_is_refused_even_if_its_text_stands_elsewhere(name: str) -> None:
    template = on_made_tokenizer_once(name)
    with pytest.raises(TemplateError, match="does not write tool results: number 3") as caught:
        full_prompt(template, conversation((ASK, CALL, ToolResult("call00001", "question"))))
    assert caught.value.param == "messages"
    full_prompt(template, conversation((ASK, CALL, ToolResult("call00001", " "), MORE)))  # nothing to lose


# --- the order of results -----------------------------------------------------------------------------------------

A, B = (
    ToolCall("call0000a", "get_weather", '{"city": "Aarhus"}'),
    ToolCall("call0000b", "get_weather", '{"city": "Bergen"}'),
)
OF_A, OF_B = ToolResult(A.id, "value-A"), ToolResult(B.id, "value-B")
BOTH = AssistantTurn("", (A, B))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if takes_two_calls(name)])
def test_CH_09_results_are_written_in_the_order_of_their_calls(name: str) -> None:
    template = on_made_tokenizer_once(name)
    as_called, as_completed = (Conversation((ASK, BOTH, *order), (TOOL,)) for order in ((OF_A, OF_B), (OF_B, OF_A)))
    assert full_prompt(template, as_called).tolist() == full_prompt(template, as_completed).tolist()
    text = template.render(as_completed, add_generation_prompt=True)
    assert text.index("value-A") < text.index("value-B")
    assert template.adapt(as_completed) == (as_called, ("results_in_call_order",))
    assert template.adapt(as_called) == (as_called, ())


@pytest.mark.parametrize("name", ["writes_ids", "nine_character_ids"])
def test_CH_09_where_the_template_writes_ids_results_stay_as_they_were_sent(name: str) -> None:
    template = on_made_tokenizer_once(name)
    as_completed = Conversation((ASK, BOTH, OF_B, OF_A), (TOOL,))
    assert template.adapt(as_completed) == (as_completed, ())
    text = template.render(as_completed, add_generation_prompt=True)
    assert text.index("value-B") < text.index("value-A")


@pytest.mark.parametrize(
    "results",
    [
        (OF_B,),
        (OF_B, OF_B),
        (OF_B, OF_A, OF_A),
        (OF_B, OF_B._replace(text="again"), OF_A),
        (OF_B, OF_A._replace(call_id="unknown")),
        (OF_B, OF_A._replace(call_id="")),
        (OF_B, MORE, OF_A),
        (LATE, OF_B, OF_A),
    ],
    ids=[
        "missing",
        "twice",
        "one too many",
        "twice and other",
        "unknown",
        "no id",
        "not in a row",
        "not behind the turn",
    ],
)
def test_CH_09_what_is_not_one_result_for_each_call_keeps_its_order(results: tuple[Item, ...]) -> None:
    assert in_call_order((ASK, BOTH, *results)) == (ASK, BOTH, *results)


@pytest.mark.parametrize("ids", [("x", "x"), ("", "y")], ids=["the same", "none"])
def test_CH_09_calls_that_cannot_be_told_apart_have_no_order(ids: tuple[str, str]) -> None:
    turn = AssistantTurn("", (A._replace(id=ids[0]), B._replace(id=ids[1])))
    items = (turn, OF_B._replace(call_id=ids[1]), OF_A._replace(call_id=ids[0]))
    assert in_call_order(items) == items


def test_CH_09_each_turns_results_are_ordered_by_its_own_calls() -> None:
    turns = (BOTH, OF_B, OF_A, AssistantTurn("", (B, A)), OF_A, OF_B, MORE)
    assert in_call_order(turns) == (BOTH, OF_A, OF_B, AssistantTurn("", (B, A)), OF_B, OF_A, MORE)
