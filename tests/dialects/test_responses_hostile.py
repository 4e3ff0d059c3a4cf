"""Bodies made to break the parser of the Responses dialect are read, or refused; and what is read can be repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.calls import ModelRequest
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.errors import InvalidRequestError

RESPONSES = ResponsesDialect()

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None), max_size=5)),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(st.text(max_size=5), values, max_size=3)),
    max_leaves=8,
)
FIELDS = (
    "input", "instructions", "tools", "tool_choice", "include", "text", "reasoning", "metadata", "conversation",
    "max_output_tokens", "top_logprobs", "stream", "background", "temperature", "stop", "user", "model",
)  # fmt: skip
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "additional_tools")
KEYS = (
    "role", "content", "type", "call_id", "name", "arguments", "output", "input", "summary", "tools", "namespace",
    "encrypted_content",
)  # fmt: skip
ITEM = st.builds(
    lambda kind, rest: {"type": kind, **rest},
    st.sampled_from(ITEM_TYPES),
    st.dictionaries(st.sampled_from(KEYS), st.one_of(JSON, st.text(max_size=3)), max_size=6),
)
TOOL = st.builds(
    lambda kind, rest: {"type": kind, "name": "t", **rest},
    st.sampled_from(["function", "custom", "namespace"]),
    st.dictionaries(st.sampled_from(("name", "description", "parameters", "strict", "tools", "format")), JSON),
)


def read_or_refused(data: bytes) -> ModelRequest | None:
    """What became of it; any other exception is raised."""
    try:
        return RESPONSES.parse(data)
    except InvalidRequestError:
        return None


@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON),
    st.one_of(st.none(), st.lists(ITEM, max_size=3)),
    st.one_of(st.none(), st.lists(TOOL, max_size=3)),
)
def test_any_body_is_read_or_refused(fields: dict[str, Any], input_items: list[Any] | None, tools: object) -> None:
    overrides = {
        **({} if input_items is None else {"input": input_items}),
        **({} if tools is None else {"tools": tools}),
    }
    request = read_or_refused(json.dumps({"model": "m", "input": "hi", **fields, **overrides}).encode())
    if request is not None:
        json.loads(b"{" + request.echo["members"] + b"}")


@pytest.mark.parametrize(("depth", "is_read"), [(100, {True}), (300, {True}), (995, {True, False}), (20_000, {False})])
@pytest.mark.parametrize("field", ["metadata", "text", "reasoning"])
def test_what_a_reply_repeats_may_nest_or_is_refused(field: str, depth: int, is_read: set[bool]) -> None:
    nested = '"a":{' * depth + '"a":1' + "}" * depth
    request = read_or_refused(f'{{"model":"m","input":"hi","{field}":{{{nested}}}}}'.encode())
    assert (request is not None) in is_read
    if request is not None:
        assert nested.encode() in request.echo["members"].replace(b" ", b"")


@pytest.mark.parametrize("number", [str(2**63), str(2**64), str(10**30), f"1{'0' * 400}", "1e400"])
@pytest.mark.parametrize("nested", [1, 300])
def test_numbers_beyond_all_ranges_are_repeated_or_refused(number: str, nested: int) -> None:
    value = "[" * nested + number + "]" * nested
    request = read_or_refused(f'{{"model":"m","input":"hi","metadata":{{"n":{value}}}}}'.encode())
    if request is not None:
        json.loads(b"{" + request.echo["members"] + b"}")
