"""Bringing a log directory back after a crash or damage.

Invariant: after `recover`, the index knows every whole record, the log has no torn tail, and every rollout that may
have lost an acknowledged record says so - in the log too, so that it is not forgotten when the damaged segment is.

Flow: read all segments -> cut what was never acknowledged -> decide which rollouts each damage masks -> write that.

Which rollouts: if the head of the damaged record is readable, the one it names. If not, every live rollout that had
been begun when the damaged segment was closed: an epoch that was given out later cannot have lost a record there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gym_capture.records import RecordProblem
from gym_capture.rollout_state import Event, ProblemFound, Retired
from gym_capture.stores.frames import Damage, RecordType
from gym_capture.stores.log_index import LogIndex
from gym_capture.stores.log_records import draft_of, event_of
from gym_capture.stores.replay import Segment, read_segments
from gym_capture.stores.segments import Location, SegmentWriter

CORRUPT_LOG: Final = "corrupt_log"


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
    """What opening a log directory found."""

    segments: int = 0
    records: int = 0
    torn_bytes: int = 0
    """Bytes at the end of the log that were never acknowledged, and were cut."""
    damaged: tuple[DamagedRange, ...] = ()
    masked_rollouts: tuple[str, ...] = ()
    """Rollouts that damage masks, as far as that was not known from an earlier opening."""


def recover(directory: Path, index: LogIndex, writer: SegmentWriter) -> Recovery:
    """Fills `index` from the directory and repairs the log. Raises `OSError` if the disk does not let it."""
    records = torn_bytes = 0
    damaged: list[DamagedRange] = []
    facts: list[tuple[int, Damage]] = []
    floors: dict[int, int | None] = {}
    for segment in read_segments(directory):
        if segment.torn_at is not None:
            torn_bytes += segment.size - segment.torn_at
            _cut(segment)
            if segment.header is None:
                continue
        records += len(segment.frames)
        floors[segment.number] = None if segment.header is None else segment.header.epoch_floor
        index.open_segment(segment.number, segment.end, floors[segment.number] or 0)
        for frame in segment.frames:
            index.add(frame.rollout_id, event_of(frame), Location(segment.number, frame.offset, frame.size))
        for damage in segment.damage:
            index.damaged.add(segment.number)
            facts.append((segment.number, damage))
            damaged.append(DamagedRange(segment.number, damage.start, damage.end, damage.rollout_id))

    masked: set[str] = set()
    for rollout_id, event in _masking(facts, floors, index):
        if index.book.knows(rollout_id, event):
            continue
        draft = draft_of(rollout_id, event, b"")
        (location,) = writer.append([draft], epoch_floor=index.epoch_floor())
        index.add(rollout_id, event, location)
        masked.add(rollout_id)
    return Recovery(
        segments=len(floors),
        records=records,
        torn_bytes=torn_bytes,
        damaged=tuple(damaged),
        masked_rollouts=tuple(sorted(masked)),
    )


def _cut(segment: Segment) -> None:
    """Removes a batch that was never acknowledged, or a segment that never got its header."""
    if segment.header is None:
        segment.path.unlink()
        return
    fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, segment.end)
        os.fsync(fd)
    finally:
        os.close(fd)


def _masking(
    facts: list[tuple[int, Damage]], floors: dict[int, int | None], index: LogIndex
) -> Iterator[tuple[str, Event]]:
    """The events that say in the log what the damage may have cost."""
    for number, damage in facts:
        problem = RecordProblem(
            reason=CORRUPT_LOG,
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
        later = [floor for other, floor in floors.items() if other > number and floor is not None]
        ceiling = min(later, default=index.epoch_floor())
        for rollout_id in index.book.live_ids():
            state = index.book.live(rollout_id)
            if state is not None and state.epoch < ceiling:
                yield rollout_id, ProblemFound(state.epoch, problem)
