"""A rollout job ends with one row for each rollout, however its rollouts went."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.errors import ConfigError, InvalidRequestError, StoreUnavailableError
from gym_capture.rollouts.environment import Environment, Observation, Register, Score, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Harness, Outcome
from gym_capture.rollouts.harnesses.tool_loop import ToolLoop
from gym_capture.rollouts.job import JobOptions, JobSummary, RolloutJob
from tests.rollouts.scripted_server import Call, sdk, serving, solve

TASKS = Register.tasks(3)
Play = Callable[[str, Environment], Awaitable[Outcome]]


class Scripted:
    """A harness whose rollouts go as `play` says, by rollout id."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.played: Counter[str] = Counter()

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        self.played[endpoint.base_url] += 1
        return await self._play(endpoint.base_url, environment)

    async def close(self) -> None:
        """Nothing is held."""


async def well(rollout_id: str, environment: Environment) -> Outcome:
    return Completed("0", n_calls=3)


async def nothing(rollout_id: str) -> None:
    """To clear, or to close."""


def make(
    directory: Path,
    harness: Harness,
    *,
    tasks: list[Task] = TASKS,
    samples: int = 2,
    clear: Callable[[str], Awaitable[None]] = nothing,
    close: Callable[[str], Awaitable[None]] = nothing,
    environment: Callable[[], Environment] = Register,
    settings: Mapping[str, Any] = {},
    **options: Any,
) -> RolloutJob:
    return RolloutJob(
        tasks=tasks,
        options=JobOptions(job_id="job", samples=samples, retry_wait_s=0.0, **options),
        harness=harness,
        make_environment=environment,
        endpoint=Endpoint,
        clear=clear,
        close=close,
        settings=settings,
        directory=directory,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_over_http_every_rollout_becomes_a_row_with_its_reward(tmp_path: Path) -> None:
    async def run() -> JobSummary:
        async with serving(solve) as server, sdk() as client:
            job = RolloutJob(
                tasks=TASKS,
                options=JobOptions(job_id="job", samples=2, concurrency=3),
                harness=ToolLoop(client),
                make_environment=Register,
                endpoint=lambda rollout_id: Endpoint(server.base_url(rollout_id), f"token-{rollout_id}"),
                clear=nothing,
                close=nothing,
                settings={},
                directory=tmp_path,
            )
            summary = await job.run()
            for call in server.calls:
                assert call.token == f"token-{call.rollout_id}"
            return summary

    summary = await run()
    assert [row.rollout_id for row in summary.rows] == [
        f"job.{task.task_id}.{i}-a1" for task in TASKS for i in range(2)
    ]
    assert [row.reward for row in summary.rows] == pytest.approx([1.0] * 6)
    written = lines(tmp_path / "rollouts.jsonl")
    assert sorted(row["rollout_id"] for row in written) == sorted(row.rollout_id for row in summary.rows)
    assert {(row["group_id"], row["n_calls"], row["status"], row["error"]) for row in written} == {
        (task.task_id, 3, "finished", None) for task in TASKS
    }


async def test_concurrency_is_bounded_and_used(tmp_path: Path) -> None:
    running: set[str] = set()
    most = 0

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        nonlocal most
        running.add(rollout_id)
        most = max(most, len(running))
        for _ in range(5):
            await asyncio.sleep(0)
        running.remove(rollout_id)
        return Completed("", n_calls=1)

    await make(tmp_path, Scripted(play), samples=4, concurrency=3).run()
    assert most == 3


async def test_rows_are_told_of_as_they_come(tmp_path: Path) -> None:
    told: list[str] = []
    await make(tmp_path, Scripted(well)).run(on_row=lambda row: told.append(row.rollout_id))
    assert sorted(told) == sorted(row["rollout_id"] for row in lines(tmp_path / "rollouts.jsonl"))


# --- failures are data ----------------------------------------------------------------------------------------------


async def broken_agent(rollout_id: str, environment: Environment) -> Outcome:
    raise ZeroDivisionError("bug in the agent")


async def no_answer_in_time(rollout_id: str, environment: Environment) -> Outcome:
    await asyncio.Event().wait()
    raise AssertionError


async def failing(rollout_id: str, environment: Environment) -> Outcome:
    return Failed("connection", "nobody there", n_calls=2)


async def own_timeout(rollout_id: str, environment: Environment) -> Outcome:
    raise TimeoutError("of the agent's own")


async def cancels_itself(rollout_id: str, environment: Environment) -> Outcome:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("play", "reason", "detail"),
    [
        (broken_agent, "exception", "ZeroDivisionError: bug in the agent (at test_job.py:"),
        (no_answer_in_time, "rollout_timeout", "not over after 0.05 s"),
        (failing, "connection", "nobody there"),
        (own_timeout, "exception", "TimeoutError: of the agent's own"),
        (cancels_itself, "exception", "CancelledError"),
    ],
)
async def test_whatever_goes_wrong_is_a_failure_row_and_the_job_goes_on(
    tmp_path: Path, play: Play, reason: str, detail: str
) -> None:
    bad = f"job.{TASKS[1].task_id}.0-a"

    async def one_bad(rollout_id: str, environment: Environment) -> Outcome:
        return await (play if rollout_id.startswith(bad) else well)(rollout_id, environment)

    harness = Scripted(one_bad)
    summary = await make(tmp_path, harness, max_attempts=2, rollout_timeout_s=0.05).run()
    assert (summary.finished, summary.failed) == (5, 1)
    row = next(row for row in summary.rows if row.rollout_id == f"{bad}2")
    assert (row.status, row.reward, row.attempt, row.error) == ("failed", None, 2, reason)
    assert row.detail is not None
    assert row.detail.startswith(detail)
    sidecar = lines(tmp_path / "failures.jsonl")
    assert [(failure["rollout_id"], failure["attempt"], failure["reason"]) for failure in sidecar] == [
        (f"{bad}1", 1, reason),
        (f"{bad}2", 2, reason),
    ]
    assert summary.failures == {reason: 2}


