"""OpenAI Responses: the real SDK's types read what is answered, and what clients echo of it is the same turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gym_capture.calls import (
    ModelReply,
    ModelRequest,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenLogProb,
    ToolCallDelta,
    ToolCallStart,
    TurnBuilder,
    Usage,
)
from gym_capture.conversation import AssistantTurn
from gym_capture.dialects.base import ApiError, ReplyIdentity
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.dialects.responses_output import sealed
from gym_capture.dialects.responses_tools import custom_arguments
from gym_capture.lineage.fingerprint import Fingerprinter

RESPONSES = ResponsesDialect()
IDENTITY = ReplyIdentity(call_id="resp_7f", model="gpt-whatever", created=1_700_000_000)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
    {"type": "custom", "name": "apply_patch"},
    {"type": "web_search"},
]
QUESTION = {"role": "user", "content": "q"}

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)

TEXT: tuple[ReplyEvent, ...] = (TextDelta("It "), TextDelta('"is" \u2028 sunny \U0001f600\n'))
CALLS: tuple[ReplyEvent, ...] = (
    ReasoningDelta("h"),
    ReasoningDelta("m"),
    TextDelta("Calling."),
    ToolCallStart(0, "c0", "get_weather"),
    ToolCallDelta(0, '{"city": '),
    ToolCallDelta(0, '"Rome"}'),
    TextDelta("\n"),
    ToolCallStart(1, "c1", "agents__spawn"),
    ToolCallDelta(1, "{}"),
    ToolCallStart(2, "c2", "apply_patch"),
    ToolCallDelta(2, '{"input": "a\\n'),
    ToolCallDelta(2, 'b"}'),
    ToolCallStart(3, "c3", "invented"),
)


def parse(**fields: Any) -> ModelRequest:
    return RESPONSES.parse(json.dumps({"model": "m", "input": [QUESTION], "tools": TOOLS, **fields}).encode())


def reply_to(events: Sequence[ReplyEvent], *, finish_reason: str = "stop", **fields: Any) -> ModelReply:
    builder = TurnBuilder()
    for event in events:
        builder.add(event)
    return ModelReply(turn=builder.turn(), finish_reason=finish_reason, usage=USAGE, **fields)


def whole(request: ModelRequest, reply: ModelReply) -> dict[str, Any]:
    """A reply as its client gets it, read by the SDK's own type on the way."""
    body = RESPONSES.reply(request, IDENTITY, reply)
    Response.model_validate_json(body)
    return cast("dict[str, Any]", json.loads(body))


