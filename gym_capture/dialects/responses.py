"""OpenAI Responses: `POST /v1/responses`, without a store.

Invariant: a request says everything. What would need state of this server (`previous_response_id`, `conversation`,
`background`, item references) is an error that says so; fields that this graph does not know are ignored.

Flow: `responses_input` and `responses_tools` read the body -> a reply is written by `responses_output`, or as it comes
by `responses_stream`. What a reply repeats of its request is encoded while parsing: what cannot be repeated is refused
before anything is generated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gym_capture.calls import ModelReply, ModelRequest
from gym_capture.conversation import Conversation
from gym_capture.dialects import fields
from gym_capture.dialects.base import ApiError, ReplyIdentity, Route, StreamEncoder, parse_object
from gym_capture.dialects.chat import ChatDialect
from gym_capture.dialects.description import (
    BOOLEAN,
    OBJECT,
    OPENAI_ERROR,
    POSITIVE,
    SAMPLING,
    STRING,
    array_of,
    content_of,
    object_of,
    one_of,
    reply_of,
)
from gym_capture.dialects.responses_input import read_items, read_tool_entries
from gym_capture.dialects.responses_output import ID_PREFIX, ItemWriter, ResponseObject, error_param, final_status
from gym_capture.dialects.responses_stream import ResponsesStream
from gym_capture.dialects.responses_tools import choose, offer
from gym_capture.errors import InvalidRequestError

_CHAT: Final = ChatDialect()
_REPEATED_AS_THEY_ARE: Final = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "temperature",
    "top_p",
    "user",
)


_BODY: Final = object_of(
    {
        "model": STRING,
        "input": {
            "anyOf": [
                STRING,
                array_of(
                    object_of({"role": one_of("system", "developer", "user"), "content": content_of("input_text")}),
                    at_least=1,
                ),
            ]
        },
    },
    {**SAMPLING, "instructions": STRING, "max_output_tokens": POSITIVE, "stream": BOOLEAN},
)


class ResponsesDialect:
    """`POST /v1/responses`."""

    route = Route(
        path="/v1/responses",
        summary="OpenAI Responses, without a store: send the whole conversation",
        body=_BODY,
        reply=reply_of(object=one_of("response"), status=STRING, output=array_of(OBJECT), usage=OBJECT),
        error=OPENAI_ERROR,
    )
    counting = None
    id_prefix = ID_PREFIX

    def parse(self, body: bytes) -> ModelRequest:
        data = parse_object(body)
        _refuse_state(data)
        offered = offer(read_tool_entries(data))
        tool_choice, tools = choose(data.get("tool_choice"), offered)
        include = () if data.get("include") is None else fields.strings(data["include"], "include")
        top_logprobs = fields.count(data, "top_logprobs", minimum=0) or 0
        return ModelRequest(
            requested_model=fields.required_string(data, "model"),
            conversation=Conversation(items=read_items(data), tools=tools),
            sampling=fields.sampling(data),
            max_tokens=fields.count(data, "max_output_tokens", minimum=1),
            tool_choice=tool_choice,
            parallel_tool_calls=fields.boolean(data, "parallel_tool_calls"),
            response_format=_response_format(_object(data, "text")),
            top_logprobs=top_logprobs if "message.output_text.logprobs" in include else None,
            left_out=offered.left_out,
            stream=bool(fields.boolean(data, "stream")),
            echo={
                "members": _repeated(data),
                "clients": offered.clients,
                "seals_reasoning": "reasoning.encrypted_content" in include,
            },
        )

    def reply(self, request: ModelRequest, identity: ReplyIdentity, reply: ModelReply) -> bytes:
        output = ItemWriter(request, identity).turn(reply)
        return ResponseObject(request, identity).encode(final_status(reply), output, usage=reply.usage)

    def stream(self, request: ModelRequest, identity: ReplyIdentity) -> StreamEncoder:
        return ResponsesStream(request, identity)

    def error(self, error: ApiError) -> bytes:
        """In the shape of Chat Completions, which both of OpenAI's APIs have."""
        return _CHAT.error(dataclasses.replace(error, param=error_param(error)))

    def status(self, error: ApiError) -> int:
        return error.status


def _refuse_state(data: Mapping[str, Any]) -> None:
    for key in ("previous_response_id", "conversation", "prompt"):
        if data.get(key):
            raise InvalidRequestError(
                f"{key} is not supported: this server stores nothing, so send the whole conversation as input",
                param=key,
            )
    if fields.boolean(data, "background"):
        raise InvalidRequestError("background is not supported: stream the response instead", param="background")


def _object(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return {} if value is None else fields.mapping(value, key)


def _response_format(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`text.format` as Chat Completions spells it."""
    if text.get("format") is None:
        return None
    form = fields.mapping(text["format"], "text.format")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        schema: dict[str, Any] = {
            "name": fields.required_string(form, "name", at="text.format."),
            "schema": fields.mapping(form.get("schema"), "text.format.schema"),
        }
        if (strict := fields.boolean(form, "strict", at="text.format.")) is not None:
            schema["strict"] = strict
        return {"type": "json_schema", "json_schema": schema}
    raise InvalidRequestError(
        f"text.format.type must be 'text', 'json_object' or 'json_schema': got {fields.shown(kind)!r}",
        param="text.format.type",
    )


def _repeated(data: Mapping[str, Any]) -> bytes:
    """The members of a response that say what was asked, encoded. Raises `InvalidRequestError` if they cannot be."""
    text = _object(data, "text")
    members = {
        **{key: data.get(key) for key in _REPEATED_AS_THEY_ARE},
        "metadata": _object(data, "metadata"),
        "parallel_tool_calls": data.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": None, "summary": None, **_object(data, "reasoning")},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": data.get("tools") or [],
        "top_logprobs": data.get("top_logprobs") or 0,
    }
    return b",".join(b'"%b":%b' % (key.encode(), _encoded(value, key)) for key, value in members.items())


def _encoded(value: object, param: str) -> bytes:
    """JSON of what was parsed from JSON. Raises `InvalidRequestError` for what nests too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits, or more than 254 levels
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{param} is nested too deep, or no JSON", param=param) from None
