"""What a job shows of itself: the same numbers on a terminal, in a log and for a program."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from contextlib import AbstractContextManager, nullcontext

import pytest
from rich.console import Console

from gym_capture.commands.rollout_view import JsonView, LineView, LiveView, clock, drawn, watching
from gym_capture.errors import ConfigError
from gym_capture.rollouts.ledger import FailureRow
from gym_capture.rollouts.progress import Built, JobProgress, Running, Snapshot

NOW = Snapshot(
    elapsed_s=75.0,
    total=64,
    done=12,
    resumed=2,
    running=8,
    failed=1,
    masked=1,
    failed_attempts={"connection": 3, "refused": 1},
    calls=30,
    calls_per_s=0.4,
    generated_tokens=2490,
    tokens_per_s=33.2,
    eligible_links=21,
    contiguous_links=20,
    mean_reward=0.5,
    eta_s=390.0,
    slowest=(Running(rollout_id="j.a.0", seconds=61.0), Running(rollout_id="j.b.0", seconds=2.0)),
    built=Built(groups=3, rollouts=12, masked=1, trajectories=11),
)
LINE = (
    "rollouts 12/64, 8 running, 1 failed (masked), mean reward 0.500, 0.4 calls/s, 33 tokens/s, "
    "20/21 links contiguous, 3 groups built, 0:01:15, 0:06:30 to go, failed attempts: connection 3x, refused 1x\n"
)


def shown(now: Snapshot) -> str:
    output = io.StringIO()
    Console(file=output, width=110).print(drawn(now))
    return output.getvalue()


def test_a_log_gets_a_line() -> None:
    output = io.StringIO()
    LineView(Console(file=output, width=40)).show(NOW)
    assert output.getvalue() == LINE


def test_what_is_not_known_is_not_shown() -> None:
    output = io.StringIO()
    nothing = dataclasses.replace(NOW, generated_tokens=0, eligible_links=0, failed_attempts={}, eta_s=None, built=None)
    LineView(Console(file=output)).show(nothing)
    assert output.getvalue().endswith("mean reward 0.500, 0.4 calls/s, 0:01:15\n")


def test_those_that_are_masked_without_having_failed_are_shown() -> None:
    assert "8 running, 1 failed, 3 masked, mean reward" in shown(dataclasses.replace(NOW, masked=3))
    assert "8 running, 2 masked, mean reward" in shown(dataclasses.replace(NOW, failed=0, masked=2))


def test_a_program_gets_all_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    JsonView().show(NOW)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dataclasses.asdict(NOW)))


def test_a_terminal_shows_what_is_slow_and_what_failed() -> None:
    lines = shown(NOW).splitlines()
    assert "12/64, 8 running, 1 failed (masked), mean reward 0.500" in lines[0]
    rates = "0.4 calls/s, 33 tokens/s, 20/21 links contiguous, 3 groups built, 0:01:15, 0:06:30 to go"
    assert lines[1].strip() == rates
    assert lines[2].strip() == "slowest: j.a.0 61 s"
    assert lines[3].strip() == "failed attempts: connection 3x, refused 1x"


@pytest.mark.parametrize(
    ("done", "failed", "mark"), [(12, 0, "…"), (64, 0, "✓"), (64, 1, "!"), (64, 64, "✗"), (0, 0, "…")]
)
def test_a_mark_says_how_it_goes(done: int, failed: int, mark: str) -> None:
    assert shown(dataclasses.replace(NOW, done=done, failed=failed)).startswith(f"{mark} rollouts")


def test_a_live_view_ends_with_how_things_stand() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output, width=110, force_terminal=True))
    with view.shown():
        view.show(NOW)
    assert "12/64" in output.getvalue()


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt, ValueError])
def test_the_last_numbers_are_shown_however_it_ends(ends: type[BaseException] | None) -> None:
    class Seen:
        every_s = 0.001

        def __init__(self) -> None:
            self.totals: list[int] = []
            self.more_than_one = asyncio.Event()

        def shown(self) -> AbstractContextManager[object]:
            return nullcontext()

        def show(self, now: Snapshot) -> None:
            self.totals.append(now.total)
            self.more_than_one.set()

    async def run(seen: Seen) -> None:
        progress = JobProgress()
        async with watching(progress, seen):
            await seen.more_than_one.wait()
            progress.begin(total=5, rows=[])
            if ends is not None:
                raise ends

    seen = Seen()
    if ends is None:
        asyncio.run(run(seen))
    else:
        with pytest.raises(ends):
            asyncio.run(run(seen))
    assert (seen.totals[0], seen.totals[-1]) == (0, 5)


async def test_RA_01_the_first_failure_of_a_kind_is_shown_at_once() -> None:
    class Seen:
        every_s = 3600.0

        def __init__(self) -> None:
            self.shows: asyncio.Queue[dict[str, int]] = asyncio.Queue()

        def shown(self) -> AbstractContextManager[object]:
            return nullcontext()

        def show(self, now: Snapshot) -> None:
            self.shows.put_nowait(now.failed_attempts)

    progress, seen = JobProgress(), Seen()
    async with asyncio.timeout(10), watching(progress, seen):
        progress.failed(failure("agent_unreachable"))
        assert await seen.shows.get() == {"agent_unreachable": 1}
        progress.failed(failure("agent_unreachable"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert seen.shows.empty()
        progress.failed(failure("agent_timeout"))
        assert await seen.shows.get() == {"agent_unreachable": 2, "agent_timeout": 1}


def failure(reason: str) -> FailureRow:
    return FailureRow(
        rollout_id="j.a.0",
        task_id="a",
        sample=0,
        attempt=1,
        reason=reason,
        detail="",
        retryable=True,
        n_calls=0,
        at=0.0,
    )


async def test_a_job_that_was_refused_shows_no_numbers() -> None:
    output = io.StringIO()
    with pytest.raises(ConfigError):
        async with watching(JobProgress(), LineView(Console(file=output))):
            raise ConfigError("no")
    assert output.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(4.6, "0:00:05"), (3723, "1:02:03")])
def test_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
