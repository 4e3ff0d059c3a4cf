"""The demo's checks fail when, and only when, what they promise does not hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gym_capture.demo.report import Check, Mode, Training, checks, mean_and_std, read_built, table, to_json

TRAINING = Training(
    loss=0.01,
    grad_norm=0.5,
    trained_tokens=1000,
    compared_tokens=100,
    mean_abs_log_prob_difference=1e-5,
    mean_importance=0.8,
)
SUPPLIED = Mode(
    prefix_supply=True,
    rollouts=16,
    failed_rollouts=0,
    calls=48,
    expected_links=32,
    eligible_links=32,
    contiguous_links=32,
    masked_rollouts=0,
    incomplete_rollouts=0,
    generated_tokens_captured=1000,
    generated_tokens_delivered=1000,
    mean_reward=0.3,
    reward_std=0.1,
    training=TRAINING,
    seconds={"serve": 40.0, "rollouts": 50.0},
)
RENDERED = dataclasses.replace(
    SUPPLIED, prefix_supply=False, contiguous_links=3, generated_tokens_delivered=400, masked_rollouts=2
)


def failing(supplied: Mode = SUPPLIED, rendered: Mode = RENDERED, leftovers: tuple[str, ...] = ()) -> list[str]:
    return [check.promise for check in checks(supplied, rendered, leftovers=leftovers) if not check.held]


def test_a_run_that_held_fails_no_check() -> None:
    assert failing() == []


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"contiguous_links": 31}, "with prefix supply every link is contiguous"),
        ({"contiguous_links": 0, "eligible_links": 0}, "with prefix supply every link is contiguous"),
        ({"eligible_links": 31, "contiguous_links": 31}, "lineage proves the parent of every call but the first"),
        ({"generated_tokens_delivered": 999}, "every generated token is delivered"),
        ({"masked_rollouts": 1}, "no rollout is masked"),
        ({"failed_rollouts": 1}, "prefix supply: every rollout finished"),
        ({"incomplete_rollouts": 1}, "prefix supply: no rollout is incomplete"),
        (
            {"training": dataclasses.replace(TRAINING, mean_abs_log_prob_difference=0.1)},
            "prefix supply: sampled and trained log probabilities agree",
        ),
        (
            {"training": dataclasses.replace(TRAINING, mean_abs_log_prob_difference=float("nan"))},
            "prefix supply: sampled and trained log probabilities agree",
        ),
        (
            {"training": dataclasses.replace(TRAINING, grad_norm=0.0)},
            "prefix supply: the step moved the weights",
        ),
    ],
)
def test_each_promise_is_checked(change: dict[str, Any], promise: str) -> None:
    assert promise in failing(dataclasses.replace(SUPPLIED, **change))


def test_only_without_prefix_supply_may_there_be_nothing_to_compare() -> None:
    nothing = dataclasses.replace(TRAINING, compared_tokens=0, mean_abs_log_prob_difference=None)
    assert failing(rendered=dataclasses.replace(RENDERED, training=nothing)) == []
    assert failing(dataclasses.replace(SUPPLIED, training=nothing)) == [
        "prefix supply: sampled and trained log probabilities agree"
    ]


def test_equal_rewards_are_no_reason_to_move() -> None:
    still = dataclasses.replace(SUPPLIED, reward_std=0.0, training=dataclasses.replace(TRAINING, grad_norm=0.0))
    assert failing(still) == []


def test_the_comparison_and_the_leftovers_are_checked() -> None:
    assert failing(rendered=dataclasses.replace(RENDERED, contiguous_links=32)) == ["rendering again keeps fewer links"]
    assert failing(rendered=dataclasses.replace(RENDERED, failed_rollouts=1)) == [
        "rendered again: every rollout finished"
    ]
    assert failing(leftovers=("raylet",)) == ["nothing is left running"]


def test_the_table_has_both_modes_side_by_side() -> None:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table((SUPPLIED, RENDERED)))
    lines = [" ".join(line.replace("│", " ").split()) for line in captured.get().splitlines()]
    assert "contiguous / eligible links 32 / 32 3 / 32" in lines
    assert "delivered fraction 1.000 0.400" in lines
    assert "rollouts, s 50.0 50.0" in lines


def test_json_has_the_figures_and_the_verdict() -> None:
    found = [Check("a", True, "1"), Check("b", False, "2")]
    read = json.loads(to_json((SUPPLIED, RENDERED), found))
    assert read["held"] is False
    assert read["modes"][1]["delivered_fraction"] == pytest.approx(0.4)
    assert read["modes"][0]["training"]["loss"] == pytest.approx(0.01)
    assert [check["held"] for check in read["checks"]] == [True, False]


def test_counts_are_taken_once_a_rollout(tmp_path: Path) -> None:
    row = {
        "rollout_id": "a",
        "masked": False,
        "n_calls": 3,
        "eligible_links": 2,
        "contiguous_links": 1,
        "generated_tokens_captured": 30,
        "generated_tokens_delivered": 20,
    }
    pq.write_table(pa.Table.from_pylist([row, row, row | {"rollout_id": "b", "masked": True}]), tmp_path / "p.parquet")
    built = read_built(tmp_path)
    assert built == (2, 6, 4, 2, 1, 60, 40)


def test_mean_and_std_of_nothing_are_zero() -> None:
    assert mean_and_std([]) == (0.0, 0.0)
    assert mean_and_std([0.0, 1.0]) == (0.5, 0.5)
