"""Every parser of tool calls that loads: calls come out as they were written, streamed and whole, and never cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.tool_parsers import ToolParserManager

from gym_capture.conversation import AssistantTurn, ToolCall
from gym_capture.engines.formats import JSON_FORMATS, READ_WHOLE
from tests.engines import tool_formats
from tests.engines.test_vllm_parsing import Format, calls, ids_of, read, tokenizer, turn
from tests.engines.tool_formats import LAST, NOT_HERE, ONE_CALL, TOOL_FORMATS, Call, to_json

TOKENS = tuple(sorted({token for form in TOOL_FORMATS.values() for token in form.tokens}))
ODD = 'Zürich } ] ; 😀 "b" \\ c\nd [x](y)'
CASES: dict[str, list[Call]] = {
    "two": [("f", {"a": 1}), ("get_weather", {"city": ODD})],
    "no arguments": [("now", {})],
    "no arguments, then some": [("now", {}), ("f", {"a": 2})],
}
NESTED: list[Call] = [("f", {"name": "x", "a": {"b": "]}</x>`"}, "o": {"name": "g", "arguments": {}}}), ("now", {})]


def format_of(parser: str, written: list[Call]) -> Format:
    return Format(parser, None, TOKENS, TOOL_FORMATS[parser].write(written))


def check(parser: str, written: list[Call]) -> None:
    written = written[:1] if parser in ONE_CALL else written
    form = format_of(parser, written)
    ids = ids_of(form, form.text)
    expected = [(name.removeprefix(LAST), given) for name, given in written]
    ways = {"whole": (), "token by token": range(1, len(ids)), "two halves": (len(ids) // 2,)}
    for way, ends in ways.items():
        made = turn(read(form, ids, ends))
        assert (calls(made), made.text.strip()) == (expected, ""), way


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_calls_come_out_as_they_were_written(parser: str, case: str) -> None:
    check(parser, CASES[case])


@pytest.mark.parametrize("parser", [name for name, form in TOOL_FORMATS.items() if form.closes is not None])
def test_ST_13_what_ends_a_call_may_be_spelled_in_its_arguments(parser: str) -> None:
    closes = TOOL_FORMATS[parser].closes
    check(parser, [("get_weather", {"city": f"doc: {closes} is the end tag"}), ("f", {"a": 2})])
    check(parser, NESTED)


@pytest.mark.parametrize("parser", [name for name, form in JSON_FORMATS.items() if form.content == "calls"])
def test_a_name_may_come_behind_the_arguments(parser: str) -> None:
    check(parser, [(LAST + name, given) for name, given in NESTED])


LINES: list[Call] = [("get_weather", {"city": "a\n b", "days": {"to": "<b>"}}), ("f", {"a": 2})]


@pytest.mark.parametrize("parser", JSON_FORMATS)
def test_ST_13_arguments_may_be_written_over_several_lines(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_formats, "to_json", lambda value: json.dumps(value, ensure_ascii=False, indent=1))
    check(parser, LINES)


@pytest.mark.parametrize("parser", [name for name, form in JSON_FORMATS.items() if form.content == "calls"])
@pytest.mark.parametrize("members", [("name", "arguments", "id"), ("id", "name", "arguments", "type")])
def test_what_else_a_call_says_is_no_part_of_its_arguments(
    parser: str, members: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_more(value: Any) -> str:
        if isinstance(value, dict) and "name" in value:
            more = {"id": "call_1", "type": "function", **value}
            value = {key: more.get(key, value.get("parameters")) for key in members}
        return json.dumps(value, ensure_ascii=False)

    monkeypatch.setattr(tool_formats, "to_json", with_more)
    check(parser, LINES)


@pytest.mark.parametrize("parser", ["llama3_json", "granite", "ernie45", "hermes"])
def test_no_call_gets_the_arguments_of_what_was_none(parser: str) -> None:
    good, bad = TOOL_FORMATS[parser].write([("now", {})]), TOOL_FORMATS[parser].write([("\0", {"a": 1})])
    text = {
        "llama3_json": '{"parameters": {"a": 1}}; {"name": "now"}',
        "granite": '<|tool_call|>[{"arguments": {"a": 1}}, {"name": "now"}]',
    }.get(parser, bad.replace('"name": "\\u0000", ', "") + good.replace(', "arguments": {}', ""))
    form = Format(parser, None, TOKENS, text)
    ids = ids_of(form, text)
    for ends in ((), range(1, len(ids))):
        made = turn(read(form, ids, ends))
        assert [call.arguments for call in made.tool_calls if call.name == "now"] in (["{}"], [""], [])


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_ST_13_of_a_reply_that_was_cut_no_call_is_made_up(parser: str) -> None:
    written: list[Call] = [("get_weather", {"city": "Zürich"}), ("now", {})]
    form = format_of(parser, written[:1] if parser in ONE_CALL else written)
    ids = ids_of(form, form.text)
    for end in range(2, len(ids), 3):
        made = turn(read(form, ids[:end], finish_reason="length"))
        assert turn(read(form, ids[:end], range(1, end), finish_reason="length")) == made
        text = tokenizer(TOKENS).decode(ids[:end])
        for call, (name, given) in zip(made.tool_calls, written, strict=False):
            assert call.name == name, text
            assert begins(call, given), text
        if parser in READ_WHOLE:
            assert (made.tool_calls, made.text.rstrip("\ufffd")) == ((), text.rstrip("\ufffd"))


def begins(call: ToolCall, given: dict[str, Any]) -> bool:
    """Whether the call has a beginning of the arguments, and not `{}` where there are some to come."""
    whole = to_json(given)
    spellings = (whole, whole.replace(": ", ":"))
    said = call.arguments.strip()
    return any(spelling.startswith(said) for spelling in spellings) and (said != "{}" or not given)


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": {"b": "}"}', '{"a": '])
@pytest.mark.parametrize("parser", ["llama3_json", "llama4_json"])
def test_a_call_without_its_last_brackets_has_the_arguments_that_are_written(parser: str, arguments: str) -> None:
    """A call without arguments is another one: it was recorded, and the agent ran it."""
    form = Format(parser, None, TOKENS, f'{{"name": "f", "parameters": {arguments}')
    ids = ids_of(form, form.text)
    for ends in ((), range(1, len(ids))):
        (call,) = turn(read(form, ids, ends)).tool_calls
        assert (call.name, call.arguments) == ("f", arguments.strip())


@pytest.mark.parametrize("parser", ["hermes", "longcat", "qwen3_json"])
def test_arguments_that_are_no_json_are_shown_as_they_are_and_no_call_is_lost(parser: str) -> None:
    written = TOOL_FORMATS[parser].write([("f", {"a": 1}), ("g", {"b": 2}), ("h", {"c": 3})])
    form = Format(parser, None, TOKENS, written.replace('{"b": 2}}', '{"b": }'))
    ids = ids_of(form, form.text)
    for ends in ((), range(1, len(ids))):
        made = [(call.name, call.arguments) for call in turn(read(form, ids, ends)).tool_calls]
        assert made == [("f", '{"a": 1}'), ("g", '{"b": }'), ("h", '{"c": 3}')]


@pytest.mark.parametrize("ends", [(), None], ids=["whole", "token by token"])
def test_what_cannot_be_read_stays_text(ends: tuple[int, ...] | None) -> None:
    """vLLM's reader of this format ends at the first bracket outside of a string."""
    form = format_of("phi4_mini_json", [("f", {"a": [1, 2]}), ("now", {})])
    ids = ids_of(form, form.text)
    assert turn(read(form, ids, range(1, len(ids)) if ends is None else ends)) == AssistantTurn(form.text)


def test_every_parser_of_calls_is_tried_or_it_is_said_why_not() -> None:
    assert set(ToolParserManager.list_registered()) == set(TOOL_FORMATS) | set(NOT_HERE)
