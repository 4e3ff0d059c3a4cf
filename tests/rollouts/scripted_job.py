"""A job with a scripted harness, for this process or for one that is killed: `python -m ... DIRECTORY HANGS_AT`.

Each rollout that is played is appended to `played.txt` in the directory above the job's, before anything else happens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from gym_capture.rollouts.environment import Environment, Observation, Register, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Harness, Outcome
from gym_capture.rollouts.job import JobOptions, RolloutJob

TASKS = Register.tasks(3)
Play = Callable[[str, Environment], Awaitable[Outcome]]


class Scripted:
    """A harness whose rollouts go as `play` says, by rollout id."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
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
        clear=nothing,
        close=nothing,
        settings=settings,
        directory=directory,
    )


def recorded(directory: Path, *, hangs_at: int | None = None) -> RolloutJob:
    """A job that writes down what it plays; the rollout with the number `hangs_at`, from 0, says so and stays."""

    async def play(rollout_id: str, environment: Environment) -> Outcome:
        with (directory.parent / "played.txt").open("a+", encoding="utf-8") as file:
            file.seek(0)
            number = len(file.readlines())
            file.write(f"{rollout_id}\n")
        if number == hangs_at:
            print("hangs", flush=True)
            await asyncio.Event().wait()
        return Completed("0", n_calls=3)

    return make(directory, Scripted(play), concurrency=1)


if __name__ == "__main__":
    asyncio.run(recorded(Path(sys.argv[1]), hangs_at=int(sys.argv[2])).run())
