"""Rollouts that are played on the nodes of a Ray cluster: where, how many at a time, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError
from gym_capture.rollouts.attempt import Scored
from gym_capture.rollouts.environment import Observation, Register, Score, Task
from gym_capture.rollouts.harness import Failed
from gym_capture.rollouts.job import JobRun, JobSummary
from gym_capture.rollouts.jobfile import JobFile, tasks_of
from gym_capture.rollouts.ledger import FailureRow
from gym_capture.rollouts.on_graph import endpoints
from gym_capture.rollouts.on_ray import RayRunner, on_ray
from tests.rollouts.nodes import Nodes, nodes
from tests.rollouts.scripted_server import Call, Server, serving, solve

KEYS = Keyring(b"0123456789abcdef0123456789abcdef")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as started:
        yield started


async def nothing_to_clear(rollout_id: str) -> None:
    return


def a_job(out: Path, **sections: Any) -> JobFile:
    limits = {"retry_wait_s": 0, **sections.pop("limits", {})}
    return JobFile.model_validate({"format_version": 1, "out": out, "limits": limits, **sections})


def running(job: JobFile, url: str, notes: list[str] | None = None) -> Any:
    note = [].append if notes is None else notes.append
    return on_ray(job, endpoint=endpoints(url, KEYS), clear=nothing_to_clear, note=note)


async def play(job: JobFile, url: str) -> JobSummary:
    async with running(job, url) as runner:
        return await run(job, runner)


async def run(job: JobFile, runner: RayRunner) -> JobSummary:
    return await JobRun(
        tasks=tasks_of(job), options=job.options("job"), attempts=runner, settings=job.settings, directory=job.out
    ).run()


def failures_of(out: Path) -> list[FailureRow]:
    return [FailureRow(**json.loads(line)) for line in (out / "failures.jsonl").read_text().splitlines()]


# --- a node is lost ---------------------------------------------------------------------------------------------------


@dataclass
class Whereabouts:
    """A policy that waits, from the second rollout on, until it is let go."""

    go: asyncio.Event
    arrived: asyncio.Event
    wanted: int

    def __post_init__(self) -> None:
        self.waiting: set[str] = set()

    async def __call__(self, call: Call) -> Any:
        if not self.go.is_set():
            self.waiting.add(call.rollout_id)
            if len(self.waiting) == self.wanted:
                self.arrived.set()
            await self.go.wait()
        return await solve(call)


async def test_ST_12_rollouts_of_a_lost_node_are_played_again_elsewhere(cluster: Nodes, tmp_path: Path) -> None:
    node = cluster.add()
    job = a_job(
        tmp_path / "job",
        samples=8,
        tasks={"count": 2},
        limits={"concurrency": 8},
        ray={"rollouts_per_worker": 4, "num_cpus": 0.6},
    )
    policy = Whereabouts(asyncio.Event(), asyncio.Event(), wanted=8)
    async with serving(policy) as server, asyncio.timeout(120), running(job, server.url) as runner:
        playing = asyncio.create_task(run(job, runner))
        await policy.arrived.wait()
        lost = set(policy.waiting)
        await asyncio.to_thread(cluster.lose, node)
        policy.go.set()
        summary = await playing
    assert (len(summary.rows), summary.failed) == (16, 0)
    failures = failures_of(job.out)
    assert {failure.reason for failure in failures} == {"node_lost"}
    assert len(failures) == 4, "half of the rollouts were there"
    assert {failure.rollout_id for failure in failures} < lost
    again = {row.rollout_id: row.attempts for row in summary.rows if row.attempts > 1}
    assert again == {failure.rollout_id: 2 for failure in failures}
    for rollout_id in {call.rollout_id for call in server.calls}:
        assert {call.token for call in server.calls_of(rollout_id)} == {KEYS.rollout_token(rollout_id)}


# --- many -------------------------------------------------------------------------------------------------------------


async def test_a_thousand_rollouts_are_under_way_at_a_time(cluster: Nodes, tmp_path: Path) -> None:
    job = a_job(
        tmp_path / "job",
        samples=10,
        tasks={"count": 100},
        limits={"concurrency": 1000},
        ray={"rollouts_per_worker": 500, "num_cpus": 0.1},
    )
    policy = Whereabouts(asyncio.Event(), asyncio.Event(), wanted=1000)
    memory: list[int] = []
    async with serving(policy) as server, asyncio.timeout(240), running(job, server.url) as runner:
        before = _memory()
        playing = asyncio.create_task(run(job, runner))
        await policy.arrived.wait()
        memory.append(_memory() - before)
        policy.go.set()
        summary = await playing
    assert (len(summary.rows), summary.failed, summary.failures) == (1000, 0, Counter())
    assert sum(row.reward or 0 for row in summary.rows) == pytest.approx(1000)
    assert memory[0] < 600 << 20, "two workers, the job and the server: less than a megabyte a rollout"


def _memory() -> int:
    """Of this process and of all workers."""
    own = psutil.Process()
    workers = [process for process in psutil.process_iter(["cmdline"]) if _is_ours(process)]
    return sum(process.memory_info().rss for process in (own, *workers))


def _is_ours(process: psutil.Process) -> bool:
    return any(word.startswith("ray::_Worker") for word in process.info["cmdline"] or ())
