"""Reading single fields of a request body, with errors that name them. Shared by the dialects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gym_capture.conversation import Tool
from gym_capture.dialects.base import json_type
from gym_capture.errors import InvalidRequestError
from gym_capture.reasons import RequestRule, join_reason

__all__ = [
    "INTEGERS",
    "MAX_BIASES",
    "MAX_COUNT",
    "MAX_STOP_STRINGS",
    "NEUTRAL",
    "NUMBERS",
    "SAMPLING",
    "array",
    "boolean",
    "count",
    "integer",
    "json_text",
    "left_out",
    "mapping",
    "number",
    "one_generation",
    "required_string",
    "sampling",
    "shown",
    "stop_strings",
    "string",
    "strings",
    "text",
    "tool",
    "wants_usage",
    "whole_pin",
    "wrong_type",
]

MAX_COUNT: Final = 2**53
"""Up to here every writer of JSON keeps integers exact."""

MAX_STOP_STRINGS: Final = 4
"""As in OpenAI's APIs, and in vLLM."""


def wrong_type(param: str, expected: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{param} must be {expected}, not {json_type(value)}", param=param)


def shown(value: object) -> str:
    """A wrong value as an error quotes it: short, however long it is or deep it nests."""
    return value[:40] if isinstance(value, str) else json_type(value)


def string(body: Mapping[str, Any], key: str, *, at: str = "", required: bool = False) -> str | None:
    value = body.get(key)
    if value is None:
        if required:
            raise InvalidRequestError(f"{at}{key} is missing", param=at + key)
        return None
    if not isinstance(value, str):
        raise wrong_type(at + key, "a string", value)
    return value


def required_string(body: Mapping[str, Any], key: str, *, at: str = "") -> str:
    value = string(body, key, at=at, required=True)
    assert value is not None
    return value


def integer(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(key, "an integer", value)
    if not -(2**63) <= value < 2**63:
        raise InvalidRequestError(f"{key} is out of range", param=key)
    return value


def count(body: Mapping[str, Any], key: str, *, minimum: int) -> int | None:
    """A number of something: of at most `MAX_COUNT`."""
    value = integer(body, key)
    if value is not None and not minimum <= value <= MAX_COUNT:
        raise InvalidRequestError(f"{key} must be at least {minimum}, at most {MAX_COUNT}: got {value}", param=key)
    return value


def boolean(body: Mapping[str, Any], key: str, *, at: str = "") -> bool | None:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(at + key, "a boolean", value)
    return value


def number(body: Mapping[str, Any], key: str) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(key, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError(f"{key} is out of range", param=key) from None


def mapping(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def array(value: object, param: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise wrong_type(param, "an array", value)
    return value


def text(content: object, param: str, *, optional: bool = False) -> str:
    """Content as OpenAI's APIs have it: a string, or the texts of its parts as they are."""
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise InvalidRequestError(f"{param} is missing", param=param)
    texts: list[str] = []
    for index, value in enumerate(array(content, param)):
        part = mapping(value, f"{param}.{index}")
        kind = "text" if part.get("type") is None else part["type"]
        if kind in ("text", "input_text", "output_text", "refusal"):
            piece = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(piece, str):
                raise wrong_type(f"{param}.{index}.text", "a string", piece)
            texts.append(piece)
        else:
            raise InvalidRequestError(
                f"{param}.{index}: content of type {shown(kind)!r} is not supported: this model takes text only",
                param=f"{param}.{index}.type",
            )
    return "".join(texts)


def strings(value: object, param: str) -> Sequence[str]:
    items = array(value, param)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise wrong_type(f"{param}.{index}", "a string", item)
    return items


def stop_strings(value: object, param: str) -> list[str]:
    """Strings that end a generation: an empty one would end it before it begins."""
    texts = list(strings(value, param))
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"{param} has {len(texts)} strings: this server takes at most {MAX_STOP_STRINGS}", param=param
        )
    if "" in texts:
        raise InvalidRequestError(f"{param} has an empty string", param=param)
    return texts


def tool(
    name: str,
    description: str | None,
    parameters: object,
    param: str,
    *,
    key: str = "parameters",
    strict: bool | None = None,
) -> Tool:
    """A function tool. Missing parameters mean: no arguments. `key`: what the dialect calls them."""
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong_type(f"{param}.{key}", "an object", parameters)
    schema = parameters or {"type": "object", "properties": {}}
    return Tool(
        name=name,
        description=description or "",
        parameters_json=json_text(schema, f"{param}.{key}"),
        strict=bool(strict),
    )


def one_generation(body: Mapping[str, Any], *names: str) -> None:
    """Refuses a request for more: a record is of one generation."""
    for name in names:
        if count(body, name, minimum=1) not in (None, 1):
            raise InvalidRequestError(f"{name} must be 1: each captured call is one generation", param=name)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream is to end with the counts of tokens (`stream_options`)."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


_VENDOR_TOOLS: Final = frozenset(
    {
        *("advisor", "code_execution", "code_interpreter", "file_search", "image_generation", "mcp", "mcp_toolset"),
        *("programmatic_tool_calling", "shell", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search", "web_search_preview"),
    }
)
"""Tools that run on a vendor's servers, by their types without the date."""


def left_out(kind: object) -> str:
    """The name under which a tool is counted that nobody here could run, and that the policy is not offered.

    One of few names, whatever a client sends: they are labels of metrics.
    """
    name = re.sub(r"_\d[\d_]*$", "", kind) if isinstance(kind, str) else ""
    return join_reason(RequestRule.TOOL_LEFT_OUT, name if name in _VENDOR_TOOLS else "other")


def json_text(value: Mapping[str, Any], param: str) -> str:
    """JSON text without spaces, keys in the client's order. Raises `InvalidRequestError` for what is nested too deep.

    Templates write schemas and arguments out again, and grammars go through the properties of a schema in turn: sorted,
    a property that the client put last, to be thought about first, would come before its reasons.
    """
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError(f"{param} is nested too deep", param=param) from None


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_BIASES = 50_000
INTEGERS = ("top_k", "seed", "min_tokens")
SAMPLING = (*NUMBERS, *INTEGERS, "stop", "logit_bias")
"""The parameters that `sampling` reads."""

NEUTRAL: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": {},
}
"""For each parameter that shapes the distribution, the value that leaves the distribution as the model has it.

Of what `sampling` reads, `seed` and `stop` are not among them: they choose which sample, and where it ends.
"""


def whole_pin(pin: Mapping[str, Any]) -> dict[str, Any]:
    """A pin of everything that shapes the distribution: neutral where `pin` says nothing; null leaves it to clients."""
    whole = {**NEUTRAL, **pin} if pin else {}
    return {name: value for name, value in whole.items() if value is not None}


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that OpenAI-style bodies carry, type-checked; ranges are the engine's to judge."""
    found: dict[str, Any] = {}
    for key in NUMBERS:
        if (value := number(body, key)) is not None:
            found[key] = value
    for key in INTEGERS:
        if (whole := integer(body, key)) is not None:
            found[key] = whole
    stop = body.get("stop")
    if stop is not None and (texts := stop_strings([stop] if isinstance(stop, str) else stop, "stop")):
        found["stop"] = texts
    bias = body.get("logit_bias")
    if bias is not None:
        if len(mapping(bias, "logit_bias")) > MAX_BIASES:
            raise InvalidRequestError(f"logit_bias has more than {MAX_BIASES:,} entries", param="logit_bias")
        for key, value in bias.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise wrong_type(f"logit_bias.{key}", "a number", value)
        if bias:
            found["logit_bias"] = dict(bias)
    return found
