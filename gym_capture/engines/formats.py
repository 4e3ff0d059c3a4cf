"""Formats that vLLM's parsers read, by the parsers' names: as little of each as this package must know.

Invariant: a parser that is not named here is fed as it is. What stands here is where the JSON of calls begins, and
which parsers cannot read a reply as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gym_capture.engines.screens import JsonFormat


def _after(*marks: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{'|'.join(marks)})\s*\Z")


_TOOL_CALL: Final = JsonFormat(_after("<tool_call>"))
_TOOL_CALLS: Final = JsonFormat(_after("<tool_calls>"))
_LLAMA: Final = JsonFormat(_after(r"\A", r"<\|python_tag\|>", r"\}\s*;"))

JSON_FORMATS: Final[Mapping[str, JsonFormat]] = {
    "apertus": JsonFormat(_after(r"<\|tools_prefix\|>"), "other"),
    "deepseek_v3": JsonFormat(_after("```json"), "arguments", one_line=True),
    "deepseek_v31": JsonFormat(_after("<｜tool▁sep｜>"), "arguments", one_line=True),
    "ernie45": _TOOL_CALL,
    "gigachat3": JsonFormat(_after(r"<\|function_call\|>", r"function call<\|role_sep\|>")),
    "granite": JsonFormat(_after(r"<\|tool_call\|>", "<tool_call>")),
    "granite-20b-fc": JsonFormat(_after("<function_call>")),
    "granite4": _TOOL_CALL,
    "hermes": _TOOL_CALL,
    "hunyuan_a13b": _TOOL_CALLS,
    "inkling": JsonFormat(_after(r"<\|content_invoke_tool_json\|>"), "other"),
    "internlm": JsonFormat(_after(r"<\|plugin\|>")),
    "jamba": _TOOL_CALLS,
    "kimi_k2": JsonFormat(_after(r"<\|tool_call_argument_begin\|>"), "arguments"),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "longcat": JsonFormat(_after("<longcat_tool_call>")),
    "mistral": JsonFormat(_after(r"\[TOOL_CALLS\]", r"\[TOOL_CALLS\][\w.-]+(?:\[CALL_ID\]\w+)?\[ARGS\]"), "other"),
    "phi4_mini_json": JsonFormat(_after("functools")),
    "plamo3": JsonFormat(_after(r"<\|plamo:msg\|>"), "arguments"),
    "qwen3_json": _TOOL_CALL,
    "xlam": JsonFormat(_after(r"\A", r"\[TOOL_CALLS\]", "```(?:json)?", "<tool_call>", "</think>"), one_line=True),
}
"""Parsers of tool calls whose arguments are written in JSON."""

READ_WHOLE: Final[Mapping[str, str]] = {
    "functiongemma": "<start_function_call>",
    "hunyuan_a13b": "<tool_calls>",
    "jamba": "<tool_calls>",
    "minicpm5": "<function",
    "phi4_mini_json": "functools",
    "xlam": "",
}
"""Parsers of tool calls that lose or mangle calls which come in parts, and what the first call begins with (nothing: it
may be many things): from there on a reply is read once it is whole."""

THINKS_WHOLE: Final = frozenset({"granite", "hunyuan_a13b"})
"""Parsers of thinking that fail on it, or lose some of it, where it comes in parts: the whole reply is read once it is
there."""

OPENS_CALL_IN_THOUGHT: Final[Mapping[str, str]] = {"k2_horizon": "<ifm|tool_calls>"}
"""Parsers of thinking that take this for its end, besides those that know such tokens by id."""
