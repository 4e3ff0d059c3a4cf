"""A rollout job: tasks x samples, each played by a harness in an environment.

Invariant: the job ends with one row for each rollout, however its rollouts went. A failed attempt - the model, the
agent, the environment, the clock - is a failure row and a retry up to a limit, then a reward-0 row; it is never an
exception out of the job. The one exception is what every rollout would meet, such as a missing token: it ends the job
and leaves no row, so that the job, started again with the fault mended, plays as if for the first time. Rollout ids
follow from job, task and sample, so a job that is started again plays exactly the rollouts that have no row yet, and
what an earlier attempt left on the server is cleared before each attempt.

Flow: pending rollouts -> `concurrency` workers -> clear stale records -> environment and harness, on a clock that
starts once a worker is free -> score -> row. Cancelling the job (Ctrl-C) leaves rollouts in flight without a row.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from gym_capture.errors import ConfigError, GymCaptureError, InvalidRolloutIdError, described
from gym_capture.reasons import AttemptFailure
from gym_capture.records import check_rollout_id
from gym_capture.rollouts.environment import EnvironmentFactory, Score, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Harness
from gym_capture.rollouts.ledger import FailureRow, Ledger, RolloutRow

_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What of a job is not its tasks."""

    job_id: str
    samples: int = 4
    """Rollouts of each task: the size of a GRPO group."""
    concurrency: int = 8
    max_attempts: int = 3
    rollout_timeout_s: float = 600.0
    retry_wait_s: float = 1.0
    """The wait before the first retry; it doubles, up to 30 s."""

    def __post_init__(self) -> None:
        for name in ("samples", "concurrency", "max_attempts"):
            if asdict(self)[name] < 1:
                raise ConfigError(f"{name} must be at least 1: got {asdict(self)[name]}")


class Rollout(NamedTuple):
    """One rollout to play."""

    rollout_id: str
    task: Task
    sample: int


