"""Anthropic Messages: how a call is answered, whole or as server-sent events.

Invariant: what a client puts together from the blocks and sends back is the turn that was generated, as far as a
fingerprint tells turns apart. Block indices are contiguous, one block is open at a time, and every delta is of its
open block's type.

What is decided here:

- The arguments of a tool call leave when they are whole, in one delta, since only then it shows whether they are an
  object (`anthropic_input`); clients throw on anything else, and what has left cannot be taken back. Until then the
  open block gets empty deltas, which tell a client that it goes on: official clients swallow pings.
- A call that the limit of tokens cut is streamed as far as it goes, and left out of a whole reply: no input is made up.
- Events that belong to no open block wait until theirs can open (`one_at_a_time`).
- A block is opened for something to see. Whitespace before it waits, as that between two tool calls does.
- `usage.input_tokens` is the whole prompt and nothing is said to be read from a cache. Anthropic counts apart what its
  cache had, since it bills it apart. Here the two always add up to the same, and count_tokens, `message_start` and a
  retry say the same number, whatever the engine's cache holds at the time.
- Thinking is shown to clients that did not ask for it, too: a block that is echoed is one that can be rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import orjson

from gym_capture.calls import (
    ModelReply,
    ModelRequest,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenLogProb,
    ToolCallDelta,
    ToolCallStart,
)
from gym_capture.dialects.anthropic_input import input_json
from gym_capture.dialects.base import ApiError, ReplyIdentity
from gym_capture.dialects.one_at_a_time import OneAtATime
from gym_capture.lineage.echoes import is_cut

OVERLOADED_STATUS: Final = 529
"""Anthropic's status in place of 503."""

_ERROR_TYPES: Final = {
    "invalid_request": "invalid_request_error",
    "context_length": "invalid_request_error",
    "too_large": "request_too_large",
    "timeout": "timeout_error",
    "not_found": "not_found_error",
    "unknown_model": "not_found_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "conflict": "invalid_request_error",
    "overloaded": "overloaded_error",
    "internal": "api_error",
}
_SIGNATURE: Final = "unsigned"
"""Clients want one that is not empty, and send it back; it is never looked at."""

_Prose: TypeAlias = Literal["text", "thinking"]
_PROSE_DELTA: Final[dict[_Prose, bytes]] = {
    "text": b'{"type":"text_delta","text":',
    "thinking": b'{"type":"thinking_delta","thinking":',
}


def whole(request: ModelRequest, identity: ReplyIdentity, reply: ModelReply) -> bytes:
    """The body of a reply that is not streamed."""
    turn = reply.turn
    content: list[dict[str, Any]] = []
    if turn.reasoning.strip():
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": _SIGNATURE})
    if turn.text.strip():
        content.append({"type": "text", "text": turn.text})
    calls = turn.tool_calls
    if calls and reply.finish_reason == "length" and is_cut(calls[-1].arguments):
        calls = calls[:-1]  # its input would have to be an object, and is none yet
    for call in calls:
        arguments = orjson.Fragment(input_json(call.arguments))
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    message = _message(identity, input_tokens=reply.usage.prompt_tokens, output_tokens=reply.usage.completion_tokens)
    return orjson.dumps({**message, "content": content, **_stop(request, reply), "usage": _usage_of(reply)})


def error_body(error: ApiError) -> bytes:
    message = error.message
    if error.overflow is not None:
        # Agents know by these words that it is time to compact the conversation, and read from the numbers by how much.
        overflow = error.overflow
        message = f"prompt is too long: {overflow.counted} tokens > {overflow.longest_prompt} maximum"
    return orjson.dumps({"type": "error", "error": {"type": _ERROR_TYPES[error.kind], "message": message}})


