"""The numbers of a job while it runs."""

from __future__ import annotations

from pathlib import Path

from gym_capture.rollouts.environment import Environment
from gym_capture.rollouts.harness import Completed, Failed, Outcome
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.progress import JobProgress, Running, Snapshot
from tests.rollouts.scripted_job import TASKS, Scripted, make


def row(name: str, reward: float | None, *, n_calls: int = 3) -> RolloutRow:
    return RolloutRow(
        rollout_id=name,
        task_id="t",
        group_id="t",
        sample=0,
        status="finished" if reward is not None else "failed",
        reward=reward,
        n_calls=n_calls,
        attempt=1,
        started_at=0.0,
        wall_s=1.0,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_of_this_run_and_rewards_of_all() -> None:
    clock = Clock()
    progress = JobProgress(clock=clock)
    progress.begin(total=8, rows=[row("a", 1.0), row("b", None)])
    progress.started("c")
    clock.now += 2
    progress.started("d")
    clock.now += 8
    assert progress.now() == Snapshot(
        elapsed_s=10.0,
        total=8,
        done=2,
        resumed=2,
        running=2,
        failed=1,
        failed_attempts={},
        calls=0,
        calls_per_s=0.0,
        mean_reward=1.0,
        eta_s=None,
        slowest=(Running(rollout_id="c", seconds=10.0), Running(rollout_id="d", seconds=8.0)),
    )
    for name, reward in (("c", 0.0), ("d", 0.5)):
        progress.stopped(name)
        progress.settled(row(name, reward))
    now = progress.now()
    assert (now.done, now.running, now.calls, now.calls_per_s, now.mean_reward) == (4, 0, 6, 0.6, 0.5)
    assert now.eta_s == 20.0, "four more, at two in ten seconds"


async def test_a_job_counts_a_rollout_once_whatever_its_attempts_were(tmp_path: Path) -> None:
    progress = JobProgress()
    seen: list[Snapshot] = []

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        seen.append(progress.now())
        first = rollout_id.endswith("-a1")
        if ".0-a" in rollout_id:
            return Failed("mine", "never", n_calls=1)
        return Failed("mine", "once") if first else Completed("", n_calls=2)

    await make(tmp_path, Scripted(play), concurrency=1, max_attempts=2).run(progress=progress)
    now = progress.now()
    assert {(each.total, each.running) for each in seen} == {(6, 1)}
    assert (now.total, now.done, now.failed, now.running) == (6, 6, 3, 0)
    assert now.failed_attempts == {"mine": len(TASKS) * 3}
    assert now.calls == 3 * 1 + 3 * 2
