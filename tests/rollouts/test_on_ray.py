"""Rollouts that are played on the nodes of a Ray cluster: where, how many at a time, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from gym_capture.auth import Keyring
from gym_capture.commands.claims import claim
from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Observation, Register, Task
from gym_capture.rollouts.harness import Harness
from gym_capture.rollouts.job import JobRun, JobSummary
from gym_capture.rollouts.jobfile import JobFile, tasks_of
from gym_capture.rollouts.ledger import FailureRow
from gym_capture.rollouts.on_graph import endpoints
from gym_capture.rollouts.on_ray import RayRunner, on_ray
from tests.rollouts.nodes import Nodes, nodes, until
from tests.rollouts.scripted_server import Call, serving, solve

KEYS = Keyring(b"0123456789abcdef0123456789abcdef")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as started:
        yield started


CLAIMS = """
import asyncio
import sys
from gym_capture.commands.claims import claim
from gym_capture.commands.cluster import join_cluster
join_cluster(sys.argv[1], namespace="claims")
held = asyncio.run(claim("job", "claims", note=print))
print("claimed", flush=True)
sys.stdin.read()
"""


async def test_a_job_id_is_claimed_by_one_process_until_it_is_gone(cluster: Nodes) -> None:
    address = ray.get_runtime_context().gcs_address
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLAIMS, address), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert await other.stdout.readline() == b"claimed\n"
        notes: list[str] = []
        with pytest.raises(ConfigError, match=rf"job job is played by process {other.pid} on .* already"):
            await claim("job", "claims", note=notes.append, wait_s=0)
        held = await claim("job", "elsewhere", note=notes.append, wait_s=0)
        assert notes == []
        other.kill()
        held = await claim("job", "claims", note=notes.append)
        notes.clear()
        waiting = asyncio.create_task(claim("job", "claims", note=notes.append, wait_s=3600))
        await until(lambda: bool(notes))
        waiting.cancel()
        async with asyncio.timeout(60):  # neither it waits on, nor a thread
            await asyncio.wait({waiting})
            await asyncio.get_running_loop().shutdown_default_executor()
        assert waiting.cancelled()
        ray.kill(held)
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()


async def nothing_to_clear(rollout_id: str) -> None:
    return


def a_job(out: Path, **sections: Any) -> JobFile:
    limits = {"retry_wait_s": 0, **sections.pop("limits", {})}
    return JobFile.model_validate({"format_version": 1, "out": out, "limits": limits, **sections})


def running(job: JobFile, url: str, notes: list[str] | None = None) -> Any:
    note = [].append if notes is None else notes.append
    return on_ray(job, endpoint=endpoints(url, KEYS), clear=nothing_to_clear, close=nothing_to_clear, note=note)


async def play(job: JobFile, url: str) -> JobSummary:
    async with running(job, url) as runner:
        return await run(job, runner)


async def run(job: JobFile, runner: RayRunner) -> JobSummary:
    return await JobRun(
        tasks=await tasks_of(job), options=job.options("job"), attempts=runner, settings=job.settings, directory=job.out
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


async def test_rollouts_of_a_lost_node_are_played_again_elsewhere(cluster: Nodes, tmp_path: Path) -> None:
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
    again = {row.place: row.attempt for row in summary.rows if row.attempt > 1}
    assert again == {failure.place: 2 for failure in failures}
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
    async with serving(policy) as server, asyncio.timeout(240), running(job, server.url) as runner:
        playing = asyncio.create_task(run(job, runner))
        await policy.arrived.wait()
        used = sum(worker.memory_info().rss for worker in cluster.workers())
        policy.go.set()
        summary = await playing
    assert (len(summary.rows), summary.failed, summary.failures) == (1000, 0, Counter())
    assert sum(row.reward or 0 for row in summary.rows) == pytest.approx(1000)
    assert 0 < used < 1 << 30, "of two workers"


# --- what a worker starts, and how it ends ----------------------------------------------------------------------------

PROGRAM = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    pathlib.Path(sys.argv[1], str(os.getpid())).write_text(str(child.pid))
    time.sleep(1000)
"""


class Plain(Register):
    """Without tools, as programs have their own."""

    async def reset(self, task: Task) -> Observation:
        return replace(await super().reset(task), tools=())


