"""OpenAI Responses: what a body means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.calls import ModelRequest, NamedToolChoice
from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.dialects.chat import ChatDialect
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.dialects.responses_output import sealed, unsealed
from gym_capture.errors import InvalidRequestError
from gym_capture.lineage.fingerprint import Fingerprinter

RESPONSES = ResponsesDialect()
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA_JSON = '{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'
WEATHER = {"type": "function", "name": "get_weather", "description": "Says it.", "parameters": SCHEMA, "strict": False}
WEATHER_TOOL = Tool("get_weather", "Says it.", SCHEMA_JSON)
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn"}, {"type": "function", "name": "wait", "parameters": SCHEMA}],
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
HOSTED = (
    {"type": "web_search", "external_web_access": True},
    {"type": "mcp", "server_label": "x"},
    {"type": "shell", "environment": {"type": "container_auto"}},
)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "hi", **fields}).encode()


def parse(**fields: Any) -> ModelRequest:
    return RESPONSES.parse(body(**fields))


def items(*given: dict[str, Any], **fields: Any) -> tuple[Item, ...]:
    return parse(input=list(given), **fields).conversation.items


def offered(*tools: dict[str, Any], **fields: Any) -> tuple[str, ...]:
    return tuple(tool.name for tool in parse(tools=list(tools), **fields).conversation.tools)


def refused(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**fields)
    return caught.value


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def call(call_id: str, name: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output(call_id: str, text: object) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


# --- the conversation --------------------------------------------------------------------------------------------


def test_a_bare_request_has_the_defaults() -> None:
    request = parse()
    assert request.conversation == Conversation((Message("user", "hi"),))
    assert (request.requested_model, request.sampling, request.max_tokens) == ("m", {}, None)
    assert (request.tool_choice, request.parallel_tool_calls, request.response_format) == ("auto", None, None)
    assert (request.top_logprobs, request.stream) == (None, False)


def test_instructions_are_the_system_message_before_everything_else() -> None:
    assert parse(instructions="Be brief.").conversation.items == (Message("system", "Be brief."), Message("user", "hi"))
    assert items(said("system", "s"), USER, instructions="i")[:2] == (Message("system", "i"), Message("system", "s"))
    assert parse(instructions="").conversation == parse(instructions=None).conversation == parse().conversation


def test_messages_are_read_in_their_easy_form_and_in_parts() -> None:
    assert items(
        {"role": "developer", "content": "d"},
        said("user", "one ", "", "two"),
        {"role": "assistant", "content": "a", "phase": "commentary"},
        {"type": "message", "role": "user", "content": [], "status": "completed"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ) == (
        Message("developer", "d"),
        Message("user", "one two"),
        AssistantTurn("a"),
        Message("user", ""),
        AssistantTurn("no"),
    )


def test_RS_01_the_items_of_one_turn_are_one_turn() -> None:
    given = (
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        said("assistant", "Checking."),
        call("c1", "f"),
        call("c2", "g"),
        output("c1", "1"),
        output("c2", "2"),
    )
    assert items(*given) == (
        Message("user", "q"),
        AssistantTurn("Checking.", (ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "{}")), "R"),
        ToolResult("c1", "1"),
        ToolResult("c2", "2"),
    )


def test_RS_03_reasoning_that_others_encrypted_is_ignored_and_so_are_ids() -> None:
    foreign = {"type": "reasoning", "id": "rs_unknown", "summary": [], "encrypted_content": "gAAAx"}
    answer = {**said("assistant", "A"), "id": "msg_unknown"}
    fields = {"store": False, "include": ["reasoning.encrypted_content"]}
    read = parse(input=[USER, foreign, answer, USER], **fields).conversation
    assert read.items[1] == AssistantTurn("A")
    assert read == parse(input=[USER, said("assistant", "A"), USER]).conversation


def test_reasoning_is_what_it_says_else_what_was_sealed_else_its_summary() -> None:
    content = {"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}
    summary = {"summary": [{"type": "summary_text", "text": "s"}]}
    sealed_too = {"encrypted_content": sealed("x")}

    def thought(**fields: Any) -> str:
        (turn,) = items({"type": "reasoning", **fields})
        assert isinstance(turn, AssistantTurn)
        return turn.reasoning

    assert thought(**content, **summary, **sealed_too) == "ab"
    assert thought(content=None, **summary, **sealed_too) == "x"
    assert thought(content=[], **summary, encrypted_content=None) == "s"
    assert thought(summary=[]) == thought() == ""


@given(st.text(max_size=50))
def test_sealed_reasoning_comes_back(text: str) -> None:
    assert unsealed(sealed(text)) == text


@given(st.text(max_size=50))
def test_what_was_not_sealed_here_is_nothing(text: str) -> None:
    assert unsealed(text) == ""


@pytest.mark.parametrize("broken", ["*", "U*g==", "QQ", "/w==", "é"])
def test_a_broken_seal_is_nothing(broken: str) -> None:
    assert unsealed(sealed("") + broken) == ""


def test_RS_09_tool_output_in_parts_late_developer_messages_and_no_tools_are_fine() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert items(USER, call("c", "f"), output("c", parts))[-1] == ToolResult("c", "ab")
    roles = items(USER, {"role": "developer", "content": "D"}, USER)
    assert roles == (Message("user", "hi"), Message("developer", "D"), Message("user", "hi"))
    assert parse(tools=[], tool_choice="auto").conversation.tools == ()


@pytest.mark.parametrize(
    ("sent", "kept"),
    [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a":1}'), (None, ""), ("", ""), ('{"a": "Par', '{"a": "Par')],
    ids=["text", "object", "null", "empty", "broken"],
)
def test_arguments_are_kept_as_text_and_never_parsed(sent: object, kept: str) -> None:
    given = {"type": "function_call", "call_id": "c", "name": "f", "arguments": sent}
    assert items(given) == (AssistantTurn("", (ToolCall("c", "f", kept),)),)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "agent_message", "author": "a", "content": []},
        {"type": ["message"]},
    ],
    ids=lambda item: str(item.get("type")),
)
def test_items_that_this_server_cannot_read_are_named(item: dict[str, Any]) -> None:
    error = refused(input=[USER, item])
    assert error.param in ("input.1", "input.1.type")
    assert "input.1" in error.message


def test_RS_05_a_compaction_trigger_is_refused_by_name() -> None:
    error = refused(input=[USER, said("assistant", "A"), {"type": "compaction_trigger"}])
    assert error.param == "input.2.type"
    assert "compaction_trigger" in error.message


# --- the same conversation through another API ---------------------------------------------------------------------


def test_chat_and_responses_agree_on_every_key() -> None:
    """What counts for lineage, and for rendering, is the conversation and not the API it came by."""
    tool = {key: WEATHER[key] for key in ("name", "description", "parameters")}
    spawn = {"name": "agents__spawn", "parameters": {}}
    chat = ChatDialect().parse(
        json.dumps(
            {
                "model": "m",
                "tools": [{"type": "function", "function": function} for function in (tool, spawn)],
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "q"},
                    {
                        "role": "assistant",
                        "content": "Checking.",
                        "reasoning_content": "R",
                        "tool_calls": [
                            {"id": "c1", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}},
                            {"id": "c2", "function": {"name": "agents__spawn", "arguments": "{}"}},
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                    {"role": "tool", "tool_call_id": "c2", "content": "yes"},
                    {"role": "assistant", "content": "Sunny."},
                    {"role": "user", "content": "q2"},
                ],
            }
        ).encode()
    )
    responses = parse(
        instructions="s",
        tools=[WEATHER, {**AGENTS, "tools": AGENTS["tools"][:1]}, *HOSTED],
        input=[
            said("user", "q"),
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "R"}]},
            said("assistant", "Checking."),
            call("c1", "get_weather", '{"city":"Rome"}'),
            call("c2", "spawn", namespace="agents"),
            output("c1", "sunny"),
            output("c2", [{"type": "input_text", "text": "yes"}]),
            said("assistant", "Sunny."),
            said("user", "q2"),
        ],
    )
    assert responses.conversation == chat.conversation
    fingerprint = Fingerprinter().fingerprint
    assert fingerprint(responses.conversation).turn_keys == fingerprint(chat.conversation).turn_keys


# --- tools -------------------------------------------------------------------------------------------------------


def test_functions_of_a_namespace_get_flat_names() -> None:
    assert parse(tools=[WEATHER, AGENTS]).conversation.tools == (
        WEATHER_TOOL,
        Tool("agents__spawn", "", '{"type":"object","properties":{}}'),
        Tool("agents__wait", "", SCHEMA_JSON),
    )
    echoed = items(call("c", "spawn", namespace="agents"), call("d", "spawn"), tools=[AGENTS])
    assert echoed == (AssistantTurn("", (ToolCall("c", "agents__spawn", "{}"), ToolCall("d", "spawn", "{}"))),)


def test_what_only_openai_can_run_is_not_offered() -> None:
    assert offered(*HOSTED, WEATHER, {"type": "brand_new"}) == ("get_weather",)
    assert offered(*HOSTED) == ()
    request = parse(tools=[*HOSTED, HOSTED[0], {"type": "brand_new"}])
    assert request.tool_choice == "auto"
    assert request.left_out == tuple(f"tool_left_out:{name}" for name in ("web_search", "mcp", "shell", "other"))
    assert parse(tools=[WEATHER]).left_out == ()


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "local_shell"},
        {"type": "shell"},
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
        {"type": "computer"},
        {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "browser"},
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    ],
)
def test_what_the_client_runs_and_nobody_describes_is_refused(tool: dict[str, Any]) -> None:
    error = refused(tools=[WEATHER, tool])
    assert error.param == "tools.1.type"
    assert f"{tool['type']!r} are not supported" in error.message
    added = {"type": "additional_tools", "role": "developer", "tools": [tool]}
    assert refused(input=[added, USER]).param == "input.0.tools.0.type"
    inside = {"type": "namespace", "name": "n", "tools": [tool]}
    assert refused(tools=[inside]).param == "tools.0.tools.0.type"


def test_tools_that_a_server_searches_are_offered_all_at_once() -> None:
    request = parse(tools=[WEATHER, {"type": "tool_search", "execution": "server"}])
    assert (request.conversation.tools, request.left_out) == ((WEATHER_TOOL,), ("tool_left_out:tool_search",))


def test_input_items_can_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [PATCH, *HOSTED]}
    request = parse(input=[added, USER], tools=[WEATHER], tool_choice={"type": "custom", "name": "apply_patch"})
    assert [tool.name for tool in request.conversation.tools] == ["get_weather", "apply_patch"]
    assert request.conversation.items == (Message("user", "hi"),)
    assert refused(input=[added, {**added, "tools": [{"type": "function"}]}]).param == "input.1.tools.0.name"


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
    plain, ruled = parse(tools=[PATCH, {**PATCH, "name": "p2", "format": grammar}]).conversation.tools
    assert json.loads(plain.parameters_json)["required"] == ["input"]
    assert plain.description == "Edits files."
    assert ruled.description.startswith("Edits files.")
    assert "lark" in ruled.description
    assert ruled.description.endswith("start: X")
    given = (
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'say "é"\n'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    )
    turn, result = items(*given)
    assert isinstance(turn, AssistantTurn)
    (asked,) = turn.tool_calls
    assert (asked.name, json.loads(asked.arguments)) == ("apply_patch", {"input": 'say "é"\n'})
    assert result == ToolResult("c", "done")


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "get_weather"}, NamedToolChoice("get_weather")),
        ({"type": "function", "name": "agents__wait"}, NamedToolChoice("agents__wait")),
        ({"type": "function", "name": "wait"}, NamedToolChoice("agents__wait")),
        ({"type": "function", "name": "wait", "namespace": "agents"}, NamedToolChoice("agents__wait")),
        ({"type": "custom", "name": "apply_patch"}, NamedToolChoice("apply_patch")),
    ],
)
def test_tool_choice(sent: object, meant: object) -> None:
    request = parse(tools=[WEATHER, AGENTS, PATCH, *HOSTED], tool_choice=sent)
    assert request.tool_choice == meant
    assert len(request.conversation.tools) == 4


def test_a_function_is_chosen_by_its_own_name_before_one_of_a_namespace() -> None:
    tools = [AGENTS, {"type": "function", "name": "wait"}]
    assert parse(tools=tools, tool_choice={"type": "function", "name": "wait"}).tool_choice == NamedToolChoice("wait")


@pytest.mark.parametrize(
    ("mode", "allowed", "meant", "left"),
    [
        ("auto", [WEATHER, PATCH], "auto", ["get_weather", "apply_patch"]),
        ("auto", [HOSTED[0]], "auto", []),
        ("required", [PATCH, {"type": "function", "name": "wait"}], "required", ["agents__wait", "apply_patch"]),
        (
            "required",
            [WEATHER, HOSTED[0]],
            NamedToolChoice("get_weather"),
            ["get_weather", "agents__spawn", "agents__wait", "apply_patch"],
        ),
    ],
)
def test_allowed_tools_narrow_the_offer(mode: str, allowed: list[Any], meant: object, left: list[str]) -> None:
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    request = parse(tools=[WEATHER, AGENTS, PATCH, *HOSTED], tool_choice=choice)
    assert request.tool_choice == meant
    assert [tool.name for tool in request.conversation.tools] == left


# --- everything else ----------------------------------------------------------------------------------------------


def test_sampling_limits_and_streaming() -> None:
    request = parse(temperature=0.5, top_p=1, top_k=5, max_output_tokens=9, stream=True, parallel_tool_calls=False)
    assert request.sampling == {"temperature": 0.5, "top_p": 1, "top_k": 5}
    assert (request.max_tokens, request.stream, request.parallel_tool_calls) == (9, True, False)
    assert parse(max_tokens=3, max_completion_tokens=4).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"top_logprobs": 5}, None),
        ({"include": None, "top_logprobs": None}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["file_search_call.results", "message.output_text.logprobs"], "top_logprobs": 5}, 5),
    ],
)
def test_log_probs_are_shown_when_asked_for(fields: dict[str, Any], shown: int | None) -> None:
    assert parse(**fields).top_logprobs == shown


def test_text_format_is_the_response_format_of_chat() -> None:
    assert parse(text={"format": {"type": "text"}, "verbosity": "low"}).response_format is None
    assert parse(text={"format": None}).response_format is None
    assert parse(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True, "description": "d"}
    assert parse(text={"format": form}).response_format == {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
    }
    del form["strict"]
    loose = parse(text={"format": form}).response_format
    assert loose == {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


def test_fields_that_mean_nothing_here_are_ignored() -> None:
    ignored = {
        "store": True,
        "service_tier": "flex",
        "truncation": "auto",
        "reasoning": {"effort": "high"},
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "stream_options": {"include_obfuscation": False},
        "context_management": [{"type": "compaction"}],
        "previous_response_id": None,
        "conversation": None,
        "background": False,
        "required_prefix_token_ids": [9, 9],
        "prompt_token_ids": [1],
    }
    request, bare = parse(**ignored), parse()
    assert (request.conversation, request.sampling) == (bare.conversation, bare.sampling)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [USER, {"role": "tool", "content": "x"}]}, "input.1.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [output("c", [{"type": "input_image"}])]}, "input.0.output.0.type"),
        ({"input": [output("c", {"a": 1})]}, "input.0.output"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"input": [{**call("c", "f"), "arguments": 1}]}, "input.0.arguments"),
        ({"input": [call("c", "f", namespace=1)]}, "input.0.namespace"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "p"}]}, "input.0.input"),
        ({"input": [{"type": "reasoning", "content": "R"}]}, "input.0.content"),
        ({"input": [{"type": "reasoning", "summary": [{"text": 1}]}]}, "input.0.summary.0.text"),
        ({"input": [{"type": "reasoning", "encrypted_content": 1}]}, "input.0.encrypted_content"),
        ({"input": [{"type": "additional_tools"}]}, "input.0.tools"),
        ({"instructions": ["x"]}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{**WEATHER, "parameters": []}]}, "tools.0.parameters"),
        ({"tools": [{**WEATHER, "strict": 1}]}, "tools.0.strict"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools"),
        ({"tools": [{**AGENTS, "tools": [{"type": "function"}]}]}, "tools.0.tools.0.name"),
        ({"tools": [AGENTS, {"type": "function", "name": "agents__wait"}]}, "tools.1"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*HOSTED], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*HOSTED], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "get_weather"}}, "tool_choice"),
        (
            {
                "tools": [AGENTS, {**AGENTS, "name": "others"}],
                "tool_choice": {"type": "function", "name": "wait"},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
            "tool_choice.tools.0",
        ),
        ({"include": "all"}, "include"),
        ({"include": [1]}, "include.0"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"metadata": []}, "metadata"),
        ({"reasoning": "high"}, "reasoning"),
        ({"text": "json"}, "text"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ],
    ids=str,
)
def test_an_error_names_what_is_wrong(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param.split(".")[0] in error.message
