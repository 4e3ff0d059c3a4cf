"""What can be a record, and what is refused with the name of its field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gym_capture.capture.records import TokenEntry, delivered_by, not_a_turn
from gym_capture.errors import RecordError
from tests.calls import entry_of


def entry(**fields: Any) -> TokenEntry:
    made: dict[str, Any] = {
        "rollout_id": "r1",
        "model_call_id": "a",
        "model": "served",
        "requested_model": "policy",
        "has_tools": True,
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": [4, 5],
        "generation_log_probs": [-0.5, -0.25],
        "parent": None,
    }
    return entry_of(**{**made, **fields})


def test_plain_lists_are_as_good_as_arrays() -> None:
    made = entry(generation_log_probs=(0, -1))
    assert (made.prompt_token_ids.dtype, made.generation_log_probs.dtype) == (np.int32, np.float32)
    assert made.generation_log_probs.tolist() == [0, -1]


@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids", "generation_log_probs"])
@pytest.mark.parametrize(
    "value",
    [
        [1, True],
        (0, False),
        [1, np.True_],
        np.array([True, False]),
        ["-0.5", "1"],
        np.array(["1", "2"]),
        [None, 1],
        [[1], [1, 2]],
        [1, "1"],
        [1j, 2],
    ],
)
def test_what_passes_for_a_number_is_none(field: str, value: Any) -> None:
    with pytest.raises(RecordError) as refused:
        entry(**{field: value})
    assert (refused.value.field, refused.value.call_id) == (field, "a")


@pytest.mark.parametrize("wrong", [7.0, 0.002, float("inf"), float("-inf"), float("nan"), -1e300])
@pytest.mark.parametrize("make", [list, np.array, lambda values: np.array(values, np.float32)])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_log_probability_is_finite_and_not_above_0(wrong: float, make: Any) -> None:
    with pytest.raises(RecordError, match=r"must be finite|must not be above 0") as refused:
        entry(generation_log_probs=make([-0.5, wrong]))
    assert refused.value.field == "generation_log_probs"


def test_a_log_probability_may_be_as_low_as_a_number_can_be() -> None:
    lowest = float(np.finfo(np.float32).min)
    assert entry(generation_log_probs=[lowest, -1.0]).generation_log_probs.tolist() == [lowest, -1.0]


def test_rounding_may_take_a_log_probability_above_0() -> None:
    assert entry(generation_log_probs=[0.0005, -0.5]).generation_log_probs[0] > 0


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"sampling": {"max_tokens": 1}}, 1),
        ({"sampling": {"max_completion_tokens": 1, "temperature": 1}}, 1),
        ({"sampling": {"max_output_tokens": 1}}, 1),
        ({"sampling": {"max_tokens": 9, "max_completion_tokens": 2}}, 2),
        ({"sampling": {"max_tokens": None}}, None),
        ({"sampling": {"max_tokens": True}}, None),
        ({"sampling": {"max_tokens": "1"}}, None),
        # What was asked for, where the context had room for one more only.
        ({"max_tokens": 100, "sampling": {"max_tokens": 1}}, 100),
    ],
)
def test_the_limit_that_was_asked_for_is_found_wherever_it_is_recorded(fields: Any, limit: int | None) -> None:
    assert entry(**fields).request.asked_max_tokens == limit


@pytest.mark.parametrize(
    ("said", "delivered"),
    [((), None), ((None,), None), ((True, None), True), ((None, False), False), ((True, False, True), False)],
)
def test_of_a_delivery_no_comes_before_yes(said: tuple[bool | None, ...], delivered: bool | None) -> None:
    assert delivered_by(said) is delivered
    assert delivered_by(reversed(said)) is delivered


@pytest.mark.parametrize(
    ("finish_reason", "generated", "reason"),
    [
        *((whole, 1, None) for whole in (None, "stop", "length", "tool_calls")),
        ("abort", 1, "aborted"),
        ("abort", 0, "aborted"),
        ("error", 1, "failed"),
        ("stop", 0, "empty_generation"),
        (None, 0, "empty_generation"),
    ],
)
def test_what_someone_else_ended_is_no_turn_of_the_policy(
    finish_reason: str | None, generated: int, reason: str | None
) -> None:
    made = entry(
        finish_reason=finish_reason, generation_token_ids=[7] * generated, generation_log_probs=[-0.5] * generated
    )
    assert not_a_turn(made) == reason


def test_log_probs_whose_sum_overflows_are_finite_all_the_same() -> None:
    """Without a warning: where warnings are errors, the record would be lost."""
    lowest = float(np.finfo(np.float32).min)
    assert entry(generation_token_ids=[1, 2], generation_log_probs=[lowest, lowest]).generation_log_probs.size == 2
    with pytest.raises(RecordError, match="must be finite"):
        entry(generation_token_ids=[1, 2], generation_log_probs=[np.inf, -np.inf])
