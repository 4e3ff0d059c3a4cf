"""Figures and checks of training runs, from what a run wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_capture.demo.learning_report import Run, checks, draw, read_run, table, to_json, to_markdown


def written(folder: Path, rewards: list[float], **changed: Any) -> Path:
    steps = [
        {
            "step": number,
            "mean_reward": reward,
            "trained_tokens": 100,
            "rollouts": 4,
            "gen_kl_error": 0.001,
            "token_mult_prob_error": 1.01,
            "version": number - 1,
            "weight_versions": [str(number - 1)],
            "lag_mean": 0.5,
            "paused_s": None if number == 1 else 0.2,
            **changed,
        }
        for number, reward in enumerate(rewards, start=1)
    ]
    recorded = {"generated_tokens": 50, "eligible_links": 2, "contiguous_links": 2}
    rows: list[dict[str, Any]] = [{"recorded": recorded}, {"recorded": recorded}, {"recorded": None}]
    for path, lines in ((folder / "run" / "metrics.jsonl", steps), (folder / "job" / "rollouts.jsonl", rows)):
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def run_of(folder: Path, rewards: list[float], *, supplied: bool = True, **changed: Any) -> Run:
    return read_run(written(folder, rewards, **changed), supplied=supplied, seed=0, seconds=1.0)


RISING = [0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 0.7, 0.7, 0.7, 0.7, 0.7]


def test_figures_are_those_of_the_lines(tmp_path: Path) -> None:
    run = run_of(tmp_path, RISING)
    assert (run.first, run.last) == (pytest.approx(0.3), pytest.approx(0.7))
    assert (run.recorded("eligible_links"), run.total("trained_tokens")) == (4, 1100)
    assert run.mean("paused_s") == pytest.approx(0.2), "an update that has no figure is not counted"
    assert (run.generated_per_rollout, run.trained_per_rollout) == (50.0, 25.0), "of rollouts that are recorded"
    assert "0.300" in to_markdown([run])
    assert table([run]).row_count > 5


@pytest.mark.parametrize(
    ("rewards", "changed", "broken"),
    [
        (RISING, {}, []),
        ([0.3] * 11, {}, ["seed 0: the reward rises"]),
        (RISING, {"token_mult_prob_error": 1.03}, ["seed 0: trainer and engine agree"]),
        (RISING, {"token_mult_prob_error": None}, ["seed 0: trainer and engine agree"]),
        (RISING, {"version": 3}, ["seed 0: each update's weights are served"]),
    ],
)
def test_what_is_promised(tmp_path: Path, rewards: list[float], changed: dict[str, Any], broken: list[str]) -> None:
    run = run_of(tmp_path, rewards, **changed)
    assert [check.promise for check in checks([run], leftovers=()) if not check.held] == broken
    told = json.loads(to_json([run], checks([run], leftovers=())))
    assert told["held"] == (not broken)
    assert len(told["runs"][0]["steps"]) == 11


def test_without_prefix_supply_nothing_is_promised_of_the_reward(tmp_path: Path) -> None:
    run = run_of(tmp_path, [0.3] * 11, supplied=False)
    assert [check.promise for check in checks([run], leftovers=())] == ["nothing is left running"]
    assert not checks([run], leftovers=("raylet",))[0].held


def test_an_update_that_trained_on_nothing_is_no_gap_in_the_report(tmp_path: Path) -> None:
    """Its line has no figures of trainer against engine: the loop leaves them out."""
    run = run_of(tmp_path, RISING)
    empty = {key: value for key, value in run.steps[2].items() if not key.startswith(("token_mult", "gen_kl"))}
    run = replace(run, steps=(*run.steps[:2], empty, *run.steps[3:]))
    draw([run], tmp_path / "reward.png")
    assert all(check.held for check in checks([run], leftovers=()))
    assert "1.0100" in to_markdown([run])


def test_both_arms_are_drawn(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a", RISING), run_of(tmp_path / "b", RISING[:7], supplied=False, gen_kl_error=None)]
    draw(runs, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
