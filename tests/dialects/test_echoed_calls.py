"""A call that a client echoes is that call and no other, whatever its arguments are: samples never change places."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses import Response

from gym_capture.calls import ModelRequest, ToolCallDelta, ToolCallStart
from gym_capture.conversation import AssistantTurn, ToolCall
from gym_capture.dialects.anthropic_input import input_json
from gym_capture.dialects.base import ReplyIdentity
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.dialects.responses_tools import custom_arguments, custom_input
from gym_capture.lineage.fingerprint import Fingerprinter, canonical_arguments
from tests.dialects import anthropic_sdk
from tests.dialects.anthropic_sdk import MESSAGES, USER, echoed, reply_to, whole_message

RESPONSES = ResponsesDialect()
IDENTITY = ReplyIdentity(call_id="resp_7f", model="m", created=1_700_000_000)
TOOLS = [
    {"type": "custom", "name": "apply_patch"},
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "spawn"}, {"type": "custom", "name": "tell"}],
    },
]
NAMES = ("apply_patch", "weather", "agents__spawn", "agents__tell", "spawn", "agents__invented", "__", "a____b")


def responses_request(*items: object) -> ModelRequest:
    return RESPONSES.parse(json.dumps({"model": "m", "input": [USER, *items], "tools": TOOLS}).encode())


def responses_echo(call: ToolCall) -> tuple[str, str]:
    """The key of a turn that is this call, and that of what the SDK makes of it and sends back."""
    request = responses_request()
    reply = reply_to((ToolCallStart(0, call.id, call.name), ToolCallDelta(0, call.arguments)))
    items = Response.model_validate_json(RESPONSES.reply(request, IDENTITY, reply)).output
    echo = responses_request(*(item.to_dict() for item in items), USER)
    (key,) = Fingerprinter().fingerprint(echo.conversation).turn_keys
    return Fingerprinter().fingerprint(request.conversation).key_with(reply.turn), key


def messages_echo(call: ToolCall) -> tuple[str, str]:
    request = anthropic_sdk.parse()
    reply = reply_to((ToolCallStart(0, call.id, call.name), ToolCallDelta(0, call.arguments)))
    message = whole_message(MESSAGES.reply(request, anthropic_sdk.IDENTITY, reply))
    echo = anthropic_sdk.parse(messages=[USER, echoed(message), USER])
    (key,) = Fingerprinter().fingerprint(echo.conversation).turn_keys
    return Fingerprinter().fingerprint(request.conversation).key_with(reply.turn), key


def spaced(text: str) -> str:
    return json.dumps({"input": text}, indent=1)


TEXTS = st.one_of(st.sampled_from(["abc", "", " ", "{}", "null", "input"]), st.text(max_size=6))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["input", "INVALID_ARGUMENTS", "INVALID_JSON"]) | st.text(max_size=3), inner, max_size=2
        )
    ),
    max_leaves=4,
).map(json.dumps)
FORMS = (custom_arguments, custom_input, input_json, spaced, str.strip, json.dumps)
"""What a text could be taken for, or could be taken from."""
ARGUMENTS = st.recursive(
    TEXTS | JSON | st.text(st.sampled_from('{}[]":,0.e-19 \\udINVALID_ARGUMENTSinput'), max_size=24),
    lambda inner: st.builds(lambda form, text: form(text), st.sampled_from(FORMS), inner),
    max_leaves=3,
)


@st.composite
def siblings(draw: st.DrawFn) -> tuple[str, str]:
    """Two argument texts, half of the time one that reads like a form of the other."""
    one = draw(ARGUMENTS)
    return one, draw(st.sampled_from(FORMS))(one) if draw(st.booleans()) else draw(ARGUMENTS)


@pytest.mark.parametrize("name", ["apply_patch", "agents__tell", "weather", "agents__spawn", "invented"])
@given(siblings())
@example(("abc", '{"input":"abc"}'))
@example(("", '{"input": ""}'))
@example(('{"input": NaN, "input": "abc"}', '{"input": "abc"}'))
@example(('{"input": 1, "input": "abc"}', '{"input": "abc"}'))
@example(('{"input": "abc", "x": 1}', '{"input": "abc"}'))
@example(('{"INVALID_ARGUMENTS":"abc"}', spaced('{"INVALID_ARGUMENTS":"abc"}')))
@example((custom_input("abc"), "abc"))
@example(('{"input": "\\ud83d"}', '{"input": "\ufffd"}'))
@example(("[" * 100_000, spaced("[" * 100_000)))
def test_items_of_responses(name: str, texts: tuple[str, str]) -> None:
    (one, one_echo), (other, other_echo) = (responses_echo(ToolCall("c", name, text)) for text in texts)
    assert (one_echo, other_echo) == (one, other)
    assert (one == other) == (canonical_arguments(texts[0]) == canonical_arguments(texts[1]))


@given(siblings())
@example(("abc", '{"INVALID_JSON":"abc"}'))
@example(('{"a": NaN, "a": 1}', '{"a": 1}'))
def test_blocks_of_messages(texts: tuple[str, str]) -> None:
    (one, one_echo), (other, other_echo) = (messages_echo(ToolCall("c", "f", text)) for text in texts)
    assert (one_echo, other_echo) == (one, other)
    assert (one == other) == (canonical_arguments(texts[0]) == canonical_arguments(texts[1]))


def test_names_that_look_alike_stay_apart() -> None:
    keys = [responses_echo(ToolCall("c", name, "{}")) for name in NAMES]
    assert all(key == echo for key, echo in keys)
    assert len({key for key, _ in keys}) == len(NAMES)


# --- what a custom tool is given -----------------------------------------------------------------------------------


@given(siblings())
def test_two_argument_texts_give_a_custom_tool_the_same_only_if_they_mean_the_same(texts: tuple[str, str]) -> None:
    one, other = texts
    for text in texts:
        assert canonical_arguments(custom_arguments(custom_input(text))) == canonical_arguments(text)
    if canonical_arguments(one) != canonical_arguments(other):
        assert custom_input(one) != custom_input(other)


@given(st.text(max_size=40))
@example('{"INVALID_ARGUMENTS":')
@example('{"INVALID_ARGUMENTS":1}')
@example('{"INVALID_ARGUMENTS":"x","b":1}')
def test_a_custom_tool_is_given_the_one_string_however_it_is_spelled(text: str) -> None:
    for arguments in (custom_arguments(text), spaced(text), json.dumps({"input": text})):
        assert custom_input(arguments) == text


@pytest.mark.parametrize(
    "arguments",
    ["", "patch", "{}", '{"input": 1}', '{"input": "a", "b": 1}', '["input"]', '{"input": "\\ud83d"}', '{"input": "a'],
)
def test_arguments_that_are_not_the_one_string_reach_a_custom_tool_marked_as_such(arguments: str) -> None:
    assert json.loads(custom_input(arguments)) == {"INVALID_ARGUMENTS": arguments}
    request = responses_request()
    events = (ToolCallStart(0, "c", "apply_patch"), ToolCallDelta(0, arguments))
    reply = reply_to(events)
    (item,) = json.loads(RESPONSES.reply(request, IDENTITY, reply))["output"]
    assert item["input"] == custom_input(arguments)
    stream = RESPONSES.stream(request, IDENTITY)
    frames = stream.start(1) + stream.events(events, None) + stream.finish(reply)
    assert json.loads(frames.split(b"data: ")[-1])["response"]["output"] == [item]
    (_, turn) = responses_request(item).conversation.items
    assert turn == AssistantTurn("", (ToolCall("c", "apply_patch", arguments),))


def test_a_string_that_reads_like_marked_arguments_is_marked_itself() -> None:
    marked = custom_input("abc")
    alike = ("abc", spaced("abc"), marked, spaced(marked), spaced(spaced("abc")))
    assert len({custom_input(arguments) for arguments in alike}) == len(alike)
