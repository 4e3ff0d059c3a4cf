"""Recorded turns as the objects of OpenAI's Responses API that others validate.

Invariant: what a record says stays as it is; only what the API requires and a record does not have is added - ids that
follow from the call, a status, empty lists. Nothing is added to a text, and no ids of tokens come from here.

Records keep of a turn what the policy wrote. Readers of a Responses object want more: each item its `id`, a message its
`status` and the `annotations` of its texts, and reasoning in `summary`, where they look for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainer_bridge.finished import JsonObject

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def response_item(item: Mapping[str, Any], *, call_id: str, position: int, cut_off: bool = False) -> JsonObject:
    """An item of the turn of `call_id`, complete. `cut_off`: the call ended at a limit of length."""
    kind = item.get("type") or "message"
    made = {"type": kind, "id": f"{_PREFIXES.get(kind, 'item')}_{call_id}_{position}"}
    status = {"status": "incomplete" if cut_off else "completed"}
    match kind:
        case "message":
            made |= {"role": "assistant"} | status
            made |= _known(item) | {"content": _contents(item.get("content"))}
        case "reasoning":
            made |= _known(item) | _summary(item)
        case "function_call":
            made |= {"call_id": made["id"], "name": "", "arguments": ""} | status | _known(item)
        case _:
            made |= _known(item)
    return made


def empty_message(*, call_id: str, position: int) -> JsonObject:
    """A message that says nothing."""
    return response_item({"type": "message", "content": []}, call_id=call_id, position=position)


def response_object(
    output: Sequence[JsonObject], *, response_id: str, model: str, created_at: float, cut_off: bool, usage: JsonObject
) -> JsonObject:
    """A Responses object of `output`. `created_at`: Unix seconds, 0 where nobody knows."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "incomplete" if cut_off else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "model": model,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def usage(input_tokens: int, output_tokens: int) -> JsonObject:
    """Counts of ids read and generated. Nothing is said of caches: a record does not know."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _known(item: Mapping[str, Any]) -> JsonObject:
    """The record's values. A null says nothing."""
    return {key: value for key, value in item.items() if value is not None}


def _contents(content: object) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "output_text", "text": content, "annotations": []}]
    parts = content if isinstance(content, list) else []
    return [
        {"annotations": [], **part} if isinstance(part, Mapping) and part.get("type") == "output_text" else part
        for part in parts
    ]


def _summary(item: Mapping[str, Any]) -> JsonObject:
    """The text that a record has in `content`; a summary that is there wins."""
    if item.get("summary"):
        return {}
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return {"summary": [{"type": "summary_text", "text": text} for text in texts]}
