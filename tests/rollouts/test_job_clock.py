"""Whatever hangs, the job ends with a row for each rollout, and what was scored before keeps its reward."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_capture.rollouts import patience
from gym_capture.rollouts.environment import Environment, Observation, Register, Score, Task
from gym_capture.rollouts.harness import Completed, Outcome
from gym_capture.rollouts.job import JobSummary, RolloutJob
from tests.rollouts.scripted_job import Scripted, make, well

TASKS = Register.tasks(6)
FIRST = f"job.{TASKS[0].task_id}.0-a"


async def for_ever() -> None:
    await asyncio.Event().wait()


async def deaf() -> None:
    """Swallows every cancellation; ends only so that a test that fails does not hang."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            continue


async def breaks() -> None:
    raise OSError("the sandbox is gone")


class Closing(Register):
    """Its `close` goes as `closes` says, where the task is the first one."""

    def __init__(self, closes: Callable[[], object]) -> None:
        super().__init__()
        self._closes = closes
        self._first = False

    async def reset(self, task: Task) -> Observation:
        self._first = task.task_id == TASKS[0].task_id
        return await super().reset(task)

    async def close(self) -> None:
        if self._first:
            await self._closes()  # type: ignore[misc]


def finish(job: RolloutJob) -> JobSummary:
    return patience.run(job.run(), grace_s=0.05)


@pytest.mark.parametrize("closes", [for_ever, deaf, breaks])
def test_RJ_01_a_tear_down_that_hangs_keeps_the_reward_and_the_job_goes_on(
    tmp_path: Path, closes: Callable[[], object]
) -> None:
    job = make(
        tmp_path,
        Scripted(well),
        tasks=TASKS,
        samples=1,
        concurrency=1,
        environment=lambda: Closing(closes),
        close_timeout_s=0.1,
    )
    summary = finish(job)
    assert [row.status for row in summary.rows] == ["finished"] * 6
    first, *others = summary.rows
    assert (first.reward, first.attempt) == (0.0, 1)
    assert first.note is not None
    assert first.note.startswith(
        "closing the environment failed: OSError: the sandbox is gone (at test_job_clock.py:"
        if closes is breaks
        else "the environment was not closed after 0.1 s"
    )
    assert {row.note for row in others} == {None}
    assert summary.left_running == (closes is deaf)


@pytest.mark.parametrize("plays", [for_ever, deaf])
@pytest.mark.parametrize("closes", [for_ever, deaf])
def test_RJ_01_an_agent_that_hangs_does_not_hold_its_worker(
    tmp_path: Path, plays: Callable[[], object], closes: Callable[[], object]
) -> None:
    attempts = 0

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        nonlocal attempts
        if rollout_id.startswith(FIRST):
            attempts += 1
            await plays()  # type: ignore[misc]
        return Completed("", n_calls=1)

    job = make(
        tmp_path,
        Scripted(play),
        tasks=TASKS,
        samples=1,
        concurrency=1,
        environment=lambda: Closing(closes),
        max_attempts=2,
        rollout_timeout_s=0.1,
        close_timeout_s=0.1,
    )
    began = time.monotonic()
    summary = finish(job)
    assert time.monotonic() - began < 10
    assert [row.status for row in summary.rows] == ["failed"] + ["finished"] * 5
    first = summary.rows[0]
    assert (first.error, first.reward) == ("rollout_timeout", None)
    # One that goes on does not keep the rollout from being tried again: the next attempt has a rollout id of its own.
    assert attempts == first.attempt == 2
    assert first.retryable


def test_a_score_that_hangs_is_a_time_out(tmp_path: Path) -> None:
    class Scoring(Register):
        async def score(self, answer: str) -> Score:
            await for_ever()
            raise AssertionError

    job = make(tmp_path, Scripted(well), samples=1, environment=Scoring, max_attempts=1, rollout_timeout_s=0.05)
    assert {(row.status, row.error) for row in finish(job).rows} == {("failed", "rollout_timeout")}


def test_an_agent_that_ends_the_process_fails_its_rollout_alone(tmp_path: Path) -> None:
    async def play(rollout_id: str, environment: Environment) -> Outcome:
        if rollout_id.startswith(FIRST):
            sys.exit("the agent's own end")
        return Completed("", n_calls=1)

    rows = finish(make(tmp_path, Scripted(play), tasks=TASKS, samples=1, max_attempts=1)).rows
    assert [row.status for row in rows] == ["failed"] + ["finished"] * 5
    assert rows[0].detail is not None
    assert rows[0].detail.startswith("SystemExit: the agent's own end")


def test_a_cancelled_job_does_not_wait_for_what_does_not_end(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        started.set()
        await deaf()
        return Completed("", n_calls=1)

    async def interrupted() -> None:
        job = make(tmp_path, Scripted(play), environment=lambda: Closing(deaf), tasks=TASKS, close_timeout_s=0.1)
        run = asyncio.create_task(job.run())
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    began = time.monotonic()
    patience.run(interrupted(), grace_s=0.05)
    assert time.monotonic() - began < 10
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b""


def test_a_process_ends_without_a_word_although_something_in_it_does_not() -> None:
    script = """
        import asyncio
        from gym_capture.rollouts.patience import Patience, run

        async def deaf():
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass

        async def main():
            return await Patience(grace_s=0.01).wait(deaf, limit_s=0.01)

        print(run(main(), grace_s=0.01))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("Late(still_runs=True)\n", "")
