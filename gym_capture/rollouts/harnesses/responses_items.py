"""Responses items: what an environment says, as a service is told it, and what a service replies, read with distrust.

Invariant: a reply that is read is a Responses object as far as anybody here looks into it, its calls are told apart by
their ids, and it can be written as JSON again. Items are kept as they came: what is not looked into is passed on.

Flow: Chat Completions `messages` and `tools` of an `Observation` -> `input` and `tools` of a request; the bytes of a
reply -> `AgentReply`, or a `ReplyError` that says what is wrong with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Observation

Item: TypeAlias = Mapping[str, Any]

_DEEPEST: Final = 64
"""Levels of a reply. Responses have about ten."""
_LONGEST_SHOWN: Final = 200


# --- what the service is told ----------------------------------------------------------------------------------------


def opening_items(observation: Observation) -> list[Item]:
    """The messages that a conversation begins with. Raises `ConfigError` for content other than text."""
    return [item for message in observation.messages for item in _items_of(message)]


def offered_tools(observation: Observation) -> list[Item]:
    """The environment's tools, which Responses write without the level `function`."""
    return [{"type": "function", "strict": False, **tool["function"]} for tool in observation.tools]


def output_of(call: FunctionCall | CustomCall, text: str) -> Item:
    """The item that answers a call."""
    return {"type": f"{call.type}_output", "call_id": call.call_id, "output": text}


def _items_of(message: Mapping[str, Any]) -> Iterator[Item]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": _text(content)}
        return
    calls = message.get("tool_calls") or []
    if content or not calls:
        yield {"type": "message", "role": role, "content": _text(content)}
    for call in calls:
        function = call["function"]
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content or [] if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) != len(content or []):
        raise ConfigError("a remote agent can be told text alone: the task has other content")
    return "".join(map(str, texts))


# --- what the service replies ----------------------------------------------------------------------------------------


class ReplyError(ValueError):
    """A fault of a reply."""

    is_json: bool = True


class NotJsonError(ReplyError):
    """It is not even JSON: whoever wrote it may not be the service."""

    is_json = False


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: Any = None

    @model_validator(mode="after")
    def _text_is_text(self) -> _Part:
        if self.type == "output_text" and not isinstance(self.text, str):
            raise ValueError("an output_text has a text")
        return self


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[_Part]


class FunctionCall(BaseModel):
    """A call of a function tool."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    status: str | None = None

    @property
    def is_cut(self) -> bool:
        """Its arguments may not be all that was to be said."""
        return self.status == "incomplete"


class CustomCall(BaseModel):
    """A call of a tool that takes free text. No environment has one."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str


class _Output(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str


class _Other(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Annotated[str, Field(min_length=1)]


_KINDS: Final[Mapping[str, TypeAdapter[Any]]] = {
    "message": TypeAdapter(_Message),
    "function_call": TypeAdapter(FunctionCall),
    "custom_tool_call": TypeAdapter(CustomCall),
    "function_call_output": TypeAdapter(_Output),
    "custom_tool_call_output": TypeAdapter(_Output),
}
_ANY: Final[TypeAdapter[_Other]] = TypeAdapter(_Other)


class _Response(BaseModel):
    model_config = ConfigDict(strict=True)

    object: Literal["response"]
    output: list[dict[str, Any]]
    # The others are of responses in the background, which nobody asked for.
    status: Literal["completed", "incomplete", "failed", "cancelled"] | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """One reply of the service."""

    response: Mapping[str, Any]
    """The whole reply as it came."""
    output: Sequence[Item]
    """Every item as it came."""
    pending: Sequence[FunctionCall | CustomCall]
    """Calls that no item of this output answers: the service asks for them."""
    call_ids: frozenset[str]
    """Of all calls."""
    answer: str | None
    """The text of the last message; None if there is none."""
    is_cut: bool
    """It ended at a limit of the service's own."""
    failure: str | None
    """The service's account of its failure."""


def read_reply(body: bytes, *, earlier: frozenset[str]) -> AgentReply:
    """Reads a reply in a conversation that has calls with the ids `earlier`. Raises `ReplyError`."""
    parsed = _parsed(body)
    response = _validated(TypeAdapter(_Response), parsed, "")
    calls: dict[str, FunctionCall | CustomCall] = {}
    answered: set[str] = set()
    answer = None
    for index, item in enumerate(response.output):
        kind = item.get("type")
        read = _validated(_KINDS.get(kind, _ANY) if isinstance(kind, str) else _ANY, item, f"output.{index}")
        match read:
            case FunctionCall() | CustomCall():
                if read.call_id in calls or read.call_id in earlier:
                    raise ReplyError(f"output.{index}.call_id: {_shown(read.call_id)} is the id of an earlier call")
                calls[read.call_id] = read
            case _Output():
                if read.call_id in answered:
                    raise ReplyError(f"output.{index}.call_id: {_shown(read.call_id)} is answered twice")
                answered.add(read.call_id)
            case _Message():
                answer = "".join(part.text for part in read.content if part.type == "output_text")
    if strays := answered - calls.keys():
        raise ReplyError(f"output: it answers {_shown(min(strays))}, and does not have that call")
    return AgentReply(
        response=parsed,
        output=response.output,
        pending=[call for call_id, call in calls.items() if call_id not in answered],
        call_ids=frozenset(calls),
        answer=answer,
        is_cut=response.status == "incomplete" or response.incomplete_details is not None,
        failure=_failure(response),
    )


def _failure(response: _Response) -> str | None:
    if response.error is not None:
        code = response.error.get("code")
        named = f"error {code:.40}" if isinstance(code, str) else "error"
        return f"{named}: {_shown(response.error.get('message', response.error))}"
    return f"status {response.status}" if response.status in ("failed", "cancelled") else None


def _validated(adapter: TypeAdapter[Any], value: object, at: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(filter(None, (at, *map(str, first["loc"])))) or "the reply"
        raise ReplyError(f"{where}: {first['msg']}: got {_shown(first['input'])}") from None


def _parsed(body: bytes) -> Any:
    try:
        parsed = json.loads(body, parse_constant=_no_number)
    except ReplyError:
        raise
    except RecursionError:
        raise ReplyError(f"it nests deeper than {_DEEPEST} levels") from None
    except ValueError as error:
        raise NotJsonError(f"it is no JSON: {error}: {_shown(body.decode(errors='replace'))}") from None
    # Level by level: what nests too deep must not be walked by recursion, nor written again.
    level = [parsed]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return parsed
    raise ReplyError(f"it nests deeper than {_DEEPEST} levels")


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, float) and not math.isfinite(value):
        raise ReplyError("it has a number that is too large")


def _no_number(name: str) -> NoReturn:
    raise ReplyError(f"it has {name}, which is no JSON")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
