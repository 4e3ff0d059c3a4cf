"""A response as server-sent events.

Invariant: sequence numbers count from 0 without holes; items come one after the other, each with everything between its
`added` and its `done`; what the done events and the last response say is what the deltas said. Cost is linear in text.

Flow: `start` -> events are put in an order in which items can follow each other (`one_at_a_time`) -> an item opens with
the first event that belongs to it, and closes when another opens or at the end.
Whitespace around calls, which models write and nobody wants as a message, waits for text that it stands before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

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
from gym_capture.conversation import ToolCall
from gym_capture.dialects.base import ApiError, ReplyIdentity
from gym_capture.dialects.chat import log_prob, message_of
from gym_capture.dialects.one_at_a_time import OneAtATime
from gym_capture.dialects.responses_output import (
    ItemWriter,
    JsonObject,
    ResponseObject,
    Status,
    error_param,
    final_status,
    reasoning_part,
    text_part,
)

_ERROR_CODES: Final = {
    "context_length": "context_length_exceeded",
    "invalid_request": "invalid_prompt",
    "too_large": "invalid_prompt",
}
"""By kind; any other kind is a `server_error`, which clients try again."""

Event: TypeAlias = tuple[str, dict[str, Any]]
"""The type of an event, and its members."""


class ResponsesStream:
    """Encodes one response. Raises `ValueError` for what `OneAtATime` cannot put in order."""

    def __init__(self, request: ModelRequest, identity: ReplyIdentity) -> None:
        self._response = ResponseObject(request, identity)
        self._items = ItemWriter(request, identity)
        self._in_order = OneAtATime()
        self._output: list[JsonObject] = []
        self._open: _OpenItem | None = None
        self._held: list[str] = []
        self._log_probs: list[TokenLogProb] = []
        """Those that no delta has shown yet."""
        self._sequence = 0

    def start(self, prompt_tokens: int) -> bytes:
        response = self._response.encode("in_progress")
        return self._life("response.created", response) + self._life("response.in_progress", response)

    def keep_alive(self) -> bytes:
        """An event where one may stand: clients that give up on a silent stream do not hear comments."""
        if self._sequence == 0:
            return b": keep-alive\n\n"
        return self._life("response.in_progress", self._response.encode("in_progress"))

    def events(self, events: Sequence[ReplyEvent], log_probs: Sequence[TokenLogProb] | None) -> bytes:
        if log_probs:
            self._log_probs.extend(log_probs)
        frames: list[bytes] = []
        for event in self._in_order.pass_on(events):
            self._show(event, frames)
        if self._log_probs and isinstance(self._open, _OpenReasoning | _OpenCall) and not self._held:
            self._log_probs.clear()  # of what is not text
        return b"".join(frames)

    def finish(self, reply: ModelReply) -> bytes:
        status = final_status(reply)
        frames: list[bytes] = []
        for event in self._in_order.rest():
            self._show(event, frames)
        if self._open is None:
            self._message(frames)
        if isinstance(self._open, _OpenMessage):
            self._open.log_probs.extend(self._log_probs)
        self._close(status, frames)
        response = self._response.encode(status, self._output, usage=reply.usage)
        frames.append(self._life(f"response.{status}", response))
        return b"".join(frames)

    def error(self, error: ApiError) -> bytes:
        code, message = _ERROR_CODES.get(error.kind, "server_error"), message_of(error)
        if self._sequence == 0:
            return self._event("error", {"code": code, "message": message, "param": error_param(error)})
        response = self._response.encode("failed", self._output, error={"code": code, "message": message})
        return self._life("response.failed", response)

    # --- items ---

    def _show(self, event: ReplyEvent, frames: list[bytes]) -> None:
        match event:
            case TextDelta(text):
                self._text(text, frames)
            case ReasoningDelta(text) if text:
                if not isinstance(self._open, _OpenReasoning):
                    self._begin(partial(_OpenReasoning, self._items), frames)
                self._delta(text, frames)
            case ToolCallStart() as start:
                self._begin(partial(_OpenCall, self._items, start=start), frames)
            case ToolCallDelta(_, arguments):
                self._delta(arguments, frames)

    def _text(self, text: str, frames: list[bytes]) -> None:
        if isinstance(self._open, _OpenMessage):
            self._delta(text, frames)
        else:
            self._held.append(text)
            if text.strip():
                self._message(frames)

    def _message(self, frames: list[bytes]) -> None:
        """Begins a message with the text that was held back for it."""
        self._begin(partial(_OpenMessage, self._items), frames)
        self._delta("".join(self._held), frames)
        self._held.clear()

    def _begin(self, item_at: Callable[[int], _OpenItem], frames: list[bytes]) -> None:
        self._close("completed", frames)
        self._open = item_at(len(self._output))
        frames.extend(self._event(*event) for event in self._open.opening())

    def _close(self, status: Status, frames: list[bytes]) -> None:
        if self._open is None:
            return
        item = self._open.finished(status)
        frames.extend(self._event(*event) for event in self._open.closing(item))
        self._output.append(item)
        self._open = None

    def _delta(self, text: str, frames: list[bytes]) -> None:
        item = self._open
        assert item is not None
        if not text:
            return
        item.parts.append(text)
        shown = item.delta_tail
        if self._log_probs and isinstance(item, _OpenMessage):
            shown = b',"logprobs":' + orjson.dumps([log_prob(p) for p in self._log_probs])
            item.log_probs.extend(self._log_probs)
            self._log_probs.clear()
        if item.delta_head is not None:
            frames.append(
                b'%b%b%b,"sequence_number":%d}\n\n' % (item.delta_head, orjson.dumps(text), shown, self._sequence)
            )
            self._sequence += 1

    # --- frames ---

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        return self._frame(kind, orjson.dumps(members)[1:])

    def _life(self, kind: str, response: bytes) -> bytes:
        return self._frame(kind, b'"response":%b}' % response)

    def _frame(self, kind: str, members: bytes) -> bytes:
        name = kind.encode()
        frame = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (name, name, self._sequence, members)
        self._sequence += 1
        return frame


# --- items that have begun -----------------------------------------------------------------------------------------


class _OpenItem(ABC):
    """An item between its `added` and its `done`."""

    delta_tail = b""
    """Members of a delta after its text."""

    def __init__(self, position: int, added: JsonObject, *, delta: str | None, **place: int) -> None:
        self.parts: list[str] = []
        self._position = position
        self._added = added
        self._place = {"item_id": added["id"], "output_index": position, **place}
        self.delta_head: bytes | None = None
        """The frame of a delta, up to its text. None: the text is not streamed."""
        if delta is not None:
            members = orjson.dumps({"type": delta, **self._place})[:-1]
            self.delta_head = b'event: %b\ndata: %b,"delta":' % (delta.encode(), members)

    def opening(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._position, "item": self._added}

    def closing(self, item: JsonObject) -> Iterator[Event]:
        yield "response.output_item.done", {"output_index": self._position, "item": item}

    @abstractmethod
    def finished(self, status: Status) -> JsonObject:
        """The item with all its text."""


class _OpenContent(_OpenItem):
    """An item whose text is its one content part."""

    def __init__(self, position: int, added: JsonObject, *, kind: str, empty_part: JsonObject) -> None:
        super().__init__(position, added, delta=f"response.{kind}.delta", content_index=0)
        self._kind = kind
        self._empty_part = empty_part

    def opening(self) -> Iterator[Event]:
        yield from super().opening()
        yield "response.content_part.added", {**self._place, "part": self._empty_part}

    def closing(self, item: JsonObject) -> Iterator[Event]:
        (part,) = item["content"]
        said = {key: part[key] for key in ("text", "logprobs") if key in part}
        yield f"response.{self._kind}.done", {**self._place, **said}
        yield "response.content_part.done", {**self._place, "part": part}
        yield from super().closing(item)


class _OpenReasoning(_OpenContent):
    def __init__(self, items: ItemWriter, position: int) -> None:
        added = items.reasoning(position, "", status="in_progress")
        super().__init__(position, added, kind="reasoning_text", empty_part=reasoning_part(""))
        self._items = items

    def finished(self, status: Status) -> JsonObject:
        return self._items.reasoning(self._position, "".join(self.parts), status=status)


class _OpenMessage(_OpenContent):
    delta_tail = b',"logprobs":[]'

    def __init__(self, items: ItemWriter, position: int) -> None:
        added = items.message(position, "", status="in_progress")
        super().__init__(position, added, kind="output_text", empty_part=text_part("", ()))
        self.log_probs: list[TokenLogProb] = []
        self._items = items

    def finished(self, status: Status) -> JsonObject:
        return self._items.message(self._position, "".join(self.parts), status=status, log_probs=self.log_probs)


class _OpenCall(_OpenItem):
    """A call. What a custom tool is given is known only when its arguments are whole, so it comes in one delta."""

    def __init__(self, items: ItemWriter, position: int, start: ToolCallStart) -> None:
        self._call = ToolCall(start.id, start.name, "")
        self._is_custom = items.client_tool(start.name).is_custom
        added = items.call(position, self._call, status="in_progress")
        super().__init__(position, added, delta=None if self._is_custom else "response.function_call_arguments.delta")
        self._items = items

    def closing(self, item: JsonObject) -> Iterator[Event]:
        if self._is_custom:
            if item["input"]:
                yield "response.custom_tool_call_input.delta", {**self._place, "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**self._place, "input": item["input"]}
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._place, **said}
        yield from super().closing(item)

    def finished(self, status: Status) -> JsonObject:
        call = self._call._replace(arguments="".join(self.parts))
        return self._items.call(self._position, call, status=status)