def frames(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream: each read by the SDK's own types, numbered without holes."""
    *blocks, rest = stream.decode().split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(request: ModelRequest, events: Sequence[ReplyEvent], reply: ModelReply) -> list[dict[str, Any]]:
    encoder = RESPONSES.stream(request, IDENTITY)
    parts = [encoder.start(3), *(encoder.events((event,), None) for event in events), encoder.finish(reply)]
    return frames(b"".join(parts))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# --- whole replies -------------------------------------------------------------------------------------------------


def test_a_response_says_what_was_asked_and_what_came_of_it() -> None:
    asked = {
        "instructions": "Be brief.",
        "metadata": {"task": "7"},
        "max_output_tokens": 9,
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "reasoning": {"effort": "high"},
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "store": True,
    }
    reply = whole(parse(**asked), reply_to(TEXT))
    (item,) = reply.pop("output")
    assert item["content"][0]["text"] == "".join(event.text for event in TEXT if isinstance(event, TextDelta))
    assert reply == {
        **asked,
        "id": "resp_7f",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": "gpt-whatever",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "tools": TOOLS,
        "reasoning": {"effort": "high", "summary": None},
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "truncation": "disabled",
        "top_p": None,
        "top_logprobs": 0,
        "max_tool_calls": None,
        "safety_identifier": None,
        "user": None,
    }


def test_items_stand_in_order_and_calls_go_by_their_clients_names() -> None:
    items = whole(parse(), reply_to(CALLS))["output"]
    assert [item["id"] for item in items] == ["rs_7f_0", "msg_7f_1", "fc_7f_2", "fc_7f_3", "ctc_7f_4", "fc_7f_5"]
    assert {item["status"] for item in items} == {"completed"}
    reasoning, message, *calls = items
    assert (reasoning["summary"], reasoning["content"]) == ([], [{"type": "reasoning_text", "text": "hm"}])
    assert "encrypted_content" not in reasoning
    assert message["content"] == [{"type": "output_text", "text": "Calling.\n", "annotations": [], "logprobs": []}]
    assert [(call["type"], call["call_id"], call.get("namespace"), call["name"]) for call in calls] == [
        ("function_call", "c0", None, "get_weather"),
        ("function_call", "c1", "agents", "spawn"),
        ("custom_tool_call", "c2", None, "apply_patch"),
        ("function_call", "c3", None, "invented"),
    ]
    assert [call.get("arguments", call.get("input")) for call in calls] == ['{"city": "Rome"}', "{}", "a\nb", ""]


@pytest.mark.parametrize(
    ("events", "types"),
    [
        ((), ["message"]),
        ((TextDelta("\n"),), ["message"]),
        ((ReasoningDelta("R"),), ["reasoning"]),
        ((ReasoningDelta("R"), TextDelta("\n\n")), ["reasoning"]),
        ((TextDelta("\n"), ToolCallStart(0, "c", "f")), ["function_call"]),
        ((ReasoningDelta(""), TextDelta("x")), ["message"]),
        ((ReasoningDelta("R"), TextDelta("x")), ["reasoning", "message"]),
    ],
    ids=[
        "nothing",
        "whitespace",
        "only thought",
        "thought and whitespace",
        "whitespace before a call",
        "no thought",
        "thought",
    ],
)
def test_there_is_an_item_for_what_was_said_and_for_nothing_else(
    events: tuple[ReplyEvent, ...], types: list[str]
) -> None:
    reply = reply_to(events)
    assert [item["type"] for item in whole(parse(), reply)["output"]] == types
    assert [item["type"] for item in streamed(parse(), events, reply)[-1]["response"]["output"]] == types


@pytest.mark.parametrize(
    "events",
    [(ReasoningDelta("R"),), (ReasoningDelta("R"), TextDelta("x")), TEXT, CALLS, CALLS[:-3], ()],
    ids=["thought", "thought, text", "text", "calls", "a custom call", "nothing"],
)
def test_cut_off_is_said_of_the_response_and_of_its_last_item(events: tuple[ReplyEvent, ...]) -> None:
    reply = reply_to(events, finish_reason="length")
    for response in (whole(parse(), reply), streamed(parse(), events, reply)[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        *before, last = [item["status"] for item in response["output"]]
        assert last == "incomplete"
        assert set(before) <= {"completed"}
    assert streamed(parse(), events, reply)[-1]["type"] == "response.incomplete"


def test_RS_03_there_is_reasoning_only_if_there_was_and_it_is_sealed_only_if_asked() -> None:
    request = parse(include=["reasoning.encrypted_content"], store=False)
    assert [item["type"] for item in whole(request, reply_to(TEXT))["output"]] == ["message"]
    for response in (whole(request, reply_to(CALLS)), streamed(request, CALLS, reply_to(CALLS))[-1]["response"]):
        assert response["output"][0]["encrypted_content"] == sealed("hm")


# --- streams -------------------------------------------------------------------------------------------------------


def test_RS_07_the_events_of_a_text() -> None:
    events = streamed(parse(), TEXT, reply_to(TEXT))
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert {(event["output_index"], event["content_index"], event["item_id"]) for event in events[3:8]} == {
        (0, 0, "msg_7f_0")
    }
    for event in (*events[:2], events[-1]):
        response = event["response"]
        assert (response["id"], response["object"], response["model"]) == ("resp_7f", "response", "gpt-whatever")
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress", "in_progress"]
    assert [event["response"]["output"] for event in events[:2]] == [[], []]
    assert events[-1]["response"] == whole(parse(), reply_to(TEXT))
    said = events[-1]["response"]["output"][0]["content"][0]["text"]
    assert said == "".join(event["delta"] for event in events[4:6])
    assert (events[6]["text"], events[7]["part"]["text"]) == (said, said)


def test_RS_07_the_events_of_reasoning_and_calls() -> None:
    events = streamed(parse(), CALLS, reply_to(CALLS))
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds(events[2:-1]) == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", *arguments, "output_item.done"),
        *("output_item.added", *arguments, "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]["output"]
    assert done == final
    for kind in ("added", "done"):
        places = [event["output_index"] for event in events if event["type"] == f"response.output_item.{kind}"]
        assert places == list(range(len(final)))
    within = [event for event in events if "item_id" in event]
    assert {(event["item_id"], event["output_index"]) for event in within} == {
        (item["id"], place) for place, item in enumerate(final)
    }
    said = {"reasoning_text.done": "text", "function_call_arguments.done": "arguments"}
    whole_texts = [event[said[kind]] for kind, event in zip(kinds(events), events, strict=True) if kind in said]
    assert whole_texts == ["hm", '{"city": "Rome"}', "{}", ""]
    assert {event["content_index"] for event in within if "content_index" in event} == {0}
    same = ("id", "type", "call_id", "name", "namespace")
    assert [[item.get(key) for key in same] for item in added] == [[item.get(key) for key in same] for item in done]
    # A whole reply differs in the whitespace between calls, which is not worth a message.
    assert [item["type"] for item in final] == [item["type"] for item in whole(parse(), reply_to(CALLS))["output"]]


def test_text_after_a_call_is_another_message() -> None:
    said = (TextDelta("a "), ToolCallStart(0, "c", "f"), TextDelta("\n"), TextDelta("\nb"), TextDelta(" \n"))
    output = streamed(parse(), said, reply_to(said))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in (output[0], output[2])] == ["a ", "\n\nb \n"]


@pytest.mark.parametrize("began", [(), (0,)], ids=["none open", "another open"])
def test_arguments_of_a_call_that_has_not_begun_are_an_error(began: tuple[int, ...]) -> None:
    encoder = RESPONSES.stream(parse(), IDENTITY)
    encoder.events([ToolCallStart(number, "c", "f") for number in began], None)
    with pytest.raises(ValueError, match="tool call 1"):
        encoder.events([ToolCallDelta(1, "{}")], None)


def test_ST_11_keep_alives_fit_anywhere() -> None:
    encoder = RESPONSES.stream(parse(), IDENTITY)
    assert encoder.keep_alive() == b": keep-alive\n\n"
    parts = [encoder.start(3), encoder.keep_alive()]
    for event in CALLS:
        parts += [encoder.events([event], None), encoder.keep_alive()]
    events = frames(b"".join([*parts, encoder.keep_alive(), encoder.finish(reply_to(CALLS))]))
    assert events[-1]["response"]["output"] == streamed(parse(), CALLS, reply_to(CALLS))[-1]["response"]["output"]
    assert kinds(events).count("in_progress") == len(CALLS) + 3


# --- what clients make of it -----------------------------------------------------------------------------------------

SAID = st.one_of(st.sampled_from(["", " ", "\n", "ab", "a\n", "\n\n"]), st.text(max_size=5))
ARGUMENTS = st.one_of(st.sampled_from(["", "{}", '{"a": 1.0}', '{"a": "Par']), st.text(max_size=8))


@st.composite
def turns(draw: st.DrawFn) -> tuple[ReplyEvent, ...]:
    """The events of a turn: calls begin in order, and get their arguments while they are the last."""
    events: list[ReplyEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call", "custom"]), max_size=8)):
        if kind == "text":
            events.append(TextDelta(draw(SAID)))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(SAID)))
        else:
            name = "apply_patch" if kind == "custom" else draw(st.sampled_from(["get_weather", "agents__spawn", "x"]))
            arguments = draw(SAID.map(custom_arguments) | ARGUMENTS) if kind == "custom" else draw(ARGUMENTS)
            cut = draw(st.integers(0, len(arguments)))
            events.append(ToolCallStart(calls, f"c{calls}", name))
            events += [ToolCallDelta(calls, arguments[:cut]), ToolCallDelta(calls, arguments[cut:])]
            calls += 1
    return tuple(events)


@given(turns())
def test_what_a_client_echoes_is_the_turn_that_was_recorded(events: tuple[ReplyEvent, ...]) -> None:
    request, reply = parse(), reply_to(events)
    key = Fingerprinter().fingerprint(request.conversation).key_with(reply.turn)
    final = streamed(request, events, reply)[-1]["response"]
    for response in (whole(request, reply), final):
        echoed = parse(input=[QUESTION, *response["output"], QUESTION]).conversation
        assert Fingerprinter().fingerprint(echoed).turn_keys == (key,)
        turn = echoed.items[1]
        assert isinstance(turn, AssistantTurn)
        assert turn.reasoning == reply.turn.reasoning
        # What the SDK makes of the items, and sends, is the same.
        dumped = [item.to_dict() for item in Response.model_validate(response).output]
        assert parse(input=[QUESTION, *dumped, QUESTION]).conversation == echoed


@given(turns())
def test_deltas_done_events_and_the_response_agree(events: tuple[ReplyEvent, ...]) -> None:
    stream = streamed(parse(), events, reply_to(events))
    final = stream[-1]["response"]["output"]
    deltas = [""] * len(final)
    closed: list[int] = []
    for event in stream[2:-1]:
        kind, position = event["type"], event["output_index"]
        if "item_id" in event:
            assert event["item_id"] == final[position]["id"]
        assert position == len(closed)  # one item after the other
        if kind.endswith(".delta"):
            assert event["delta"]
            deltas[position] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"] == final[position]
            closed.append(position)
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            (text,) = (event[key] for key in ("text", "arguments", "input") if key in event)
            assert text == deltas[position]
    assert closed == list(range(len(final)))
    for item, text in zip(final, deltas, strict=True):
        content = item.get("content")
        assert text == (content[0]["text"] if content else item.get("arguments", item.get("input")))


def test_reasoning_comes_back_from_clients_that_keep_only_what_is_encrypted() -> None:
    response = whole(parse(include=["reasoning.encrypted_content"]), reply_to(CALLS))
    (reasoning, *rest) = response["output"]
    del reasoning["content"]
    turn = parse(input=[QUESTION, reasoning, *rest]).conversation.items[1]
    assert isinstance(turn, AssistantTurn)
    assert turn.reasoning == "hm"


# --- log probabilities -----------------------------------------------------------------------------------------------


def test_log_probs_are_shown_streamed_and_whole() -> None:
    asked = parse(include=["message.output_text.logprobs"], top_logprobs=2)
    shown = (TokenLogProb("é", -0.5, (("é", -0.5), ("x", float("-inf")))), TokenLogProb("", -1.0))
    part = whole(asked, reply_to(TEXT, log_probs=shown))["output"][0]["content"][0]
    first, second = part["logprobs"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [("é", -0.5), ("x", -9999.0)]
    assert (second["logprob"], second["top_logprobs"]) == (-1.0, [])

    encoder = RESPONSES.stream(asked, IDENTITY)
    # Half a character, then two deltas in one chunk, then a stop token: each log probability is said once.
    half, both, stop = shown[:1], shown[1:], (TokenLogProb("<end>", -2.0),)
    stream = encoder.start(3) + encoder.events((), half) + encoder.events(TEXT, both) + encoder.events((), stop)
    events = frames(stream + encoder.finish(reply_to(TEXT, log_probs=(*half, *both, *stop))))
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in entries] for entries in deltas] == [["é", ""], []]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]] == ["é", "", "<end>"]


