"""Invariants of the splice over drawn conversations, whatever the parent generated."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.splice.splicer import full_prompt, splice
from gym_capture.splice.template import control_pattern
from tests.word_template import (
    CONTROLS,
    MORE,
    SYSTEM,
    WORDS,
    WordTemplate,
    chatml,
    ids,
    spliced,
    strips_thinking,
)

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
