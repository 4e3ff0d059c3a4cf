"""A rollout job: tasks x samples, each played by a harness in an environment.

Invariant: the job ends with one row for each rollout, in the time that its clocks give it, however its rollouts went. A
failed attempt is a failure row and a retry up to a limit, then a row without a reward; it is never an exception out of
the job. Three things are: what every rollout would meet, such as a missing token, a graph that stays away (`outage`),
and a disk that takes no more rows. They end the job and leave no row of what was under way, so that the job, started
again with the fault mended, plays as if it had not been played. A job that is started again plays exactly the rollouts
that have no row yet.

An attempt that was lost with what it ran on - its node, or the graph - is no fault of the rollout's. It has a limit of
its own (`max_lost`), as what it did may be why it was lost.

Attempts are fenced: each is a rollout of its own on the server, `job.task.sample-aN`, with its own URL and token. Its
number is on disk before it plays, so none comes twice, however the job dies; an attempt that another one supersedes is
closed. So nothing that an agent of an earlier attempt still does is in the records that a row names. With `resume`, one
that was cut is closed later, when the rollout is over: until then its records answer the calls that are repeated.

Flow: pending rollouts -> `concurrency` workers -> an attempt begins in the ledger -> it plays (`attempt`), its clock
starting once a worker is free -> row. Cancelling the job (Ctrl-C) leaves rollouts in flight without a row.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from gym_capture.errors import ConfigError, GymCaptureError, InvalidRolloutIdError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollout_ids import check_rollout_id
from gym_capture.rollouts.attempt import AttemptRunner, Attempts, Before, Outcome, Scored, TurnResume
from gym_capture.rollouts.environment import EnvironmentFactory, Task
from gym_capture.rollouts.harness import Endpoint, Failed, Harness
from gym_capture.rollouts.ledger import LOST, AttemptRow, FailureRow, Ledger, Place, RolloutRow
from gym_capture.rollouts.outage import Outage
from gym_capture.rollouts.patience import Patience
from gym_capture.rollouts.progress import Counting, JobProgress, uncounted

_LONGEST_WAIT_S = 30.0
_DOUBLED: Final = 60
"""How often the wait may double: as a number, it has an end."""
_MOST_ATTEMPTS: Final = 999_999
"""Rollout ids have room for the number of an attempt up to this one."""
_OF_THE_ROLLOUT: Final = frozenset(
    {AttemptFailure.ENVIRONMENT_START, AttemptFailure.ENVIRONMENT_SCORE, AttemptFailure.BAD_REWARD}
)
"""Failures that no graph has a part in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """A job's options beside its tasks."""

    job_id: str
    samples: int = 4
    """Rollouts of each task: the size of a GRPO group."""
    concurrency: int = 8
    max_attempts: int = 3
    rollout_timeout_s: float = 600.0
    """Seconds that an attempt may take, from the clearing of stale records to its score."""
    close_timeout_s: float = 10.0
    """Seconds for the tear-down of an attempt: an agent's, once it is cancelled, and its environment's `close`."""
    retry_wait_s: float = 1.0
    """The wait before the first retry; it doubles, up to 30 s."""
    max_lost: int = 10
    """Attempts at a rollout that may be lost with their node or their graph, beside `max_attempts`."""
    outage_timeout_s: float = 1800.0
    """Seconds for which a job waits for a graph that does not answer. Then it ends, and goes on when it is started
    again."""

    def __post_init__(self) -> None:
        for name in ("samples", "concurrency", "max_attempts"):
            if asdict(self)[name] < 1:
                raise ConfigError(f"{name} must be at least 1: got {asdict(self)[name]}")
        for name in ("rollout_timeout_s", "close_timeout_s", "outage_timeout_s"):
            if not asdict(self)[name] > 0:
                raise ConfigError(f"{name} must be more than 0: got {asdict(self)[name]}")


class Rollout(NamedTuple):
    """One rollout to play."""

    job_id: str
    task: Task
    sample: int

    @property
    def place(self) -> Place:
        return self.task.task_id, self.sample

    def attempt_id(self, attempt: int) -> str:
        """The rollout id of an attempt at it, from 1."""
        return f"{self.job_id}.{self.task.task_id}.{self.sample}-a{attempt}"


