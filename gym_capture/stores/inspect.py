"""Looking into a log directory, while a store has it open or not.

Invariant: nothing in the directory is changed and no lock is taken. What is read is what was durable at some moment
during the reading.

Flow: `scan` says what is there and what is damaged; `read_snapshots` reads rollouts back, the live ones or those that
were consumed and kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gym_capture.capture.facts import Committed, Retired
from gym_capture.capture.records import Snapshot
from gym_capture.capture.rollout_state import RolloutState
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.log_records import event_of
from gym_capture.stores.reading import read_snapshot
from gym_capture.stores.recovery import DamagedRange, Replayed, SegmentSummary, replay
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import Location, SegmentReader

__all__ = ["LogReport", "RolloutReport", "read_snapshots", "scan"]

_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """A live rollout, without its records."""

    rollout_id: str
    calls: int
    """Calls with a record."""
    size_bytes: int
    version: int
    incomplete: tuple[str, ...]
    problems: tuple[str, ...]
    """Reasons, each once."""


@dataclass(frozen=True, slots=True)
class LogReport:
    """The contents of a log directory."""

    segments: tuple[SegmentSummary, ...]
    rollouts: tuple[RolloutReport, ...]
    consumed: tuple[str, ...]
    """Rollouts that were consumed and whose records were kept; one that was consumed twice stands here twice."""
    damaged: tuple[DamagedRange, ...]
    torn_bytes: int
    """Bytes at the end of the log that are not acknowledged: being written now, or left by a crash."""

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def is_sound(self) -> bool:
        return not self.damaged


def scan(directory: str | Path) -> LogReport:
    """Reads a log directory from end to end.

    Raises `StoreUnavailableError` if it cannot be read, `CorruptLogError` if a newer version wrote it.
    """
    found = _replay(Path(directory).expanduser())
    index = found.index
    rollouts: list[RolloutReport] = []
    for rollout_id in index.states.live_ids():
        frozen = index.states.freeze(rollout_id).snapshot
        rollouts.append(
            RolloutReport(
                rollout_id,
                len(index.entries(rollout_id)),
                index.bytes_of(rollout_id),
                frozen.version,
                frozen.incomplete,
                tuple(sorted({problem.reason for problem in frozen.problems})),
            )
        )
    return LogReport(
        segments=found.segments,
        rollouts=tuple(rollouts),
        consumed=tuple(rollout_id for rollout_id, _ in index.kept_epochs()),
        damaged=found.damaged,
        torn_bytes=sum(segment.size - segment.end for segment in found.segments),
    )


def read_snapshots(
    directory: str | Path, *, consumed: bool = False, rollout_ids: Collection[str] | None = None
) -> Iterator[Snapshot]:
    """The live rollouts, or those that were consumed and kept: in order of their ids, one at a time in memory.

    `rollout_ids`: only these, as far as they are there; the records of others are not read back.

    A rollout that was consumed more than once comes once for each attempt. Raises as `scan`, and
    `StoreUnavailableError` also if a store deletes a segment while it is read.
    """
    path = Path(directory).expanduser()
    index = _replay(path).index
    reader = SegmentReader(path)
    try:
        if consumed:
            kept = [
                (rollout_id, epoch) for rollout_id, epoch in index.kept_epochs() if _wanted(rollout_id, rollout_ids)
            ]
            attempts = _attempts(path, kept)
            frozen = ((state.freeze(), sorted(entries.items())) for state, entries in attempts)
        else:
            live = [rollout_id for rollout_id in index.states.live_ids() if _wanted(rollout_id, rollout_ids)]
            frozen = ((index.states.freeze(rollout_id), index.entries(rollout_id)) for rollout_id in live)
        for facts, entries in frozen:
            yield decode_snapshot(read_snapshot(reader, facts, entries))
    except OSError as error:
        raise StoreUnavailableError(f"the log directory {path} changed while it was read: {error}") from error
    finally:
        reader.close()


def _wanted(rollout_id: str, rollout_ids: Collection[str] | None) -> bool:
    return rollout_ids is None or rollout_id in rollout_ids


def _replay(directory: Path) -> Replayed:
    """Reads the directory, again if a store deletes a segment before it is read: its records then stand elsewhere."""
    for _ in range(_ATTEMPTS):
        try:
            found = replay(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreUnavailableError(f"the log directory {directory} cannot be read: {error}") from error
        for rollout_id, event in found.masking:
            found.index.states.apply(rollout_id, event)
        return found
    raise StoreUnavailableError(f"the log directory {directory} changes faster than it can be read")


def _attempts(directory: Path, wanted: list[tuple[str, int]]) -> list[tuple[RolloutState, dict[str, Location]]]:
    """The facts of retired attempts, and where their entries stand."""
    attempts: dict[tuple[str, int], tuple[RolloutState, dict[str, Location]]] = {
        (rollout_id, epoch): (RolloutState(rollout_id, epoch), {}) for rollout_id, epoch in wanted
    }
    for segment in read_segments(directory):
        for frame in segment.frames:
            event = event_of(frame)
            attempt = attempts.get((frame.rollout_id, frame.epoch))
            if attempt is None or isinstance(event, Retired):
                continue
            state, entries = attempt
            state.apply(event)
            if isinstance(event, Committed):
                entries[event.call_id] = Location(segment.number, frame.offset, frame.size)
    return list(attempts.values())
