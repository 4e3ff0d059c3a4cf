"""What an agent knows of each API: how it asks, echoes what it got, and tells that a reply is whole.

Invariant: a reply is whole by the rules of its API - its body was read to the end, or the event that ends its stream
has come. Everything else raises.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final, NamedTuple


class NotWholeError(Exception):
    """A stream that ended, or said that it failed, before its reply was whole."""


class Exchange(NamedTuple):
    """A turn that is over: what was asked, and what the agent got."""

    asked: str
    text: str


class Api(ABC):
    """One of the APIs that the graph serves."""

    path: str
    ends: str
    """The event that ends a stream."""

    @abstractmethod
    def body(self, history: Sequence[Exchange], asked: str) -> dict[str, Any]:
        """The request that goes on from `history`."""

    @abstractmethod
    def text(self, reply: dict[str, Any]) -> str:
        """Of a reply in one piece."""

    @abstractmethod
    def delta(self, event: dict[str, Any]) -> str:
        """The text that an event of a stream adds."""

    async def deltas(self, lines: AsyncIterator[str]) -> AsyncGenerator[str]:
        """The text of a stream, piece by piece; returns when its end has come."""
        async for line in lines:
            data = line.removeprefix("data: ")
            if data == line:
                continue
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event or event.get("type") in ("error", "response.failed", "response.incomplete"):
                raise NotWholeError(f"the stream says: {data[:200]}")
            if delta := self.delta(event):
                yield delta
            if event.get("type") == self.ends:
                return
        raise NotWholeError("the stream just ended")


class Chat(Api):
    path = "chat/completions"
    ends = "[DONE]"

    def body(self, history: Sequence[Exchange], asked: str) -> dict[str, Any]:
        return {"model": "policy", "messages": _messages(history, asked)}

    def text(self, reply: dict[str, Any]) -> str:
        return str(reply["choices"][0]["message"]["content"])

    def delta(self, event: dict[str, Any]) -> str:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


class Responses(Api):
    path = "responses"
    ends = "response.completed"

    def body(self, history: Sequence[Exchange], asked: str) -> dict[str, Any]:
        return {"model": "policy", "input": _messages(history, asked)}

    def text(self, reply: dict[str, Any]) -> str:
        return "".join(part["text"] for item in reply["output"] for part in item["content"])

    def delta(self, event: dict[str, Any]) -> str:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


class Messages(Api):
    path = "messages"
    ends = "message_stop"

    def body(self, history: Sequence[Exchange], asked: str) -> dict[str, Any]:
        return {"model": "policy", "max_tokens": 4096, "messages": _messages(history, asked)}

    def text(self, reply: dict[str, Any]) -> str:
        return "".join(block["text"] for block in reply["content"])

    def delta(self, event: dict[str, Any]) -> str:
        return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


class Completions(Api):
    """Has no conversation: nothing goes on from anything."""

    path = "completions"
    ends = "[DONE]"

    def body(self, history: Sequence[Exchange], asked: str) -> dict[str, Any]:
        return {"model": "policy", "prompt": asked}

    def text(self, reply: dict[str, Any]) -> str:
        return str(reply["choices"][0]["text"])

    def delta(self, event: dict[str, Any]) -> str:
        return "".join(choice["text"] for choice in event["choices"])


APIS: Final[Sequence[Api]] = (Chat(), Responses(), Messages())


def _messages(history: Sequence[Exchange], asked: str) -> list[dict[str, str]]:
    messages = []
    for exchange in history:
        messages.append({"role": "user", "content": exchange.asked})
        messages.append({"role": "assistant", "content": exchange.text})
    return [*messages, {"role": "user", "content": asked}]