def rollouts_of(tasks: Sequence[Task], options: JobOptions) -> Iterator[Rollout]:
    """All rollouts of a job, in order. Raises `ConfigError` if ids repeat or are not allowed."""
    repeated = [task_id for task_id, count in Counter(task.task_id for task in tasks).items() if count > 1]
    if repeated:
        raise ConfigError(f"task ids must be unique: {repeated[0]!r} is there more than once")
    for task in tasks:
        for sample in range(options.samples):
            rollout = Rollout(options.job_id, task, sample)
            try:
                check_rollout_id(rollout.attempt_id(_MOST_ATTEMPTS))
            except InvalidRolloutIdError as error:
                raise ConfigError(f"job id and task id do not make a rollout id: {error.message}") from None
            yield rollout


def identity(tasks: Sequence[Task], options: JobOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same for rows of an earlier run that count: all that decides what is sampled and scored."""
    listed = json.dumps([asdict(task) for task in tasks], sort_keys=True)
    return {
        "job_id": options.job_id,
        "samples": options.samples,
        "tasks": hashlib.sha256(listed.encode()).hexdigest(),
        "limits": {"rollout_timeout_s": options.rollout_timeout_s},
        **settings,
    }


class JobSummary(NamedTuple):
    """How a job ended. `resumed` of its rollouts had a row before it started."""

    rows: tuple[RolloutRow, ...]
    resumed: int
    failures: Counter[str]
    """Failed attempts by reason, earlier runs included."""
    left_running: int = 0
    """Agents and environments that went on although they were cancelled; they end with the process."""

    @property
    def finished(self) -> int:
        return sum(row.status == "finished" for row in self.rows)

    @property
    def failed(self) -> int:
        return len(self.rows) - self.finished

    @property
    def replayed_calls(self) -> int:
        """Calls that were answered from records of attempts that were cut."""
        return sum(row.replayed_calls for row in self.rows)

    @property
    def truncated(self) -> int:
        """Those among the finished whose conversation outgrew the context."""
        return sum(row.truncated for row in self.rows)


async def at_once(group_id: str) -> None:
    """Nothing holds a rollout back."""


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """A job and what it plays with. `run` may be called again, in this process or another, until all rows are there."""

    tasks: Sequence[Task]
    options: JobOptions
    harness: Harness
    make_environment: EnvironmentFactory
    endpoint: Callable[[str], Endpoint]
    """Where the calls of a rollout id go."""
    clear: Callable[[str], Awaitable[object]]
    """Makes the server forget what another job of the same id left under an attempt's rollout id, and take calls."""
    close: Callable[[str], Awaitable[object]]
    """Makes the server forget a superseded attempt, and refuse its calls from then on."""
    settings: Mapping[str, Any]
    """Names of `harness` and `make_environment`, and the options they were made with: JSON. Rows of a job with other
    settings do not count for this one. Endpoints and credentials are no part of it."""
    directory: Path
    """Where rows are kept, see `ledger`."""
    resume: TurnResume | None = None
    """None: what was cut is played anew."""
    keep: Callable[[RolloutRow, Outcome], None] = lambda row, outcome: None
    """Told of each row and what it was made of, before the row is written: for what is too large for it."""
    counting: Counting = uncounted
    """Asked what is recorded of each attempt, once it is over."""
    outage: Outage = field(default_factory=Outage)
    may_begin: Callable[[str], Awaitable[object]] = at_once
    """Waited for before each rollout, with its group's id. A group's rollouts come one behind the other."""

    async def run(
        self,
        *,
        on_row: Callable[[RolloutRow], None] = lambda row: None,
        on_kept: Callable[[RolloutRow], None] = lambda row: None,
        progress: JobProgress | None = None,
    ) -> JobSummary:
        """Plays what has no row yet. `on_kept` is told of each row that an earlier run left, before anything is played,
        `on_row` of each new one, `progress` of all that goes on.

        Raises `ConfigError` if the server does not admit the job's calls or if the rows cannot be written.
        """
        attempts = Attempts(
            harness=self.harness,
            make_environment=self.make_environment,
            endpoint=self.endpoint,
            clear=self.clear,
            close=self.close,
            patience=Patience(grace_s=self.options.close_timeout_s),
            rollout_timeout_s=self.options.rollout_timeout_s,
            close_timeout_s=self.options.close_timeout_s,
            resume=self.resume,
        )
        run = JobRun(
            tasks=self.tasks,
            options=self.options,
            attempts=attempts,
            settings=self.settings,
            directory=self.directory,
            resume=self.resume,
            keep=self.keep,
            counting=self.counting,
            outage=self.outage,
            may_begin=self.may_begin,
        )
        return await run.run(on_row=on_row, on_kept=on_kept, progress=progress)


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """A job, wherever its attempts are played: which rollouts are played, how often, and what is kept of them."""

    tasks: Sequence[Task]
    options: JobOptions
    attempts: AttemptRunner
    settings: Mapping[str, Any]
    """As those of `RolloutJob`."""
    directory: Path
    resume: TurnResume | None = None
    keep: Callable[[RolloutRow, Outcome], None] = lambda row, outcome: None
    counting: Counting = uncounted
    outage: Outage = field(default_factory=Outage)
    """Knows when the graph is away: an outage that nobody looks for is none."""
    may_begin: Callable[[str], Awaitable[object]] = at_once

    async def run(
        self,
        *,
        on_row: Callable[[RolloutRow], None] = lambda row: None,
        on_kept: Callable[[RolloutRow], None] = lambda row: None,
        progress: JobProgress | None = None,
    ) -> JobSummary:
        """As `RolloutJob.run`."""
        every = list(rollouts_of(self.tasks, self.options))
        progress = progress or JobProgress()
        with Ledger(self.directory, identity(self.tasks, self.options, self.settings)) as ledger:
            failed = _failed_attempts(ledger.failures)
            again = [place for place, row in ledger.rows.items() if self._deserves_more(row, failed[place])]
            ledger.forget(again)
            pending = [rollout for rollout in every if rollout.place not in ledger.rows]
            progress.begin(total=len(every), rows=ledger.rows.values())
            for row in ledger.rows.values():
                on_kept(row)
            queue = iter(pending)

            async def worker() -> None:
                for rollout in queue:
                    await self.may_begin(rollout.task.task_id)
                    row = await self._settle(rollout, ledger, progress, failed[rollout.place])
                    progress.settled(row)
                    on_row(row)

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(self.options.concurrency, len(pending))):
                        workers.create_task(worker())
            except BaseExceptionGroup as group:
                # The first error cancelled the other workers; some of them may have met the same.
                raise group.exceptions[0] from None
            finally:
                await self.outage.close()
            return JobSummary(
                rows=tuple(ledger.rows[rollout.place] for rollout in every),
                resumed=len(every) - len(pending),
                failures=Counter(failure.reason for failure in ledger.failures),
                left_running=self.attempts.left_running,
            )

    def _deserves_more(self, row: RolloutRow, failed: Counter[str]) -> bool:
        lost = sum(failed[reason] for reason in LOST)
        own = failed.total() - lost
        within = own < self.options.max_attempts and lost <= self.options.max_lost
        return row.status == "failed" and row.retryable and within

    async def _settle(
        self, rollout: Rollout, ledger: Ledger, progress: JobProgress, failed: Counter[str]
    ) -> RolloutRow:
        """Attempts until one succeeds or no more are allowed. `failed`: by reason, those of earlier runs included."""
        while True:
            play = await self.attempts.place()
            await self.outage.over()  # last: room may come because the graph went
            attempt = ledger.attempts.get(rollout.place, 0) + 1
            before = self._before(rollout, attempt, last_uncut=ledger.last_uncut(rollout.place))
            rollout_id = rollout.attempt_id(attempt)
            started_at, clock = time.time(), time.monotonic()
            progress.started(rollout_id)
            known: RolloutCounts | None = None
            try:
                await ledger.begin(_begun(rollout, attempt, at=started_at))
                outcome = await play(rollout_id, rollout.task, before=before)
                wall_s = time.monotonic() - clock
                counted = await self.counting([rollout_id])
                counts = None if counted is None else counted[0]
                known = RolloutCounts(calls=outcome.result.n_calls) if counts is None else counts
            finally:
                progress.stopped(rollout_id, known)
            if not isinstance(outcome.result, Scored):
                outcome = outcome._replace(result=await self._judged(outcome.result))
            row = _row(rollout, outcome, attempt=attempt, counts=counts, started_at=started_at, wall_s=wall_s)
            if row.status == "failed":
                failure = _failure(row)
                ledger.add_failure(failure)
                progress.failed(failure)
                failed[failure.reason] += 1
            if not self._deserves_more(row, failed):
                if before.goes_on_from:
                    row = await self._with_replays(row, before.goes_on_from)
                self.keep(row, outcome)
                ledger.add_row(row)
                return row
            await asyncio.sleep(
                min(self.options.retry_wait_s * 2 ** min(failed.total() - 1, _DOUBLED), _LONGEST_WAIT_S)
            )

    async def _judged(self, failed: Failed) -> Failed:
        """Whose fault it was. Raises `ConfigError` for what every rollout would meet."""
        if failed.ends_job:
            raise ConfigError(
                f"the server does not admit the job's calls: {failed.detail} - name its secret file with "
                "--secret-file; nothing counts as failed by this, the same command plays it"
            )
        if failed.retryable and failed.reason not in LOST | _OF_THE_ROLLOUT and await self.outage.is_away():
            return replace(failed, reason=AttemptFailure.GRAPH_LOST, detail=f"{failed.reason}: {failed.detail}")
        return failed

    def _before(self, rollout: Rollout, attempt: int, *, last_uncut: int) -> Before:
        # All before it, whichever were closed already: an earlier run may have died before it did that.
        every = [rollout.attempt_id(number) for number in range(1, attempt)]
        if self.resume is None:
            return Before(every)
        return Before(every[:last_uncut], every[last_uncut:])

    async def _with_replays(self, row: RolloutRow, sources: Sequence[str]) -> RolloutRow:
        """With what the attempt repeated of those that it went on from, which are forgotten now.

        Before its row is written: a job that dies in between has cut this attempt too, and goes on from it.
        """
        assert self.resume is not None
        try:
            found = await self.resume.over(row.rollout_id, sources)
        except GymCaptureError as error:
            said = f"what it repeated of earlier attempts cannot be told: {error.message}"
            return replace(row, note=f"{row.note}; {said}" if row.note else said)
        return replace(row, replayed_calls=found.calls, diverged_at=found.diverged_at)


