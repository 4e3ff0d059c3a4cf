"""OpenAI Chat Completions.

Invariant: fields that this graph does not know are ignored, never an error: harnesses send new ones every month. Fields
that name token ids or a prefix are among them, so a client cannot choose what the policy sees. What a client would wait
for in vain is an error that says what to do: audio, and the `functions` of before tools. A reply in that old form has
room for one call, where a policy makes several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

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
    ToolChoice,
    Usage,
)
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
from gym_capture.dialects import fields
from gym_capture.dialects.base import ApiError, ReplyIdentity, Route, StreamEncoder, parse_object
from gym_capture.dialects.description import (
    BOOLEAN,
    OBJECT,
    OPENAI_ERROR,
    POSITIVE,
    SAMPLING,
    STOP,
    STRING,
    array_of,
    content_of,
    object_of,
    one_of,
    reply_of,
)
from gym_capture.errors import InvalidRequestError

_ERROR_TYPES: Final = {
    "invalid_request": ("invalid_request_error", None),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "timeout": ("invalid_request_error", "request_timeout"),
    "not_found": ("invalid_request_error", None),
    "unknown_model": ("invalid_request_error", "model_not_found"),
    "authentication": ("authentication_error", "invalid_api_key"),
    "permission": ("permission_error", None),
    "conflict": ("invalid_request_error", "conflict"),
    "overloaded": ("overloaded_error", "overloaded"),
    "internal": ("server_error", None),
}


_FUNCTION: Final = object_of({"name": STRING}, {"description": STRING, "parameters": OBJECT})

_BODY: Final = object_of(
    {
        "model": STRING,
        "messages": array_of(
            object_of({"role": one_of("system", "user"), "content": content_of("text", is_typed=False)}), at_least=1
        ),
    },
    {
        **SAMPLING,
        "max_tokens": POSITIVE,
        "max_completion_tokens": POSITIVE,
        "stream": BOOLEAN,
        "stop": STOP,
        "logprobs": BOOLEAN,
        "n": {"enum": [1]},
        "modalities": array_of(one_of("text")),
        "tools": array_of(object_of({"type": one_of("function"), "function": _FUNCTION})),
    },
)


class ChatDialect:
    """`POST /v1/chat/completions`."""

    route = Route(
        path="/v1/chat/completions",
        summary="OpenAI Chat Completions",
        body=_BODY,
        reply=reply_of(object=one_of("chat.completion"), choices=array_of(OBJECT, at_least=1), usage=OBJECT),
        error=OPENAI_ERROR,
    )
    counting = None
    id_prefix = "chatcmpl-"

    def parse(self, body: bytes) -> ModelRequest:
        data = parse_object(body)
        fields.one_generation(data, "n")
        stream = bool(fields.boolean(data, "stream"))
        _refuse_unserved(data)
        tool_choice, tools = _tool_choice(data.get("tool_choice"), _tools(data))
        top_logprobs = None
        if fields.boolean(data, "logprobs"):
            top_logprobs = fields.count(data, "top_logprobs", minimum=0) or 0
        limits = [fields.count(data, key, minimum=1) for key in ("max_completion_tokens", "max_tokens")]
        max_tokens = next((limit for limit in limits if limit is not None), None)
        response_format = data.get("response_format")
        if response_format is not None:
            fields.mapping(response_format, "response_format")
        return ModelRequest(
            requested_model=fields.required_string(data, "model"),
            conversation=Conversation(items=_items(data), tools=tools),
            sampling=fields.sampling(data),
            max_tokens=max_tokens,
            tool_choice=tool_choice,
            parallel_tool_calls=fields.boolean(data, "parallel_tool_calls"),
            response_format=response_format,
            top_logprobs=top_logprobs,
            left_out=() if data.get("web_search_options") is None else (fields.left_out("web_search"),),
            stream=stream,
            include_usage=fields.wants_usage(data),
        )

    def reply(self, request: ModelRequest, identity: ReplyIdentity, reply: ModelReply) -> bytes:
        turn = reply.turn
        content = None if turn.tool_calls and not turn.text else turn.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None if reply.log_probs is None else {"content": [log_prob(p) for p in reply.log_probs]},
            "finish_reason": reply.finish_reason,
        }
        return orjson.dumps(
            {
                "id": identity.call_id,
                "object": "chat.completion",
                "created": identity.created,
                "model": identity.model,
                "choices": [choice],
                "usage": usage(reply.usage),
            }
        )

    def stream(self, request: ModelRequest, identity: ReplyIdentity) -> StreamEncoder:
        return _ChatStream(identity, include_usage=request.include_usage)

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps(_error(error))

    def status(self, error: ApiError) -> int:
        return error.status


class _ChatStream:
    """Chunks are assembled from a prefix encoded once: one JSON string is all that a text delta costs."""

    def __init__(self, identity: ReplyIdentity, *, include_usage: bool) -> None:
        head = {
            "id": identity.call_id,
            "object": "chat.completion.chunk",
            "created": identity.created,
            "model": identity.model,
        }
        self._prefix = b"data: " + orjson.dumps(head)[:-1]
        self._include_usage = include_usage

    def start(self, prompt_tokens: int) -> bytes:
        return self._chunk(b'{"role":"assistant","content":""}')

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def events(self, events: Sequence[ReplyEvent], log_probs: Sequence[TokenLogProb] | None) -> bytes:
        shown = b"null"
        if log_probs is not None:
            shown = orjson.dumps({"content": [log_prob(p) for p in log_probs]})
            if not events:
                return self._chunk(b"{}", log_probs=shown)
        out: list[bytes] = []
        for event in events:
            out.append(self._chunk(_delta(event), log_probs=shown))
            shown = b"null"
        return b"".join(out)

    def finish(self, reply: ModelReply) -> bytes:
        out = self._chunk(b"{}", finish=orjson.dumps(reply.finish_reason))
        if self._include_usage:
            out += self._prefix + b',"choices":[],"usage":' + orjson.dumps(usage(reply.usage)) + b"}\n\n"
        return out + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + orjson.dumps(_error(error)) + b"\n\n"

    def _chunk(self, delta: bytes, *, log_probs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b,"choices":[{"index":0,"delta":%b,"logprobs":%b,"finish_reason":%b}]}\n\n' % (
            self._prefix,
            delta,
            log_probs,
            finish,
        )


def _delta(event: ReplyEvent) -> bytes:
    match event:
        case TextDelta(text):
            return b'{"content":%b}' % orjson.dumps(text)
        case ReasoningDelta(text):
            return b'{"reasoning_content":%b}' % orjson.dumps(text)
        case ToolCallStart(index, id, name):
            start = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return orjson.dumps({"tool_calls": [start]})
        case ToolCallDelta(index, arguments):
            return orjson.dumps({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})


def log_prob(shown: TokenLogProb) -> dict[str, Any]:
    """A token's log probability as OpenAI's APIs spell it."""

    def one(token: str, log_prob: float) -> dict[str, Any]:
        # JSON has no -inf; OpenAI uses -9999 for "as good as impossible".
        return {"token": token, "logprob": max(log_prob, -9999.0), "bytes": list(token.encode())}

    return {**one(shown.token, shown.log_prob), "top_logprobs": [one(*top) for top in shown.top]}


def usage(counts: Usage) -> dict[str, Any]:
    """Counts as OpenAI's APIs of before Responses spell them."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


