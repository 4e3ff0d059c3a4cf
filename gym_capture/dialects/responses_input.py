"""Input items of the Responses API, read as a conversation.

Invariant: ids of items count for nothing. This server stores no items: a client sends every one in full, and one
that it only refers to is an error. Items of the assistant that stand next to each other are one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gym_capture.conversation import (
    AssistantTurn,
    Item,
    Message,
    ToolCall,
    ToolResult,
    merge_assistant_turns,
)
from gym_capture.dialects import fields
from gym_capture.dialects.responses_output import unsealed
from gym_capture.dialects.responses_tools import custom_arguments, flat_name
from gym_capture.errors import InvalidRequestError


def read_items(data: Mapping[str, Any]) -> tuple[Item, ...]:
    """The conversation of a request body: `instructions`, then `input`."""
    items: list[Item] = []
    if instructions := fields.string(data, "instructions"):
        items.append(Message("system", instructions))
    given = data.get("input")
    if isinstance(given, str):
        return (*items, Message("user", given))
    if given is None:
        raise InvalidRequestError("input is missing", param="input")
    entries = fields.array(given, "input")
    if not entries:
        raise InvalidRequestError("input must not be empty", param="input")
    for index, value in enumerate(entries):
        at = f"input.{index}"
        entry = fields.mapping(value, at)
        kind = _kind(entry, at)
        if kind != "additional_tools":
            items.append(_READERS[kind](entry, f"{at}."))
    return merge_assistant_turns(items)


def read_tool_entries(data: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The tools of a request body, with their paths: those of `tools`, then those that input items add."""
    if (tools := data.get("tools")) is not None:
        for index, tool in enumerate(fields.array(tools, "tools")):
            yield f"tools.{index}", tool
    given = data.get("input")
    for position, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            at = f"input.{position}.tools"
            for index, tool in enumerate(fields.array(item.get("tools"), at)):
                yield f"{at}.{index}", tool


def _kind(entry: Mapping[str, Any], at: str) -> str:
    kind = entry.get("type")
    if kind is None:
        kind = "message" if "role" in entry else "item_reference" if "id" in entry else "message"
    if kind == "item_reference":
        raise InvalidRequestError(
            f"{at} refers to an item by its id, but this server stores none: send the item itself", param=at
        )
    if not isinstance(kind, str) or (kind not in _READERS and kind != "additional_tools"):
        raise InvalidRequestError(
            f"{at}.type: items of type {fields.shown(kind)!r} are not supported", param=f"{at}.type"
        )
    return kind


def _message(entry: Mapping[str, Any], at: str) -> Item:
    role = fields.required_string(entry, "role", at=at)
    if role in ("user", "system", "developer"):
        return Message(role, fields.text(entry.get("content"), f"{at}content"))
    if role == "assistant":
        return AssistantTurn(text=fields.text(entry.get("content"), f"{at}content", optional=True))
    raise InvalidRequestError(
        f"{at}role must be user, system, developer or assistant: got {role[:40]!r}", param=f"{at}role"
    )


def _reasoning(entry: Mapping[str, Any], at: str) -> Item:
    """Its content; else what this server sealed into it; else its summary. What others encrypted cannot be read."""
    text = _texts(entry, "content", at)
    if not text and (sealed := fields.string(entry, "encrypted_content", at=at)):
        text = unsealed(sealed)
    return AssistantTurn(reasoning=text or _texts(entry, "summary", at))


def _texts(entry: Mapping[str, Any], key: str, at: str) -> str:
    if entry.get(key) is None:
        return ""
    parts = enumerate(fields.array(entry[key], f"{at}{key}"))
    return "".join(
        fields.required_string(fields.mapping(part, f"{at}{key}.{index}"), "text", at=f"{at}{key}.{index}.")
        for index, part in parts
    )


def _function_call(entry: Mapping[str, Any], at: str) -> Item:
    arguments = entry.get("arguments")
    if isinstance(arguments, dict):
        arguments = fields.json_text(arguments, f"{at}arguments")
    elif arguments is not None and not isinstance(arguments, str):
        raise fields.wrong_type(f"{at}arguments", "a string", arguments)
    return _call(entry, arguments or "", at)


def _custom_tool_call(entry: Mapping[str, Any], at: str) -> Item:
    return _call(entry, custom_arguments(fields.required_string(entry, "input", at=at)), at)


def _call(entry: Mapping[str, Any], arguments: str, at: str) -> Item:
    name = fields.required_string(entry, "name", at=at)
    call_id = fields.required_string(entry, "call_id", at=at)
    flat = flat_name(name, fields.string(entry, "namespace", at=at))
    return AssistantTurn(tool_calls=(ToolCall(id=call_id, name=flat, arguments=arguments),))


def _call_output(entry: Mapping[str, Any], at: str) -> Item:
    call_id = fields.required_string(entry, "call_id", at=at)
    return ToolResult(call_id, fields.text(entry.get("output"), f"{at}output", optional=True))


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], str], Item]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _call_output,
}
