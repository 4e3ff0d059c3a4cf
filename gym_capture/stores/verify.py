"""Is every byte of a log directory what a store wrote there?

Invariant: nothing is changed and no lock is taken, so a directory can be verified while a store has it open. What is
being written at that moment is not taken for damage: a tail that is not whole counts only if it is the same when it is
read again.

Flow: segment by segment, both checksums of each frame (`replay`) -> the records inside, which have a version and a
digest of their own -> `Finding`s, and the rollouts that they mask.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gym_capture.capture.codec import decode_or_problem
from gym_capture.capture.records import RecordProblem
from gym_capture.errors import CorruptLogError, SchemaVersionError, StoreUnavailableError
from gym_capture.reasons import ProblemReason
from gym_capture.stores.frames import Frame, RecordType
from gym_capture.stores.inspect import scan
from gym_capture.stores.log_records import event_of
from gym_capture.stores.replay import Segment, read_segment
from gym_capture.stores.segments import segment_numbers, segment_path

_ATTEMPTS: Final = 5
_SETTLING_S: Final = 0.25
"""Longer than a batch takes to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something in a segment that is not as a store of this version leaves it."""

    kind: str
    """newer_version | lost_header | corrupt | unreadable_record | torn_tail."""
    segment: int
    start: int
    end: int
    """With `start`: which bytes of the segment."""
    rollout_id: str | None = None
    """Whose record it is, where that is known."""
    call_id: str | None = None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The findings about one log directory."""

    segments: int
    records: int
    size_bytes: int
    findings: tuple[Finding, ...]
    masked_rollouts: tuple[str, ...]
    """Live rollouts that the findings mask: they are kept, and not trained on."""

    @property
    def is_sound(self) -> bool:
        return not self.findings


def verify(directory: Path) -> Verification:
    """Reads a log directory from end to end. Raises `StoreUnavailableError` if it cannot be read."""
    for _ in range(_ATTEMPTS):
        try:
            return _verify(directory)
        except FileNotFoundError:
            continue  # compaction moved what stood there
        except OSError as error:
            raise StoreUnavailableError(f"the log directory {directory} cannot be read: {error}") from error
    raise StoreUnavailableError(f"the log directory {directory} changes faster than it can be read")


def _verify(directory: Path) -> Verification:
    findings: list[Finding] = []
    records = size_bytes = 0
    numbers = segment_numbers(directory)
    for number in numbers:
        try:
            segment = read_segment(directory, number, is_last=number == numbers[-1])
        except CorruptLogError as error:
            size = segment_path(directory, number).stat().st_size
            findings.append(Finding(kind="newer_version", segment=number, start=0, end=size, detail=error.message))
            size_bytes += size
            continue
        size_bytes += segment.size
        records += len(segment.frames)
        findings += _damage(segment)
        findings += (finding for frame in segment.frames for finding in _unreadable(number, frame))
        if segment.torn_at is not None and _is_still_torn(directory, segment):
            findings.append(_torn(segment, segment.torn_at))
    return Verification(
        segments=len(numbers),
        records=records,
        size_bytes=size_bytes,
        findings=tuple(findings),
        masked_rollouts=_masked(directory, findings),
    )


def _damage(segment: Segment) -> Iterator[Finding]:
    for damage in segment.damage:
        if segment.header is None:
            kind, detail = "lost_header", "both copies of the segment's header are damaged: nothing in it can be read"
        elif damage.type is None:
            kind, detail = "corrupt", "a checksum fails, and the head of the record is lost: it may be any rollout's"
        else:
            kind, detail = "corrupt", f"the checksum of a {damage.type.name.lower()} record fails"
        yield Finding(
            kind=kind,
            segment=segment.number,
            start=damage.start,
            end=damage.end,
            rollout_id=damage.rollout_id,
            call_id=damage.call_id or None,
            detail=detail,
        )


def _unreadable(number: int, frame: Frame) -> Iterator[Finding]:
    """A frame whose checksums hold and whose record is not one of this version."""
    kind, detail = "unreadable_record", ""
    try:
        event_of(frame)
        if frame.type is RecordType.COMMITTED:
            found = decode_or_problem(frame.payload)
            detail = found.detail if isinstance(found, RecordProblem) else ""
    except SchemaVersionError as error:
        kind, detail = "newer_version", error.message
    except CorruptLogError as error:
        newer = isinstance(error.__cause__, SchemaVersionError)
        kind, detail = "newer_version" if newer else kind, error.message
    if detail:
        yield Finding(
            kind=kind,
            segment=number,
            start=frame.offset,
            end=frame.offset + frame.size,
            rollout_id=frame.rollout_id,
            call_id=frame.call_id or None,
            detail=detail,
        )


def _is_still_torn(directory: Path, segment: Segment) -> bool:
    time.sleep(_SETTLING_S)
    again = read_segment(directory, segment.number, is_last=True)
    return (again.torn_at, again.size) == (segment.torn_at, segment.size)


def _torn(segment: Segment, torn_at: int) -> Finding:
    detail = (
        "the last write is not whole. A crash cut it short before it was acknowledged, or it was damaged since, which "
        "looks the same: the store cuts it off when it opens"
    )
    return Finding(kind="torn_tail", segment=segment.number, start=torn_at, end=segment.size, detail=detail)


def _masked(directory: Path, findings: list[Finding]) -> tuple[str, ...]:
    kinds = {finding.kind for finding in findings}
    masked = {finding.rollout_id for finding in findings if finding.kind == "unreadable_record"} - {None}
    # Whom the damage in a log of a newer version masks, the newer version knows.
    if kinds & {"corrupt", "lost_header"} and "newer_version" not in kinds:
        with suppress(CorruptLogError):  # of an unreadable record, which is among the findings
            rollouts = scan(directory).rollouts
            masked |= {each.rollout_id for each in rollouts if ProblemReason.CORRUPT_LOG in each.problems}
    return tuple(sorted(rollout_id for rollout_id in masked if rollout_id is not None))