def _failed_attempts(failures: Iterable[FailureRow]) -> defaultdict[Place, Counter[str]]:
    """By rollout and reason."""
    found: defaultdict[Place, Counter[str]] = defaultdict(Counter)
    for failure in failures:
        found[failure.place][failure.reason] += 1
    return found


def _begun(rollout: Rollout, attempt: int, *, at: float) -> AttemptRow:
    task_id, sample = rollout.place
    return AttemptRow(rollout_id=rollout.attempt_id(attempt), task_id=task_id, sample=sample, attempt=attempt, at=at)


def _row(
    rollout: Rollout,
    outcome: Outcome,
    *,
    attempt: int,
    counts: RolloutCounts | None,
    started_at: float,
    wall_s: float,
) -> RolloutRow:
    result = outcome.result
    recorded = None if counts is None else counts._asdict()
    if isinstance(result, Scored):
        return RolloutRow(
            rollout_id=rollout.attempt_id(attempt),
            task_id=rollout.task.task_id,
            group_id=rollout.task.task_id,
            sample=rollout.sample,
            status="finished",
            reward=result.reward,
            reward_components=result.components,
            call_rewards={str(call_id): float(given) for call_id, given in result.completed.call_rewards.items()},
            n_calls=result.n_calls,
            attempt=attempt,
            truncated=result.completed.truncated,
            failed_call=result.completed.failed_call,
            answer=result.answer,
            note=outcome.note,
            recorded=recorded,
            started_at=started_at,
            wall_s=wall_s,
        )
    return RolloutRow(
        rollout_id=rollout.attempt_id(attempt),
        task_id=rollout.task.task_id,
        group_id=rollout.task.task_id,
        sample=rollout.sample,
        status="failed",
        reward=None,
        n_calls=result.n_calls,
        attempt=attempt,
        error=result.reason,
        detail=result.detail,
        failed_call=result.failed_call,
        retryable=result.retryable,
        note=outcome.note,
        recorded=recorded,
        started_at=started_at,
        wall_s=wall_s,
    )


def _failure(row: RolloutRow) -> FailureRow:
    return FailureRow(
        rollout_id=row.rollout_id,
        task_id=row.task_id,
        sample=row.sample,
        attempt=row.attempt,
        reason=row.error or AttemptFailure.FAILED,
        detail=row.detail or "",
        failed_call=row.failed_call,
        retryable=row.retryable,
        n_calls=row.n_calls,
        note=row.note,
        at=time.time(),
    )