async def test_a_job_that_is_interrupted_kills_what_its_workers_started(cluster: Nodes, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(pids)]
    job = a_job(
        tmp_path / "job",
        samples=3,
        tasks={"count": 1},
        environment={"name": f"{__name__}:Plain"},
        harness={"name": "command", "command": words},
    )
    async with serving(solve) as server, asyncio.timeout(120), running(job, server.url) as runner:
        playing = asyncio.create_task(run(job, runner))
        await until(lambda: playing.done() or sum(bool(path.read_text()) for path in pids.iterdir()) == 3)
        assert not playing.done(), failures_of(job.out)
        processes = [psutil.Process(int(pid)) for path in pids.iterdir() for pid in (path.name, path.read_text())]
        (worker,) = cluster.workers()
        playing.cancel()
        await asyncio.wait({playing})
        assert playing.cancelled()
        assert [process.pid for process in processes if process.is_running()] == []
        assert worker.is_running(), "it was the rollouts that were ended"
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running()
    assert (job.out / "rollouts.jsonl").read_bytes() == b""
    assert not list(job.out.glob("seen-*"))


class Blocks(Register):
    """Holds up its whole process, but for its first task."""

    async def reset(self, task: Task) -> Observation:
        if not task.task_id.endswith("-0"):
            time.sleep(1000)  # noqa: ASYNC251
        return await super().reset(task)


async def test_a_worker_that_does_not_answer_is_killed(
    cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_capture.rollouts.on_ray._ANSWER_S", 0.2)
    job = a_job(
        tmp_path / "job",
        samples=1,
        tasks={"count": 2},
        environment={"name": f"{__name__}:Blocks"},
        limits={"concurrency": 1, "max_attempts": 2, "rollout_timeout_s": 2, "close_timeout_s": 0.2},
    )
    async with serving(solve) as server, asyncio.timeout(120):
        summary = await play(job, server.url)
    assert [(row.status, row.error, row.attempt) for row in summary.rows] == [
        ("finished", None, 1),
        ("failed", "rollout_timeout", 2),
    ]
    assert "its worker did not answer: it was killed" in (summary.rows[1].detail or "")


def not_installed() -> Harness:
    raise ConfigError("the agent is not installed")


async def test_what_a_worker_cannot_make_ends_the_job_before_anything_is_played(cluster: Nodes, tmp_path: Path) -> None:
    job = a_job(tmp_path / "job", harness={"name": f"{__name__}:not_installed"})
    with pytest.raises(ConfigError, match="the agent is not installed"):
        async with asyncio.timeout(120):
            await play(job, "http://127.0.0.1:9")


async def test_workers_go_where_the_resources_are_that_they_ask_for(
    cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_capture.rollouts.on_ray._NO_ROOM_AFTER_S", 0.1)
    job = a_job(tmp_path / "job", samples=2, ray={"num_cpus": 0.5, "resources": {"sandbox": 1}})
    said = asyncio.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        said.set()

    async with (
        serving(solve) as server,
        asyncio.timeout(120),
        on_ray(
            job, endpoint=endpoints(server.url, None), clear=nothing_to_clear, close=nothing_to_clear, note=note
        ) as runner,
    ):
        playing = asyncio.create_task(run(job, runner))
        await said.wait()
        assert "no room for a worker yet: each asks a node for 0.5 CPUs, 1 sandbox" in notes[0]
        assert not playing.done()
        node = cluster.add(resources={"sandbox": 1})  # in this thread, as Ray wants it
        summary = await playing
    await asyncio.to_thread(cluster.lose, node)
    assert (len(summary.rows), summary.failed) == (8, 0)


async def test_a_directory_that_another_node_does_not_see_is_named(cluster: Nodes, tmp_path: Path) -> None:
    job = a_job(tmp_path / "job", samples=1, tasks={"count": 1})
    notes: list[str] = []
    async with serving(solve) as server, asyncio.timeout(120), running(job, server.url, notes) as runner:
        (mark,) = job.out.glob("seen-*")
        mark.unlink()  # no worker has been asked for it yet
        assert (await run(job, runner)).failed == 0
    assert len(notes) == 1
    assert notes[0].startswith(f"{job.out} is on node ")
    assert notes[0].endswith("Name a directory on storage that all nodes share")
