"""What the inspector looks into: the seam.

Invariant: a source only reads. `look` is asked by one thread at a time, `read` by any number of them.

Flow: `look`, again and again, says which rollouts are new or changed, in a bounded time each -> `read` gives one
rollout as it is shown (`seen`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gym_capture.inspector.seen import SeenRollout


class State(enum.StrEnum):
    """How far a rollout is."""

    LIVE = "live"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Basics:
    """What is known of a rollout without reading it. None: not known, and what was known before stays."""

    rollout_id: str
    group: str | None = None
    sample: int | None = None
    attempt: int | None = None
    state: State | None = None
    reward: float | None = None
    mask_reason: str | None = None
    harness: str | None = None
    calls: int | None = None
    generated_tokens: int | None = None
    trained_tokens: int | None = None
    turns: int | None = None
    chains: int | None = None
    prompt_tokens: int | None = None
    weight_version_min: str | None = None
    weight_version_max: str | None = None
    eligible_links: int | None = None
    exact_links: int | None = None
    put_ms: float | None = None
    """The mean over its records that are timed."""
    finished_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look found."""

    changed: Sequence[Basics] = ()
    gone: Sequence[str] = ()
    """Rollouts that were consumed, or cleared."""
    is_more: bool = False
    """Whether another look would find more that is there already."""
    problem: str | None = None
    """Why not all of it could be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What whoever opens a source knows beyond it."""

    special: frozenset[int] = frozenset()
    """Ids of tokens that only templates write."""
    ends_elsewhere: bool = False
    """Whether a job's ledger says how rollouts ended, and the records' own word of it does not count."""


NOTHING_KNOWN: Final = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What a source has."""

    records: bool = False
    trajectories: bool = False
    job: bool = False


class Source(ABC):
    """Something with rollouts in it."""

    kind: str
    title: str
    shows: Shows
    directory: Path | None = None
    """Where annotations are added; None: nowhere that stays."""
    is_read_whole: bool = True
    """Whether to read every rollout in the background, for what only that shows. It costs the owner of the records as
    much as a build."""

    @abstractmethod
    def look(self) -> Look:
        """What is new since the look before. Raises `GymCaptureError` if that cannot be said now."""

    @abstractmethod
    def read(self, rollout_id: str) -> SeenRollout | None:
        """One rollout; None: there is no such. Raises `GymCaptureError` if it cannot be read."""

    @property
    def is_live(self) -> bool:
        """Whether somebody still writes."""
        return False

    def found(self) -> str:
        """What was found, in a line for a person."""
        return f"{self.kind}: {self.title}"

    def annotated(self) -> Sequence[Path]:
        """Directories whose annotations are shown. Of several annotations of one thing, that of the last counts."""
        return () if self.directory is None else (self.directory,)

    def steps(self) -> Sequence[dict[str, Any]]:
        """Lines of a trainer's metrics, if there are any."""
        return ()

    def close(self) -> None:
        """Nothing more is asked."""
        return
