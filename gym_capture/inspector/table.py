"""The rollouts of a source as columns, kept up as they change.

Invariant: a row's number is that of the last change in it, so what is behind a cursor is just what its holder has not
seen. Of each rollout a few hundred bytes are kept, whatever is recorded of it.

Flow: `put` what a look says, `fill` with what reading a rollout says -> `columns(since)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Final

from gym_capture.inspector.seen import SeenRollout
from gym_capture.inspector.source import Basics, State


@dataclass(slots=True)
class Row:
    """A rollout; None: not known, or not yet."""

    rollout: str
    group: str | None = None
    sample: int | None = None
    attempt: int | None = None
    state: str = State.LIVE
    reward: float | None = None
    mask_reason: str | None = None
    harness: str | None = None
    calls: int | None = None
    turns: int | None = None
    chains: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    trained_tokens: int | None = None
    eligible_links: int | None = None
    exact_links: int | None = None
    put_ms: float | None = None
    logprob_diff: float | None = None
    weight_version_min: str | None = None
    weight_version_max: str | None = None
    finished_at: float | None = None
    number: int = 0
    """Of the last change."""
    version: int = 0
    """Number of the last change of what is recorded of it."""
    is_filled: bool = False
    """Whether it has been read as it is now."""


QUIET_S: Final = 3.0
"""A rollout that grows is read again once nothing was new in it for so long: each reading costs all of it."""
_MOST_GONE: Final = 100_000
_MOST_DIGITS: Final = 18
"""A weight version of more is a name, and no number."""
_NOT_COLUMNS: Final = ("number", "version", "is_filled")
COLUMNS: Final = tuple(field.name for field in fields(Row) if field.name not in _NOT_COLUMNS)


class Table:
    """Not for several threads at once."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._due: dict[str, float] = {}
        """When to read a rollout: at once if it is over, else when it has been quiet for a while."""
        self.number = 0
        self._gone: dict[str, int] = {}
        self.forgotten = 0
        """Of what went until this number nothing is known any more: whoever has not seen that begins anew."""
        self._groups: dict[str, dict[str, None]] = {}

    def put(self, basics: Basics, now: float = 0.0) -> None:
        """What a look says of a rollout. `now`: seconds of a clock that only goes forward."""
        row = self.rows.get(basics.rollout_id)
        if row is None:
            row = self.rows[basics.rollout_id] = Row(basics.rollout_id)
            self._gone.pop(basics.rollout_id, None)
        before = row.group
        for name in _OF_BASICS:
            value = getattr(basics, name)
            if value is not None:
                setattr(row, name, value)
        row.group = row.group or row.rollout
        if before != row.group:
            if before is not None:
                self._leave(before, row.rollout)
            self._groups.setdefault(row.group, {})[row.rollout] = None
        row.is_filled = False
        self._due[row.rollout] = now + (QUIET_S if row.state == State.LIVE else 0.0)
        self._touch(row)
        row.version = row.number

    def fill(self, seen: SeenRollout) -> None:
        """What reading a rollout says."""
        row = self.rows.get(seen.rollout_id)
        if row is None:
            return
        recorded = [call for call in seen.calls if call.generated_tokens is not None]
        main = next((each for each in seen.trajectories if each.is_delivered), None)
        row.calls = len(recorded) or row.calls
        row.turns = len(main.call_ids) if main else None
        row.chains = seen.chains
        row.prompt_tokens = sum(int(ids.size) for ids in seen.new_prompts.values())
        row.generated_tokens = seen.generated_tokens
        row.trained_tokens = seen.trained_tokens
        row.eligible_links, row.exact_links = seen.eligible_links, seen.exact_links
        row.mask_reason = seen.mask_reasons[0] if seen.mask_reasons else None
        versions = sorted({name for each in seen.trajectories for name in each.version_names}, key=in_order)
        if versions:
            row.weight_version_min, row.weight_version_max = versions[0], versions[-1]
        ended = [call.created_at for call in recorded if call.created_at is not None]
        row.finished_at = row.finished_at or max(ended, default=None)
        row.is_filled = True
        self._due.pop(row.rollout, None)
        self._touch(row)

    def unreadable(self, rollout_id: str, reason: str) -> None:
        """A rollout cannot be read: it is not tried again until something of it changes."""
        row = self.rows.get(rollout_id)
        if row is not None:
            row.mask_reason = row.mask_reason or reason
            row.is_filled = True
            self._due.pop(rollout_id, None)
            self._touch(row)

    def measured(self, rollout_id: str, difference: float | None) -> None:
        """The mean difference of log probabilities to a trainer's."""
        row = self.rows.get(rollout_id)
        if row is not None and row.logprob_diff != difference:
            row.logprob_diff = difference
            self._touch(row)

    def drop(self, rollout_id: str) -> None:
        """A rollout is not there any more."""
        row = self.rows.pop(rollout_id, None)
        if row is not None:
            self.number += 1
            self._gone[rollout_id] = self.number
            if len(self._gone) > _MOST_GONE:
                self.forgotten = self._gone.pop(next(iter(self._gone)))
            self._due.pop(rollout_id, None)
            if row.group is not None:
                self._leave(row.group, rollout_id)

    def _leave(self, group: str, rollout_id: str) -> None:
        self._groups[group].pop(rollout_id, None)
        if not self._groups[group]:
            del self._groups[group]

    def group(self, group: str) -> Sequence[Row]:
        """Its rollouts, by their samples."""
        rows = (self.rows[rollout_id] for rollout_id in self._groups.get(group, ()))
        return sorted(rows, key=lambda row: (row.sample is None, row.sample, row.rollout))

    def due(self, limit: int, now: float) -> list[str]:
        """Rollouts that are to be read now."""
        return list(islice((rollout_id for rollout_id, at in self._due.items() if at <= now), limit))

    @property
    def unread(self) -> int:
        """Rollouts that have not been read as they are now."""
        return len(self._due)

    def columns(self, since: int = 0) -> tuple[dict[str, list[Any]], list[str]]:
        """The rows that have changed behind `since`, as columns, and the rollouts that have gone."""
        rows = [row for row in self.rows.values() if row.number > since]
        found: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
        stale = _staleness(self.rows.values()) if rows else {}
        found["staleness"] = [stale.get(row.rollout) for row in rows]
        return found, [rollout_id for rollout_id, number in self._gone.items() if number > since]

    def _touch(self, row: Row) -> None:
        self.number += 1
        row.number = self.number


_OF_BASICS: Final = tuple(field.name for field in fields(Basics) if field.name in COLUMNS)


def in_order(version: str) -> tuple[int, int, str]:
    """Numbers by their value, then what is no number."""
    return (0, int(version), "") if _is_number(version) else (1, 0, version)


def _is_number(version: str) -> bool:
    return version.isdecimal() and len(version) <= _MOST_DIGITS


def _staleness(rows: Iterable[Row]) -> Mapping[str, int]:
    """How many versions behind the newest that was seen until a rollout was over its oldest tokens are."""
    known = [
        (
            row.finished_at,
            int(row.weight_version_min),
            int(row.weight_version_max or row.weight_version_min),
            row.rollout,
        )
        for row in rows
        if row.finished_at is not None and row.weight_version_min is not None
        if _is_number(row.weight_version_min) and _is_number(row.weight_version_max or row.weight_version_min)
    ]
    known.sort()
    newest = 0
    found: dict[str, int] = {}
    for _, oldest, latest, rollout in known:
        newest = max(newest, latest)
        found[rollout] = newest - oldest
    return found
