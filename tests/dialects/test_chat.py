"""OpenAI Chat Completions: what a body means, and that the real SDK's types read what is answered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gym_capture.calls import (
    ModelReply,
    ModelRequest,
    NamedToolChoice,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenLogProb,
    ToolCallDelta,
    ToolCallStart,
    TurnBuilder,
    Usage,
)
from gym_capture.conversation import AssistantTurn, Conversation, Message, Tool, ToolCall, ToolResult
from gym_capture.dialects.base import ApiError, ReplyIdentity
from gym_capture.dialects.chat import ChatDialect
from gym_capture.errors import InvalidRequestError, Overflow
from gym_capture.lineage.fingerprint import Fingerprinter

CHAT = ChatDialect()
REQUEST = ModelRequest(requested_model="gpt-whatever", conversation=Conversation(items=()))
IDENTITY = ReplyIdentity(call_id="chatcmpl-1", model="gpt-whatever", created=1_700_000_000)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Says it.", "parameters": SCHEMA}}
WEATHER_TOOL = Tool(
    "get_weather", "Says it.", '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'
)


def parse(**fields: Any) -> ModelRequest:
    return CHAT.parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def items(*messages: dict[str, Any]) -> tuple[object, ...]:
    return parse(messages=list(messages)).conversation.items


def refused(body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        CHAT.parse(body)
    return caught.value


def chunks(stream: bytes) -> list[ChatCompletionChunk]:
    """The chunks of a stream that ends as it should."""
    *frames, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(frame.startswith("data: ") for frame in frames)
    return [ChatCompletionChunk.model_validate_json(frame.removeprefix("data: ")) for frame in frames]


# --- parsing: the conversation -----------------------------------------------------------------------------------


def test_a_bare_request_has_the_defaults() -> None:
    assert parse() == ModelRequest(requested_model="m", conversation=Conversation((Message("user", "hi"),)))


def test_every_role_becomes_its_item() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    assert items(
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "name": "ann", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": None, "tool_calls": None},
    ) == (
        Message("system", "s"),
        Message("developer", "d"),
        Message("user", "u"),
        AssistantTurn("a", (ToolCall("c1", "get_weather", '{"city": "Rome"}'),), "r"),
        ToolResult("c1", "sunny"),
        AssistantTurn(),
    )


def test_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": ""}, {"text": "two"}]
    assert items({"role": "user", "content": parts}) == (Message("user", "one two"),)
    refusal = [{"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "."}]
    assert items({"role": "assistant", "content": refusal}) == (AssistantTurn("no."),)
    assert items({"role": "tool", "tool_call_id": "c", "content": []}) == (ToolResult("c", ""),)


def test_assistant_messages_side_by_side_are_one_turn() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    split = items({"role": "assistant", "content": "a"}, {"role": "assistant", "tool_calls": [call]})
    assert split == (AssistantTurn("a", (ToolCall("c1", "f", "{}"),)),)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a":1}'), (None, ""), ("", ""), ('{"a": "Par', '{"a": "Par')],
    ids=["text", "object", "null", "empty", "broken"],
)
def test_arguments_are_kept_as_text_and_never_parsed(sent: object, kept: str) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": sent}}
    assert items({"role": "assistant", "tool_calls": [call]}) == (AssistantTurn("", (ToolCall("c1", "f", kept),)),)


def test_CH_01_a_malformed_tool_call_in_the_history_is_no_error_and_keeps_its_lineage() -> None:
    broken = '{"city": "Par'
    history = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": broken}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "error: bad arguments"},
        {"role": "user", "content": "again"},
    ]
    first = parse(tools=[WEATHER], max_tokens=8)
    second = parse(tools=[WEATHER], max_tokens=8, messages=history)
    generated = AssistantTurn("", (ToolCall("server-made", "get_weather", broken),))
    fingerprinter = Fingerprinter()
    recorded = fingerprinter.fingerprint(first.conversation).key_with(generated)
    assert fingerprinter.fingerprint(second.conversation).turn_keys == (recorded,)
    other = AssistantTurn("", (ToolCall("server-made", "get_weather", broken + "is"),))
    assert fingerprinter.fingerprint(first.conversation).key_with(other) != recorded


def test_CH_03_reasoning_is_read_under_both_of_its_names() -> None:
    def body(name: str) -> ModelRequest:
        return parse(messages=[USER, {"role": "assistant", "content": "a", name: "R"}, USER])

    assert body("reasoning_content") == body("reasoning")
    assert body("reasoning").conversation.items[1] == AssistantTurn("a", (), "R")
    assert body("reasoning_details").conversation.items[1] == AssistantTurn("a")


def test_lone_surrogates_become_replacement_characters() -> None:
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "cut \ud83d emoji, whole \ud83d\ude00"}]}'
    assert CHAT.parse(body).conversation.items == (Message("user", "cut \ufffd emoji, whole \U0001f600"),)


@given(st.text(st.characters(codec=None), max_size=20))
def test_any_text_that_json_can_spell_is_read_and_can_be_encoded(text: str) -> None:
    (message,) = items({"role": "user", "content": text})
    assert isinstance(message, Message)
    message.text.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert message.text == text


# --- parsing: tools and everything else --------------------------------------------------------------------------


def test_tools_keep_name_description_schema_and_strictness() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    strict = {"function": {"name": "s", "parameters": {}, "strict": True}}
    empty = '{"type":"object","properties":{}}'
    assert parse(tools=[WEATHER, bare, strict]).conversation.tools == (
        WEATHER_TOOL,
        Tool("now", "", empty),
        Tool("s", "", empty, strict=True),
    )
    assert parse(tools=[]).conversation.tools == ()
    assert parse(tools=None).conversation.tools == ()


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "get_weather"}}, NamedToolChoice("get_weather")),
    ],
)
def test_tool_choice(sent: object, meant: object) -> None:
    assert parse(tools=[WEATHER], tool_choice=sent).tool_choice == meant


NOW = {"type": "function", "function": {"name": "now"}}
TIDE = {"type": "function", "function": {"name": "tide"}}


@pytest.mark.parametrize(
    ("mode", "allowed", "meant", "left"),
    [
        ("auto", [WEATHER, NOW], "auto", ["get_weather", "now"]),
        ("auto", [NOW], "auto", ["now"]),
        ("auto", [], "auto", []),
        ("required", [TIDE, NOW], "required", ["now", "tide"]),
        ("required", [NOW], NamedToolChoice("now"), ["get_weather", "now", "tide"]),
    ],
)
def test_allowed_tools_narrow_the_offer(mode: str, allowed: list[Any], meant: object, left: list[str]) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    request = parse(tools=[WEATHER, NOW, TIDE], tool_choice=choice)
    assert request.tool_choice == meant
    assert [tool.name for tool in request.conversation.tools] == left


def test_thinking_parts_are_reasoning_and_no_part_of_the_text() -> None:
    parts = [{"type": "thinking", "thinking": "hm, ", "closed": True}, {"type": "text", "text": "hello"}]
    echoed = {"role": "assistant", "content": [*parts, {"type": "thinking", "thinking": "well"}]}
    assert items(USER, echoed) == (Message("user", "hi"), AssistantTurn("hello", reasoning="hm, well"))
    assert items(USER, {**echoed, "reasoning_content": "r"})[-1] == AssistantTurn("hello", reasoning="r")
    thoughts_alone = {"role": "assistant", "content": parts[:1]}
    assert items(USER, thoughts_alone)[-1] == AssistantTurn("", reasoning="hm, ")


def test_a_search_by_the_server_is_told_as_left_out() -> None:
    assert parse(web_search_options={}).left_out == ("tool_left_out:web_search",)
    assert parse(web_search_options=None).left_out == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"functions": [{"name": "f"}]}, "functions belongs to the API of before tools, .* send tools instead"),
        ({"function_call": {"name": "f"}}, "send tool_choice instead"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "send tool_calls instead"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "send the role 'tool' instead"),
        ({"modalities": ["text", "audio"]}, "answers with text only"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "takes text only"),
        ({"stop": list("abcde")}, "stop has 5 strings: this server takes at most 4"),
    ],
)
def test_what_a_client_would_wait_for_in_vain_is_refused_with_what_to_do(fields: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(json.dumps({"model": "m", "messages": [USER], **fields}).encode()).message)


def test_fields_of_before_tools_that_say_nothing_are_fine() -> None:
    null = {"role": "assistant", "content": "x", "function_call": None, "audio": None}
    silent = {"functions": [], "function_call": "none", "modalities": ["text"], "audio": None}
    assert parse(messages=[USER, null], **silent) == parse(messages=[USER, {"role": "assistant", "content": "x"}])


def test_sampling_fields_go_by_their_engine_names() -> None:
    sampling = {
        "temperature": 0,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "top_k": 5,
        "seed": 3.0,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "logit_bias": {"12": -100},
    }
    assert parse(**sampling).sampling == {**sampling, "seed": 3}
    assert parse(stop="x").sampling == {"stop": ["x"]}
    assert parse(stop=[], logit_bias={}, temperature=None).sampling == {}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6, "max_tokens": 5}, 6), ({"max_tokens": 4.0}, 4)],
)
def test_the_limit_of_generated_tokens(fields: dict[str, Any], limit: int | None) -> None:
    assert parse(**fields).max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 3}, None),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_log_probs_are_shown_when_asked_for(fields: dict[str, Any], shown: int | None) -> None:
    assert parse(**fields).top_logprobs == shown


def test_streaming_options_and_the_rest() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options=None).include_usage
    response_format = {"type": "json_object"}
    request = parse(parallel_tool_calls=False, response_format=response_format)
    assert (request.parallel_tool_calls, request.response_format) == (False, response_format)


def test_unknown_fields_are_ignored() -> None:
    assert parse(store=True, metadata={"a": 1}, reasoning_effort=["?"], user=5, service_tier="flex") == parse()


def test_SE_03_a_client_cannot_choose_what_the_policy_sees() -> None:
    forged = {
        "required_prefix_token_ids": [9, 9, 9],
        "prompt_token_ids": [1],
        "extra_body": {"required_prefix_token_ids": [7]},
        "prompt_embeds": "AAAA",
        "add_generation_prompt": False,
        "chat_template": "{{ 'mine' }}",
    }
    assert parse(**forged) == parse()


# --- errors name the parameter -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [USER, {"content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools.0.function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools.0.function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            },
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "other"}}]},
                },
            },
            "tool_choice.allowed_tools.tools.0",
        ),
        ({"modalities": "audio"}, "modalities"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages.0.content.0.thinking"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [1]}, "stop.0"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": "9", "max_completion_tokens": 9}, "max_tokens"),
        ({"max_tokens": 2**53 + 1}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 1}, "stop"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_an_error_names_what_is_wrong(fields: dict[str, Any], param: str) -> None:
    error = refused(json.dumps({"model": "m", "messages": [USER], **fields}).encode())
    assert error.param == param
    assert param.split(".")[0] in error.message


def test_CH_05_more_than_one_choice_is_refused() -> None:
    assert parse(n=1) == parse(n=None) == parse()
    assert refused(json.dumps({"model": "m", "messages": [USER], "n": 2}).encode()).param == "n"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000], ids=repr
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert "JSON" in refused(body).message or "model" in refused(body).message


# --- replies -----------------------------------------------------------------------------------------------------

TEXT: tuple[ReplyEvent, ...] = (TextDelta("It "), TextDelta('"is" \u2028 sunny \U0001f600\n'))
CALLS: tuple[ReplyEvent, ...] = (
    ReasoningDelta("hm"),
    TextDelta("Calling."),
    ToolCallStart(0, "c0", "get_weather"),
    ToolCallDelta(0, '{"city": '),
    ToolCallDelta(0, '"Rome"}'),
    ToolCallStart(1, "c1", "now"),
    ToolCallDelta(1, "{}"),
)
SILENT_CALL: tuple[ReplyEvent, ...] = (ToolCallStart(0, "c0", "now"), ToolCallDelta(0, "{}"))


def reply_to(events: tuple[ReplyEvent, ...], *, finish_reason: str = "stop", **fields: Any) -> ModelReply:
    builder = TurnBuilder()
    for event in events:
        builder.add(event)
    return ModelReply(turn=builder.turn(), finish_reason=finish_reason, usage=USAGE, **fields)


def streamed(events: tuple[ReplyEvent, ...], reply: ModelReply, *, include_usage: bool = False) -> bytes:
    request = parse(stream=True, stream_options={"include_usage": include_usage})
    encoder = CHAT.stream(request, IDENTITY)
    return b"".join([encoder.start(3), *(encoder.events((event,), None) for event in events), encoder.finish(reply)])


@pytest.mark.parametrize("events", [(), TEXT, CALLS, SILENT_CALL], ids=["nothing", "text", "calls", "only a call"])
def test_the_sdk_reads_the_same_turn_streamed_and_whole(events: tuple[ReplyEvent, ...]) -> None:
    reply = reply_to(events)
    whole = ChatCompletion.model_validate_json(CHAT.reply(REQUEST, IDENTITY, reply))
    assert (whole.id, whole.model, whole.created) == ("chatcmpl-1", "gpt-whatever", 1_700_000_000)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    message = choice.message
    assert (message.content or "") == reply.turn.text
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
        if call.type == "function"
    )
    assert calls == reply.turn.tool_calls
    assert (message.model_extra or {}).get("reasoning_content", "") == reply.turn.reasoning
    assert from_chunks(chunks(streamed(events, reply))) == reply.turn


def from_chunks(parts: list[ChatCompletionChunk]) -> AssistantTurn:
    """What a client puts together."""
    text, reasoning = "", ""
    calls: dict[int, ToolCall] = {}
    assert parts[0].choices[0].delta.role == "assistant"
    for part in parts:
        delta = part.choices[0].delta
        text += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content", "")
        for call in delta.tool_calls or ():
            assert call.function is not None
            before = calls.get(call.index, ToolCall(call.id or "", call.function.name or "", ""))
            calls[call.index] = before._replace(arguments=before.arguments + (call.function.arguments or ""))
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == "stop"
    return AssistantTurn(text, tuple(calls[index] for index in sorted(calls)), reasoning)


def test_a_turn_of_calls_alone_has_null_content() -> None:
    message = json.loads(CHAT.reply(REQUEST, IDENTITY, reply_to(SILENT_CALL)))["choices"][0]["message"]
    assert message["content"] is None
    assert json.loads(CHAT.reply(REQUEST, IDENTITY, reply_to(())))["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("events", [TEXT, CALLS], ids=["text", "calls"])
def test_CH_07_cut_off_is_said_streamed_and_whole(events: tuple[ReplyEvent, ...]) -> None:
    reply = reply_to(events, finish_reason="length")
    whole = ChatCompletion.model_validate_json(CHAT.reply(REQUEST, IDENTITY, reply))
    assert whole.choices[0].finish_reason == "length"
    assert chunks(streamed(events, reply))[-1].choices[0].finish_reason == "length"


def test_usage_is_in_every_whole_reply_and_in_streams_that_ask() -> None:
    reply = reply_to(TEXT)
    usage = ChatCompletion.model_validate_json(CHAT.reply(REQUEST, IDENTITY, reply)).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 3, 10)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert chunks(streamed(TEXT, reply, include_usage=True))[-1].usage == usage
    assert chunks(streamed(TEXT, reply, include_usage=True))[-1].choices == []
    assert all(part.usage is None for part in chunks(streamed(TEXT, reply)))


def test_log_probs_are_shown_streamed_and_whole() -> None:
    shown = (TokenLogProb("é", -0.5, (("é", -0.5), ("x", float("-inf")))), TokenLogProb("", float("-inf")))
    whole = ChatCompletion.model_validate_json(CHAT.reply(REQUEST, IDENTITY, reply_to(TEXT, log_probs=shown)))
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    first, second = logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("é", -0.5), ("x", -9999.0)]
    assert (second.logprob, second.top_logprobs) == (-9999.0, [])

    encoder = CHAT.stream(parse(stream=True), IDENTITY)
    # Two events of one chunk, then a chunk whose text is held back: each log probability is said once.
    stream = encoder.events(TEXT, shown[:1]) + encoder.events((), shown[1:]) + encoder.finish(reply_to(TEXT))
    said = [part.choices[0].logprobs for part in chunks(stream)]
    assert [len(entry.content or ()) if entry else None for entry in said] == [1, None, 1, None]


def test_nothing_to_say_is_no_frame() -> None:
    assert CHAT.stream(parse(stream=True), IDENTITY).events((), None) == b""


@pytest.mark.parametrize(
    ("kind", "type_", "code"),
    [
        ("invalid_request", "invalid_request_error", None),
        ("context_length", "invalid_request_error", "context_length_exceeded"),
        ("not_found", "invalid_request_error", None),
        ("unknown_model", "invalid_request_error", "model_not_found"),
        ("authentication", "authentication_error", "invalid_api_key"),
        ("permission", "permission_error", None),
        ("conflict", "invalid_request_error", "conflict"),
        ("overloaded", "overloaded_error", "overloaded"),
        ("internal", "server_error", None),
    ],
)
def test_errors_have_the_shape_of_the_api_and_end_a_stream_without_done(
    kind: str, type_: str, code: str | None
) -> None:
    error = ApiError(status=400, kind=kind, message="why", param="messages")
    expected = {"error": {"message": "why", "type": type_, "param": "messages", "code": code}}
    assert json.loads(CHAT.error(error)) == expected
    frame = CHAT.stream(parse(stream=True), IDENTITY).error(error)
    assert json.loads(frame.removeprefix(b"data: ")) == expected
    assert frame.endswith(b"\n\n")
    assert b"[DONE]" not in frame


def test_a_context_that_overflows_is_said_in_the_words_that_clients_look_for() -> None:
    for overflow, counted in (
        (Overflow(5000, 4096), "5000"),
        (Overflow(5000, 4096, is_at_least=True), "at least 5000"),
    ):
        error = ApiError(status=400, kind="context_length", message="m", param="messages", overflow=overflow)
        told = json.loads(CHAT.error(error))["error"]
        assert told["code"] == "context_length_exceeded"
        # What LiteLLM, LangChain and others search for, in the case that they search it in.
        assert "Input tokens exceed the configured limit" in told["message"]
        assert "this model's maximum context length is 4096 tokens" in told["message"].lower()
        assert f"your messages resulted in {counted} tokens" in told["message"]
        assert not re.search(r"\d,\d", told["message"])  # some read the numbers


@given(st.lists(st.one_of(st.builds(TextDelta, st.text()), st.builds(ReasoningDelta, st.text())), max_size=5))
def test_any_text_streams_as_it_is(events: list[ReplyEvent]) -> None:
    reply = reply_to(tuple(events))
    assert from_chunks(chunks(streamed(tuple(events), reply))) == reply.turn


@pytest.mark.parametrize(
    "add",
    [
        lambda builder: builder.add(ToolCallDelta(0, "{}")),
        lambda builder: builder.add(ToolCallStart(1, "c", "f")),
    ],
    ids=["arguments before the start", "out of order"],
)
def test_a_turn_is_not_built_from_events_that_make_no_sense(add: Callable[[TurnBuilder], None]) -> None:
    with pytest.raises(ValueError, match="tool call"):
        add(TurnBuilder())
