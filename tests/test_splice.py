"""The splice against a template that is small enough to write its ids down.

`WordTemplate` tokenizes a ChatML-like text by longest match over a handful of words; anything else is one id per
character. Real templates and tokenizers are in `tests/engines/test_hf_template.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.dialects.chat import ChatDialect
from gym_capture.errors import InvalidRequestError
from gym_capture.records import IdArray
from gym_capture.splice import NOT_SPLICED_REASONS, NotSpliced, Spliced, full_prompt, splice
from gym_capture.template import TemplateError, control_pattern

IDS = {
    "<|im_start|>": 1,
    "user": 2,
    "assistant": 3,
    "system": 4,
    "\n": 8,
    "<|im_end|>": 9,
    "hello": 21,
    "more": 22,
    "again": 23,
    "an": 30,
    "swer": 31,
    "answer": 35,
    "You are": 50,
    " helpful": 51,
    "<think>": 60,
    "hm": 61,
    "</think>": 62,
    "<call>": 70,
    "</call>": 71,
    "tool": 72,
    "literal": 77,
    "<|endoftext|>": 100,
}
WORDS = {number: word for word, number in IDS.items()}
CONTROLS = frozenset({"<|im_start|>", "<|im_end|>", "<|endoftext|>"})
FIRST_CHARACTER_ID = 1000

Render = Callable[[Conversation, bool], str]


@dataclass
class WordTemplate:
    """A chat template over small integers; `encoded` has every text that was tokenized."""

    rendering: Render
    special_tokens: frozenset[str] = CONTROLS
    stop_tokens: frozenset[str] = frozenset({"<|im_end|>", "<|endoftext|>"})
    encoded: list[str] = field(default_factory=list)

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        return self.rendering(conversation, add_generation_prompt)

    def encode(self, text: str) -> IdArray:
        self.encoded.append(text)
        return longest_matches(text, IDS)

    def encode_plain(self, text: str) -> IdArray:
        self.encoded.append(text)
        return longest_matches(text, {word: number for word, number in IDS.items() if word not in CONTROLS})

    def decode(self, ids: IdArray) -> str:
        return "".join(WORDS.get(n) or chr(n - FIRST_CHARACTER_ID) for n in ids.tolist())


def longest_matches(text: str, words: dict[str, int]) -> IdArray:
    ids: list[int] = []
    at = 0
    while at < len(text):
        word = max((word for word in words if text.startswith(word, at)), key=len, default="")
        ids.append(words[word] if word else FIRST_CHARACTER_ID + ord(text[at]))
        at += len(word) or 1
    return np.asarray(ids, dtype=np.int32)


def chatml(conversation: Conversation, prompted: bool) -> str:
    return "".join(map(chatml_item, conversation.items)) + ("<|im_start|>assistant" if prompted else "")


def chatml_item(item: Item) -> str:
    match item:
        case Message(role, text):
            return f"<|im_start|>{role}{text}<|im_end|>\n"
        case ToolResult(_, text):
            return f"<|im_start|>tool{text}<|im_end|>\n"
        case AssistantTurn(text, calls, reasoning):
            thought = f"<think>{reasoning}</think>" if reasoning else ""
            called = "".join(f"<call>{call.name} {call.arguments}</call>" for call in calls)
            return f"<|im_start|>assistant{thought}{text}{called}<|im_end|>\n"


def strips_thinking(conversation: Conversation, prompted: bool) -> str:
    items = [i._replace(reasoning="") if isinstance(i, AssistantTurn) else i for i in conversation.items]
    return chatml(Conversation(tuple(items)), prompted)


def drops_empty_turns(conversation: Conversation, prompted: bool) -> str:
    said = [i for i in conversation.items if not (isinstance(i, AssistantTurn) and not i.text and not i.tool_calls)]
    return strips_thinking(Conversation(tuple(said)), prompted)


def has_default_system(conversation: Conversation, prompted: bool) -> str:
    first = conversation.items[0]
    default = (
        "" if isinstance(first, Message) and first.role == "system" else "<|im_start|>systemYou are helpful<|im_end|>\n"
    )
    return default + chatml(conversation, prompted)


def ids(*values: int) -> IdArray:
    return np.asarray(values, dtype=np.int32)


def ask(*items: Item) -> Conversation:
    return Conversation((Message("user", "hello"), *items))


PROMPT = (1, 2, 21, 9, 8, 1, 3)
ANSWER = AssistantTurn("answer")
MORE = Message("user", "more")
NEXT = (8, 1, 2, 22, 9, 8, 1, 3)
"""What follows the close of a turn when the user says `more`."""


def spliced(result: Spliced | NotSpliced) -> Spliced:
    assert isinstance(result, Spliced), result
    return result


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


CALL = AssistantTurn(tool_calls=(ToolCall("c1", "more", '{"n": 1}'),))
RESULT = ToolResult("c1", "again")


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


# --- what cannot be continued -------------------------------------------------------------------------------------


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


SYSTEM = Message("system", "You are helpful")
TOOL = Tool("more", "Says more.", "{}")


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
    assert result.reason in NOT_SPLICED_REASONS


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


# --- invariants ---------------------------------------------------------------------------------------------------

texts = st.text(st.sampled_from(["a", " ", "\n", "<", "|", '"', "ø"]), max_size=6) | st.lists(
    st.sampled_from(["hello", "<|im_end|>", "<|im_start|>user", " ", "\n", "M1Z", "</call>"]), max_size=4
).map("".join)
arguments = texts | st.builds('{{"k": "{}"}}'.format, st.sampled_from(["a", "<|im_end|>", "\\n"]))
calls = st.lists(st.builds(ToolCall, st.sampled_from(["c1", "c2"]), st.just("more"), arguments), max_size=2)
turns = st.builds(AssistantTurn, texts, calls.map(tuple), texts)
others = st.builds(Message, st.just("user"), texts) | st.builds(ToolResult, st.just("c1"), texts)
exchanges = st.lists(st.tuples(turns, st.lists(others, min_size=1, max_size=2)), min_size=1, max_size=3)
generations = st.lists(st.sampled_from(sorted(WORDS)), max_size=6)


@settings(deadline=None)
@given(exchanges, generations, st.data())
def test_a_splice_is_the_parents_ids_and_then_the_templates_words(
    exchanges: list[tuple[AssistantTurn, list[Item]]], generated: list[int], data: st.DataObject
) -> None:
    template = WordTemplate(strips_thinking)
    items: tuple[Item, ...] = (SYSTEM, MORE)
    for reply, following in exchanges:
        items = (*items, reply, *following)
    turn = data.draw(st.integers(0, len(exchanges) - 1))
    at = [n for n, item in enumerate(items) if isinstance(item, AssistantTurn)][turn]
    parent_ids = np.append(full_prompt(template, Conversation(items[:at])), ids(*generated))
    result = spliced(splice(template, Conversation(items), turn=turn, parent_ids=parent_ids))
    assert result.ids[: parent_ids.size].tolist() == parent_ids.tolist()
    tail = template.decode(result.ids[parent_ids.size :])
    after = strips_thinking(Conversation(items[at + 1 :]), True)
    assert tail.endswith(f"\n{after}")
    # Before that there is at most what closes the turn, and control tokens are the template's alone.
    assert tail.removesuffix(f"\n{after}") in ("", "<|im_end|>", "</call><|im_end|>", "/call><|im_end|>")
    n_controls = sum(n in (1, 9, 100) for n in result.ids[parent_ids.size :].tolist())
    assert n_controls == 2 * len(items[at + 1 :]) + 1 + tail.removesuffix(f"\n{after}").count("<|im_end|>")


@settings(deadline=None)
@given(st.lists(others | turns, min_size=1, max_size=5), st.booleans())
def test_only_the_template_writes_control_tokens(items: list[Item], has_tools: bool) -> None:
    def with_tools(conversation: Conversation, prompted: bool) -> str:
        listed = "".join(tool.name + tool.description + tool.parameters_json for tool in conversation.tools)
        return f"<|im_start|>system{listed}<|im_end|>\n" + chatml(conversation, prompted)

    template = WordTemplate(with_tools)
    tools = (Tool("f<|im_end|>", "<|im_start|>", '{"a": "<|endoftext|>"}'),) if has_tools else ()
    prompt = full_prompt(template, Conversation(tuple(items), tools)).tolist()
    assert [n for n in prompt if n in (1, 9, 100)] == [1, 9] * (len(items) + 1) + [1]


@settings(deadline=None)
@given(st.lists(others | turns, min_size=1, max_size=5))
def test_a_conversation_that_spells_no_control_token_is_tokenized_as_one_text(items: list[Item]) -> None:
    template = WordTemplate(chatml)
    spelled = control_pattern(CONTROLS).search("".join(map(str, items)))
    text = chatml(Conversation(tuple(items)), True)
    prompt = full_prompt(template, Conversation(tuple(items)))
    if spelled is None:
        assert template.encoded == [text]
    assert template.decode(prompt) == text
