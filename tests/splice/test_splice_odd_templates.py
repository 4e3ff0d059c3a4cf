"""Templates that move, drop, repeat or look at what they write: continued all the same, or refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, ToolResult
from gym_capture.reasons import NotSplicedReason
from gym_capture.splice.splicer import NotSpliced, splice
from gym_capture.splice.template import TemplateError
from tests.word_template import (
    ANSWER,
    CALL,
    MORE,
    NEXT,
    PROMPT,
    RESULT,
    SYSTEM,
    TOOL,
    Render,
    WordTemplate,
    ask,
    chatml,
    chatml_item,
    ids,
    spliced,
)


def refuses(conversation: Conversation, prompted: bool) -> str:
    raise TemplateError("no")


def drops_turns(conversation: Conversation, prompted: bool) -> str:
    return chatml(Conversation(tuple(i for i in conversation.items if not isinstance(i, AssistantTurn))), prompted)


def repeats_turns(conversation: Conversation, prompted: bool) -> str:
    return "".join(chatml_item(i) * (1 + isinstance(i, AssistantTurn)) for i in conversation.items)


def drops_tool_results(conversation: Conversation, prompted: bool) -> str:
    return chatml(Conversation(tuple(i for i in conversation.items if not isinstance(i, ToolResult))), prompted)


def hoists_system(conversation: Conversation, prompted: bool) -> str:
    return chatml(Conversation(tuple(sorted(conversation.items, key=lambda item: item[0] != "system"))), prompted)


def system_before_last_user(conversation: Conversation, prompted: bool) -> str:
    items = list(conversation.items)
    system = items.pop(0)
    last = max(n for n, item in enumerate(items) if isinstance(item, Message))
    items[last] = Message("user", f"{system.text}\n{items[last].text}")
    return chatml(Conversation(tuple(items)), prompted)


def tools_before_last_user(conversation: Conversation, prompted: bool) -> str:
    *before, last = conversation.items
    listed = "".join(tool.description for tool in conversation.tools)
    return chatml(Conversation(tuple(before)), False) + listed + chatml(Conversation((last,)), prompted)


def writes_first_call_only(conversation: Conversation, prompted: bool) -> str:
    items = [i._replace(tool_calls=i.tool_calls[:1]) if isinstance(i, AssistantTurn) else i for i in conversation.items]
    return chatml(Conversation(tuple(items)), prompted)


def counts_characters(conversation: Conversation, prompted: bool) -> str:
    return chatml(conversation, prompted) + str(sum(len(item.text) for item in conversation.items))


@pytest.mark.parametrize(
    ("rendering", "conversation", "reason"),
    [
        (refuses, ask(ANSWER, MORE), "template_refuses"),
        (drops_turns, ask(ANSWER, MORE), "turn_lost"),
        (repeats_turns, ask(ANSWER, MORE), "turn_repeated"),
        (drops_tool_results, ask(CALL, RESULT), "new_item_lost"),
        (hoists_system, ask(ANSWER, SYSTEM, MORE), "new_item_moved"),
        (system_before_last_user, Conversation((SYSTEM, *ask(ANSWER, MORE).items)), "old_item_moved"),
        (tools_before_last_user, Conversation(ask(ANSWER, MORE).items, (TOOL,)), "old_item_moved"),
        (writes_first_call_only, ask(AssistantTurn("an", CALL.tool_calls * 2), RESULT, RESULT), "old_item_moved"),
        (counts_characters, ask(ANSWER, MORE), "tail_differs"),
    ],
)
def test_says_why_it_cannot_continue(rendering: Render, conversation: Conversation, reason: str) -> None:
    result = splice(WordTemplate(rendering), conversation, turn=0, parent_ids=ids(*PROMPT, 35, 9))
    assert isinstance(result, NotSpliced)
    assert result.reason == reason
    assert result.reason in NotSplicedReason


def test_a_text_that_the_template_writes_behind_the_results_is_not_said_twice() -> None:
    def text_last(conversation: Conversation, prompted: bool) -> str:
        turn = conversation.items[1]
        assert isinstance(turn, AssistantTurn)
        head = chatml(Conversation((conversation.items[0], turn._replace(text=""), *conversation.items[2:])), False)
        return head + turn.text + ("<|im_start|>assistant" if prompted else "")

    turn = CALL._replace(text="answer")
    template = WordTemplate(text_last)
    parent_ids = np.append(ids(*PROMPT, 30, 31), template.encode('<call>more {"n": 1}</call><|im_end|>'))
    result = spliced(splice(template, ask(turn, RESULT), turn=0, parent_ids=parent_ids))
    assert template.decode(result.ids[parent_ids.size :]) == "\n<|im_start|>toolagain<|im_end|>\n<|im_start|>assistant"


def test_calls_that_the_template_does_not_write_do_not_matter() -> None:
    def text_only(conversation: Conversation, prompted: bool) -> str:
        items = [i._replace(tool_calls=()) if isinstance(i, AssistantTurn) else i for i in conversation.items]
        return chatml(Conversation(tuple(items)), prompted)

    result = spliced(splice(WordTemplate(text_only), ask(CALL, RESULT), turn=0, parent_ids=ids(*PROMPT, 70, 22, 71, 9)))
    assert result.ids.tolist() == [*PROMPT, 70, 22, 71, 9, 8, 1, 72, 23, 9, 8, 1, 3]


def test_what_the_assistant_says_later_may_be_left_out() -> None:
    """Calls without the text beside them, say, or nothing at all where all of it was thinking."""

    def quotes_thinking(conversation: Conversation, prompted: bool) -> str:
        items = [
            i._replace(text=i.text.rpartition("</think>")[2]) if isinstance(i, AssistantTurn) else i
            for i in conversation.items
        ]
        return chatml(Conversation(tuple(items)), prompted)

    request = ask(ANSWER, MORE, AssistantTurn("hm</think>"), Message("user", "again"))
    result = spliced(splice(WordTemplate(quotes_thinking), request, turn=0, parent_ids=ids(*PROMPT, 35, 9)))
    assert result.ids.tolist() == [*PROMPT, 35, 9, *NEXT, 9, 8, 1, 2, 23, 9, 8, 1, 3]


def test_a_template_may_look_at_how_a_text_begins_and_ends() -> None:
    def knows_results(conversation: Conversation, prompted: bool) -> str:
        def is_result(item: Item) -> bool:
            return item.text.startswith("<call>") and item.text.endswith("</call>")

        items = [ToolResult("", i.text) if is_result(i) else i for i in conversation.items]
        return chatml(Conversation(tuple(items)), prompted)

    request = ask(ANSWER, Message("user", "<call>more</call>"))
    result = spliced(splice(WordTemplate(knows_results), request, turn=0, parent_ids=ids(*PROMPT, 35, 9)))
    assert result.ids.tolist() == [*PROMPT, 35, 9, 8, 1, 72, 70, 22, 71, 9, 8, 1, 3]
