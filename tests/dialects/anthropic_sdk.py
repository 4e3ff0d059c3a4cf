"""The real Anthropic SDK over bytes at hand: what its clients make of a reply, and what they send back."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent

from gym_capture.calls import ModelReply, ModelRequest, ReplyEvent, TurnBuilder, Usage
from gym_capture.dialects.anthropic import MessagesDialect
from gym_capture.dialects.base import ReplyIdentity

MESSAGES = MessagesDialect()
IDENTITY = ReplyIdentity(call_id="msg_1", model="claude-whatever", created=1_700_000_000)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, "messages": [USER], **fields}).encode()


def parse(**fields: Any) -> ModelRequest:
    return MESSAGES.parse(body(**fields))


def reply_to(events: tuple[ReplyEvent, ...], *, finish_reason: str = "stop", **fields: Any) -> ModelReply:
    builder = TurnBuilder()
    for event in events:
        builder.add(event)
    return ModelReply(turn=builder.turn(), finish_reason=finish_reason, usage=USAGE, **fields)


def encoded(events: tuple[ReplyEvent, ...], reply: ModelReply, **fields: Any) -> bytes:
    """The whole stream, one chunk an event, each with a keep-alive before it."""
    encoder = MESSAGES.stream(parse(stream=True, **fields), IDENTITY)
    deltas = [encoder.keep_alive() + encoder.events((event,), None) for event in events]
    return b"".join([encoder.keep_alive(), encoder.start(7), *deltas, encoder.finish(reply)])


def data_of(stream: bytes) -> list[dict[str, Any]]:
    """The data of each server-sent event, pings left out; every one is named after its type."""
    *frames, rest = stream.decode().split("\n\n")
    assert rest == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] != "ping":
            found.append(value)
    return found


def streamed_message(stream: bytes) -> Message:
    """What the SDK's stream helper puts together."""
    with _client(stream, "text/event-stream") as client, client.messages.stream(**_ARGUMENTS) as messages:
        message: Message = messages.get_final_message()
        return message


def raw_events(stream: bytes) -> list[RawMessageStreamEvent]:
    with _client(stream, "text/event-stream") as client:
        return list(client.messages.create(**_ARGUMENTS, stream=True))


def whole_message(reply: bytes) -> Message:
    with _client(reply, "application/json") as client:
        message: Message = client.messages.create(**_ARGUMENTS)
        return message


def echoed(message: Message) -> dict[str, Any]:
    """The assistant's message as an agent sends it back."""
    return {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}


_ARGUMENTS: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}


def _client(content: bytes, media_type: str) -> Anthropic:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=content, headers={"content-type": media_type})

    transport = httpx2.MockTransport(answer)
    return Anthropic(api_key="unused", max_retries=0, http_client=httpx2.Client(transport=transport, trust_env=False))
