"""What parsers see of a generation: JSON strings and thoughts without markup, all else as it is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.engines.screens import JsonFormat, JsonScreen, PartRestorer, restore
from gym_capture.engines.steps import Piece

FORM = JsonFormat(re.compile(r"<call>\s*\Z"))


def seen(*texts: str, form: JsonFormat = FORM) -> str:
    screen = JsonScreen(form, plain_id=7)
    pieces = [piece for n, text in enumerate(texts) for piece in screen.feed(Piece([100 + n], text))]
    return "".join(piece.text for piece in [*pieces, *screen.rest()])


def test_ST_13_markup_in_strings_is_replaced_and_nothing_else() -> None:
    text = 'x<y {"a": "<b>"} <call>{"name": "f<", "arguments": {"k": ["]</call>\\"<", 1]}}</call> "<"'
    shown = seen(*text)
    assert restore(shown) == text
    assert shown.count("<") == 5  # x<y, <b>, <call>, </call> and the last one
    assert len(shown) == len(text)


def test_a_token_of_markup_in_a_string_is_no_token_of_markup() -> None:
    screen = JsonScreen(FORM, plain_id=7)
    texts = ["<call>", '{"name": "f", "arguments": {"k": "', "</call>", '"}}', "</call>"]
    pieces = [piece for n, text in enumerate(texts) for piece in screen.feed(Piece([100 + n], text))]
    assert [piece.token_ids for piece in pieces] == [[100], [101], [7], [103], [104]]


@pytest.mark.parametrize(
    "text",
    [
        '<call>{"name": "f", "arguments": {"k": "never closed\n</call> <call>{}</call>',
        '<call>{"name": "f", "arguments": [1}</call>',
        "<call>{]</call>",
        '{"k": "</call>"}',
        "<call>f({})</call>",
    ],
)
def test_what_is_no_json_is_not_taken_for_it(text: str) -> None:
    assert seen(*text) == text


@given(st.text('<call>{}[]"\\:, name\nx1`;', max_size=40), st.booleans())
def test_no_text_is_lost_or_made_up(text: str, at_once: bool) -> None:
    screen = JsonScreen(JsonFormat(FORM.opens, "other"), plain_id=7)
    parts = [text] if at_once else list(text)
    pieces = [piece for part in parts for piece in screen.feed(Piece([1], part))]
    pieces += screen.rest()
    assert restore("".join(piece.text for piece in pieces)) == text


def test_a_call_is_put_in_order_and_what_is_around_it_stays() -> None:
    text = 'a <call>{"arguments": {"name": "no", "k": "</call>"}, "id": 1, "name": "f"}</call> b'
    ordered = 'a <call>{"name": "f", "id": 1, "arguments": {"name": "no", "k": "</call>"}}</call> b'
    assert restore(seen(*text)) == restore(seen(text)) == ordered


def test_a_call_that_was_cut_before_its_name_is_none() -> None:
    text = 'a <call>{"arguments": {"name": "no"}, "na'
    assert seen(*text) == seen(text) == "a <call>"


def test_calls_that_have_ended_are_known_and_what_is_none_is_not_counted() -> None:
    screen = JsonScreen(FORM, plain_id=7)
    written = '<call>[{"name": "f"}, {"parameters": {}}, {"name": "g", "parameters": {"a": "<"}}, {"name": "h"'
    screen.feed(Piece([1], written))
    assert screen.calls == [("f", "{}"), ("g", '{"a": "<"}')]


def test_what_stands_behind_the_arguments_of_a_call_is_left_out() -> None:
    text = '<call>[{"name": "f", "arguments": {"a": [1]}, "id": "<}", "x": {"y": [1]}}, {"arguments": {}, "name": "g"}]'
    kept = '<call>[{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]'
    assert seen(*text) == seen(text) == kept
    # A call that is not closed leaves out nothing but what is JSON.
    assert seen(*'<call>{"name": "f", "arguments": {}, </call> b') == '<call>{"name": "f", "arguments": {}</call> b'


def test_a_call_for_a_parser_of_lines_is_in_one() -> None:
    form = JsonFormat(FORM.opens, "arguments", one_line=True)
    text = '<call>\n{\n"a": "b\\n",\r\n"c": [\n1]}\n</call>'
    assert seen(*text, form=form) == '<call>\n{ "a": "b\\n",  "c": [ 1]}\n</call>'


def test_noncharacters_of_a_model_are_no_stand_ins() -> None:
    assert restore(seen('<call>{"name": "\ufdd0"}')) == '<call>{"name": "\ufffd"}'


def test_a_stand_in_that_comes_as_a_cut_escape_is_restored() -> None:
    restorer = PartRestorer()
    parts = [restorer.feed(char) for char in "a\\ufdd0b\\n\\u00e9\\"]
    assert "".join(parts) + restorer.rest() == "a<b\\n\\u00e9\\"


def test_a_backslash_before_what_looks_like_a_stand_in_stays_a_backslash() -> None:
    text = '"\\\\ufdd0 \\\\\\\\ufdd1"'
    for parts in ([text], text):
        restorer = PartRestorer()
        assert "".join(restorer.feed(part) for part in parts) + restorer.rest() == text
    assert restore("is \\ufdd0 a character?") == "is \\ufdd0 a character?"
