"""Bringing a log directory back after a crash or damage.

Invariant: after `recover`, the index knows every whole record, the log has no torn tail, and every rollout that may
have lost an acknowledged record says so - in the log too, so that it is not forgotten when the damaged segment is.

Flow: read all segments -> cut what was never acknowledged -> decide which rollouts each damage masks -> write that.

Which rollouts: if the head of the damaged record is readable, the one it names. If not, every live rollout that had
been begun when the damaged segment was closed: an epoch that was given out later cannot have lost a record there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_capture.capture.facts import Event, ProblemFound, Retired
from gym_capture.capture.records import RecordProblem
from gym_capture.reasons import ProblemReason
from gym_capture.stores.frames import Damage, RecordType
from gym_capture.stores.log_index import LogIndex
from gym_capture.stores.log_records import draft_of, event_of
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import Location, SegmentWriter


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes of a segment that held acknowledged records and cannot be read."""

    segment: int
    start: int
    end: int
    rollout_id: str | None
    """None: the head of the record is lost too."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Findings of opening a log directory."""

    segments: int = 0
    records: int = 0
    torn_bytes: int = 0
    """Bytes at the end of the log that were never acknowledged, and were cut."""
    damaged: tuple[DamagedRange, ...] = ()
    masked_rollouts: tuple[str, ...] = ()
    """Rollouts that damage masks, as far as that was not known from an earlier opening."""


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """One segment file."""

    number: int
    path: Path
    size: int
    end: int
    """Where its acknowledged part ends; smaller than `size` only in the last segment after a crash."""
    records: int
    has_header: bool

    @property
    def is_torn(self) -> bool:
        """Whether a crash left something at its end, or left it before it had its header."""
        return self.end < self.size or self.end == 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A log directory as it was read. Nothing was changed in it."""

    index: LogIndex
    segments: tuple[SegmentSummary, ...]
    damaged: tuple[DamagedRange, ...]
    masking: tuple[tuple[str, Event], ...]
    """Facts that the damage adds to rollouts, those from earlier openings aside. Not in the index yet."""


def replay(directory: Path, *, keep_records: bool = False) -> Replayed:
    """Reads a log directory. Raises `OSError` if that fails, `CorruptLogError` if a newer version wrote it."""
    index = LogIndex(keep_records=keep_records)
    summaries: list[SegmentSummary] = []
    damages: list[tuple[int, Damage]] = []
    floors: dict[int, int] = {}
    for segment in read_segments(directory):
        if segment.header is not None:
            floors[segment.number] = segment.header.epoch_floor
        if segment.end > 0:
            index.open_segment(segment.number, segment.end, floors.get(segment.number, 0))
        for frame in segment.frames:
            index.add(frame.rollout_id, event_of(frame), Location(segment.number, frame.offset, frame.size))
        if segment.damage:
            index.damaged.add(segment.number)
            damages += [(segment.number, damage) for damage in segment.damage]
        summaries.append(
            SegmentSummary(
                segment.number,
                segment.path,
                segment.size,
                segment.end,
                len(segment.frames),
                segment.header is not None,
            )
        )
    found = masking(damages, floors, index.epoch_floor(), _live(index))
    unknown = [fact for fact in found if not index.states.knows(*fact)]
    return Replayed(
        index,
        tuple(summaries),
        tuple(DamagedRange(number, damage.start, damage.end, damage.rollout_id) for number, damage in damages),
        tuple(dict.fromkeys(unknown)),
    )


def recover(directory: Path, writer: SegmentWriter, *, keep_records: bool = False) -> tuple[LogIndex, Recovery]:
    """Reads a log directory and repairs it. Raises as `replay`."""
    found = replay(directory, keep_records=keep_records)
    index = found.index
    for segment in found.segments:
        if segment.is_torn:
            _cut(segment)
    for rollout_id, event in found.masking:
        (location,) = writer.append([draft_of(rollout_id, event, b"")], epoch_floor=index.epoch_floor())
        index.add(rollout_id, event, location)
    return index, Recovery(
        segments=len(index.sizes),
        records=sum(segment.records for segment in found.segments),
        torn_bytes=sum(segment.size - segment.end for segment in found.segments),
        damaged=found.damaged,
        masked_rollouts=tuple(sorted({rollout_id for rollout_id, _ in found.masking})),
    )


def _cut(segment: SegmentSummary) -> None:
    """Removes a batch that was never acknowledged, or a segment that never got its header."""
    if not segment.has_header:
        segment.path.unlink()
        return
    fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, segment.end)
        os.fsync(fd)
    finally:
        os.close(fd)


def masking(
    damages: Iterable[tuple[int, Damage]],
    floors: Mapping[int, int],
    epoch_floor: int,
    live: Sequence[tuple[str, int]],
) -> Iterator[tuple[str, Event]]:
    """The events that say in the log what the damage may have cost.

    `damages` with the numbers of their segments, `floors` by them; `live` rollouts with their epochs, as they are
    before any of these events.
    """
    for number, damage in damages:
        problem = RecordProblem(
            reason=ProblemReason.CORRUPT_LOG,
            call_id=damage.call_id or None,
            field=None,
            detail=f"bytes {damage.start} to {damage.end} of segment {number} cannot be read",
        )
        if damage.rollout_id is not None and damage.epoch is not None:
            if damage.type is RecordType.RETIRED:
                # What it retired is known from its epoch; whether that was consumed or cleared is not.
                yield damage.rollout_id, Retired(damage.epoch, None, "", 0, 0.0, keeps_records=False)
            else:
                yield damage.rollout_id, ProblemFound(damage.epoch, problem)
            continue
        later = [floor for other, floor in floors.items() if other > number]
        ceiling = min(later, default=epoch_floor)
        for rollout_id, epoch in live:
            if epoch < ceiling:
                yield rollout_id, ProblemFound(epoch, problem)


def _live(index: LogIndex) -> list[tuple[str, int]]:
    states = ((rollout_id, index.states.live(rollout_id)) for rollout_id in index.states.live_ids())
    return [(rollout_id, state.epoch) for rollout_id, state in states if state is not None]