class Breaking(Register):
    """An environment that breaks in the method it is told to."""

    closed = 0

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    async def reset(self, task: Task) -> Observation:
        if self._method == "reset":
            raise KeyError(task.task_id)
        return await super().reset(task)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._method == "call_tool":
            raise OSError("the sandbox is gone")
        return await super().call_tool(name, arguments)

    async def score(self, answer: str) -> Score:
        if self._method == "score":
            raise ValueError(answer)
        return Score({"answer": math.nan if self._method == "nan" else 1.0})

    async def close(self) -> None:
        Breaking.closed += 1


async def uses_a_tool(rollout_id: str, environment: Environment) -> Outcome:
    await environment.call_tool("add", {"number": 1})
    return Completed("33", n_calls=1)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("reset", "environment_start"),
        ("call_tool", "exception"),
        ("score", "environment_score"),
        ("nan", "bad_reward"),
    ],
)
async def test_an_environment_that_breaks_fails_its_rollout_and_is_closed(
    tmp_path: Path, method: str, reason: str
) -> None:
    Breaking.closed = 0
    job = make(
        tmp_path,
        Scripted(uses_a_tool),
        tasks=TASKS[:1],
        samples=1,
        max_attempts=2,
        environment=lambda: Breaking(method),
    )
    summary = await job.run()
    assert [row.error for row in summary.rows] == [reason]
    assert Breaking.closed == 2


async def test_a_retry_that_succeeds_makes_a_finished_row(tmp_path: Path) -> None:
    async def first_time_fails(rollout_id: str, environment: Environment) -> Outcome:
        return Failed("connection", "") if rollout_id.endswith("-a1") else Completed("", n_calls=3)

    harness = Scripted(first_time_fails)
    summary = await make(tmp_path, harness).run()
    assert {(row.status, row.attempt) for row in summary.rows} == {("finished", 2)}
    assert summary.failures == {"connection": 6}


def test_what_cannot_end_differently_is_not_retried(tmp_path: Path) -> None:
    async def refused(rollout_id: str, environment: Environment) -> Outcome:
        return Failed("refused", "HTTP 400", retryable=False)

    async def raises(rollout_id: str, environment: Environment) -> Outcome:
        raise InvalidRequestError("no", param="x")

    for name, play in (("value", refused), ("error", raises)):
        summary = asyncio.run(make(tmp_path / name, Scripted(play), max_attempts=5).run())
        assert {row.attempt for row in summary.rows} == {1}


