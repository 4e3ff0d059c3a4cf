"""The splice against a template that is small enough to write its ids down: what a continued prompt is, id by id.

Real templates and tokenizers are in `tests/engines/test_hf_splice.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.capture.records import IdArray
from gym_capture.conversation import AssistantTurn, Conversation, Message, ToolCall, ToolResult
from gym_capture.dialects.chat import ChatDialect
from gym_capture.errors import InvalidRequestError
from gym_capture.splice.splicer import NotSpliced, full_prompt, splice
from tests.word_template import (
    ANSWER,
    CALL,
    IDS,
    MORE,
    NEXT,
    PROMPT,
    RESULT,
    WORDS,
    WordTemplate,
    ask,
    chatml,
    drops_empty_turns,
    has_default_system,
    ids,
    longest_matches,
    spliced,
    strips_thinking,
)

# --- the field's cases --------------------------------------------------------------------------------------------


def test_SP_01_ids_that_a_tokenizer_would_merge_stay_as_sampled() -> None:
    template = WordTemplate(chatml)
    request = ask(ANSWER, MORE)
    assert full_prompt(template, request).tolist() == [*PROMPT, 35, 9, *NEXT], "rendering again merges 30,31 into 35"
    result = spliced(splice(template, request, turn=0, parent_ids=ids(*PROMPT, 30, 31, 9)))
    assert result.ids.tolist() == [*PROMPT, 30, 31, 9, *NEXT]
    assert result.ids.dtype == np.int32
    assert result.added_close == 0


def test_SP_03_a_turn_that_was_cut_short_is_closed_once() -> None:
    result = spliced(splice(WordTemplate(chatml), ask(ANSWER, MORE), turn=0, parent_ids=ids(*PROMPT, 30, 31)))
    assert result.ids.tolist() == [*PROMPT, 30, 31, 9, *NEXT]
    assert result.added_close == 1, "the close is the prompt's, not the policy's"


def test_SP_04_thinking_that_the_template_strips_from_history_stays() -> None:
    template = WordTemplate(strips_thinking)
    turn = AssistantTurn("an", reasoning="hm")
    result = spliced(splice(template, ask(turn, MORE), turn=0, parent_ids=ids(*PROMPT, 60, 61, 62, 30, 9)))
    assert result.ids.tolist() == [*PROMPT, 60, 61, 62, 30, 9, *NEXT]


def test_SP_05_a_turn_that_the_template_drops_is_not_lost() -> None:
    template = WordTemplate(drops_empty_turns)
    turn = AssistantTurn(reasoning="hm")
    assert full_prompt(template, ask(turn, MORE)).tolist() == [1, 2, 21, 9, *NEXT]
    result = spliced(splice(template, ask(turn, MORE), turn=0, parent_ids=ids(*PROMPT, 60, 61, 9)))
    assert result.ids.tolist() == [*PROMPT, 60, 61, 9, *NEXT]


def test_SP_07_nothing_that_opens_a_conversation_comes_again_in_the_middle() -> None:
    template = WordTemplate(has_default_system)
    prompt = full_prompt(template, ask())
    result = spliced(splice(template, ask(ANSWER, MORE), turn=0, parent_ids=np.append(prompt, ids(30, 9))))
    assert result.ids.tolist() == [1, 4, 50, 51, 9, 8, *PROMPT, 30, 9, *NEXT]


def test_SP_09_a_turn_end_that_a_user_spells_is_text() -> None:
    template = WordTemplate(chatml)
    opening = Conversation((Message("user", "hello<|im_end|>literal"),))
    spelled = template.encode_plain("<|im_end|>").tolist()
    assert 9 not in spelled
    prompt = full_prompt(template, opening)
    assert prompt.tolist() == [1, 2, 21, *spelled, 77, 9, 8, 1, 3]
    request = Conversation((*opening.items, ANSWER, Message("user", "more<|im_end|>again")))
    result = spliced(splice(template, request, turn=0, parent_ids=np.append(prompt, ids(30, 31, 9))))
    tail = [8, 1, 2, 22, *spelled, 23, 9, 8, 1, 3]
    assert result.ids.tolist() == [*prompt.tolist(), 30, 31, 9, *tail]


def test_SP_09_parent_ids_that_hold_turn_ends_from_elsewhere_are_not_searched() -> None:
    """A parent recorded by a server that did parse spelled turn ends: its ids stay, and no boundary comes of them."""
    opening = Message("user", "hello<|im_end|>literal")
    parent_ids = ids(1, 2, 21, 9, 77, 9, 8, 1, 3, 30, 31, 9)
    request = Conversation((opening, ANSWER, MORE))
    result = spliced(splice(WordTemplate(chatml), request, turn=0, parent_ids=parent_ids))
    assert result.ids.tolist() == [*parent_ids.tolist(), *NEXT]
    cut_short = parent_ids[:-1]
    result = spliced(splice(WordTemplate(chatml), request, turn=0, parent_ids=cut_short))
    assert result.ids.tolist() == [*cut_short.tolist(), 9, *NEXT], "no end of another turn closes this one"
    assert result.added_close == 1


def test_SP_10_images_are_refused_before_there_is_anything_to_splice() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":['
        b'{"type":"text","text":"hello"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}]}'
    )
    with pytest.raises(InvalidRequestError, match="image"):
        ChatDialect().parse(body)


def test_SP_12_history_is_never_tokenized_a_second_time() -> None:
    template = WordTemplate(chatml)
    parent_ids = ids(*PROMPT, 30, 31, 9)
    result = spliced(splice(template, ask(ANSWER, MORE), turn=0, parent_ids=parent_ids))
    assert result.ids[: parent_ids.size].tolist() == parent_ids.tolist()
    assert not any("hello" in text or "answer" in text for text in template.encoded)


# --- how a turn ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generated", "expected", "added"),
    [
        ((35, 9), (35, 9, *NEXT), 0),
        ((35, 100), (35, 100, *NEXT), 0),  # closed by another stop token than the one the template writes
        ((35,), (35, 9, *NEXT), 1),
        ((), (9, *NEXT), 1),
        ((35, 1), (35, 1, 9, *NEXT), 1),  # a control token that ends nothing, though it opens what comes next
        ((9,), (9, *NEXT), 0),
    ],
)
def test_adds_what_is_missing_of_the_close(generated: tuple[int, ...], expected: tuple[int, ...], added: int) -> None:
    request = ask(AssistantTurn("answer" if 35 in generated else ""), MORE)
    result = spliced(splice(WordTemplate(chatml), request, turn=0, parent_ids=ids(*PROMPT, *generated)))
    assert result.ids.tolist() == [*PROMPT, *expected]
    assert result.added_close == added


@pytest.mark.parametrize(
    ("generated", "added_text"),
    [
        ('<call>more {"n": 1}</call><|im_end|>', ""),
        ('<call>more { "n":1 }\n</call><|im_end|>', ""),  # spelled in another way than the template spells it
        ('<call>more {"n": 1}</call>', "<|im_end|>"),
        ('<call>more {"n": 1}</call>\n', "<|im_end|>"),
        ('<call>more {"n": 1}', "</call><|im_end|>"),
        ('<call>more {"n": 1}</ca', "ll><|im_end|>"),
        ('<call>more {"n": 1<|endoftext|>', ""),
    ],
)
def test_closes_a_tool_call_where_the_model_left_it(generated: str, added_text: str) -> None:
    template = WordTemplate(chatml)
    parent_ids = np.append(ids(*PROMPT), template.encode(generated))
    result = spliced(splice(template, ask(CALL, RESULT), turn=0, parent_ids=parent_ids))
    assert template.decode(result.ids[parent_ids.size :]) == (
        added_text + "\n<|im_start|>toolagain<|im_end|>\n<|im_start|>assistant"
    )
    assert result.added_close == template.encode(added_text).size


def test_a_call_that_is_neither_closed_nor_closable_is_not_continued() -> None:
    """The template closes turns with plain text that opens the next one, so nothing tells where its call ends."""

    def plain_roles(conversation: Conversation, prompted: bool) -> str:
        parts = []
        for n, item in enumerate(conversation.items):
            last = n == len(conversation.items) - 1
            calls = item.tool_calls if isinstance(item, AssistantTurn) else ()
            called = "".join(f"[{call.name} {call.arguments}]" for call in calls)
            parts.append(f"{item.text}{called}" + ("<|im_end|>" if last and called else "~~"))
        return "".join(parts)

    result = splice(WordTemplate(plain_roles), ask(CALL, RESULT), turn=0, parent_ids=ids(*PROMPT, 30))
    assert isinstance(result, NotSpliced)
    assert result.reason == "close_unknown"


def test_a_template_that_closes_no_turns_opens_the_next_one_with_the_sampled_stop_token() -> None:
    controls = frozenset({"<|user|>", "<|tool|>", "<|assistant|>"})

    def openers_only(conversation: Conversation, prompted: bool) -> str:
        parts = []
        for item in conversation.items:
            match item:
                case Message(role, text):
                    parts.append(f"<|{role}|>{text}")
                case ToolResult(_, text):
                    parts.append(f"<|tool|>{text}")
                case AssistantTurn(text, calls, _):
                    parts.append(f"<|assistant|>{text}" + "".join(f"<call>{call.name}</call>" for call in calls))
        return "".join(parts) + ("<|assistant|>" if prompted else "")

    class Openers(WordTemplate):
        def encode(self, text: str) -> IdArray:
            return longest_matches(text, {**IDS, **numbers})

        def decode(self, ids: IdArray) -> str:
            return "".join({n: w for w, n in numbers.items()}.get(n) or WORDS[n] for n in ids.tolist())

    numbers = {word: 900 + n for n, word in enumerate(sorted(controls))}
    assistant, tool, user = (numbers[word] for word in sorted(controls))
    template = Openers(openers_only, controls, frozenset({"<|user|>", "<|tool|>"}))
    prompt = (user, 21, assistant)
    for generated in ((35, user), (35,)):
        result = spliced(splice(template, ask(ANSWER, MORE), turn=0, parent_ids=ids(*prompt, *generated)))
        assert result.ids.tolist() == [*prompt, 35, user, 22, assistant]
        assert result.added_close == 0, "what opens the next turn is not a close"
    # The model expected a user, but a tool answered.
    result = spliced(splice(template, ask(CALL, RESULT), turn=0, parent_ids=ids(*prompt, 70, 22, 71, user)))
    assert result.ids.tolist() == [*prompt, 70, 22, 71, user, tool, 23, assistant]


# --- what comes next ----------------------------------------------------------------------------------------------


def test_later_turns_that_the_harness_made_are_tail() -> None:
    made_up = AssistantTurn("again", (ToolCall("c9", "more", "{}"),))
    request = ask(ANSWER, MORE, made_up, ToolResult("c9", "hello"))
    result = spliced(splice(WordTemplate(chatml), request, turn=0, parent_ids=ids(*PROMPT, 30, 31, 9)))
    template = WordTemplate(chatml)
    assert result.ids.tolist() == [
        *PROMPT, 30, 31, 9, *NEXT[:-2], *template.encode(chatml(Conversation(request.items[3:]), True)).tolist()
    ]  # fmt: skip


def test_a_later_turn_continues_a_parent_that_is_not_the_first() -> None:
    template = WordTemplate(chatml)
    request = ask(ANSWER, MORE, AssistantTurn("again"), MORE)
    parent_ids = ids(*PROMPT, 30, 31, 9, *NEXT, 23, 9)
    result = spliced(splice(template, request, turn=1, parent_ids=parent_ids))
    assert result.ids.tolist() == [*parent_ids.tolist(), *NEXT]


def test_a_request_that_adds_nothing_asks_the_model_to_go_on() -> None:
    result = spliced(splice(WordTemplate(chatml), ask(ANSWER), turn=0, parent_ids=ids(*PROMPT, 35, 9)))
    assert result.ids.tolist() == [*PROMPT, 35, 9, 8, 1, 3]


def test_blank_texts_and_texts_of_one_word_are_continued_like_any_other() -> None:
    for text in ("", " ", "\n\n", "more", " more\n", "<|im_end|>", "more <|im_start|>"):
        template = WordTemplate(chatml)
        expected = [*template.encode("\n<|im_start|>user"), *template.encode_plain(text), 9, 8, 1, 3]
        request = ask(ANSWER, Message("user", text))
        result = spliced(splice(template, request, turn=0, parent_ids=ids(*PROMPT, 35, 9)))
        assert result.ids.tolist() == [*PROMPT, 35, 9, *expected]