class MessageStream:
    """Deltas are assembled from a head encoded once a block: one JSON string is all that a text delta costs.

    Raises `ValueError` for what `OneAtATime` cannot put in order.
    """

    def __init__(self, request: ModelRequest, identity: ReplyIdentity) -> None:
        self._request = request
        self._identity = identity
        self._in_order = OneAtATime()
        self._index = -1
        self._open: _Prose | Literal["tool_use"] | None = None
        self._delta_head = b""
        self._arguments: list[str] = []
        """Of the open tool call."""
        self._blank: dict[_Prose, list[str]] = {"text": [], "thinking": []}
        """Whitespace that waits for something to see."""

    def start(self, prompt_tokens: int) -> bytes:
        message = _message(self._identity, input_tokens=prompt_tokens, output_tokens=0)
        return _frame(b"message_start", orjson.dumps({"type": "message_start", "message": message}))

    def keep_alive(self) -> bytes:
        return _frame(b"ping", b'{"type":"ping"}')

    def events(self, events: Sequence[ReplyEvent], log_probs: Sequence[TokenLogProb] | None) -> bytes:
        out: list[bytes] = []
        for event in self._in_order.pass_on(events):
            self._show(out, event)
        if events and not out and self._open == "tool_use":
            out.append(self._input_delta(""))
        return b"".join(out)

    def finish(self, reply: ModelReply) -> bytes:
        out: list[bytes] = []
        for event in self._in_order.rest():
            self._show(out, event)
        self._close_block(out, may_be_cut=reply.finish_reason == "length")
        delta = {"type": "message_delta", "delta": _stop(self._request, reply), "usage": _usage_of(reply)}
        out.append(_frame(b"message_delta", orjson.dumps(delta)))
        out.append(_frame(b"message_stop", b'{"type":"message_stop"}'))
        return b"".join(out)

    def error(self, error: ApiError) -> bytes:
        return _frame(b"error", error_body(error))

    def _show(self, out: list[bytes], event: ReplyEvent) -> None:
        match event:
            case TextDelta(text):
                self._prose(out, "text", text)
            case ReasoningDelta(text):
                self._prose(out, "thinking", text)
            case ToolCallStart(_, id, name):
                self._open_block(out, "tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
            case ToolCallDelta(_, arguments):
                self._arguments.append(arguments)

    def _prose(self, out: list[bytes], kind: _Prose, text: str) -> None:
        if self._open != kind:
            self._blank[kind].append(text)
            if not text.strip():
                return
            text = "".join(self._blank[kind])
            self._blank[kind].clear()
            if kind == "text":
                self._open_block(out, kind, {"type": "text", "text": ""})
            else:
                self._open_block(out, kind, {"type": "thinking", "thinking": "", "signature": ""})
        out.append(self._delta(_PROSE_DELTA[kind] + orjson.dumps(text) + b"}"))

    def _open_block(self, out: list[bytes], kind: _Prose | Literal["tool_use"], block: dict[str, Any]) -> None:
        self._close_block(out)
        self._open = kind
        self._index += 1
        self._delta_head = b'{"type":"content_block_delta","index":%d,"delta":' % self._index
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        out.append(_frame(b"content_block_start", orjson.dumps(start)))

    def _close_block(self, out: list[bytes], *, may_be_cut: bool = False) -> None:
        if self._open is None:
            return
        if self._open == "thinking":
            out.append(self._delta(orjson.dumps({"type": "signature_delta", "signature": _SIGNATURE})))
        elif self._open == "tool_use":
            arguments = "".join(self._arguments)
            self._arguments.clear()
            # Of a call that was cut clients get what there is, as from Anthropic.
            out.append(self._input_delta(arguments if may_be_cut and is_cut(arguments) else input_json(arguments)))
        self._open = None
        out.append(_frame(b"content_block_stop", b'{"type":"content_block_stop","index":%d}' % self._index))

    def _input_delta(self, partial_json: str) -> bytes:
        return self._delta(b'{"type":"input_json_delta","partial_json":%b}' % orjson.dumps(partial_json))

    def _delta(self, delta: bytes) -> bytes:
        return _frame(b"content_block_delta", self._delta_head + delta + b"}")


def _frame(event: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event, data)


def _message(identity: ReplyIdentity, *, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A message before anything has been said."""
    return {
        "id": identity.call_id,
        "type": "message",
        "role": "assistant",
        "model": identity.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(input_tokens=input_tokens, output_tokens=output_tokens),
    }


def _usage(*, input_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _usage_of(reply: ModelReply) -> dict[str, Any]:
    counts = _usage(input_tokens=reply.usage.prompt_tokens, output_tokens=reply.usage.completion_tokens)
    return {**counts, "output_tokens_details": {"thinking_tokens": reply.usage.reasoning_tokens}}


def _stop(request: ModelRequest, reply: ModelReply) -> dict[str, str | None]:
    """`stop_reason` and `stop_sequence`. A call that was made is to be run, whatever stopped the text behind it."""
    if reply.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    # An engine also gives the id of a stop token here.
    if reply.stop_reason is not None and reply.stop_reason in request.sampling.get("stop", ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
