"""Anthropic Messages: what is answered, as the real SDK reads it, and that it comes back as the turn it was."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock
from hypothesis import example, given
from hypothesis import strategies as st

from gym_capture.calls import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.dialects.anthropic_input import arguments_of, input_json
from gym_capture.dialects.base import ApiError
from gym_capture.errors import Overflow
from gym_capture.lineage.fingerprint import Fingerprinter, canonical_arguments
from tests.dialects.anthropic_sdk import (
    IDENTITY,
    MESSAGES,
    USER,
    data_of,
    echoed,
    encoded,
    parse,
    raw_events,
    reply_to,
    streamed_message,
    whole_message,
)

TEXT: tuple[ReplyEvent, ...] = (TextDelta("It "), TextDelta('"is" \u2028 sunny \U0001f600\n'))
CALLS: tuple[ReplyEvent, ...] = (
    ReasoningDelta("h"),
    ReasoningDelta("m"),
    TextDelta("Calling."),
    ToolCallStart(0, "c0", "get_weather"),
    ToolCallDelta(0, '{"city": '),
    ToolCallDelta(0, '"Rome"}'),
    ToolCallStart(1, "c1", "now"),
    ToolCallDelta(1, "{}"),
)
SILENT_CALL: tuple[ReplyEvent, ...] = (ToolCallStart(0, "c0", "now"),)
REQUEST = parse()


def both(events: tuple[ReplyEvent, ...], **fields: Any) -> tuple[Message, Message]:
    """The reply as the SDK has it: streamed, and whole."""
    reply = reply_to(events, **fields)
    return streamed_message(encoded(events, reply)), whole_message(MESSAGES.reply(REQUEST, IDENTITY, reply))


# --- both ways ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [(), TEXT, CALLS, SILENT_CALL], ids=["nothing", "text", "calls", "only a call"])
def test_the_sdk_reads_the_same_message_streamed_and_whole(events: tuple[ReplyEvent, ...]) -> None:
    streamed, whole = both(events)
    assert streamed.model_dump() == whole.model_dump() | {"content": streamed.model_dump()["content"]}
    assert echoed(streamed) == echoed(whole)
    assert (whole.id, whole.type, whole.role, whole.model) == ("msg_1", "message", "assistant", "claude-whatever")
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


def test_blocks_are_thinking_then_text_then_calls() -> None:
    for message in both(CALLS, finish_reason="tool_calls"):
        thinking, text, weather, now = message.content
        assert isinstance(thinking, ThinkingBlock)
        assert thinking.thinking == "hm"
        assert thinking.signature
        assert isinstance(text, TextBlock)
        assert text.text == "Calling."
        assert isinstance(weather, ToolUseBlock)
        assert (weather.id, weather.name, weather.input) == ("c0", "get_weather", {"city": "Rome"})
        assert isinstance(now, ToolUseBlock)
        assert (now.id, now.name, now.input) == ("c1", "now", {})
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "151645", ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", "END", ("tool_use", None)),
    ],
)
def test_why_it_stopped_is_said_in_their_words(
    finish_reason: str, stop_reason: str | None, told: tuple[str, str | None]
) -> None:
    reply = reply_to(TEXT, finish_reason=finish_reason, stop_reason=stop_reason)
    request = parse(stop_sequences=["STOP", "END"])
    whole = whole_message(MESSAGES.reply(request, IDENTITY, reply))
    streamed = streamed_message(encoded(TEXT, reply, stop_sequences=["STOP", "END"]))
    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence) == told


def test_input_tokens_are_the_whole_prompt_everywhere() -> None:
    for message in both(TEXT):
        assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 3)
        assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
    start = data_of(encoded(TEXT, reply_to(TEXT)))[0]
    assert start["message"]["usage"]["input_tokens"] == 7
    assert json.loads(MESSAGES.counting.reply(7)) == {"input_tokens": 7}


# --- streams -----------------------------------------------------------------------------------------------------


def test_the_events_of_a_stream_in_order() -> None:
    stream = encoded(CALLS, reply_to(CALLS, finish_reason="tool_calls"))
    told = [
        (event["type"], event.get("index"), event.get("delta", event.get("content_block", {})).get("type"))
        for event in data_of(stream)
        if event.get("delta") != {"type": "input_json_delta", "partial_json": ""}
    ]
    assert told == [
        ("message_start", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, "tool_use"),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert [event.model_dump(exclude_none=True)["type"] for event in raw_events(stream)] == [
        event["type"] for event in data_of(stream)
    ]


def test_ST_02_text_makes_text_deltas_and_nothing_of_a_tool() -> None:
    events = (TextDelta("Hi"), TextDelta(" there"))
    stream = encoded(events, reply_to(events))
    deltas = [event["delta"] for event in data_of(stream) if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "text_delta", "text": "Hi"}, {"type": "text_delta", "text": " there"}]
    assert b"tool_use" not in stream


def test_ST_04_whitespace_between_calls_never_lands_in_a_call() -> None:
    events = (
        TextDelta("\n"),
        ToolCallStart(0, "a", "f"),
        ToolCallDelta(0, "{}"),
        TextDelta("\n"),
        ToolCallStart(1, "b", "g"),
        ToolCallDelta(1, '{"x":'),
        ToolCallDelta(1, "1}"),
        TextDelta("\n"),
    )
    stream = encoded(events, reply_to(events, finish_reason="tool_calls"))
    assert_well_formed(stream)
    message = streamed_message(stream)
    assert [(block.type, block.id, block.input) for block in message.content if block.type == "tool_use"] == [
        ("tool_use", "a", {}),
        ("tool_use", "b", {"x": 1}),
    ]
    assert len(message.content) == 2
    assert message.stop_reason == "tool_use"


def test_text_after_a_call_is_a_block_of_its_own_with_the_whitespace_that_waited() -> None:
    events = (TextDelta("one"), *SILENT_CALL, TextDelta("\n"), TextDelta("two"))
    assert [
        block.text for block in streamed_message(encoded(events, reply_to(events))).content if block.type == "text"
    ] == [
        "one",
        "\ntwo",
    ]


def test_ST_08_an_error_ends_a_stream_without_a_stop() -> None:
    encoder = MESSAGES.stream(REQUEST, IDENTITY)
    broken = ApiError(status=500, kind="internal", message="the engine stopped without saying why")
    stream = encoder.start(7) + encoder.events((TextDelta("par"),), None) + encoder.error(broken)
    assert data_of(stream)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine stopped without saying why"},
    }
    assert b"message_stop" not in stream
    with pytest.raises(anthropic.APIStatusError, match="the engine stopped"):
        streamed_message(stream)


def test_ST_11_a_call_that_takes_long_shows_that_it_goes_on() -> None:
    encoder = MESSAGES.stream(REQUEST, IDENTITY)
    encoder.events((ToolCallStart(0, "c0", "write"),), None)
    (sign,) = data_of(encoder.events((ToolCallDelta(0, '{"text": "'), ToolCallDelta(0, "long")), None))
    assert sign["delta"] == {"type": "input_json_delta", "partial_json": ""}
    assert encoder.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_arguments_of_a_call_that_has_not_begun_are_an_error() -> None:
    encoder = MESSAGES.stream(REQUEST, IDENTITY)
    encoder.events((ToolCallStart(0, "a", "f"),), None)
    with pytest.raises(ValueError, match="arguments of tool call 1"):
        encoder.events((ToolCallDelta(1, "{}"),), None)


def assert_well_formed(stream: bytes) -> None:
    """Blocks one after the other, numbered from 0, with deltas that fit them."""
    fits = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}
    start, *middle, delta, stop = data_of(stream)
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    kind, blocks = None, 0
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert (kind, event["index"]) == (None, blocks)
                kind, blocks = event["content_block"]["type"], blocks + 1
            case "content_block_delta":
                assert event["index"] == blocks - 1
                assert event["delta"]["type"] in fits[kind or ""]
            case "content_block_stop":
                assert (kind is not None, event["index"]) == (True, blocks - 1)
                kind = None
            case other:
                raise AssertionError(other)
    assert kind is None


# --- the way back ------------------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from('a \n"\\{}é\U0001f600'), max_size=6)
ARGUMENTS = st.one_of(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("INVALID_JSON"), inner, max_size=3),
        max_leaves=6,
    ).map(json.dumps),
    TEXTS,
    st.text(st.sampled_from('{}[]":,0.e-19 \\ud'), max_size=12),
)


@st.composite
def generations(draw: st.DrawFn) -> tuple[ReplyEvent, ...]:
    """Events in an order in which parsers give them: calls one after the other, prose anywhere between."""
    events: list[ReplyEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=8)):
        if kind == "text":
            events.append(TextDelta(draw(TEXTS)))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(TEXTS)))
        else:
            events.append(ToolCallStart(calls, f"c{calls}", draw(st.sampled_from(["f", "g"]))))
            arguments = draw(ARGUMENTS)
            cut = draw(st.integers(0, len(arguments)))
            events += [ToolCallDelta(calls, part) for part in (arguments[:cut], arguments[cut:]) if part]
            calls += 1
    return tuple(events)


@given(generations())
@example(
    (TextDelta("one"), *SILENT_CALL, TextDelta("\n"), ReasoningDelta("\n"), TextDelta("two"), ReasoningDelta("hm"))
)
def test_what_the_sdk_sends_back_is_the_turn_that_was_generated(events: tuple[ReplyEvent, ...]) -> None:
    reply = reply_to(events)
    stream = encoded(events, reply)
    assert_well_formed(stream)
    fingerprint = Fingerprinter().fingerprint(REQUEST.conversation)
    for message in (streamed_message(stream), whole_message(MESSAGES.reply(REQUEST, IDENTITY, reply))):
        echo = parse(messages=[USER, echoed(message), USER])
        assert Fingerprinter().fingerprint(echo.conversation).turn_keys == (fingerprint.key_with(reply.turn),)
        assert all(block.text.strip() for block in message.content if block.type == "text")


@given(ARGUMENTS)
@example('{"INVALID_JSON": "{}"}')
@example('{"INVALID_JSON": "{\\"INVALID_JSON\\": \\"x\\"}"}')
@example('{"a": 1, "a": 2}')
@example('{"city": "Par')
@example("[1, 2]")
@example('{"a": "\\ud83d"}')
@example('{"a": NaN}')
@example('{"a": 1e999}')
@example("\u00a0")
@example(" null ")
@example("[" * 100_000)
@example('{"a":' * 500 + "1" + "}" * 500)
def test_arguments_come_back_as_they_were(arguments: str) -> None:
    sent = json.loads(input_json(arguments))
    assert isinstance(sent, dict)
    assert canonical_arguments(arguments_of(sent, "input")) == canonical_arguments(arguments)


@pytest.mark.parametrize("cut", ["", "{", '{"city', '{"city": "Par', '{"city": "Paris", "days": [1, '])
def test_ST_13_of_a_call_that_was_cut_nothing_is_made_up(cut: str) -> None:
    events = (ToolCallStart(0, "c0", "get_weather"), *((ToolCallDelta(0, cut),) if cut else ()))
    streamed, whole = both(events, finish_reason="length")
    assert (whole.content, whole.stop_reason, streamed.stop_reason) == ([], "max_tokens", "max_tokens")
    told = data_of(encoded(events, reply_to(events, finish_reason="length")))
    assert "".join(event["delta"]["partial_json"] for event in told if event["type"] == "content_block_delta") == cut


@pytest.mark.parametrize("broken", ["city=Paris", '["Paris"]', '{"city": "Paris"}}'])
def test_arguments_that_are_no_object_reach_the_tool_marked_as_such(broken: str) -> None:
    events = (ToolCallStart(0, "c0", "get_weather"), ToolCallDelta(0, broken))
    for message in both(events, finish_reason="length"):
        (call,) = message.content
        assert isinstance(call, ToolUseBlock)
        assert call.input == {"INVALID_JSON": broken}
        assert message.stop_reason == "max_tokens"


def test_an_object_leaves_spelled_as_the_policy_spelled_it() -> None:
    spelled = '{ "b": 1.0, "a": 12345678901234567890123 }'
    reply = reply_to((ToolCallStart(0, "c0", "f"), ToolCallDelta(0, spelled)))
    assert f'"input":{spelled}'.encode() in MESSAGES.reply(REQUEST, IDENTITY, reply)


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "told", "told_status"),
    [
        ("invalid_request", 400, "invalid_request_error", 400),
        ("context_length", 400, "invalid_request_error", 400),
        ("too_large", 413, "request_too_large", 413),
        ("not_found", 404, "not_found_error", 404),
        ("unknown_model", 404, "not_found_error", 404),
        ("authentication", 401, "authentication_error", 401),
        ("permission", 403, "permission_error", 403),
        ("conflict", 409, "invalid_request_error", 409),
        ("overloaded", 503, "overloaded_error", 529),
        ("internal", 500, "api_error", 500),
    ],
)
def test_errors_have_their_shape_and_status(kind: str, status: int, told: str, told_status: int) -> None:
    error = ApiError(status=status, kind=kind, message="m", param="p")
    shape = json.loads(MESSAGES.error(error))
    assert (shape["type"], shape["error"]["type"]) == ("error", told)
    assert MESSAGES.status(error) == told_status


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_agents_look_for() -> None:
    for overflow, said in (
        (Overflow(4096, 4096), "prompt is too long: 4096 tokens > 4095 maximum"),
        (Overflow(9000, 4096, is_at_least=True), "prompt is too long: at least 9000 tokens > 4095 maximum"),
    ):
        error = ApiError(status=400, kind="context_length", message="m", overflow=overflow)
        assert json.loads(MESSAGES.error(error))["error"]["message"] == said
        # How an agent finds out by how much it has to shorten the conversation.
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", said)
        assert found is not None
        assert int(found[1]) - int(found[2]) == overflow.tokens - 4095
