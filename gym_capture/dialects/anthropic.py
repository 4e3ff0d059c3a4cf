"""Anthropic Messages: what a request means. How it is answered is `anthropic_reply`.

Invariant: a conversation means here what it means in Chat: the same history gives the same keys and the same prompt.
Fields that this graph does not know are ignored, never an error: harnesses send new ones every month. Blocks that it
cannot show to the policy are an error that names them, since an agent that goes on without them would be trained on
what it never saw.

What is decided here:

- Texts of several blocks are joined with nothing between them, as in Chat. `cache_control`, signatures and redacted
  thinking do not count.
- Results of tools come before the text that the same user message has, wherever in it they stand: a chat template
  wants them right behind the calls.
- System messages within `messages` stay where they are. Hoisting one to the top would rewrite the history that comes
  before it, and no prefix would ever match.
- Claude Code's billing header, which is new in every request, is left out of the prompt: it would give every rollout
  of a group a first prompt of its own, which neither prefix caching nor a trainer that groups by prompts survives.
- The last message cannot be the assistant's. Anthropic's API would go on writing it, a chat template can only begin
  another turn; nothing says which of the two the client would get, so it is told.
- Tools of Anthropic's servers are not offered to the policy: nobody would run them; the record names them. Tools that
  the client runs but that Anthropic defines (bash, text editor, ...) have no schema here to offer, and the client
  relies on them: an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import orjson

from gym_capture.calls import ModelReply, ModelRequest, NamedToolChoice, ToolChoice
from gym_capture.conversation import (
    AssistantTurn,
    Conversation,
    Item,
    Message,
    Tool,
    ToolCall,
    ToolResult,
    merge_assistant_turns,
)
from gym_capture.dialects import anthropic_reply, fields
from gym_capture.dialects.anthropic_blocks import Block, blocks
from gym_capture.dialects.anthropic_input import arguments_of
from gym_capture.dialects.base import ApiError, ReplyIdentity, Route, StreamEncoder, parse_object
from gym_capture.dialects.description import (
    BOOLEAN,
    OBJECT,
    POSITIVE,
    SAMPLING,
    STOPS,
    STRING,
    array_of,
    content_of,
    object_of,
    one_of,
    reply_of,
)
from gym_capture.errors import InvalidRequestError
from gym_capture.lineage.fingerprint import BILLING_HEADER

_RUN_BY_CLIENT: Final = ("bash_", "text_editor_", "computer_", "memory_", "browser_")
"""How types of tools begin that Anthropic defines and clients run; what follows is a date."""


_MESSAGES: Final = {
    "model": STRING,
    "messages": array_of(object_of({"role": one_of("user"), "content": content_of("text")}), at_least=1),
}
_BEFORE_MESSAGES: Final = {
    "system": content_of("text"),
    "tools": array_of(object_of({"name": STRING, "input_schema": OBJECT}, {"description": STRING})),
}
_COUNT: Final = object_of(_MESSAGES, _BEFORE_MESSAGES)
_MESSAGE: Final = object_of(
    {**_MESSAGES, "max_tokens": POSITIVE},
    {**_BEFORE_MESSAGES, **SAMPLING, "stream": BOOLEAN, "stop_sequences": STOPS},
)
_ERROR: Final = object_of({"type": one_of("error"), "error": object_of({"type": STRING, "message": STRING})})


class MessagesCounting:
    """`POST /v1/messages/count_tokens`. A request to count may end with the assistant's turn: nothing is generated,
    and agents measure what they have."""

    route = Route(
        path="/v1/messages/count_tokens",
        summary="How many tokens the prompt of a Messages request would have",
        body=_COUNT,
        reply=object_of({"input_tokens": {"type": "integer", "minimum": 1}}),
        error=_ERROR,
        streams=False,
    )

    def parse(self, body: bytes) -> ModelRequest:
        data = parse_object(body)
        return ModelRequest(requested_model=fields.required_string(data, "model"), conversation=_conversation(data))

    def reply(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


class MessagesDialect:
    """`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

    route = Route(
        path="/v1/messages",
        summary="Anthropic Messages",
        body=_MESSAGE,
        reply=reply_of(type=one_of("message"), role=one_of("assistant"), content=array_of(OBJECT), usage=OBJECT),
        error=_ERROR,
    )
    counting = MessagesCounting()
    id_prefix = "msg_"

    def parse(self, body: bytes) -> ModelRequest:
        data = parse_object(body)
        conversation = _conversation(data)
        if isinstance(conversation.items[-1], AssistantTurn):
            raise InvalidRequestError(
                "the last message is the assistant's: prefilling a reply is not supported; "
                "end the conversation with a user message",
                param="messages",
            )
        max_tokens = fields.count(data, "max_tokens", minimum=1)
        if max_tokens is None:
            raise InvalidRequestError("max_tokens is missing", param="max_tokens")
        tool_choice, parallel_tool_calls = _tool_choice(data.get("tool_choice"), conversation.tools)
        return ModelRequest(
            requested_model=fields.required_string(data, "model"),
            conversation=conversation,
            sampling=_sampling(data),
            max_tokens=max_tokens,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=_response_format(data),
            left_out=_left_out(data),
            stream=bool(fields.boolean(data, "stream")),
        )

    def reply(self, request: ModelRequest, identity: ReplyIdentity, reply: ModelReply) -> bytes:
        return anthropic_reply.whole(request, identity, reply)

    def stream(self, request: ModelRequest, identity: ReplyIdentity) -> StreamEncoder:
        return anthropic_reply.MessageStream(request, identity)

    def error(self, error: ApiError) -> bytes:
        return anthropic_reply.error_body(error)

    def status(self, error: ApiError) -> int:
        return anthropic_reply.OVERLOADED_STATUS if error.kind == "overloaded" else error.status


# --- the conversation ---------------------------------------------------------------------------------------------


def _conversation(data: Mapping[str, Any]) -> Conversation:
    if data.get("mcp_servers"):
        raise InvalidRequestError(
            "mcp_servers is not supported: connect to them in the agent, and offer their tools as tools",
            param="mcp_servers",
        )
    if "messages" not in data:
        raise InvalidRequestError("messages is missing", param="messages")
    messages = fields.array(data["messages"], "messages")
    items: list[Item] = list(_system(data.get("system"), "system"))
    for index, message in enumerate(messages):
        items += _items(message, f"messages.{index}")
    if not messages or not items:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return Conversation(items=merge_assistant_turns(items), tools=tuple(_tools(data)))


def _items(value: object, at: str) -> Iterable[Item]:
    message = fields.mapping(value, at)
    role = fields.required_string(message, "role", at=f"{at}.")
    content = message.get("content")
    if content is None:
        raise InvalidRequestError(f"{at}.content is missing", param=f"{at}.content")
    match role:
        case "user":
            return _user(content, f"{at}.content")
        case "assistant":
            return (_assistant(content, f"{at}.content"),)
        case "system":
            return _system(content, f"{at}.content")
        case _:
            raise InvalidRequestError(
                f"{at}.role must be user, assistant or system: got {role[:40]!r}", param=f"{at}.role"
            )


def _system(content: object, at: str) -> Iterable[Message]:
    """One message, or none if there is nothing to say."""
    text = "".join(_without_billing_header(block.text()) for block in blocks(content, at))
    return (Message("system", text),) if text else ()


def _user(content: object, at: str) -> Iterable[Item]:
    results: list[Item] = []
    texts: list[str] = []
    for block in blocks(content, at):
        if block.kind == "tool_result":
            call_id = fields.required_string(block.value, "tool_use_id", at=f"{block.at}.")
            parts = blocks(block.value.get("content"), f"{block.at}.content")
            results.append(ToolResult(call_id, "".join(part.shown() for part in parts)))
        else:
            texts.append(block.shown())
    text = "".join(texts)
    return (*results, Message("user", text)) if text or not results else results


def _assistant(content: object, at: str) -> AssistantTurn:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks(content, at):
        match block.kind:
            case "thinking":
                reasoning.append(fields.string(block.value, "thinking", at=f"{block.at}.") or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                texts.append(block.text())
    return AssistantTurn(text="".join(texts), tool_calls=tuple(calls), reasoning="".join(reasoning))


def _tool_call(block: Block) -> ToolCall:
    at = f"{block.at}.input"
    value = block.value.get("input")
    return ToolCall(
        id=fields.required_string(block.value, "id", at=f"{block.at}."),
        name=fields.required_string(block.value, "name", at=f"{block.at}."),
        arguments="" if value is None else arguments_of(fields.mapping(value, at), at),
    )


def _without_billing_header(text: str) -> str:
    for _, end in BILLING_HEADER.spans(Message("system", text)):
        return text[end:].lstrip("\r\n")
    return text


# --- everything else ----------------------------------------------------------------------------------------------


def _tools(data: Mapping[str, Any]) -> Iterator[Tool]:
    value = data.get("tools")
    for index, item in enumerate(() if value is None else fields.array(value, "tools")):
        at = f"tools.{index}"
        entry = fields.mapping(item, at)
        kind = fields.string(entry, "type", at=f"{at}.") or "custom"
        schema = entry.get("input_schema")
        if schema is None and kind.startswith(_RUN_BY_CLIENT):
            raise InvalidRequestError(
                f"{at}: tools of type {kind[:40]!r} are not supported, since only Anthropic's models know what they "
                "take; offer a tool of your own with an input_schema",
                param=f"{at}.type",
            )
        if schema is None and kind != "custom":
            continue
        yield fields.tool(
            fields.required_string(entry, "name", at=f"{at}."),
            fields.string(entry, "description", at=f"{at}."),
            fields.mapping(schema, f"{at}.input_schema"),
            at,
            key="input_schema",
            strict=fields.boolean(entry, "strict", at=f"{at}."),
        )


def _left_out(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of tools that `_tools` passes over; it has read them all by now."""
    kinds = (tool.get("type") for tool in data.get("tools") or () if tool.get("input_schema") is None)
    return tuple(dict.fromkeys(fields.left_out(kind) for kind in kinds))


def _tool_choice(value: object, tools: tuple[Tool, ...]) -> tuple[ToolChoice, bool | None]:
    """The choice, and whether several calls at once are fine; None: the client does not say."""
    if value is None:
        return "auto", None
    choice = fields.mapping(value, "tool_choice")
    kind = fields.required_string(choice, "type", at="tool_choice.")
    is_single = fields.boolean(choice, "disable_parallel_tool_use", at="tool_choice.")
    parallel = None if is_single is None else not is_single
    match kind:
        case "auto":
            return "auto", parallel
        case "none":
            return "none", parallel
        case "any" | "tool" if not tools:
            raise InvalidRequestError("tool_choice needs tools to choose from", param="tool_choice")
        case "any":
            return "required", parallel
        case "tool":
            name = fields.required_string(choice, "name", at="tool_choice.")
            if name in {tool.name for tool in tools}:
                return NamedToolChoice(name), parallel
            raise InvalidRequestError(
                f"tool_choice names {name[:64]!r}, which is not among tools", param="tool_choice.name"
            )
    raise InvalidRequestError(
        f"tool_choice.type must be auto, any, tool or none: got {kind[:40]!r}", param="tool_choice.type"
    )


def _sampling(data: Mapping[str, Any]) -> dict[str, Any]:
    """Type-checked; ranges are the engine's to judge."""
    found: dict[str, Any] = {}
    for key in ("temperature", "top_p"):
        if (value := fields.number(data, key)) is not None:
            found[key] = value
    if (top_k := fields.integer(data, "top_k")) is not None:
        found["top_k"] = top_k
    stop = data.get("stop_sequences")
    if stop is not None and (texts := fields.stop_strings(stop, "stop_sequences")):
        found["stop"] = texts
    return found


def _response_format(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`output_config.format`, or `output_format` as betas call it, in OpenAI's shape."""
    at = "output_config.format"
    config = data.get("output_config")
    value = None if config is None else fields.mapping(config, "output_config").get("format")
    if value is None:
        at, value = "output_format", data.get("output_format")
    if value is None:
        return None
    wanted = fields.mapping(value, at)
    kind = fields.required_string(wanted, "type", at=f"{at}.")
    if kind != "json_schema":
        raise InvalidRequestError(f"{at}.type must be 'json_schema': got {kind[:40]!r}", param=f"{at}.type")
    schema = fields.mapping(wanted.get("schema"), f"{at}.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
