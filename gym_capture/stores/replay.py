"""Reading a log directory from end to end: what a store does when it opens, and what `inspect` reports.

Invariant: whatever stands in the files, every whole record is found, and everything that is not whole is named.
One segment is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gym_capture.regular_files import read_regular
from gym_capture.stores.frames import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Frame,
    SegmentHeader,
    read_segment_header,
    scan_segment,
)
from gym_capture.stores.segments import segment_numbers, segment_path


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as it was read."""

    number: int
    path: Path
    size: int
    header: SegmentHeader | None
    """None if it is lost: then nothing of the segment can be read."""
    frames: tuple[Frame, ...]
    damage: tuple[Damage, ...]
    """Acknowledged records that cannot be read any more."""
    torn_at: int | None
    """Where a batch that was never acknowledged begins; only the last segment can have one."""

    @property
    def end(self) -> int:
        """Where the acknowledged part ends."""
        return self.size if self.torn_at is None else self.torn_at


def read_segments(directory: Path, *, payloads: bool = True) -> Iterator[Segment]:
    """The segments of a directory, oldest first; without `payloads`, frames have none."""
    numbers = segment_numbers(directory)
    for number in numbers:
        yield read_segment(directory, number, is_last=number == numbers[-1], payloads=payloads)


def read_segment(directory: Path, number: int, *, is_last: bool, payloads: bool = True) -> Segment:
    """Raises `CorruptLogError` if a newer version wrote it, `OSError` if it cannot be read."""
    path = segment_path(directory, number)
    data = read_regular(path)
    header = read_segment_header(data)
    if header is None:
        # The header is durable before the first record is written: without one, the last segment holds none.
        torn = is_last and len(data) <= SEGMENT_HEADER_BYTES
        damage = () if torn else (Damage(0, len(data)),)
        return Segment(number, path, len(data), None, (), damage, 0 if torn else None)
    frames: list[Frame] = []
    damages: list[Damage] = []
    for found in scan_segment(data, header, payloads=payloads):
        if isinstance(found, Frame):
            frames.append(found)
        else:
            damages.append(found)
    torn_at = _torn_at(frames, damages) if is_last else None
    if torn_at is not None:
        frames = [frame for frame in frames if frame.offset < torn_at]
        damages = [damage for damage in damages if damage.start < torn_at]
    return Segment(number, path, len(data), header, tuple(frames), tuple(damages), torn_at)


def _torn_at(frames: list[Frame], damages: list[Damage]) -> int | None:
    """Start of the first damage that no later batch follows: that batch was never acknowledged."""
    last_batch = max((frame.offset for frame in frames if frame.starts_batch), default=0)
    return next((damage.start for damage in damages if damage.start > last_batch), None)