class JobSummary(NamedTuple):
    """How a job ended. `resumed` of its rollouts had a row before it started."""

    rows: tuple[RolloutRow, ...]
    resumed: int
    failures: Counter[str]
    """Failed attempts by reason, earlier runs included."""

    @property
    def finished(self) -> int:
        return sum(row.status == "finished" for row in self.rows)

    @property
    def failed(self) -> int:
        return len(self.rows) - self.finished


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """A job and what it plays with. `run` may be called again, in this process or another, until all rows are there."""

    tasks: Sequence[Task]
    options: JobOptions
    harness: Harness
    make_environment: EnvironmentFactory
    endpoint: Callable[[str], Endpoint]
    """Where the calls of a rollout id go."""
    clear: Callable[[str], Awaitable[None]]
    """Makes the server forget what an earlier attempt of a rollout id left."""
    directory: Path
    """Where rows are kept, see `ledger`."""

    def rollouts(self) -> Iterator[Rollout]:
        """All rollouts of the job, in order. Raises `ConfigError` if ids repeat or are not allowed."""
        repeated = [task_id for task_id, count in Counter(task.task_id for task in self.tasks).items() if count > 1]
        if repeated:
            raise ConfigError(f"task ids must be unique: {repeated[0]!r} is there more than once")
        for task in self.tasks:
            for sample in range(self.options.samples):
                try:
                    rollout_id = check_rollout_id(f"{self.options.job_id}.{task.task_id}.{sample}")
                except InvalidRolloutIdError as error:
                    raise ConfigError(f"job id and task id do not make a rollout id: {error.message}") from None
                yield Rollout(rollout_id, task, sample)

    async def run(self, *, on_row: Callable[[RolloutRow], None] = lambda row: None) -> JobSummary:
        """Plays what has no row yet. `on_row` is told of each new row.

        Raises `ConfigError` if the server does not admit the job's calls.
        """
        every = list(self.rollouts())
        with Ledger(self.directory, self._identity()) as ledger:
            ledger.forget([row.rollout_id for row in ledger.rows.values() if self._deserves_more(row)])
            attempts = Counter(failure.rollout_id for failure in ledger.failures)
            pending = [rollout for rollout in every if rollout.rollout_id not in ledger.rows]
            queue = iter(pending)

            async def worker() -> None:
                for rollout in queue:
                    on_row(await self._settle(rollout, ledger, failed_attempts=attempts[rollout.rollout_id]))

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(self.options.concurrency, len(pending))):
                        workers.create_task(worker())
            except BaseExceptionGroup as group:
                # The first error cancelled the other workers; some of them may have met the same.
                raise group.exceptions[0] from None
            return JobSummary(
                rows=tuple(ledger.rows[rollout.rollout_id] for rollout in every),
                resumed=len(every) - len(pending),
                failures=Counter(failure.reason for failure in ledger.failures),
            )

    def _identity(self) -> dict[str, object]:
        """What must be the same for rows of an earlier run to count."""
        tasks = json.dumps([asdict(task) for task in self.tasks], sort_keys=True)
        return {
            "job_id": self.options.job_id,
            "samples": self.options.samples,
            "tasks": hashlib.sha256(tasks.encode()).hexdigest(),
        }

    def _deserves_more(self, row: RolloutRow) -> bool:
        return row.status == "failed" and row.retryable and row.attempts < self.options.max_attempts

    async def _settle(self, rollout: Rollout, ledger: Ledger, *, failed_attempts: int) -> RolloutRow:
        """Attempts until one succeeds or no more are allowed; an earlier run's failures count."""
        attempt = failed_attempts
        while True:
            attempt += 1
            started_at, clock = time.time(), time.monotonic()
            outcome = await self._attempt(rollout)
            if isinstance(outcome, Failed) and outcome.ends_job:
                raise ConfigError(
                    f"the server does not admit the job's calls: {outcome.detail} - name its secret file with "
                    "--secret-file; nothing counts as failed by this, the same command plays it"
                )
            row = _row(rollout, outcome, attempts=attempt, started_at=started_at, wall_s=time.monotonic() - clock)
            if isinstance(outcome, Failed):
                ledger.add_failure(_failure(rollout, outcome, attempt))
            if not self._deserves_more(row):
                ledger.add_row(row)
                return row
            await asyncio.sleep(min(self.options.retry_wait_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))

    async def _attempt(self, rollout: Rollout) -> tuple[Completed, Score] | Failed:
        """The one place where whatever went wrong becomes a value. Only the cancelling of the job passes through."""
        (outcome,) = await asyncio.gather(self._timed(rollout), return_exceptions=True)
        if isinstance(outcome, BaseException):
            retryable = outcome.retryable if isinstance(outcome, GymCaptureError) else True
            return Failed(AttemptFailure.EXCEPTION, described(outcome), retryable=retryable)
        return outcome

    async def _timed(self, rollout: Rollout) -> tuple[Completed, Score] | Failed:
        limit = self.options.rollout_timeout_s
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                return await self._play(rollout)
        except TimeoutError:
            if not clock.expired():
                raise
            return Failed(AttemptFailure.ROLLOUT_TIMEOUT, f"not over after {limit:g} s")

    async def _play(self, rollout: Rollout) -> tuple[Completed, Score] | Failed:
        await self.clear(rollout.rollout_id)
        environment = self.make_environment()
        try:
            observation = await environment.reset(rollout.task)
            endpoint = self.endpoint(rollout.rollout_id)
            outcome = await self.harness.run(endpoint=endpoint, observation=observation, environment=environment)
            if isinstance(outcome, Failed):
                return outcome
            score = await environment.score(outcome.answer)
            if not math.isfinite(score.reward):
                return Failed(AttemptFailure.BAD_REWARD, f"the environment's reward is {score.reward}", outcome.n_calls)
            return outcome, score
        finally:
            await environment.close()


def _row(
    rollout: Rollout, outcome: tuple[Completed, Score] | Failed, *, attempts: int, started_at: float, wall_s: float
) -> RolloutRow:
    if isinstance(outcome, Failed):
        return RolloutRow(
            rollout_id=rollout.rollout_id,
            task_id=rollout.task.task_id,
            group_id=rollout.task.task_id,
            sample=rollout.sample,
            status="failed",
            reward=0.0,
            n_calls=outcome.n_calls,
            attempts=attempts,
            error=outcome.reason,
            detail=outcome.detail,
            retryable=outcome.retryable,
            started_at=started_at,
            wall_s=wall_s,
        )
    completed, score = outcome
    return RolloutRow(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task.task_id,
        group_id=rollout.task.task_id,
        sample=rollout.sample,
        status="finished",
        reward=score.reward,
        reward_components=score.components,
        n_calls=completed.n_calls,
        attempts=attempts,
        answer=completed.answer,
        started_at=started_at,
        wall_s=wall_s,
    )


def _failure(rollout: Rollout, failed: Failed, attempt: int) -> FailureRow:
    return FailureRow(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task.task_id,
        sample=rollout.sample,
        attempt=attempt,
        reason=failed.reason,
        detail=failed.detail,
        retryable=failed.retryable,
        n_calls=failed.n_calls,
        at=time.time(),
    )
