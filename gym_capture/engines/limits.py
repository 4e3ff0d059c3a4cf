"""Limits of what a request may ask of an engine, beyond those that the engine itself checks.

Invariant: numbers that pass stay finite through an engine's arithmetic, and a grammar that passes is compiled in about
a second. Everything else is an `InvalidRequestError` that names the parameter, before an engine sees it. For an engine
has other callers: log probabilities that are no numbers mask a rollout, and one endless grammar stalls all that follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from gym_capture.errors import InvalidRequestError

_REPETITION_PENALTY: Final = (0.01, 100.0)
"""Logits are divided and multiplied by it. Far beyond what anybody uses, far below where float32 overflows."""

SCHEMA_LIMITS: Final = {
    "properties": (300, 3_000),
    "enum": (5_000, 20_000),
    "anyOf": (1_000, 5_000),
    "oneOf": (1_000, 5_000),
    "allOf": (1_000, 5_000),
}
"""How many entries one such member of a JSON schema may have, and all of them together. The time that a grammar takes
grows with the square of the first; the second keeps many middling ones from adding up to as much."""


def check_sampling(sampling: Mapping[str, Any], *, vocab_size: int) -> None:
    """Raises `InvalidRequestError`. Ranges that the engine checks by itself are left to it."""
    for name, value in sampling.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"{name} must be a finite number: got {value}", param=name)
    penalty = sampling.get("repetition_penalty", 1.0)
    low, high = _REPETITION_PENALTY
    if not low <= penalty <= high:
        raise InvalidRequestError(
            f"repetition_penalty must be between {low:g} and {high:g}: got {penalty}", param="repetition_penalty"
        )
    for key, bias in sampling.get("logit_bias", {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequestError(
                f"logit_bias: {key[:20]!r} is not the id of one of this model's {vocab_size} tokens", param="logit_bias"
            )
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequestError(f"logit_bias: {key} must be between -100 and 100", param="logit_bias")


def object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments as a grammar needs it: they are an object, whatever else the client wrote."""
    if "type" not in schema:
        # Next to these a type would be one condition of several, which not every compiler of grammars reads so.
        return schema if {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys() else {"type": "object", **schema}
    return schema if schema["type"] == "object" else {"type": "object"}


def arguments_as_objects(structural_tag: str) -> str:
    """vLLM's grammar for calls, where it leaves the arguments of tools that are not strict to be any JSON value."""
    return json.dumps(_without_any(json.loads(structural_tag)))


def _without_any(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_any(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return {**node, "json_schema": {"type": "object"}} if node["json_schema"] is True else node
    return {key: _without_any(value) for key, value in node.items()}


def check_schema(schema: object, *, param: str) -> None:
    """Raises `InvalidRequestError` if compiling a grammar from this JSON schema would take too long."""
    totals = dict.fromkeys(SCHEMA_LIMITS, 0)
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
            for key, (limit, total_limit) in SCHEMA_LIMITS.items():
                members = value.get(key)
                if isinstance(members, dict | list):
                    totals[key] += len(members)
                    if len(members) > limit or totals[key] > total_limit:
                        raise InvalidRequestError(
                            f"{param}: a JSON schema may have {limit:,} entries in one {key!r}, {total_limit:,} in all",
                            param=param,
                        )
