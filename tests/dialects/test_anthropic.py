"""Anthropic Messages: what a body means. What is answered is in `test_anthropic_reply`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.calls import ModelRequest, NamedToolChoice
from gym_capture.conversation import AssistantTurn, Conversation, Message, Tool, ToolCall, ToolResult
from gym_capture.dialects.chat import ChatDialect
from gym_capture.errors import InvalidRequestError
from gym_capture.lineage.fingerprint import Fingerprinter
from tests.dialects.anthropic_sdk import MESSAGES, USER, body, parse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Says it.", "input_schema": SCHEMA}
WEATHER_TOOL = Tool(
    "get_weather", "Says it.", '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'
)
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.1f3; cc_entrypoint=sdk-cli; cch=4c2a1;"


def items(*messages: dict[str, Any], **fields: Any) -> tuple[object, ...]:
    return parse(messages=list(messages), **fields).conversation.items


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def use(call_id: str, name: str, value: object = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if value is None else value}


def result(call_id: str, content: object, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def refused(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        MESSAGES.parse(body(**fields))
    return caught.value


# --- the conversation --------------------------------------------------------------------------------------------


def test_a_bare_request_has_the_defaults() -> None:
    conversation = Conversation((Message("user", "hi"),))
    assert parse() == ModelRequest(requested_model="m", conversation=conversation, max_tokens=9)


def test_system_text_comes_first_and_its_blocks_are_joined_as_they_are() -> None:
    assert items(USER, system="S") == (Message("system", "S"), Message("user", "hi"))
    blocks = [text("one\n", cache_control={"type": "ephemeral"}), text(""), text("two")]
    assert items(USER, system=blocks) == (Message("system", "one\ntwo"), Message("user", "hi"))
    for nothing in (None, "", [], [text("")]):
        assert items(USER, system=nothing) == (Message("user", "hi"),)


@pytest.mark.parametrize(
    "system",
    [
        [text(HEADER), text("You help.")],
        [text(HEADER + "\n"), text("You help.")],
        HEADER + "\nYou help.",
        HEADER + "You help.",
    ],
    ids=["block", "block and line end", "line", "same line"],
)
def test_the_billing_header_is_no_part_of_the_prompt(system: object) -> None:
    assert items(USER, system=system) == (Message("system", "You help."), Message("user", "hi"))
    assert items(USER, {"role": "system", "content": system}, USER)[1] == Message("system", "You help.")


def test_a_billing_header_alone_leaves_no_message() -> None:
    assert items(USER, system=[text(HEADER)]) == (Message("user", "hi"),)
    assert items({"role": "system", "content": HEADER}, USER) == (Message("user", "hi"),)
    quoted = f"What is {HEADER}"
    assert items({"role": "user", "content": quoted}, system=quoted) == (
        Message("system", quoted),
        Message("user", quoted),
    )


def test_AN_01_system_messages_among_the_others_stay_where_they_are() -> None:
    history = [
        {"role": "user", "content": "task"},
        {"role": "system", "content": "Agents: a, b"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "go"},
    ]
    trailing = {"role": "system", "content": [text("100 left", cache_control={"type": "ephemeral"})]}
    before = items(*history, system=[text("S")])
    assert before == (
        Message("system", "S"),
        Message("user", "task"),
        Message("system", "Agents: a, b"),
        AssistantTurn("ok"),
        Message("user", "go"),
    )
    assert items(*history, trailing, system=[text("S")]) == (*before, Message("system", "100 left"))


def test_AN_05_results_come_before_the_text_of_their_message() -> None:
    found = items(
        {"role": "user", "content": "q"},
        assistant(use("t1", "f"), use("t2", "g", {"b": 1, "a": [True]})),
        user(
            text("first, "),
            result("t1", "r1"),
            text("mid, "),
            result("t2", [text("r2a"), text("r2b")], is_error=True),
            text("last", cache_control={"type": "ephemeral"}),
        ),
    )
    assert found == (
        Message("user", "q"),
        AssistantTurn("", (ToolCall("t1", "f", "{}"), ToolCall("t2", "g", '{"b":1,"a":[true]}'))),
        ToolResult("t1", "r1"),
        ToolResult("t2", "r2ar2b"),
        Message("user", "first, mid, last"),
    )


PLAIN_WORDS = {"type": "text", "media_type": "text/plain", "data": "plain words"}
TEXT_BY_ANOTHER_NAME: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "document", "title": "a.txt", "context": "A note.", "source": PLAIN_WORDS, "citations": None},
        "<document>\n<title>a.txt</title>\n<context>A note.</context>\nplain words\n</document>\n",
    ),
    (
        {"type": "document", "source": {"type": "content", "content": [text("plain "), text("words")]}},
        "<document>\nplain words\n</document>\n",
    ),
    (
        {"type": "document", "source": {"type": "content", "content": "plain words"}},
        "<document>\nplain words\n</document>\n",
    ),
    (
        {"type": "search_result", "source": "http://x", "title": "t", "content": [text("plain words")]},
        "<search_result>\n<title>t</title>\n<source>http://x</source>\nplain words\n</search_result>\n",
    ),
    ({"type": "tool_reference", "tool_name": "Grep"}, "<tool_reference>Grep</tool_reference>\n"),
]


@pytest.mark.parametrize(("block", "shown"), TEXT_BY_ANOTHER_NAME)
def test_AN_14_text_by_another_name_is_text(block: dict[str, Any], shown: str) -> None:
    as_result = items(USER, assistant(use("t", "f")), user(result("t", [text("see "), block])))
    assert as_result[-1] == ToolResult("t", f"see {shown}")
    assert items(user(text("see "), block, text("that"))) == (Message("user", f"see {shown}that"),)


def test_results_alone_make_no_user_message() -> None:
    for block in (result("t1", ""), result("t1", []), result("t1", None), {"type": "tool_result", "tool_use_id": "t1"}):
        assert items(USER, assistant(use("t1", "f")), user(block, text("")))[2:] == (ToolResult("t1", ""),)
    assert items(user()) == (Message("user", ""),)


def test_AN_07_thinking_is_reasoning_whatever_signs_it() -> None:
    for signature in ({"signature": "sig"}, {"signature": ""}, {}):
        thinking = {"type": "thinking", "thinking": "R", **signature}
        turn = assistant(thinking, {"type": "redacted_thinking", "data": "zz"}, text("A"))
        assert items(USER, turn, USER)[1] == AssistantTurn("A", (), "R")
    assert items(USER, assistant({"type": "thinking", "signature": "only"}), USER)[1] == AssistantTurn()


def test_AN_13_thinking_between_calls_keeps_the_turn_whole_and_its_key() -> None:
    thoughts = [{"type": "thinking", "thinking": f"R{n}", "signature": ""} for n in (1, 2)]
    interleaved = parse(messages=[USER, assistant(thoughts[0], use("t1", "f"), thoughts[1], text("A")), USER])
    assert interleaved.conversation.items[1] == AssistantTurn("A", (ToolCall("t1", "f", "{}"),), "R1R2")
    plain = parse(messages=[USER, assistant(use("t1", "f"), text("A")), USER])
    assert keys(interleaved) == keys(plain)


@pytest.mark.parametrize(
    "content",
    [
        "Hello",
        [text("Hello")],
        [text("Hello", cache_control={"type": "ephemeral", "ttl": "1h"})],
        [text("Hello"), text("", cache_control={"type": "ephemeral"})],
        [text("Hel"), text("lo", citations=None)],
    ],
    ids=["string", "block", "cached", "empty block", "two blocks"],
)
def test_FP_08_an_echo_is_the_same_turn_however_its_blocks_are_cut(content: object) -> None:
    echo = parse(messages=[USER, {"role": "assistant", "content": content}, USER])
    asked = Fingerprinter().fingerprint(parse().conversation)
    assert keys(echo) == (asked.key_with(AssistantTurn("Hello")),)


def keys(request: ModelRequest) -> tuple[str, ...]:
    return Fingerprinter().fingerprint(request.conversation).turn_keys


def test_assistant_messages_side_by_side_are_one_turn() -> None:
    split = items(USER, assistant(text("a")), assistant(use("t1", "f")), user(result("t1", "r")))
    assert split[1] == AssistantTurn("a", (ToolCall("t1", "f", "{}"),))


def test_the_same_history_means_the_same_in_chat() -> None:
    chat = ChatDialect().parse(
        json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": "S1\nS2"},
                    {"role": "user", "content": "one two"},
                    {
                        "role": "assistant",
                        "content": "A",
                        "reasoning_content": "R",
                        "tool_calls": [
                            {"id": "t1", "function": {"name": "get_weather", "arguments": '{"city":"Rome","days":2}'}},
                            {"id": "t2", "function": {"name": "get_weather", "arguments": '{"city": "Par'}},
                        ],
                    },
                    {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
                    {"role": "tool", "tool_call_id": "t2", "content": "broken"},
                    {"role": "user", "content": "go on"},
                ],
                "tools": [{"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}],
            }
        ).encode()
    )
    messages = parse(
        system=[text(HEADER), text("S1\n"), text("S2")],
        messages=[
            user(text("one "), text("two")),
            assistant(
                {"type": "thinking", "thinking": "R", "signature": "s"},
                text("A"),
                use("t1", "get_weather", {"city": "Rome", "days": 2}),
                use("t2", "get_weather", {"INVALID_JSON": '{"city": "Par'}),
            ),
            user(result("t1", "sunny"), result("t2", [text("broken")]), text("go on")),
        ],
        tools=[WEATHER],
    )
    assert messages.conversation == chat.conversation


def test_a_reply_cannot_be_begun_by_the_client_but_it_can_be_measured() -> None:
    prefilled = [USER, {"role": "assistant", "content": "{"}]
    error = refused(messages=prefilled)
    assert error.param == "messages"
    assert "prefilling" in error.message
    assert MESSAGES.counting.parse(body(messages=prefilled)).conversation.items[-1] == AssistantTurn("{")


def test_AN_03_what_is_counted_is_the_prompt_that_would_be_generated_from() -> None:
    fields: dict[str, Any] = {"system": "S " * 50, "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    counted = MESSAGES.counting.parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode())
    assert counted.conversation == parse(**fields).conversation
    assert counted.conversation.tools == (WEATHER_TOOL,)


def test_AN_14_what_is_counted_has_the_documents_too() -> None:
    fields: dict[str, Any] = {"messages": [user(*(block for block, _ in TEXT_BY_ANOTHER_NAME))]}
    assert MESSAGES.counting.parse(body(**fields)).conversation == parse(**fields).conversation


# --- tools and parameters ----------------------------------------------------------------------------------------


def test_AN_09_tools_of_the_client_are_offered_and_those_of_a_server_are_not() -> None:
    request = parse(
        tools=[
            WEATHER,
            {
                "name": "w2",
                "input_schema": SCHEMA,
                "type": "custom",
                "cache_control": {"type": "ephemeral"},
                "defer_loading": True,
                "strict": True,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "mcp_toolset", "mcp_server_name": "x"},
        ],
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        output_config={"effort": "high"},
        service_tier="auto",
        mcp_servers=[],
    )
    assert request.conversation.tools == (
        WEATHER_TOOL,
        Tool("w2", "", WEATHER_TOOL.parameters_json, strict=True),
    )
    assert request.left_out == ("tool_left_out:web_search", "tool_left_out:mcp_toolset")
    offered = parse(tools=[WEATHER, {"name": "w2", "input_schema": SCHEMA, "strict": True}])
    assert replace(request, left_out=()) == offered


@pytest.mark.parametrize(
    "kind",
    ["bash_20250124", "text_editor_20250728", "computer_20250124", "memory_20250818", "browser_toolset_20260801"],
)
def test_a_tool_that_the_client_runs_and_nobody_describes_is_refused(kind: str) -> None:
    error = refused(tools=[{"type": kind, "name": "x"}])
    assert error.param == "tools.0.type"
    assert kind in error.message


@pytest.mark.parametrize(
    ("choice", "read", "parallel"),
    [
        (None, "auto", None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "get_weather"}, NamedToolChoice("get_weather"), None),
    ],
)
def test_tool_choice(choice: object, read: object, parallel: bool | None) -> None:
    request = parse(tools=[WEATHER], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (read, parallel)


def test_sampling_is_read_under_the_engine_s_names_and_nothing_else_is() -> None:
    request = parse(
        temperature=0, top_p=0.9, top_k=5, stop_sequences=["END"], stream=True, max_tokens=7, stop="x", seed=1
    )
    assert request.sampling == {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "stop": ["END"]}
    assert (request.stream, request.max_tokens) == (True, 7)
    assert parse(stop_sequences=[]).sampling == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
    ids=["output_config", "output_format"],
)
def test_a_wanted_format_is_passed_on_as_openai_spells_it(fields: dict[str, Any]) -> None:
    assert parse(**fields).response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
    }


@pytest.mark.parametrize(
    ("kinds", "left_out"),
    [
        ([], ()),
        (["web_search_20250305", "web_search_20260318"], ("tool_left_out:web_search",)),
        (
            ["code_execution_20250825", "web_fetch_20250910"],
            ("tool_left_out:code_execution", "tool_left_out:web_fetch"),
        ),
        (["tool_search_tool_bm25_20251119"], ("tool_left_out:tool_search_tool_bm25",)),
        (["whatever_20990101", "x" * 99], ("tool_left_out:other",)),
    ],
)
def test_tools_that_are_not_offered_are_told_by_few_names(kinds: list[str], left_out: tuple[str, ...]) -> None:
    tools = [WEATHER, *({"type": kind, "name": f"n{index}"} for index, kind in enumerate(kinds))]
    request = parse(tools=tools)
    assert (request.conversation.tools, request.left_out) == ((WEATHER_TOOL,), left_out)


def test_more_stop_sequences_than_are_served_are_refused_by_the_name_that_the_client_knows() -> None:
    assert parse(stop_sequences=["a", "b", "c", "d"]).sampling["stop"] == ["a", "b", "c", "d"]
    error = refused(stop_sequences=["a", "b", "c", "d", "e"])
    assert (error.param, error.message) == (
        "stop_sequences",
        "stop_sequences has 5 strings: this server takes at most 4",
    )


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        *itertools.product(
            ["user", "assistant", "system"], ["image", "container_upload", "server_tool_use", "web_search_tool_result"]
        ),
        *itertools.product(["assistant", "system"], ["document", "search_result", "tool_reference"]),
    ],
)
def test_blocks_that_the_policy_cannot_see_are_named(role: str, kind: str) -> None:
    error = refused(messages=[USER, {"role": role, "content": [text("a"), {"type": kind, "source": {}}]}, USER])
    assert error.param == "messages.1.content.1.type"
    assert kind in error.message


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    "source", [PDF, {"type": "url", "url": "http://x/a.pdf"}, {"type": "file", "file_id": "file_1"}]
)
@pytest.mark.parametrize("is_result", [True, False])
def test_AN_14_a_document_that_is_no_text_is_named(source: dict[str, Any], is_result: bool) -> None:
    document = {"type": "document", "title": "a.pdf", "source": source}
    blocks = [result("t", [text("a"), document])] if is_result else [text("a"), document]
    error = refused(messages=[USER, assistant(use("t", "f")), user(*blocks)])
    at = "messages.2.content.0.content.1" if is_result else "messages.2.content.1"
    assert error.param == f"{at}.source.type"
    assert f"source of type {source['type']}" in error.message


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "document"}, "source"),
        ({"type": "document", "source": {"type": "text"}}, "source.data"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}, "source.content.0.type"),
        ({"type": "document", "title": 1, "source": {"type": "text", "data": "x"}}, "title"),
        ({"type": "search_result", "source": "http://x", "content": []}, "title"),
        ({"type": "search_result", "title": "t", "content": []}, "source"),
        ({"type": "search_result", "title": "t", "source": "s", "content": [{"type": "image"}]}, "content.0.type"),
        ({"type": "tool_reference"}, "tool_name"),
    ],
)
def test_AN_14_a_part_that_is_missing_or_no_text_is_named(block: dict[str, Any], named: str) -> None:
    assert refused(messages=[user(block)]).param == f"messages.0.content.0.{named}"


def test_an_image_in_a_result_is_named() -> None:
    error = refused(messages=[USER, assistant(use("t", "f")), user(result("t", [text("a"), {"type": "image"}]))])
    assert error.param == "messages.2.content.0.content.1.type"
    assert "image" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [], "system": "S"}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [user({"text": "hi"})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [user({"type": "tool_result"})]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [user(result("t", 3))]}, "messages.0.content.0.content"),
        ({"messages": [assistant({"type": "tool_use", "name": "f"})]}, "messages.0.content.0.id"),
        ({"messages": [assistant({"type": "tool_use", "id": "t"})]}, "messages.0.content.0.name"),
        ({"messages": [assistant(use("t", "f", "{}"))]}, "messages.0.content.0.input"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{**WEATHER, "strict": 1}]}, "tools.0.strict"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences.0"),
        ({"stream": "yes"}, "stream"),
        ({"output_config": "high"}, "output_config"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
def test_an_error_names_what_is_wrong(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param.split(".")[0] in error.message


def test_AN_11_a_request_for_no_tokens_is_refused() -> None:
    assert refused(max_tokens=0).param == "max_tokens"


NUMBERS = st.integers(-1, 2) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=2)
KINDS = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"])
BLOCKS: st.SearchStrategy[dict[str, Any]] = st.deferred(
    lambda: st.fixed_dictionaries(
        {},
        optional={
            "type": KINDS | SCALARS,
            "text": SCALARS,
            "id": SCALARS,
            "name": SCALARS,
            "input": st.dictionaries(st.just("INVALID_JSON") | st.text(max_size=1), SCALARS, max_size=2) | SCALARS,
            "thinking": SCALARS,
            "tool_use_id": SCALARS,
            "content": CONTENTS,
        },
    )
)
CONTENTS: st.SearchStrategy[Any] = st.lists(BLOCKS | SCALARS, max_size=3) | SCALARS
TURNS = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system"]) | SCALARS, "content": CONTENTS}
)
TOOLS = st.fixed_dictionaries(
    {}, optional={"type": st.just("custom") | SCALARS, "name": SCALARS, "input_schema": BLOCKS | SCALARS}
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(TURNS | SCALARS, max_size=3) | SCALARS,
        "system": CONTENTS,
        "tools": st.lists(TOOLS | SCALARS, max_size=2) | SCALARS,
        "tool_choice": TOOLS | SCALARS,
        "output_config": st.fixed_dictionaries({}, optional={"format": BLOCKS | SCALARS}) | SCALARS,
        **dict.fromkeys(["model", "max_tokens", "stream", "temperature", "top_k", "stop_sequences"], SCALARS),
    },
)


def parsed_or_refused(read: Callable[[bytes], ModelRequest], data: bytes) -> str:
    """What became of it; anything else raises."""
    try:
        request = read(data)
    except InvalidRequestError as error:
        return f"refused: {error.param}"
    assert request.conversation.items
    return "parsed"


@given(BODIES)
def test_whatever_a_client_sends_is_read_or_refused_with_a_name(fields: dict[str, Any]) -> None:
    for read in (MESSAGES.parse, MESSAGES.counting.parse):
        assert parsed_or_refused(read, body(**fields)) != "refused: None"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000], ids=repr
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    for read in (MESSAGES.parse, MESSAGES.counting.parse):
        with pytest.raises(InvalidRequestError):
            read(body)


@pytest.mark.parametrize(("depth", "may_be"), [(300, "parsed"), (900, "either"), (20_000, "refused")])
def test_inputs_and_schemas_nested_deep_are_taken_or_refused(depth: int, may_be: str) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    call = f'{{"type":"tool_use","id":"t","name":"f","input":{nested}}}'
    for part in (
        f'"messages":[{{"role":"assistant","content":[{call}]}},{{"role":"user","content":"hi"}}]',
        f'"messages":[{{"role":"user","content":"hi"}}],"tools":[{{"name":"f","input_schema":{nested}}}]',
    ):
        became = parsed_or_refused(MESSAGES.parse, f'{{"model":"m","max_tokens":1,{part}}}'.encode())
        assert may_be == "either" or became.startswith(may_be)
