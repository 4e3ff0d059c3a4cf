"""Reply events in an order in which an API can show them that has one item open at a time.

Invariant: what comes out is what went in, in another order at most: a call's arguments follow its start, with nothing
but blank text between them. Calls keep their order, and so do texts and thoughts. The cost is linear.

Flow: events pass as they come. When something else comes while a call is open, its arguments are looked at, once: if
they are an object already, the call is over and the next thing begins. If not, more of them may come. The call then
stays open to the end of the reply, and everything else waits for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import orjson

from gym_capture.calls import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart

_Beginning: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart


class OneAtATime:
    """Puts the events of one reply in order."""

    def __init__(self) -> None:
        self._open: int | None = None
        """The position of the call that is open."""
        self._arguments: list[str] = []
        """Of that call."""
        self._waiting: list[_Beginning] = []
        self._waiting_arguments: dict[int, list[str]] = {}
        """Of the calls that wait, by position."""

    def pass_on(self, events: Iterable[ReplyEvent]) -> Iterator[ReplyEvent]:
        """The events that can be shown by now. Use them up before the next call.

        Raises `ValueError` for arguments of a call that has not begun, and for those that go on after they were an
        object and something else began: a client has run the tool by then, or may have.
        """
        for event in events:
            if isinstance(event, ToolCallDelta):
                yield from self._more(event)
            elif self._waiting or not self._may_begin(event):
                self._waiting.append(event)
                if isinstance(event, ToolCallStart):
                    self._waiting_arguments[event.position] = []
            else:
                if not _is_blank(event):
                    self._open = event.position if isinstance(event, ToolCallStart) else None
                    self._arguments.clear()
                yield event

    def rest(self) -> Iterator[ReplyEvent]:
        """At the end of the reply: what has waited for it."""
        for event in self._waiting:
            yield event
            if isinstance(event, ToolCallStart):
                yield ToolCallDelta(event.position, "".join(self._waiting_arguments[event.position]))

    def _more(self, delta: ToolCallDelta) -> Iterator[ReplyEvent]:
        position, arguments = delta
        if position == self._open:
            self._arguments.append(arguments)
            yield delta
        elif position in self._waiting_arguments:
            self._waiting_arguments[position].append(arguments)
        elif arguments.strip():  # whitespace behind an object means nothing
            raise ValueError(f"arguments of tool call {position}, which has not begun or is over")

    def _may_begin(self, event: _Beginning) -> bool:
        if self._open is None or _is_blank(event):
            return True
        try:
            return isinstance(orjson.loads("".join(self._arguments)), dict)
        except orjson.JSONDecodeError:
            return False


def _is_blank(event: _Beginning) -> bool:
    """Whether it is text that does not end a call: encoders keep it for the text that follows."""
    return isinstance(event, TextDelta) and not event.text.strip()
