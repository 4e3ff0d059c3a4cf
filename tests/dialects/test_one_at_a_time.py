"""Events in an order in which blocks and items can follow each other, and what the SDKs make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import ToolUseBlock
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gym_capture.calls import (
    ModelReply,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    TurnBuilder,
)
from gym_capture.conversation import AssistantTurn
from gym_capture.dialects.base import ReplyIdentity, StreamEncoder
from gym_capture.dialects.one_at_a_time import OneAtATime
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.lineage.fingerprint import Fingerprinter
from tests.dialects import anthropic_sdk
from tests.dialects.anthropic_sdk import MESSAGES, USER, data_of, echoed, encoded, reply_to, streamed_message

RESPONSES = ResponsesDialect()
IDENTITY = ReplyIdentity(call_id="resp_7f", model="m", created=1_700_000_000)
TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}]
SDK_EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)

TEXT_INSIDE: tuple[ReplyEvent, ...] = (
    ToolCallStart(0, "c0", "f"),
    ToolCallDelta(0, '{"a":'),
    TextDelta("By the way, "),
    ReasoningDelta("hm"),
    ToolCallDelta(0, "1}"),
    TextDelta("hi."),
)
ALTERNATING: tuple[ReplyEvent, ...] = (
    TextDelta("Both."),
    ToolCallStart(0, "c0", "f"),
    ToolCallStart(1, "c1", "patch"),
    ToolCallDelta(0, '{"a":'),
    ToolCallDelta(1, '{"input":'),
    ToolCallDelta(0, "1}"),
    ToolCallDelta(1, ' "x"}'),
    ToolCallStart(2, "c2", "f"),
)


def in_order(*pieces: tuple[ReplyEvent, ...]) -> Iterator[list[ReplyEvent]]:
    """What can be shown after each piece, and at the end."""
    order = OneAtATime()
    for piece in pieces:
        yield list(order.pass_on(piece))
    yield list(order.rest())


def turn_of(events: list[ReplyEvent]) -> AssistantTurn:
    builder = TurnBuilder()
    for event in events:
        builder.add(event)
    return builder.turn()


# --- the order -----------------------------------------------------------------------------------------------------


def test_calls_one_after_the_other_are_shown_as_they_come() -> None:
    events: tuple[ReplyEvent, ...] = (
        ReasoningDelta("hm"),
        TextDelta("Both."),
        ToolCallStart(0, "c0", "f"),
        ToolCallDelta(0, '{"a":'),
        TextDelta("\n"),
        ToolCallDelta(0, " 1}"),
        TextDelta("\n"),
        ToolCallStart(1, "c1", "f"),
        ToolCallDelta(1, "{}"),
        TextDelta("Done."),
        ToolCallStart(2, "c2", "f"),
    )
    *shown, rest = in_order(*((event,) for event in events))
    assert shown == [[event] for event in events]
    assert rest == []


@pytest.mark.parametrize(
    ("began", "other"),
    [
        ("", ToolCallStart(1, "c1", "f")),
        ('{"a":', ToolCallStart(1, "c1", "f")),
        ('{"a":', TextDelta("Hi")),
        ('{"a":', ReasoningDelta("hm")),
        ("patch", TextDelta("Hi")),
        ("1", TextDelta("Hi")),
    ],
)
def test_a_call_that_may_go_on_stays_open_and_the_rest_waits(began: str, other: ReplyEvent) -> None:
    start = (ToolCallStart(0, "c0", "f"), ToolCallDelta(0, began))
    more: tuple[ReplyEvent, ...] = (ToolCallDelta(0, "{}"), TextDelta("\n"), ToolCallDelta(0, "x"))
    shown, waits, own, rest = in_order(start, (other,), more)
    assert shown == list(start)
    assert waits == []
    assert own == [more[0], more[2]]
    assert rest[0] == other
    assert rest[-1] == more[1]


def test_calls_that_wait_keep_their_order_and_get_their_arguments() -> None:
    *_, rest = in_order(ALTERNATING)
    assert rest == [
        ToolCallStart(1, "c1", "patch"),
        ToolCallDelta(1, '{"input": "x"}'),
        ToolCallStart(2, "c2", "f"),
        ToolCallDelta(2, ""),
    ]


def test_arguments_after_their_object_and_after_something_else_cannot_be_shown() -> None:
    order = OneAtATime()
    whole: list[ReplyEvent] = [ToolCallStart(0, "c0", "f"), ToolCallDelta(0, "{}"), ToolCallStart(1, "c1", "f")]
    assert list(order.pass_on([*whole, ToolCallDelta(0, "\n")])) == whole
    with pytest.raises(ValueError, match="tool call 0"):
        list(order.pass_on([ToolCallDelta(0, "x")]))
    with pytest.raises(ValueError, match="tool call 2"):
        list(order.pass_on([ToolCallDelta(2, "{}")]))


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[ReplyEvent, ...]:
    """A turn with its texts and the pieces of its calls' arguments anywhere, as long as calls begin in order.

    A call's arguments do not go on once they are an object.
    """
    pieces: list[list[str]] = []
    for _ in range(draw(st.integers(0, 4))):
        arguments = draw(st.sampled_from(["", "{}", '{"a": 1}', '{"input": "a\\nb"}', "patch", "[1]", '{"a', "x}"]))
        cut = draw(st.integers(0, len(arguments)))
        pieces.append([piece for piece in (arguments[:cut], arguments[cut:]) if piece])
    texts = draw(st.lists(st.sampled_from(["", "\n", "Hi ", "there."]), max_size=5))
    events: list[ReplyEvent] = []
    begun = 0
    while begun < len(pieces) or texts or any(pieces):
        choices = [number for number in range(begun) if pieces[number]]
        choices += [-1] * bool(texts) + [-2] * (begun < len(pieces))
        match draw(st.sampled_from(choices)):
            case -1:
                text = texts.pop()
                events.append(TextDelta(text) if draw(st.booleans()) else ReasoningDelta(text))
            case -2:
                events.append(ToolCallStart(begun, f"c{begun}", draw(st.sampled_from(["f", "patch", "invented"]))))
                begun += 1
            case number:
                events.append(ToolCallDelta(number, pieces[number].pop(0)))
    return tuple(events)


@given(interleaved())
@example(TEXT_INSIDE)
@example(ALTERNATING)
def test_it_is_the_same_turn_with_its_calls_one_after_the_other(events: tuple[ReplyEvent, ...]) -> None:
    shown = [event for part in in_order(*((event,) for event in events)) for event in part]
    assert turn_of(shown) == turn_of(list(events))
    last: ReplyEvent | None = None
    for event in shown:
        if isinstance(event, ToolCallDelta):
            assert isinstance(last, ToolCallStart | ToolCallDelta)
            assert last.position == event.position
        if not (isinstance(event, TextDelta) and not event.text.strip()):
            last = event


# --- what clients make of it ---------------------------------------------------------------------------------------


def response_of(events: tuple[ReplyEvent, ...], reply: ModelReply) -> Response:
    """The response that ends a stream, one chunk an event. Every event is one that the SDK knows and fits its item."""
    request = RESPONSES.parse(json.dumps({"model": "m", "input": [USER], "tools": TOOLS}).encode())
    frames = data_of(stream_of(RESPONSES.stream(request, IDENTITY), events, reply))
    added = done = 0
    deltas: dict[int, str] = {}
    for frame in frames[2:-1]:
        SDK_EVENTS.validate_python(frame)
        added += frame["type"] == "response.output_item.added"
        assert frame["output_index"] == done == added - 1
        if frame["type"].endswith(".delta"):
            deltas[done] = deltas.get(done, "") + frame["delta"]
        done += frame["type"] == "response.output_item.done"
    response = Response.model_validate(frames[-1]["response"])
    for position, item in enumerate(response.output):
        if item.type in ("function_call", "custom_tool_call"):
            assert deltas.get(position, "") == (item.arguments if item.type == "function_call" else item.input)
    return response


def stream_of(encoder: StreamEncoder, events: tuple[ReplyEvent, ...], reply: ModelReply) -> bytes:
    return b"".join([encoder.start(7), *(encoder.events((event,), None) for event in events), encoder.finish(reply)])


@given(interleaved())
@example(TEXT_INSIDE)
@example(ALTERNATING)
def test_a_response_says_the_turn_and_its_echo_is_the_turn(events: tuple[ReplyEvent, ...]) -> None:
    reply = reply_to(events)
    output = [item.to_dict() for item in response_of(events, reply).output]
    body: dict[str, Any] = {"model": "m", "input": [USER, *output, USER], "tools": TOOLS}
    conversation = RESPONSES.parse(json.dumps(body).encode()).conversation
    turn = conversation.items[1]
    assert isinstance(turn, AssistantTurn)
    assert [call.id for call in turn.tool_calls] == [call.id for call in reply.turn.tool_calls]
    asked = conversation._replace(items=conversation.items[:1])
    key = Fingerprinter().fingerprint(asked).key_with(reply.turn)
    assert Fingerprinter().fingerprint(conversation).turn_keys == (key,)


@given(interleaved())
@example(TEXT_INSIDE)
@example(ALTERNATING)
def test_a_message_says_the_turn_and_its_echo_is_the_turn(events: tuple[ReplyEvent, ...]) -> None:
    reply = reply_to(events)
    stream = encoded(events, reply)
    blocks = open_blocks = 0
    for event in data_of(stream):
        kind = event["type"]
        blocks += kind == "content_block_start"
        open_blocks += (kind == "content_block_start") - (kind == "content_block_stop")
        assert open_blocks in (0, 1)
        if "index" in event:
            assert event["index"] == blocks - 1
    message = streamed_message(stream)
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert [(call.id, call.name) for call in calls] == [(call.id, call.name) for call in reply.turn.tool_calls]
    asked = anthropic_sdk.parse().conversation
    echo = anthropic_sdk.parse(messages=[USER, echoed(message), USER]).conversation
    key = Fingerprinter().fingerprint(asked).key_with(reply.turn)
    assert Fingerprinter().fingerprint(echo).turn_keys == (key,)


def test_a_message_shows_that_it_goes_on_while_calls_wait() -> None:
    encoder = MESSAGES.stream(anthropic_sdk.parse(), anthropic_sdk.IDENTITY)
    encoder.events((ToolCallStart(0, "c0", "f"),), None)
    for waiting in (ToolCallStart(1, "c1", "f"), ToolCallDelta(1, "{}"), TextDelta("Hi")):
        (sign,) = data_of(encoder.events((waiting,), None))
        assert (sign["index"], sign["delta"]) == (0, {"type": "input_json_delta", "partial_json": ""})
