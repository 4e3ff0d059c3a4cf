"""The checks of a tried job fail when, and only when, what they promise does not hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gym_capture.build.builder import build
from gym_capture.capture.records import Continues, Root
from gym_capture.data.schema import rows, to_table
from gym_capture.demo.job_report import Tried, checks, read_tried, table, to_json
from gym_capture.demo.report import Built, Training
from tests.calls import call, snapshot

TRAINING = Training(
    loss=0.0,
    grad_norm=0.0,
    trained_tokens=120,
    compared_tokens=120,
    mean_abs_log_prob_difference=1e-5,
    mean_importance=1.0,
)
TRIED = Tried(
    built=Built(
        rollouts=4, calls=8, eligible_links=4, contiguous_links=4, masked_rollouts=0, captured=130, delivered=120
    ),
    tool_calls=4,
    unresolved_calls=0,
    excluded_tokens={"not_main_chain": 10},
    first_prompts={"a": [(1, 2), (1, 2)], "b": [(3,), (3,)]},
    mean_reward=0.25,
    reward_std=0.4,
    training=TRAINING,
    seconds={"serve": 40.0},
)


def failing(tried: Tried, leftovers: tuple[str, ...] = ()) -> list[str]:
    return [check.promise for check in checks(tried, leftovers=leftovers) if not check.held]


def test_a_job_that_held_fails_no_check() -> None:
    assert failing(TRIED) == []


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        ({"masked_rollouts": 1}, "every rollout can be trained on"),
        ({"rollouts": 5}, "every rollout can be trained on"),
        ({"contiguous_links": 3}, "every eligible link is contiguous"),
        ({"contiguous_links": 0, "eligible_links": 0}, "every eligible link is contiguous"),
        ({"delivered": 119}, "every generated token is delivered, or left out for a reason"),
    ],
)
def test_each_count_is_checked(change: dict[str, Any], promise: str) -> None:
    assert failing(dataclasses.replace(TRIED, built=TRIED.built._replace(**change))) == [promise]


@pytest.mark.parametrize("prompts", [[(3,), (4,)], [(3,), (3, 3)]])
def test_first_prompts_that_differ_within_a_group_are_named(prompts: list[tuple[int, ...]]) -> None:
    tried = dataclasses.replace(TRIED, first_prompts={**TRIED.first_prompts, "b": prompts})
    (check,) = [check for check in checks(tried, leftovers=()) if not check.held]
    assert check.promise == "the first prompts of a group are equal, id for id"
    assert check.figure.endswith("they differ in b")


def test_nothing_to_check_is_nothing_that_held() -> None:
    nothing = dataclasses.replace(TRIED, built=Built(0, 0, 0, 0, 0, 0, 0), first_prompts={}, training=None)
    assert len(failing(nothing)) == 5
    alone = dataclasses.replace(TRIED, first_prompts={group: [(1,)] for group in "abcd"})
    assert failing(alone) == ["the first prompts of a group are equal, id for id"]


@pytest.mark.parametrize("difference", [0.1, float("nan"), None])
def test_log_probabilities_of_other_ids_are_noticed(difference: float | None) -> None:
    other = dataclasses.replace(TRAINING, mean_abs_log_prob_difference=difference)
    assert failing(dataclasses.replace(TRIED, training=other)) == ["sampled and trained log probabilities agree"]


def test_what_is_left_running_is_named() -> None:
    assert failing(TRIED, ("raylet",)) == ["nothing is left running"]


def test_the_figures_are_those_of_the_files(tmp_path: Path) -> None:
    asked = ({"type": "function_call", "name": "Bash", "arguments": "{}", "call_id": "1"},)
    said = ({"type": "message", "role": "assistant", "content": []},)
    played = snapshot(
        call("c1", [1, 2, 3], [4, 5], parent=Root(), output_items=asked),
        call("c2", [1, 2, 3, 4, 5, 6], [7], parent=Continues("c1", 5), output_items=said, prefix_requested=True),
    )
    table_rows = [
        row
        for group_id, reward in (("a", 1.0), ("b", 0.0))
        for row in rows(build(played), snapshot=played, group_id=group_id, reward=reward)
    ]
    table_rows[1] = table_rows[1] | {"rollout_id": "r2"}
    pq.write_table(to_table(table_rows), tmp_path / "part-0.parquet")
    tried = read_tried(tmp_path, training=None, seconds={})
    assert tried.first_prompts == {"a": [(1, 2, 3)], "b": [(1, 2, 3)]}
    assert (tried.tool_calls, tried.mean_reward, tried.reward_std) == (2, 0.5, 0.5)
    assert tried.built == (2, 4, 2, 2, 0, 6, 6)


def test_the_table_and_the_json_have_the_figures() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table(TRIED, title="a job"))
    lines = [" ".join(line.replace("\u2502", " ").split()) for line in captured.get().splitlines()]
    assert "contiguous / eligible links 4 / 4" in lines
    assert "first prompts, tokens 1 to 2" in lines
    assert "left out: not_main_chain 10" in lines
    read = json.loads(to_json(TRIED, checks(TRIED, leftovers=("raylet",))))
    assert read["held"] is False
    assert read["built"]["calls"] == 8
    assert read["first_prompts"] == {"a": [2, 2], "b": [1, 1]}
