"""Tool arguments as the `input` object of Anthropic Messages, both ways.

Invariant: `arguments_of` undoes `input_json`, up to what a comparison of arguments ignores
(`fingerprint.canonical_arguments`). So a call that the client echoes is the call that the policy made - also if what
the policy wrote is no JSON object, which is all that `input` can be.

Such text travels as `{"INVALID_JSON": text}`, the form in which Anthropic's documentation has clients hand broken
arguments around. The tool refuses it, as it must, and the policy is told; nothing is guessed, closed or cut. A call
that was cut by a limit does not travel so (`anthropic_reply`): nobody could run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gym_capture.dialects import fields

_WRAPPER: Final = "INVALID_JSON"


def input_json(arguments: str) -> str:
    """JSON text of an object: the policy's own text if that is one, so that not even a number is spelled anew."""
    if not arguments.strip():
        return "{}"
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = arguments
    if value is None:
        return "{}"
    # An object that reads like wrapped text is wrapped itself, else it would come back as that text.
    if isinstance(value, dict) and not _is_wrapped(value):
        return arguments
    return orjson.dumps({_WRAPPER: arguments}).decode()


def arguments_of(value: Mapping[str, Any], param: str) -> str:
    """The argument text that an echoed `input` stands for. Raises `InvalidRequestError` if it is nested too deep."""
    if _is_wrapped(value):
        text: str = value[_WRAPPER]
        return text
    return fields.json_text(value, param)


def _is_wrapped(value: Mapping[str, Any]) -> bool:
    return len(value) == 1 and isinstance(value.get(_WRAPPER), str)
