"""An assistant's turn as OpenAI Responses items: the form in which records keep it and trainers read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_capture.conversation import AssistantTurn


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


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}
