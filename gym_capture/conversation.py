"""A conversation in one form, whatever API it came in by.

Invariant: items are immutable, and one assistant turn is one item - assistant messages, function calls and
reasoning that stand next to each other in a request are merged (`merge_assistant_turns`).

Flow: a dialect parses a request into a `Conversation` -> `fingerprint` hashes it -> `template` renders it.

Half an emoji, which JSON can spell and neither UTF-8 nor a tokenizer can hold, becomes U+FFFD where text comes in:
where a body is parsed (`dialects.base`), where the JSON that stands in a text is parsed for a template, and in what an
engine's parsers make (`calls.sendable`). Nothing behind these decides again. What hashes or stores text takes any;
and records of before have such halves, so whatever writes records for others leaves them out as well.

Items are named tuples: comparing two conversations compares strings in C, which is what makes repeated
fingerprints of a growing history cheap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "MAX_JSON_DEPTH",
    "AssistantTurn",
    "Conversation",
    "Item",
    "Message",
    "Tool",
    "ToolCall",
    "ToolResult",
    "json_without_surrogates",
    "merge_assistant_turns",
    "nests_too_deep",
    "without_surrogates",
]

MAX_JSON_DEPTH: Final = 100
"""Arguments that nest deeper are no JSON to a template, and schemas that do are refused. Templates write JSON with
macros that call themselves, several frames for a level: this much they can write and have frames to spare."""
_STRING_OR_BRACKET: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


class Message(NamedTuple):
    """A system, developer or user message."""

    role: str
    """system | developer | user"""
    text: str


class ToolCall(NamedTuple):
    """A tool call as the model wrote it, or as the client echoes it."""

    id: str
    name: str
    arguments: str
    """The raw argument text: JSON if the model managed, never parsed and written again."""


class AssistantTurn(NamedTuple):
    """Everything the assistant said in one turn."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class ToolResult(NamedTuple):
    """A tool's answer to the call with id `call_id`."""

    call_id: str
    text: str


Item: TypeAlias = Message | AssistantTurn | ToolResult


class Tool(NamedTuple):
    """A function offered to the model."""

    name: str
    description: str
    parameters_json: str
    """JSON schema of the arguments, as JSON text without spaces; its keys stand in the order in which the client sent
    them, which is the order in which templates write them and grammars ask for them."""
    strict: bool = False
    """A forced call's arguments must follow the schema, by the grammar that the engine samples under."""

    def as_openai(self) -> dict[str, Any]:
        """The tool as OpenAI Chat spells it, which is also what chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = json.loads(self.parameters_json)
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class Conversation(NamedTuple):
    """The conversation that a request asks the model to continue."""

    items: tuple[Item, ...]
    tools: tuple[Tool, ...] = ()


def without_surrogates(text: str) -> str:
    """Half an emoji (`"\\ud83d"`) becomes U+FFFD; two halves that belong together become the emoji."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def json_without_surrogates(value: Any) -> Any:
    """`without_surrogates` for every text in a JSON value, keys included."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {json_without_surrogates(key): json_without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_without_surrogates(each) for each in value]
    return value


def merge_assistant_turns(items: Iterable[Item]) -> tuple[Item, ...]:
    """Merges assistant items that stand next to each other into one turn: texts joined, calls in order."""
    merged: list[Item] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, AssistantTurn) and isinstance(last, AssistantTurn):
            merged[-1] = AssistantTurn(
                text=last.text + item.text,
                tool_calls=last.tool_calls + item.tool_calls,
                reasoning=last.reasoning + item.reasoning,
            )
        else:
            merged.append(item)
    return tuple(merged)


def nests_too_deep(json_text: str) -> bool:
    """Whether arrays and objects nest deeper than `MAX_JSON_DEPTH`. Read off the text, and so wherever it is asked."""
    if json_text.count("[") + json_text.count("{") <= MAX_JSON_DEPTH:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(json_text):
        if match[0] in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return True
        elif match[0] in "]}":
            depth -= 1
    return False
