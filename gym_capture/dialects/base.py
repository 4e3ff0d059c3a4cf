"""The dialect seam: one wire API, parsed into `ModelRequest` and spoken back.

Invariant: a dialect is pure. It never sees a token id, and whatever a client sends ends as a `ModelRequest` or as an
`InvalidRequestError` that names the parameter.

Flow: `parse(body)` -> the graph generates -> `reply(...)` for a whole body, or a `StreamEncoder`: `start`, `events`...
with `keep_alive` wherever nothing is ready, then exactly one of `finish` (after the record is durable) or `error`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import orjson

from gym_capture.calls import ModelReply, ModelRequest, ReplyEvent, TokenLogProb
from gym_capture.conversation import json_without_surrogates
from gym_capture.errors import InvalidRequestError, Overflow

__all__ = [
    "ApiError",
    "Dialect",
    "ErrorKind",
    "ReplyIdentity",
    "Route",
    "Schema",
    "StreamEncoder",
    "TokenCounting",
    "json_type",
    "parse_object",
]

ErrorKind: TypeAlias = Literal[
    "invalid_request",
    "context_length",
    "too_large",
    "timeout",
    "not_found",
    "unknown_model",
    "authentication",
    "permission",
    "conflict",
    "overloaded",
    "internal",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """A classified error, before a dialect gives it its shape."""

    status: int
    kind: ErrorKind
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    overflow: Overflow | None = None
    """Of a context_length error: dialects say it in the words that their clients look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyIdentity:
    """The fields by which a reply is known."""

    call_id: str
    model: str
    """The name that the client asked for: clients compare it."""
    created: int
    """Unix seconds."""


class StreamEncoder(Protocol):
    """Encodes one reply as server-sent events."""

    def start(self, prompt_tokens: int) -> bytes:
        """The events that announce a reply; `prompt_tokens` is the length of its prompt."""
        ...

    def keep_alive(self) -> bytes:
        """Tells client and proxies that the connection lives, and nothing else. Fits between any two events."""
        ...

    def events(self, events: Sequence[ReplyEvent], log_probs: Sequence[TokenLogProb] | None) -> bytes:
        """Bytes of what is new; may be empty."""
        ...

    def finish(self, reply: ModelReply) -> bytes:
        """The terminal events. Sent only after the record of the call is durable."""
        ...

    def error(self, error: ApiError) -> bytes:
        """A terminal error: the client must not mistake it for a finished reply."""
        ...


Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema; `description` has the words for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path that takes `POST`, below every base URL of the graph, as `/openapi.json` describes it."""

    path: str
    summary: str
    body: Schema
    reply: Schema
    error: Schema
    streams: bool = True
    """Whether a reply may also come as server-sent events."""


class TokenCounting(Protocol):
    """How clients of an API ask how long the prompt of a request would be."""

    @property
    def route(self) -> Route: ...

    def parse(self, body: bytes) -> ModelRequest:
        """Reads only what shapes the prompt. Raises `InvalidRequestError`."""
        ...

    def reply(self, tokens: int) -> bytes:
        """`tokens`: the whole prompt, as it would be generated from."""
        ...


class Dialect(Protocol):
    """One wire API. `registry.DIALECTS` lists them all."""

    @property
    def route(self) -> Route:
        """Where its calls go."""
        ...

    @property
    def counting(self) -> TokenCounting | None:
        """None: this API has no such thing."""
        ...

    @property
    def id_prefix(self) -> str:
        """How ids of its replies begin."""
        ...

    def parse(self, body: bytes) -> ModelRequest:
        """Raises `InvalidRequestError`."""
        ...

    def reply(self, request: ModelRequest, identity: ReplyIdentity, reply: ModelReply) -> bytes: ...

    def stream(self, request: ModelRequest, identity: ReplyIdentity) -> StreamEncoder: ...

    def error(self, error: ApiError) -> bytes: ...

    def status(self, error: ApiError) -> int:
        """The HTTP status by which this API's clients know such an error."""
        ...


def parse_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in `body`. Raises `InvalidRequestError`.

    JavaScript clients that cut a string inside an emoji send a lone surrogate; those become U+FFFD here, since
    neither UTF-8 nor a tokenizer can hold them.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:
            value = json_without_surrogates(json.loads(body.decode("utf-8-sig"), parse_constant=_no_number))
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, not {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """The name of a value's type as a JSON person would say it."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _no_number(name: str) -> float:
    """JSON has no NaN and no Infinity."""
    raise ValueError(f"{name} is no JSON")
