"""What a job does while its graph is away, and what it does not count as a rollout's failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.attempt import Outcome, Play, Scored
from gym_capture.rollouts.environment import Register, Task
from gym_capture.rollouts.harness import Completed, Failed
from gym_capture.rollouts.harnesses.tool_loop import tool_loop
from gym_capture.rollouts.job import JobOptions, JobRun, JobSummary
from gym_capture.rollouts.on_graph import play_on_graph
from gym_capture.rollouts.outage import Outage, asking
from tests.rollouts.nodes import until
from tests.rollouts.scripted_server import Call, Server, serving, solve


async def nothing(rollout_id: str) -> None:
    """To clear, or to close."""


async def play(server: Server, directory: Path, notes: list[str], **options: Any) -> JobSummary:
    return await play_on_graph(
        url=server.url,
        tasks=Register.tasks(3),
        make_environment=Register,
        options=JobOptions(job_id="job", samples=2, retry_wait_s=0, **options),
        harness=tool_loop(model="policy"),
        settings={},
        clear=nothing,
        close=nothing,
        directory=directory,
        note=notes.append,
    )


async def test_an_outage_costs_no_attempts_that_count(tmp_path: Path) -> None:
    notes: list[str] = []
    failures = tmp_path / "failures.jsonl"

    async def policy(call: Call) -> Any:
        if server.is_well:
            return await solve(call)
        return web.json_response({"error": {"message": "no engine"}}, status=500)

    async with serving(policy) as server, asyncio.timeout(60):
        server.is_well = False
        job = asyncio.create_task(play(server, tmp_path, notes, max_attempts=1, concurrency=2))
        await until(lambda: failures.exists() and failures.read_text().count("\n") == 2)
        asked = server.asked_for_health
        await until(lambda: server.asked_for_health > asked + 1)
        assert (tmp_path / "attempts.jsonl").read_text().count("\n") == 2, "no other begins"
        server.is_well = True
        summary = await job
    assert (summary.finished, summary.failed) == (6, 0)
    assert summary.failures == {AttemptFailure.GRAPH_LOST: 2}, "one of each rollout that was under way, no other began"
    assert Counter(row.attempt for row in summary.rows) == {1: 4, 2: 2}
    assert ["does not answer" in notes[0], "answers again" in notes[1], len(notes)] == [True, True, 2]


async def test_a_graph_that_stays_away_ends_the_job_which_goes_on_later(tmp_path: Path) -> None:
    async def gone(call: Call) -> Any:
        return web.json_response({"error": {"message": "no engine"}}, status=503)

    async with serving(gone) as server, asyncio.timeout(60):
        server.is_well = False
        with pytest.raises(ConfigError, match=r"not answered for 0\.1 s"):
            await play(server, tmp_path, [], max_attempts=1, outage_timeout_s=0.1)
    async with serving(solve) as server:
        summary = await play(server, tmp_path, [], max_attempts=1)
    assert (summary.finished, summary.failed, summary.resumed) == (6, 0, 0)


async def test_a_failure_while_the_graph_is_well_counts(tmp_path: Path) -> None:
    async def broken(call: Call) -> Any:
        return web.json_response({"error": {"message": "no"}}, status=500)

    async with serving(broken) as server:
        summary = await play(server, tmp_path, [], max_attempts=2)
    assert summary.failures == {AttemptFailure.SERVER_ERROR: 12}
    assert summary.failed == 6


async def test_what_waits_for_room_does_not_begin_when_room_comes_because_the_graph_went(tmp_path: Path) -> None:
    """On a cluster that has room for one attempt at a time."""
    is_well, asked, playing = False, asyncio.Event(), 0

    async def looks() -> bool:
        asked.set()
        return is_well

    class OneAtATime:
        left_running = 0

        def __init__(self) -> None:
            self.room = asyncio.Semaphore(1)

        async def place(self) -> Play:
            await self.room.acquire()
            return self._play

        async def _play(self, rollout_id: str, task: Task, *, before: Any = None) -> Outcome:
            nonlocal playing
            playing += 1
            try:
                if is_well:
                    scored = Scored(answer="", n_calls=1, reward=1.0, components={}, completed=Completed("", 1))
                    return Outcome(scored, None)
                return Outcome(Failed(AttemptFailure.CONNECTION, "gone"), None)
            finally:
                self.room.release()

    job = JobRun(
        tasks=Register.tasks(1),
        options=JobOptions(job_id="job", samples=3, concurrency=3, retry_wait_s=0, max_attempts=1),
        attempts=OneAtATime(),
        settings={},
        directory=tmp_path,
        outage=Outage(looks, asked_every_s=0.01),
    )
    async with asyncio.timeout(60):
        running = asyncio.create_task(job.run())
        for _ in range(3):  # asked again and again: by now each could have begun
            asked.clear()
            await asked.wait()
        assert playing == 1
        is_well = True
        summary = await running
    assert (summary.finished, summary.failures) == (3, {AttemptFailure.GRAPH_LOST: 1})


async def test_a_wait_that_has_doubled_very_often_has_an_end(tmp_path: Path) -> None:
    runner = Losing(AttemptFailure.EXCEPTION)
    options = JobOptions(job_id="job", samples=1, retry_wait_s=0.0, max_attempts=1100)
    job = JobRun(tasks=Register.tasks(1), options=options, attempts=runner, settings={}, directory=tmp_path)
    assert (await job.run()).failed == 1
    assert runner.played == 1100


class Losing:
    """A runner whose nodes go."""

    left_running = 0

    def __init__(self, *reasons: AttemptFailure) -> None:
        self._reasons = reasons
        self.played = 0

    async def place(self) -> Play:
        return self._play

    async def _play(self, rollout_id: str, task: Task, *, before: Any = None) -> Outcome:
        self.played += 1
        return Outcome(Failed(self._reasons[(self.played - 1) % len(self._reasons)], "gone"), None)


@pytest.mark.parametrize(
    ("reasons", "played"),
    [
        ((AttemptFailure.NODE_LOST,), 6),
        ((AttemptFailure.EXCEPTION,), 3),
        ((AttemptFailure.NODE_LOST, AttemptFailure.EXCEPTION), 6),
    ],
    ids=["lost", "failed", "both"],
)
async def test_lost_attempts_have_a_limit_of_their_own_also_when_the_job_goes_on(
    tmp_path: Path, reasons: tuple[AttemptFailure, ...], played: int
) -> None:
    async def run(runner: Losing, **options: int) -> JobSummary:
        return await JobRun(
            tasks=Register.tasks(1),
            options=JobOptions(job_id="job", samples=1, retry_wait_s=0, max_attempts=3, **options),
            attempts=runner,
            settings={},
            directory=tmp_path,
        ).run()

    runner = Losing(*reasons)
    summary = await run(runner, max_lost=5)
    assert (runner.played, summary.failed) == (played, 1)
    again = Losing(*reasons)
    await run(again, max_lost=5)
    assert again.played == 0


async def test_no_proxy_of_the_environment_stands_between_a_job_and_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nothing listens
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serving(solve) as server:
        async with asking(server.url) as is_well:
            assert await is_well()
        summary = await play(server, tmp_path, [])
        assert summary.finished == 6
