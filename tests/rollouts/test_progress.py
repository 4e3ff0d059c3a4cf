"""The numbers of a job while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollouts.environment import Environment
from gym_capture.rollouts.harness import Completed, Failed, Outcome
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.progress import Built, JobProgress, Running, Snapshot, looking
from tests.rollouts.scripted_job import TASKS, Scripted, make


def row(name: str, reward: float | None, *, flaws: int = 0) -> RolloutRow:
    return RolloutRow(
        rollout_id=name,
        task_id="t",
        group_id="t",
        sample=0,
        status="finished" if reward is not None else "failed",
        reward=reward,
        n_calls=3,
        attempt=1,
        recorded=RolloutCounts(3, 30, 2, 2, flaws)._asdict(),
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
        masked=1,
        failed_attempts={},
        calls=0,
        calls_per_s=0.0,
        generated_tokens=0,
        tokens_per_s=0.0,
        eligible_links=0,
        contiguous_links=0,
        mean_reward=1.0,
        eta_s=None,
        slowest=(Running(rollout_id="c", seconds=10.0), Running(rollout_id="d", seconds=8.0)),
        built=None,
    )
    for name, reward in (("c", 0.0), ("d", 0.5)):
        progress.stopped(name, RolloutCounts(calls=3, generated_tokens=30))
        progress.settled(row(name, reward))
    now = progress.now()
    assert (now.done, now.running, now.calls, now.calls_per_s, now.mean_reward) == (4, 0, 6, 0.6, 0.5)
    assert (now.generated_tokens, now.tokens_per_s) == (60, 6.0)
    assert now.eta_s == 20.0, "four more, at two in ten seconds"


def test_what_is_recorded_counts_while_an_attempt_runs_and_never_goes_down() -> None:
    progress = JobProgress()
    progress.begin(total=3, rows=[])

    def recorded() -> RolloutCounts:
        now = progress.now()
        return RolloutCounts(now.calls, now.generated_tokens, now.eligible_links, now.contiguous_links)

    for name in ("a", "b"):
        progress.started(name)
    assert progress.running == ("a", "b")
    progress.looked({"a": RolloutCounts(2, 20, 1, 1), "b": RolloutCounts(1, 5), "over already": RolloutCounts(9)})
    assert recorded() == RolloutCounts(3, 25, 1, 1)
    progress.looked({"a": RolloutCounts(3, 30, 2, 1)})
    assert recorded() == RolloutCounts(4, 35, 2, 1)
    progress.stopped("b")  # cut off: what was seen last counts
    progress.stopped("a", RolloutCounts(4, 40, 3, 2))
    assert recorded() == RolloutCounts(5, 45, 3, 2)
    progress.started("a-a2")
    progress.looked({"a": RolloutCounts(7, 70)})
    assert recorded() == RolloutCounts(5, 45, 3, 2)


def test_a_masked_rollout_counts_once_whoever_says_so() -> None:
    progress = JobProgress()
    progress.begin(total=6, rows=[row("failed", None), row("flawed", 1.0, flaws=1), row("well", 1.0)])
    assert (progress.now().masked, progress.now().built) == (2, None)
    progress.builds()
    assert progress.now().built == Built()
    progress.built(rollouts=3, masked=["failed", "late"], trajectories=2)
    progress.built(rollouts=3, masked=[], trajectories=3)
    now = progress.now()
    assert (now.masked, now.built) == (3, Built(groups=2, rollouts=6, masked=2, trajectories=5))


async def test_running_attempts_are_looked_at_all_at_once() -> None:
    progress = JobProgress()
    asked: asyncio.Queue[Sequence[str]] = asyncio.Queue()
    answers: list[Sequence[RolloutCounts] | None] = [None, [RolloutCounts(1, 10), RolloutCounts(2, 20)]]
    seen = asyncio.Event()

    async def counting(rollout_ids: Sequence[str]) -> Sequence[RolloutCounts] | None:
        asked.put_nowait(rollout_ids)
        if not answers:
            seen.set()
            await asyncio.Event().wait()
        return answers.pop(0)

    progress.begin(total=2, rows=[])
    async with asyncio.timeout(30), looking(progress, counting, every_s=0.001):
        for name in ("a", "b"):
            progress.started(name)
        await seen.wait()
    assert progress.now().calls == 3, "a look without an answer changes nothing"
    assert [asked.get_nowait() for _ in range(3)] == [("a", "b")] * 3


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
    assert now.calls == 3 * (1 + 1) + 3 * 2, "of all attempts"


async def test_a_row_says_what_is_recorded_of_it(tmp_path: Path) -> None:
    """And `null` if nobody knows: the job goes on."""
    asked: list[str] = []

    async def counting(rollout_ids: Sequence[str]) -> Sequence[RolloutCounts] | None:
        asked.extend(rollout_ids)
        return [RolloutCounts(2, 20, 1, 1)] if ".0-a" in rollout_ids[0] else None

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        if rollout_id.endswith("0-a1"):
            return Failed("mine", "once", n_calls=1)
        return Completed("", n_calls=3)

    progress = JobProgress()
    job = dataclasses.replace(make(tmp_path, Scripted(play), max_attempts=2), counting=counting)
    summary = await job.run(progress=progress)
    known = {"calls": 2, "generated_tokens": 20, "eligible_links": 1, "contiguous_links": 1, "flaws": 0}
    known |= {"timed_puts": 0, "put_s": 0.0}
    assert {(row.sample, json.dumps(row.recorded)) for row in summary.rows} == {(0, json.dumps(known)), (1, "null")}
    assert sorted(asked) == sorted(
        f"job.{task.task_id}.{attempt}" for task in TASKS for attempt in ("0-a1", "0-a2", "1-a1")
    )
    now = progress.now()
    assert (now.calls, now.generated_tokens) == (3 * (2 + 2 + 3), 3 * (20 + 20))


async def test_rows_of_earlier_versions_say_nothing_of_what_is_recorded_and_stay(tmp_path: Path) -> None:
    async def play(rollout_id: str, environment: Environment) -> Outcome:
        return Completed("", n_calls=2)

    await make(tmp_path, Scripted(play)).run()
    file = tmp_path / "rollouts.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each.pop("recorded") for each in rows] == [None] * 6
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    progress = JobProgress()
    summary = await make(tmp_path, Scripted(play)).run(progress=progress)
    assert (summary.resumed, summary.failed, progress.now().masked) == (6, 0, 0)
