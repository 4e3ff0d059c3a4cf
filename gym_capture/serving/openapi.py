"""What the routes take and answer, as `/openapi.json` describes them.

Invariant: a body that does not fit the schema here is refused with 400, and what is answered fits it. The schemas name
the fields that this graph reads; others are ignored, which is what `additionalProperties` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gym_capture.dialects.fields import MAX_COUNT, MAX_STOP_STRINGS

Schema = Mapping[str, Any]

_STRING: Final[Schema] = {"type": "string"}
_NAME: Final[Schema] = {"type": "string", "minLength": 1}
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_OBJECT: Final[Schema] = {"type": "object"}
_NUMBER: Final[Schema] = {"type": "number"}
"""Of sampling parameters: their ranges are the engine's to judge."""
_POSITIVE: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """`optional` members may be null too, which means what leaving them out means."""
    may_be_null = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in (optional or {}).items()}
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **may_be_null},
        "additionalProperties": True,
    }


def _array(items: Schema, *, at_least: int = 0, at_most: int | None = None) -> Schema:
    array = {"type": "array", "items": items, "minItems": at_least}
    return array if at_most is None else {**array, "maxItems": at_most}


_SAMPLING: Final[Mapping[str, Schema]] = {"temperature": _NUMBER, "top_p": _NUMBER}
_STOPS: Final = _array(_NAME, at_most=MAX_STOP_STRINGS)
_STOP: Final[Schema] = {"anyOf": [_NAME, _STOPS]}


def _content(*types: str, is_typed: bool = True) -> Schema:
    """Text, or parts of it."""
    kind = {"type": _one_of(*types)}
    part = _object({**kind, "text": _STRING}) if is_typed else _object({"text": _STRING}, kind)
    return {"anyOf": [_STRING, _array(part)]}


_FUNCTION: Final = _object({"name": _STRING}, {"description": _STRING, "parameters": _OBJECT})

_CHAT: Final = _object(
    {
        "model": _STRING,
        "messages": _array(
            _object({"role": _one_of("system", "user"), "content": _content("text", is_typed=False)}), at_least=1
        ),
    },
    {
        **_SAMPLING,
        "max_tokens": _POSITIVE,
        "max_completion_tokens": _POSITIVE,
        "stream": _BOOLEAN,
        "stop": _STOP,
        "logprobs": _BOOLEAN,
        "n": {"enum": [1]},
        "modalities": _array(_one_of("text")),
        "tools": _array(_object({"type": _one_of("function"), "function": _FUNCTION})),
    },
)
_COMPLETION: Final = _object(
    {"model": _STRING, "prompt": _NAME},
    {**_SAMPLING, "max_tokens": _POSITIVE, "stream": _BOOLEAN, "stop": _STOP, "n": {"enum": [1]}},
)
_RESPONSE: Final = _object(
    {
        "model": _STRING,
        "input": {
            "anyOf": [
                _STRING,
                _array(
                    _object({"role": _one_of("system", "developer", "user"), "content": _content("input_text")}),
                    at_least=1,
                ),
            ]
        },
    },
    {**_SAMPLING, "instructions": _STRING, "max_output_tokens": _POSITIVE, "stream": _BOOLEAN},
)
_MESSAGES: Final = {
    "model": _STRING,
    "messages": _array(_object({"role": _one_of("user"), "content": _content("text")}), at_least=1),
}
_BEFORE_MESSAGES: Final = {
    "system": _content("text"),
    "tools": _array(_object({"name": _STRING, "input_schema": _OBJECT}, {"description": _STRING})),
}
_COUNT: Final = _object(_MESSAGES, _BEFORE_MESSAGES)
_MESSAGE: Final = _object(
    {**_MESSAGES, "max_tokens": _POSITIVE},
    {**_BEFORE_MESSAGES, **_SAMPLING, "stream": _BOOLEAN, "stop_sequences": _STOPS},
)

_OPENAI_ERROR: Final = _object({"error": _object({"message": _STRING, "type": _STRING}, {"param": {}, "code": {}})})
_ANTHROPIC_ERROR: Final = _object({"type": _one_of("error"), "error": _object({"type": _STRING, "message": _STRING})})


def _reply(**fields: Schema) -> Schema:
    return _object({"id": _NAME, "model": _STRING, **fields})


_ROUTES: Final[Mapping[str, tuple[str, Schema, Schema, Schema, bool]]] = {
    "/v1/chat/completions": (
        "OpenAI Chat Completions",
        _CHAT,
        _reply(object=_one_of("chat.completion"), choices=_array(_OBJECT, at_least=1), usage=_OBJECT),
        _OPENAI_ERROR,
        True,
    ),
    "/v1/completions": (
        "OpenAI Completions: text that goes on as it is, without a chat template",
        _COMPLETION,
        _reply(object=_one_of("text_completion"), choices=_array(_OBJECT, at_least=1), usage=_OBJECT),
        _OPENAI_ERROR,
        True,
    ),
    "/v1/responses": (
        "OpenAI Responses, without a store: send the whole conversation",
        _RESPONSE,
        _reply(object=_one_of("response"), status=_STRING, output=_array(_OBJECT), usage=_OBJECT),
        _OPENAI_ERROR,
        True,
    ),
    "/v1/messages": (
        "Anthropic Messages",
        _MESSAGE,
        _reply(type=_one_of("message"), role=_one_of("assistant"), content=_array(_OBJECT), usage=_OBJECT),
        _ANTHROPIC_ERROR,
        True,
    ),
    "/v1/messages/count_tokens": (
        "How many tokens the prompt of a Messages request would have",
        _COUNT,
        _object({"input_tokens": {"type": "integer", "minimum": 1}}),
        _ANTHROPIC_ERROR,
        False,
    ),
}

_FAILURES: Final = {
    "400": "The request is at fault: the message names the field.",
    "401": "A token is missing.",
    "403": "The token is one for something else.",
    "404": "No such model.",
    "409": "The rollout is over: its records have been consumed.",
    "413": "The body is too large.",
    "500": "The server is at fault; its log has the details.",
    "503": "No capacity now: `Retry-After` says when to ask again. 529 in Anthropic's API.",
    "529": "No capacity now: `Retry-After` says when to ask again.",
}


def describe(path: str, *, in_rollout: bool) -> dict[str, Any]:
    """What FastAPI adds to its description of `POST {path}`."""
    summary, body, reply, error, streams = _ROUTES[path]
    content: dict[str, Any] = {"application/json": {"schema": reply}}
    if streams:
        content["text/event-stream"] = {"schema": {}}
    failures = {
        status: {"description": description, "content": {"application/json": {"schema": error}}}
        for status, description in _FAILURES.items()
    }
    found: dict[str, Any] = {
        "summary": summary + (", recorded as a call of a rollout" if in_rollout else ""),
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The reply.", "content": content}, **failures},
    }
    if in_rollout:
        found["parameters"] = [
            {
                "name": "rollout_id",
                "in": "path",
                "required": True,
                "schema": {
                    "type": "string",
                    "pattern": "^[A-Za-z0-9_.-]{1,128}$",
                    "not": {"enum": [".", ".."]},
                },
            }
        ]
    return found