def message_of(error: ApiError) -> str:
    """The error in OpenAI's words. There are two ways to say that a context overflows, and clients look for either."""
    overflow = error.overflow
    if overflow is None:
        return error.message
    return (
        f"Input tokens exceed the configured limit of {overflow.longest_prompt} tokens. This model's maximum context "
        f"length is {overflow.context} tokens, generation included, but your messages resulted in {overflow.counted} "
        "tokens. Shorten the conversation."
    )


def _error(error: ApiError) -> dict[str, Any]:
    kind, code = _ERROR_TYPES[error.kind]
    return {"error": {"message": message_of(error), "type": kind, "param": error.param, "code": code}}


# --- parsing ------------------------------------------------------------------------------------------------------


def _items(data: Mapping[str, Any]) -> tuple[Item, ...]:
    if "messages" not in data:
        raise InvalidRequestError("messages is missing", param="messages")
    messages = fields.array(data["messages"], "messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return merge_assistant_turns(_item(message, f"messages.{index}") for index, message in enumerate(messages))


def _item(value: object, at: str) -> Item:
    message = fields.mapping(value, at)
    role = fields.required_string(message, "role", at=f"{at}.")
    if role in ("system", "developer", "user"):
        return Message(role, fields.text(message.get("content"), f"{at}.content"))
    if role == "assistant":
        return _assistant(message, at)
    if role == "tool":
        call_id = fields.required_string(message, "tool_call_id", at=f"{at}.")
        return ToolResult(call_id, fields.text(message.get("content"), f"{at}.content", optional=True))
    if role == "function":
        raise _legacy(f"{at}.role", "the role 'tool'")
    raise InvalidRequestError(
        f"{at}.role must be system, developer, user, assistant or tool: got {role[:40]!r}", param=f"{at}.role"
    )


def _assistant(message: Mapping[str, Any], at: str) -> AssistantTurn:
    if message.get("function_call"):
        raise _legacy(f"{at}.function_call", "tool_calls")
    if message.get("audio"):
        raise InvalidRequestError(f"{at}.audio is not supported: this model takes text only", param=f"{at}.audio")
    content, thoughts = message.get("content"), ""
    if isinstance(content, list):
        content, thoughts = _without_thoughts(content, f"{at}.content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return AssistantTurn(
        text=fields.text(content, f"{at}.content", optional=True),
        tool_calls=_tool_calls(message.get("tool_calls"), f"{at}.tool_calls"),
        reasoning=reasoning if isinstance(reasoning, str) and reasoning else thoughts,
    )


def _without_thoughts(content: list[Any], at: str) -> tuple[list[Any], str]:
    """The parts of an assistant's content that are text, and what its `thinking` parts say."""
    parts: list[Any] = []
    thoughts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "thinking":
            thoughts.append(fields.required_string(part, "thinking", at=f"{at}.{index}."))
        else:
            parts.append(part)
    return parts, "".join(thoughts)


def _tool_calls(value: object, at: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    calls: list[ToolCall] = []
    for index, item in enumerate(fields.array(value, at)):
        call = fields.mapping(item, f"{at}.{index}")
        function = fields.mapping(call.get("function"), f"{at}.{index}.function")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = fields.json_text(arguments, f"{at}.{index}.function.arguments")
        elif arguments is not None and not isinstance(arguments, str):
            raise fields.wrong_type(f"{at}.{index}.function.arguments", "a string", arguments)
        calls.append(
            ToolCall(
                id=fields.string(call, "id", at=f"{at}.{index}.") or "",
                name=fields.required_string(function, "name", at=f"{at}.{index}.function."),
                arguments=arguments or "",
            )
        )
    return tuple(calls)


def _tools(data: Mapping[str, Any]) -> tuple[Tool, ...]:
    value = data.get("tools")
    if value is None:
        return ()
    found: list[Tool] = []
    for index, item in enumerate(fields.array(value, "tools")):
        at = f"tools.{index}"
        entry = fields.mapping(item, at)
        kind = entry.get("type", "function")
        if kind != "function":
            raise InvalidRequestError(f"{at}.type must be 'function': got {fields.shown(kind)!r}", param=f"{at}.type")
        function = fields.mapping(entry.get("function"), f"{at}.function")
        found.append(
            fields.tool(
                fields.required_string(function, "name", at=f"{at}.function."),
                fields.string(function, "description", at=f"{at}.function."),
                function.get("parameters"),
                f"{at}.function",
                strict=fields.boolean(function, "strict", at=f"{at}.function."),
            )
        )
    return tuple(found)


def _tool_choice(value: object, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that are left to choose from.

    `allowed_tools` narrows the offer itself, as in Responses: that is the one way in which every model obeys it.
    """
    if value is None or value == "auto":
        return "auto", tools
    if value == "none":
        return "none", tools
    if not tools:
        raise InvalidRequestError("tool_choice needs tools to choose from", param="tool_choice")
    if value == "required":
        return "required", tools
    if not isinstance(value, dict):
        raise InvalidRequestError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    if value.get("type") != "allowed_tools":
        return NamedToolChoice(_chosen(value, tools, "tool_choice")), tools
    at = "tool_choice.allowed_tools"
    narrowed = fields.mapping(value.get("allowed_tools"), at)
    mode = narrowed.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{at}.mode must be 'auto' or 'required'", param=f"{at}.mode")
    entries = fields.array(narrowed.get("tools"), f"{at}.tools")
    allowed = {_chosen(entry, tools, f"{at}.tools.{index}") for index, entry in enumerate(entries)}
    if mode == "required" and len(allowed) == 1:
        return NamedToolChoice(allowed.pop()), tools
    if mode == "required" and not allowed:
        raise InvalidRequestError(f"{at}.tools must not be empty", param=f"{at}.tools")
    return mode, tuple(tool for tool in tools if tool.name in allowed)


def _chosen(value: object, tools: tuple[Tool, ...], at: str) -> str:
    """The name of the one tool that `value` means."""
    function = fields.mapping(fields.mapping(value, at).get("function"), f"{at}.function")
    name = fields.required_string(function, "name", at=f"{at}.function.")
    if name not in {tool.name for tool in tools}:
        raise InvalidRequestError(f"{at} names {name[:64]!r}, which is not among tools", param=at)
    return name


def _refuse_unserved(data: Mapping[str, Any]) -> None:
    """Refuses fields that would be ignored although the client relies on them."""
    for key, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        # The words mean what leaving them out means, where no functions are offered.
        if data.get(key) and data[key] not in ("auto", "none"):
            raise _legacy(key, instead)
    modalities = data.get("modalities")
    if modalities is not None and set(fields.strings(modalities, "modalities")) - {"text"}:
        raise InvalidRequestError("modalities must be ['text']: this model answers with text only", param="modalities")


def _legacy(param: str, instead: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} belongs to the API of before tools, which is not supported: send {instead} instead", param=param
    )
