"""An assistant's turn as OpenAI Responses items: the form in which records keep it and trainers read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_capture.conversation import AssistantTurn, ToolCall

__all__ = ["output_items", "turn_of"]


def output_items(turn: AssistantTurn) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """The items of `turn` and the index of the one that its generated ids are filed under: the last.

    One generation makes all items of a turn, so its ids belong to them together; the last is where the turn ended.
    """
    items: list[Mapping[str, Any]] = []
    if turn.reasoning:
        items.append({"type": "reasoning", "summary": [], "content": [_text("reasoning_text", turn.reasoning)]})
    if turn.text or not (turn.tool_calls or turn.reasoning):
        items.append({"type": "message", "role": "assistant", "content": [_text("output_text", turn.text)]})
    items.extend(
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in turn.tool_calls
    )
    return tuple(items), len(items) - 1


def turn_of(items: Sequence[Mapping[str, Any]]) -> AssistantTurn:
    """The turn that `output_items` made these of. Raises `ValueError` for items that it never makes."""
    text = reasoning = ""
    calls: list[ToolCall] = []
    for item in items:
        match item:
            case {"type": "reasoning", "content": [{"text": str(reasoning)}]}:
                pass
            case {"type": "message", "content": [{"type": "output_text", "text": str(text)}]}:
                pass
            case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
                calls.append(ToolCall(id, name, arguments))
            case _:
                raise ValueError(f"an item of type {item.get('type')!r} that no turn of a graph has")
    turn = AssistantTurn(text=text, tool_calls=tuple(calls), reasoning=reasoning)
    if output_items(turn)[0] != tuple(items):
        raise ValueError("items that no turn of a graph has in this order")
    return turn


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}