def test_a_job_without_its_token_ends_at_once_and_with_it_plays_as_if_for_the_first_time(tmp_path: Path) -> None:
    async def guarded(call: Call) -> web.Response:
        if call.token == "right":
            return await solve(call)
        body = {"error": {"message": "a token is needed", "type": "authentication_error"}}
        return web.json_response(body, status=401)

    async def run(token: str) -> tuple[JobSummary, int]:
        async with serving(guarded) as server, sdk() as client:
            job = RolloutJob(
                tasks=TASKS,
                options=JobOptions(job_id="job", samples=2, concurrency=2, max_attempts=1),
                harness=ToolLoop(client),
                make_environment=Register,
                endpoint=lambda rollout_id: Endpoint(server.base_url(rollout_id), token),
                clear=nothing,
                close=nothing,
                settings={},
                directory=tmp_path,
            )
            try:
                return await job.run(), len(server.calls)
            finally:
                assert token == "right" or len(server.calls) <= 2

    with pytest.raises(ConfigError, match=r"HTTP 401: a token is needed - .* --secret-file") as stopped:
        asyncio.run(run("unused"))
    assert "\n" not in str(stopped.value)
    assert (tmp_path / "rollouts.jsonl").read_text() == (tmp_path / "failures.jsonl").read_text() == ""
    summary, _ = asyncio.run(run("right"))
    assert (summary.finished, summary.resumed, summary.failures) == (6, 0, Counter())


# --- stale records ---------------------------------------------------------------------------------------------------


