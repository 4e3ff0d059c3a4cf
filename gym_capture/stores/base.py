"""The store seam: what a state actor hosts, how it is opened, and what a store may be able to do beyond that.

Invariant: an ability is declared, never guessed from what an object looks like. A store has the abilities whose classes
it names as its bases; what its opening takes, its `StoreFactory` says. A store without any works all the same.

Flow: `state.store` names a factory -> each state actor opens one store with it -> calls reach the store through the
methods of `RecordStore`, or of the abilities that it has. `gym_capture.conformance` checks any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from gym_capture.capture.operations import Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.protocols import RecordStore, TokenSource
from gym_capture.capture.rollout_state import RolloutStatus, call_counts
from gym_capture.errors import GymCaptureError
from gym_capture.imports import load
from gym_capture.reasons import CaptureMark, reason_name
from gym_capture.rollout_counts import RolloutCounts

__all__ = [
    "CommitCounts",
    "CountedStore",
    "EncodedStore",
    "ListedStore",
    "MeasuredStore",
    "StoreFactory",
    "StoreStats",
    "counts_of",
    "standings_of",
    "status_of",
]


@dataclass(frozen=True, slots=True)
class StoreFactory:
    """A way to open a store, named by `state.store`. A coroutine function alone is one without abilities."""

    open: Callable[..., Awaitable[RecordStore]]
    """`await open(directory=..., **store_kwargs)`, called once by each state actor when it starts, and when it
    restarts. `directory` is that actor's alone."""
    takes_mirror: bool = False
    """Whether `open` takes `mirror=` (a `stores.mirror.Mirror`) and keeps a second copy of all it acknowledges there:
    what `state.replicas: 2` needs."""

    @classmethod
    def at(cls, path: str) -> StoreFactory:
        """The factory that the import path `module:name` names. Raises `ConfigError` if there is nothing."""
        found = load(path)
        return found if isinstance(found, cls) else cls(found)


class EncodedStore(ABC):
    """A store that takes what arrived together together, and gives records as the bytes in which they travel."""

    @abstractmethod
    async def write_many(self, operations: Sequence[Operation]) -> Sequence[int | GymCaptureError]:
        """`write` on behalf of many callers: one wait for all. To each, in its place, the answer or the error."""

    @abstractmethod
    async def freeze_encoded(self, rollout_id: str) -> bytes:
        """`freeze`, as `snapshot_codec.encode_snapshot` writes it."""


class ListedStore(ABC):
    """A store that knows what is said of its rollouts without reading their records."""

    @abstractmethod
    async def standings(self) -> Sequence[Standing]:
        """Of the live rollouts, sorted by their ids."""


async def standings_of(source: TokenSource) -> Sequence[Standing]:
    """The standings of the live rollouts of any source: one that cannot list it is read from end to end."""
    if isinstance(source, ListedStore):
        return await source.standings()
    found = []
    for rollout_id in await source.rollout_ids():
        snapshot = await source.freeze(rollout_id)
        found.append(Standing(rollout_id, snapshot.registration, snapshot.outcome))
    return found


class CountedStore(ABC):
    """A store that knows how a rollout stands without reading its records."""

    @abstractmethod
    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]:
        """To each, in its place; zero for one of which nothing is recorded. A job that plays asks for it often."""

    @abstractmethod
    async def status(self, rollout_id: str) -> RolloutStatus:
        """As `freeze` would answer, but for the records."""


async def counts_of(source: TokenSource, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]:
    """`CountedStore.counts` of any source: one that cannot count them is read."""
    if isinstance(source, CountedStore):
        return await source.counts(rollout_ids)
    return [(await status_of(source, rollout_id)).counts for rollout_id in rollout_ids]


async def status_of(source: TokenSource, rollout_id: str) -> RolloutStatus:
    """`CountedStore.status` of any source."""
    if isinstance(source, CountedStore):
        return await source.status(rollout_id)
    snapshot = await source.freeze(rollout_id)
    counts = RolloutCounts()
    for record in snapshot.records:
        counts = counts.plus(call_counts(record))
    marks = sum(reason_name(reason) != CaptureMark.DANGLING_INTENT for reason in snapshot.incomplete)
    return RolloutStatus(
        replace(snapshot, entries=(), orphans=()), counts._replace(flaws=marks + len(snapshot.problems))
    )


class MeasuredStore(ABC):
    """A store that says how it is doing: `/stats` and the metrics of its actor show it."""

    @abstractmethod
    def stats(self) -> StoreStats: ...


@dataclass(frozen=True, slots=True)
class CommitCounts:
    """Counts of a group commit since it was started."""

    records: int = 0
    batches: int = 0
    bytes_written: int = 0
    failed_batches: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How a store is doing."""

    live_rollouts: int
    """Those whose first call is being made durable included."""
    segments: int
    total_bytes: int
    live_bytes: int
    queued_writes: int
    """Writes that wait for the sync that is under way to end."""
    has_lost_mirror: bool
    """It should have a second copy, and has none now."""
    commits: CommitCounts