def test_a_stream_shows_the_log_probs_of_text_only() -> None:
    encoder = RESPONSES.stream(parse(include=["message.output_text.logprobs"]), IDENTITY)
    encoder.start(3)
    encoder.events([ReasoningDelta("hm")], [TokenLogProb("hm", -1.0)])
    encoder.events([], [TokenLogProb("</think>", -1.0)])
    encoder.events([TextDelta("\n")], [TokenLogProb("\n", -2.0)])
    said = encoder.events([TextDelta("x")], [TokenLogProb("x", -3.0)])
    (delta,) = [json.loads(line[6:]) for line in said.splitlines() if b"output_text.delta" in line and line[:1] == b"d"]
    assert [entry["token"] for entry in delta["logprobs"]] == ["\n", "x"]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "type_", "code", "in_stream"),
    [
        ("invalid_request", "invalid_request_error", None, "invalid_prompt"),
        ("context_length", "invalid_request_error", "context_length_exceeded", "context_length_exceeded"),
        ("too_large", "invalid_request_error", "request_too_large", "invalid_prompt"),
        ("unknown_model", "invalid_request_error", "model_not_found", "server_error"),
        ("authentication", "authentication_error", "invalid_api_key", "server_error"),
        ("overloaded", "overloaded_error", "overloaded", "server_error"),
        ("internal", "server_error", None, "server_error"),
    ],
)
def test_errors_have_the_shape_of_the_api(kind: str, type_: str, code: str | None, in_stream: str) -> None:
    error = ApiError(status=400, kind=kind, message="why", param="messages")
    assert json.loads(RESPONSES.error(error)) == {
        "error": {"message": "why", "type": type_, "param": "input", "code": code}
    }
    assert RESPONSES.status(error) == 400
    (event,) = frames(RESPONSES.stream(parse(), IDENTITY).error(error))
    assert event == {"type": "error", "code": in_stream, "message": "why", "param": "input", "sequence_number": 0}


def test_ST_08_a_stream_that_breaks_off_ends_in_response_failed() -> None:
    encoder = RESPONSES.stream(parse(), IDENTITY)
    stream = encoder.start(3) + encoder.events([ReasoningDelta("R"), TextDelta("par")], None)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in (stream + encoder.error(ApiError(status=500, kind="internal", message="why"))).decode().split("\n")
        if line.startswith("data: ")
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.failed"
    response = Response.model_validate(last["response"])
    assert response.status == "failed"
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", "why")
    assert [item.type for item in response.output] == ["reasoning"]
