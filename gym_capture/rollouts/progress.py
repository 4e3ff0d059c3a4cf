"""How far a rollout job is, as numbers: what every view of it shows.

Invariant: a rollout is counted once, whatever its attempts were. What is recorded - calls, tokens, links - is that of
all attempts of this run, and no such count goes down. Rates and the time that is left are of this run alone: what an
earlier run finished took none of its time.

Flow: the job tells what begins and ends, `looking` asks now and then what is recorded of the attempts that run -> `now`
makes a `Snapshot` of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from gym_capture.rollout_counts import RolloutCounts, summed
from gym_capture.rollouts.ledger import FailureRow, RolloutRow

_SLOWEST: Final = 3
_LOOK_EVERY_S: Final = 2.0

Counting: TypeAlias = Callable[[Sequence[str]], Awaitable[Sequence[RolloutCounts] | None]]
"""What is recorded of rollouts, by their ids: to each, in its place. None: the records cannot be asked now."""


async def uncounted(rollout_ids: Sequence[str]) -> None:
    """Counts nothing: for a job whose server keeps no records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A rollout that is being played."""

    rollout_id: str
    seconds: float
    """Since its attempt began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What is built of a job already, earlier runs included."""

    groups: int = 0
    rollouts: int = 0
    masked: int = 0
    """Rollouts of them that are masked."""
    trajectories: int = 0


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
    masked: int
    """Those of which it is known by now that a build masks them: the failed ones, those whose capture is known to lack
    something, and with `--build` all that were masked. Other reasons show only when they are built."""
    failed_attempts: dict[str, int]
    """Of this run, by reason; also those that another attempt mended."""
    calls: int
    """Model calls that were recorded in this run, as of a moment ago; where that cannot be known of an attempt, those
    that its agent counted."""
    replayed_calls: int = 0
    """Of rollouts that were over in this run: those that were answered from records of attempts that were cut."""
    calls_per_s: float
    generated_tokens: int
    """Of those calls."""
    tokens_per_s: float
    eligible_links: int
    """Those calls whose parent was proven."""
    contiguous_links: int
    """Those of them that are contiguous: their prompt starts with their parent's ids."""
    mean_reward: float | None
    """Of the rollouts that finished, earlier runs included."""
    eta_s: float | None
    """None as long as no rollout was over in this run."""
    slowest: tuple[Running, ...]
    """Those that have been running for the longest."""
    built: Built | None
    """None: nothing is built while the job plays."""


@dataclass(slots=True)
class _Attempt:
    """An attempt that runs."""

    began: float
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """At the last look."""


class JobProgress:
    """Counts as a job goes on. One object for one run."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._total = self._resumed = self._settled = self._failed = self._replayed_calls = 0
        self._rewarded, self._reward = 0, 0.0
        self._failed_attempts: Counter[str] = Counter()
        self._running: dict[str, _Attempt] = {}
        self._recorded = RolloutCounts()
        """Of the attempts that are over."""
        self._masked: set[str] = set()
        self._built: Built | None = None
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
        self._running[rollout_id] = _Attempt(self._clock())

    @property
    def running(self) -> Sequence[str]:
        """The attempts that run."""
        return tuple(self._running)

    def looked(self, counts: Mapping[str, RolloutCounts]) -> None:
        """So much is recorded of attempts that run, or did when it was asked for."""
        for rollout_id in counts.keys() & self._running.keys():
            self._running[rollout_id].counts = counts[rollout_id]

    def stopped(self, rollout_id: str, counts: RolloutCounts | None = None) -> None:
        """An attempt is over, one way or the other. `counts`: what is recorded of it, where that is known."""
        attempt = self._running.pop(rollout_id)
        self._recorded = summed((self._recorded, attempt.counts if counts is None else counts))

    def failed(self, failure: FailureRow) -> None:
        """An attempt failed."""
        if failure.reason not in self._failed_attempts:
            self.news.set()
        self._failed_attempts[failure.reason] += 1

    def settled(self, row: RolloutRow) -> None:
        """A rollout is over."""
        self._settled += 1
        self._replayed_calls += row.replayed_calls
        self._count(row)

    def builds(self) -> None:
        """The job is built while it plays."""
        self._built = Built()

    def built(self, *, rollouts: int, masked: Collection[str], trajectories: int) -> None:
        """A group is built, or was before this run."""
        before = self._built or Built()
        self._masked.update(masked)
        self._built = Built(
            groups=before.groups + 1,
            rollouts=before.rollouts + rollouts,
            masked=before.masked + len(masked),
            trajectories=before.trajectories + trajectories,
        )

    def now(self) -> Snapshot:
        now = self._clock()
        elapsed_s = now - self._began
        done = self._resumed + self._settled

        recorded = summed((self._recorded, *(attempt.counts for attempt in self._running.values())))
        oldest = sorted(self._running.items(), key=lambda item: item[1].began)[:_SLOWEST]
        return Snapshot(
            elapsed_s=elapsed_s,
            total=self._total,
            done=done,
            resumed=self._resumed,
            running=len(self._running),
            failed=self._failed,
            masked=len(self._masked),
            failed_attempts=dict(self._failed_attempts.most_common()),
            calls=recorded.calls,
            calls_per_s=recorded.calls / elapsed_s if elapsed_s > 0 else 0.0,
            generated_tokens=recorded.generated_tokens,
            tokens_per_s=recorded.generated_tokens / elapsed_s if elapsed_s > 0 else 0.0,
            eligible_links=recorded.eligible_links,
            contiguous_links=recorded.contiguous_links,
            replayed_calls=self._replayed_calls,
            mean_reward=self._reward / self._rewarded if self._rewarded else None,
            eta_s=elapsed_s * (self._total - done) / self._settled if self._settled else None,
            slowest=tuple(Running(rollout_id=name, seconds=now - attempt.began) for name, attempt in oldest),
            built=self._built,
        )

    def _count(self, row: RolloutRow) -> None:
        if row.reward is None or (row.recorded is not None and row.recorded.get("flaws")):
            self._masked.add(row.rollout_id)
        if row.reward is None:
            self._failed += 1
        else:
            self._rewarded += 1
            self._reward += row.reward


@asynccontextmanager
async def looking(progress: JobProgress, counting: Counting, *, every_s: float = _LOOK_EVERY_S) -> AsyncIterator[None]:
    """Asks, while what is inside goes on, what is recorded of the attempts that run: one question for all of them."""

    async def look() -> None:
        while True:
            await asyncio.sleep(every_s)
            running = progress.running
            counts = await counting(running) if running else None
            if counts is not None:
                progress.looked(dict(zip(running, counts, strict=True)))

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
