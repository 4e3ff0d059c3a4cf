"""What an engine does not check by itself, or only by suffering from it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gym_capture.engines.limits import (
    SCHEMA_LIMITS,
    arguments_as_objects,
    check_sampling,
    check_schema,
    object_schema,
)
from gym_capture.errors import InvalidRequestError


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_are_finite(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match="finite") as caught:
        check_sampling({name: value}, vocab_size=100)
    assert caught.value.param == name


@pytest.mark.parametrize("value", [1e308, 1e-320, 0.0, -1.0, 101.0])
def test_a_repetition_penalty_leaves_logits_finite(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"between 0\.01 and 100") as caught:
        check_sampling({"repetition_penalty": value}, vocab_size=100)
    assert caught.value.param == "repetition_penalty"


@pytest.mark.parametrize(
    "bias",
    [
        {"x": 1},
        {"-1": 1},
        {"100": 1},
        {"²": 1},
        {"9" * 5_000: 1},
        {"5": math.nan},
        {"5": math.inf},
        {"5": -101},
        {"5": 10**400},
    ],
    ids=lambda bias: next(iter(bias))[:5],
)
def test_logit_bias_is_of_ids_that_there_are_and_by_numbers_that_there_are(bias: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias") as caught:
        check_sampling({"logit_bias": bias}, vocab_size=100)
    assert caught.value.param == "logit_bias"
    assert len(caught.value.message) < 200


def test_what_is_in_order_passes() -> None:
    check_sampling(
        {"temperature": 0.7, "top_k": 2**62, "seed": -5, "stop": ["\n"], "logit_bias": {"0": -100, "99": 100.0}},
        vocab_size=100,
    )


def members(key: str, count: int) -> object:
    if key == "properties":
        return {f"p{n}": {"type": "string"} for n in range(count)}
    return [{"const": n} for n in range(count)]


@pytest.mark.parametrize("key", SCHEMA_LIMITS)
def test_a_schema_has_members_up_to_a_limit(key: str) -> None:
    limit, total = SCHEMA_LIMITS[key]
    check_schema({"items": {key: members(key, limit)}}, param="tools")
    with pytest.raises(InvalidRequestError, match=key) as caught:
        check_schema({"items": {key: members(key, limit + 1)}}, param="tools")
    assert caught.value.param == "tools"
    many = [{key: members(key, limit)} for _ in range(total // limit + 1)]
    with pytest.raises(InvalidRequestError, match=key):
        check_schema({"prefixItems": many}, param="tools")


def test_a_schema_may_be_deep_and_hold_anything() -> None:
    schema: object = {"enum": [1, None, "a", {"x": []}], "properties": True}
    for _ in range(100_000):
        schema = {"items": schema}
    check_schema(schema, param="response_format")


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"description": "x"}, {"type": "object", "description": "x"}),
        ({"type": "string"}, {"type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"type": None}, {"type": "object"}),
        ({"anyOf": [{"type": "object"}]}, {"anyOf": [{"type": "object"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}),
    ],
)
def test_arguments_are_an_object_whatever_a_tool_s_schema_says(schema: dict[str, Any], meant: dict[str, Any]) -> None:
    assert object_schema(schema) == meant


def test_only_what_may_be_anything_becomes_an_object() -> None:
    strict = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"json_schema": True}}}
    free = {"type": "json_schema", "json_schema": True, "style": "json"}
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [strict, {"tags": [{"content": free}]}]}}
    done = json.loads(arguments_as_objects(json.dumps(tag)))
    kept, [changed] = done["format"]["elements"][0], done["format"]["elements"][1]["tags"]
    assert kept == strict
    assert changed == {"content": {**free, "json_schema": {"type": "object"}}}
