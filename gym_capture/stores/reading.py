"""Rollouts read back from the segments in which their records stand.

Invariant: a record that cannot be read any more becomes a problem of its rollout's snapshot; it neither fails the
reading of the others nor goes missing in silence.
"""

from __future__ import annotations

from dataclasses import replace

from gym_capture.capture.records import RecordProblem
from gym_capture.capture.rollout_state import Frozen
from gym_capture.capture.snapshot_codec import join_snapshot
from gym_capture.errors import CorruptLogError
from gym_capture.reasons import ProblemReason
from gym_capture.stores.frames import Frame, read_frame
from gym_capture.stores.segments import Location, SegmentReader


def read_snapshot(reader: SegmentReader, frozen: Frozen, entries: list[tuple[str, Location]]) -> bytes:
    """The snapshot, encoded. A record that has become unreadable is a problem of it."""
    problems = list(frozen.snapshot.problems)
    encoded: list[bytes] = []
    for call_id, location in entries:
        frame = read_record(reader, location)
        if frame is not None:
            encoded.append(frame.payload)
            continue
        problems.append(unreadable(location, call_id))
    return join_snapshot(replace(frozen.snapshot, problems=tuple(problems)), encoded, frozen.delivery)


def unreadable(location: Location, call_id: str | None) -> RecordProblem:
    """The problem of a rollout of which a record can no longer be read."""
    return RecordProblem(
        reason=ProblemReason.CORRUPT_LOG,
        call_id=call_id,
        field=None,
        detail=f"the record at byte {location.offset} of segment {location.segment} cannot be read",
    )


def read_record(reader: SegmentReader, location: Location) -> Frame | None:
    """The record that stands there; None if it cannot be read."""
    try:
        found = read_frame(*reader.read(location))
    except CorruptLogError:
        return None
    return found if isinstance(found, Frame) else None
