"""How far a rollout job is, as numbers: what every view of it shows.

Invariant: a rollout is counted once, whatever its attempts were, and rates and the time that is left are of this run
alone: what an earlier run finished took none of its time.

Flow: the job tells what begins and ends -> `now` makes a `Snapshot` of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gym_capture.rollouts.ledger import FailureRow, RolloutRow

_SLOWEST: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A rollout that is being played."""

    rollout_id: str
    seconds: float
    """Since its attempt began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job at one moment."""

    elapsed_s: float
    total: int
    """Rollouts of the job."""
    done: int
    """Those that are over, with those of earlier runs; `failed` ones are among them."""
    resumed: int
    """Those that were over before this run."""
    running: int
    failed: int
    """Those of which no attempt came to its end. They have no reward, and a build masks them."""
    failed_attempts: dict[str, int]
    """Of this run, by reason; also those that another attempt mended."""
    calls: int
    """Model calls of the rollouts that were over in this run."""
    replayed_calls: int = 0
    """Those that were answered from records of attempts that were cut."""
    calls_per_s: float
    mean_reward: float | None
    """Of the rollouts that finished, earlier runs included."""
    eta_s: float | None
    """None as long as no rollout was over in this run."""
    slowest: tuple[Running, ...]
    """Those that have been running for the longest."""


class JobProgress:
    """Counts as a job goes on. One object for one run."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._total = self._resumed = self._settled = self._failed = self._calls = 0
        self._replayed_calls = 0
        self._rewarded, self._reward = 0, 0.0
        self._failed_attempts: Counter[str] = Counter()
        self._running: dict[str, float] = {}
        self.news = asyncio.Event()
        """Set when an attempt failed as none did before: not to be kept until it is time to show how things stand."""

    def begin(self, *, total: int, rows: Iterable[RolloutRow]) -> None:
        """The job has `total` rollouts, of which `rows` were over before this run."""
        self._began, self._total = self._clock(), total
        for row in rows:
            self._resumed += 1
            self._count(row)

    def started(self, rollout_id: str) -> None:
        """An attempt begins."""
        self._running[rollout_id] = self._clock()

    def stopped(self, rollout_id: str) -> None:
        """An attempt is over, one way or the other."""
        del self._running[rollout_id]

    def failed(self, failure: FailureRow) -> None:
        """An attempt failed."""
        if failure.reason not in self._failed_attempts:
            self.news.set()
        self._failed_attempts[failure.reason] += 1

    def settled(self, row: RolloutRow) -> None:
        """A rollout is over."""
        self._settled += 1
        self._calls += row.n_calls
        self._replayed_calls += row.replayed_calls
        self._count(row)

    def now(self) -> Snapshot:
        now = self._clock()
        elapsed_s = now - self._began
        done = self._resumed + self._settled

        oldest = sorted(self._running.items(), key=lambda item: item[1])[:_SLOWEST]
        return Snapshot(
            elapsed_s=elapsed_s,
            total=self._total,
            done=done,
            resumed=self._resumed,
            running=len(self._running),
            failed=self._failed,
            failed_attempts=dict(self._failed_attempts.most_common()),
            calls=self._calls,
            replayed_calls=self._replayed_calls,
            calls_per_s=self._calls / elapsed_s if elapsed_s > 0 else 0.0,
            mean_reward=self._reward / self._rewarded if self._rewarded else None,
            eta_s=elapsed_s * (self._total - done) / self._settled if self._settled else None,
            slowest=tuple(Running(rollout_id=rollout_id, seconds=now - began) for rollout_id, began in oldest),
        )

    def _count(self, row: RolloutRow) -> None:
        if row.reward is None:
            self._failed += 1
        else:
            self._rewarded += 1
            self._reward += row.reward