async def test_before_every_attempt_its_id_is_cleared_and_those_before_it_are_closed(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []

    async def clear(rollout_id: str) -> None:
        events.append(("clear", rollout_id))

    async def close(rollout_id: str) -> None:
        events.append(("close", rollout_id))

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        events.append(("play", rollout_id))
        return Failed("connection", "")

    job = make(
        tmp_path, Scripted(play), tasks=TASKS[:1], samples=1, clear=clear, close=close, concurrency=1, max_attempts=3
    )
    await job.run()
    first, second, third = (f"job.{TASKS[0].task_id}.0-a{attempt}" for attempt in (1, 2, 3))
    assert events == [
        *(("clear", first), ("play", first)),
        *(("close", first), ("clear", second), ("play", second)),
        *(("close", first), ("close", second), ("clear", third), ("play", third)),
    ]


async def test_an_attempt_does_not_play_while_the_one_before_it_cannot_be_closed(tmp_path: Path) -> None:
    async def close(rollout_id: str) -> None:
        raise StoreUnavailableError("no answer", rollout_id=rollout_id)

    harness = Scripted(failing)
    summary = await make(tmp_path, harness, close=close, max_attempts=2).run()
    assert {rollout_id[-3:] for rollout_id in harness.played} == {"-a1"}
    assert {(row.error, row.attempt) for row in summary.rows} == {("not_cleared", 2)}


async def test_a_rollout_whose_stale_records_cannot_be_cleared_is_not_played(tmp_path: Path) -> None:
    async def clear(rollout_id: str) -> None:
        raise StoreUnavailableError("no answer", rollout_id=rollout_id)

    harness = Scripted(well)
    summary = await make(tmp_path, harness, clear=clear, max_attempts=2).run()
    assert harness.played == Counter()
    assert {(row.error, row.attempt) for row in summary.rows} == {("not_cleared", 2)}


# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_cancelled_job_keeps_its_finished_rollouts_and_plays_only_the_others_again(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def some_hang(rollout_id: str, environment: Environment) -> Outcome:
        if rollout_id.endswith(".1-a1"):
            started.set()
            await asyncio.Event().wait()
        return Completed("", n_calls=3)

    async def interrupted() -> None:
        run = asyncio.create_task(make(tmp_path, Scripted(some_hang), concurrency=6).run())
        await started.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(interrupted())
    assert sorted(row["sample"] for row in lines(tmp_path / "rollouts.jsonl")) == [0, 0, 0]
    assert (tmp_path / "failures.jsonl").read_text() == ""

    harness = Scripted(well)
    summary = asyncio.run(make(tmp_path, harness).run())
    assert sorted(harness.played) == sorted(f"job.{task.task_id}.1-a2" for task in TASKS)
    assert (summary.resumed, summary.finished) == (3, 6)


def test_failed_rollouts_get_more_attempts_only_when_the_limit_is_raised(tmp_path: Path) -> None:
    asyncio.run(make(tmp_path, Scripted(failing), max_attempts=2).run())

    harness = Scripted(well)
    summary = asyncio.run(make(tmp_path, harness, max_attempts=2).run())
    assert (harness.played, summary.failed) == (Counter(), 6)

    summary = asyncio.run(make(tmp_path, harness, max_attempts=3).run())
    assert {(row.status, row.attempt) for row in summary.rows} == {("finished", 3)}
    assert len(lines(tmp_path / "rollouts.jsonl")) == 6


@settings(max_examples=25, deadline=None)
@given(
    outcomes=st.lists(st.sampled_from([well, failing, broken_agent]), min_size=1, max_size=20),
    concurrency=st.integers(1, 8),
    stops=st.lists(st.integers(0, 30), max_size=3),
)
def test_however_often_it_is_stopped_there_is_one_row_for_each_rollout(
    tmp_path_factory: pytest.TempPathFactory, outcomes: list[Play], concurrency: int, stops: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("job")
    remaining = iter(outcomes)
    played: list[str] = []

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        played.append(rollout_id)
        await asyncio.sleep(0)
        return await next(remaining, well)(rollout_id, environment)

    async def run(stop_after: int | None) -> JobSummary | None:
        job = asyncio.create_task(make(directory, Scripted(play), concurrency=concurrency).run())
        if stop_after is not None:
            for _ in range(stop_after):
                await asyncio.sleep(0)
            job.cancel()
            await asyncio.wait({job})
            return None
        return await job

    for stop in stops:
        asyncio.run(run(stop))
    summary = asyncio.run(run(None))
    assert summary is not None
    expected = {(task.task_id, sample) for task in TASKS for sample in range(2)}
    written = lines(directory / "rollouts.jsonl")
    assert Counter((row["task_id"], row["sample"]) for row in written) == Counter(expected)
    assert {row.place for row in summary.rows} == expected
    assert len(set(played)) == len(played), "an attempt's rollout id came twice"
    assert {row.rollout_id for row in summary.rows} <= set(played)
    assert all((row.reward is None) == (row.status == "failed") for row in summary.rows)


# --- what cannot work is said before anything is played ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a"), Task("a")], "'a' is there more than once"),
        ([Task("a/b")], "do not make a rollout id"),
        ([Task("x" * 128)], "do not make a rollout id"),
    ],
)
async def test_ids_that_cannot_work_are_refused(tmp_path: Path, tasks: list[Task], message: str) -> None:
    harness = Scripted(well)
    with pytest.raises(ConfigError, match=message):
        await make(tmp_path, harness, tasks=tasks).run()
    assert harness.played == Counter()


def test_other_tasks_in_the_same_directory_are_refused(tmp_path: Path) -> None:
    asyncio.run(make(tmp_path, Scripted(well)).run())
    with pytest.raises(ConfigError, match=r"holds another job: tasks: other ones \(count, seed, file"):
        asyncio.run(make(tmp_path, Scripted(well), tasks=Register.tasks(3, seed=1)).run())


@pytest.mark.parametrize("option", ["samples", "concurrency", "max_attempts"])
def test_an_option_that_would_play_nothing_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        JobOptions(job_id="job", **{option: 0})


async def test_a_refused_call_over_http_ends_the_rollout_with_its_reason(tmp_path: Path) -> None:
    async def refuse(call: Call) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async def run() -> JobSummary:
        async with serving(refuse) as server, sdk() as client:
            job = RolloutJob(
                tasks=TASKS[:1],
                options=JobOptions(job_id="job", samples=1),
                harness=ToolLoop(client),
                make_environment=Register,
                endpoint=lambda rollout_id: Endpoint(server.base_url(rollout_id)),
                clear=nothing,
                close=nothing,
                settings={},
                directory=tmp_path,
            )
            return await job.run()

    (row,) = (await run()).rows
    assert (row.error, row.attempt) == ("refused", 1)
    assert row.detail == "HTTP 400: too long"
