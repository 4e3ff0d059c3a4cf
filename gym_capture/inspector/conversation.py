"""A call's conversation, from what is on record of it: the replies as items, and what was sent as the ids of prompts.

Invariant: nothing is made up. Records hold no text of what agents sent, so that is what the prompt's own ids spell, as
the template wrote it. Where its marks of a message are known, it is taken apart at them; they are looked for among ids,
so text that spells a mark takes nothing apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gym_capture.capture.records import IdArray
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.seen import SeenCall, SeenRollout

_OPENING: Final = {"<|im_start|>": "\n", "<|start_header_id|>": "<|end_header_id|>", "<start_of_turn>": "\n"}
"""What begins a message, and what is behind its role."""
_CLOSING: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


def reply_of(call: SeenCall) -> dict[str, Any]:
    """What a call said."""
    said = _message("assistant")
    texts: list[str] = []
    thoughts: list[str] = []
    for item in call.output_items:
        match item.get("type"):
            case "message":
                texts += _texts(item.get("content"))
            case "reasoning":
                thoughts += _texts(item.get("content")) or _texts(item.get("summary"))
            case "function_call":
                said["tool_calls"].append({"name": item.get("name"), "arguments": item.get("arguments")})
    said["text"] = "".join(texts) if texts else None
    said["reasoning"] = "".join(thoughts) if thoughts else None
    return said


def messages_of(seen: SeenRollout, call: SeenCall, vocabulary: Vocabulary | None) -> list[dict[str, Any]]:
    """What the call's prompt was made of, oldest first: `new` is what its parent's call had not."""
    calls = {each.call_id: each for each in seen.calls}
    messages: list[dict[str, Any]] = []
    for call_id in seen.paths.get(call.call_id, (call.call_id,)):
        is_new = call_id == call.call_id
        prompt = seen.new_prompts.get(call_id)
        if prompt is not None:
            messages += [{**each, "new": is_new, "call": call_id} for each in _sent(prompt, vocabulary)]
        if not is_new and call_id in calls:
            messages.append({**reply_of(calls[call_id]), "new": False, "call": call_id})
    return messages


def _sent(prompt: IdArray, vocabulary: Vocabulary | None) -> Iterator[dict[str, Any]]:
    if not prompt.size:
        return
    if vocabulary is None:
        yield {**_message("prompt"), "tokens": int(prompt.size)}
        return
    for role, text, tokens in _taken_apart(prompt, vocabulary):
        yield {**_message(role), "text": text, "tokens": tokens}


def _taken_apart(prompt: IdArray, vocabulary: Vocabulary) -> Iterator[tuple[str, str, int]]:
    """Role, text and number of ids of each message; an opening for the reply itself, with nothing in it, is none."""
    role, behind = "prompt", ""
    parts: list[bytes] = []
    count = 0
    for token_id in prompt.tolist():
        piece = vocabulary.piece(token_id)
        mark = piece.decode("utf-8", "replace") if token_id in vocabulary.special else ""
        if mark in _OPENING or mark in _CLOSING:
            yield from _ended(role, behind, parts, count)
            role, behind, parts, count = "prompt", _OPENING.get(mark, ""), [], 0
        else:
            parts.append(piece)
            count += 1
    yield from _ended(role, behind, parts, count, is_open=True)


def _ended(
    role: str, behind: str, parts: Sequence[bytes], count: int, *, is_open: bool = False
) -> Iterator[tuple[str, str, int]]:
    text = b"".join(parts).decode("utf-8", "replace")
    if behind:
        role, _, text = text.partition(behind)
        role, text = role.strip() or "prompt", text.lstrip("\n")
        if is_open and role in ("assistant", "model") and not text:
            return
    if text.strip():
        yield role, text, count


def _message(role: str) -> dict[str, Any]:
    return {"role": role, "text": None, "reasoning": None, "tool_calls": [], "tool_result_of": None}


def _texts(parts: object) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, Sequence):
        return []
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str)]
