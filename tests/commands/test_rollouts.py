"""Tasks from a file, and the line that a job ends with."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from gym_capture.commands.rollouts import _job_id, made_tasks, read_tasks, summarized, with_progress
from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Register, Task
from gym_capture.rollouts.job import JobSummary
from gym_capture.rollouts.ledger import RolloutRow


def row(sample: int, *, failed: bool = False) -> RolloutRow:
    return RolloutRow(
        rollout_id=f"j.t.{sample}",
        task_id="t",
        group_id="t",
        sample=sample,
        status="failed" if failed else "finished",
        reward=0.0 if failed else 0.5,
        n_calls=3,
        attempts=1,
        error="connection" if failed else None,
        detail="nobody\nthere" if failed else None,
        started_at=0.0,
        wall_s=1.0,
    )


def test_tasks_are_read_from_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "a", "data": {"start": 1}}\n\n{"task_id": "b"}\n')
    assert read_tasks(path) == [Task("a", {"start": 1}), Task("b")]


@pytest.mark.parametrize("line", ["{", "[]", '"text"', '{"data": {}}', "1"])
def test_a_line_that_is_no_task_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"task_id": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl, line 2: not a task"):
        read_tasks(path)


def test_a_file_without_tasks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no tasks"):
        read_tasks(path)


def test_an_environment_may_make_tasks() -> None:
    register = "gym_capture.rollouts.environment:Register"
    assert made_tasks(register, 2, seed=1) == Register.tasks(2, seed=1)
    with pytest.raises(ConfigError, match=r"Task makes no tasks of its own: give it some with --tasks \(cannot load "):
        made_tasks("gym_capture.rollouts.environment:Task", 2, seed=1)


def test_the_bar_shows_the_mean_reward_and_what_failed() -> None:
    rows = (row(0), row(1, failed=True), row(2))

    def play(on_row: Callable[[RolloutRow], None]) -> JobSummary:
        for each in rows:
            on_row(each)
        return JobSummary(rows, resumed=0, failures=Counter(connection=3))

    output = io.StringIO()
    summary = with_progress(play, total=3, console=Console(file=output, width=120))
    assert "3/3 mean reward 0.500, 1 failed" in output.getvalue()
    assert summarized(summary, "http://here") == (
        "2 of 3 rollouts finished; 1 failed for good; failed attempts: connection 3x; "
        "the first to fail, j.t.1: nobody there; calls could not connect to http://here: is `serve run` still up?"
    )


@pytest.mark.parametrize(
    ("rows", "mark", "shown"),
    [
        ((row(0), row(1)), "✓", "mean reward 0.500"),
        ((row(0), row(1, failed=True)), "!", "mean reward 0.500, 1 failed"),
        ((row(0, failed=True), row(1, failed=True)), "✗", "2/2 2 failed"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_mark_says_how_it_went(rows: tuple[RolloutRow, ...], mark: str, shown: str, *, resumed: bool) -> None:
    def play(on_row: Callable[[RolloutRow], None]) -> JobSummary:
        for each in () if resumed else rows:
            on_row(each)
        return JobSummary(rows, resumed=2 * resumed, failures=Counter())

    output = io.StringIO()
    with_progress(play, total=2, console=Console(file=output, width=120))
    assert output.getvalue().strip().startswith(f"{mark} rollouts")
    assert resumed or shown in output.getvalue()


def test_a_job_of_which_everything_failed_before_says_what_to_do() -> None:
    line = summarized(JobSummary((row(0, failed=True),), resumed=1, failures=Counter(refused=1)), "http://here")
    assert line == (
        "0 of 1 rollouts finished; 1 failed for good; 1 were over before this run; failed attempts: refused 1x; "
        "the first to fail, j.t.0: nobody there; nothing was left to play: name another --out to start anew"
    )


def test_a_resumed_job_says_so() -> None:
    assert summarized(JobSummary((row(0), row(1)), resumed=1, failures=Counter()), "http://here") == (
        "2 of 2 rollouts finished; 1 were over before this run"
    )


def test_jobs_in_folders_of_one_name_have_rollouts_of_their_own_and_a_resumed_one_keeps_its(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "job", tmp_path / "b" / "job"
    ids = [_job_id(first), _job_id(second)]
    assert ids[0] != ids[1]
    assert all(job_id.startswith("job-") for job_id in ids)
    first.mkdir(parents=True)
    (first / "job.json").write_text(json.dumps({"job_id": ids[0]}), encoding="utf-8")
    assert _job_id(first) == ids[0]
