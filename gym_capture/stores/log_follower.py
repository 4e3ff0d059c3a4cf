"""An index of a log directory that is kept up while a store writes to it: what an inspector looks into.

Invariant: nothing in the directory is changed and no lock is taken. What is shown of a rollout was durable at some
moment. Memory holds 32 bytes for each record, and what one look reads. A log that is not the one of the look before -
it was cleared and begun again, or a crash had it cut back - is read from its beginning.

Flow: `advance` reads what was added behind the last look - some megabytes at a time, so that whoever waits sees
something soon - and notes where the records of each rollout's highest epoch stand -> `read` freezes one rollout, as
`log_reader` does. A batch that is half written is looked at again later. Where compaction has deleted a segment, what
was needed of it stands in a later one already: its places are dropped, and all copies say the same facts. Bytes that
are no records are passed over a look at a time, and count as damage once something stands behind them.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from gym_capture.capture.codec import decode_intent, peek_time
from gym_capture.capture.facts import Event, Retired
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import RecordProblem, Snapshot
from gym_capture.capture.rollout_state import RolloutState
from gym_capture.capture.snapshot_codec import decode_snapshot, join_snapshot
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.regular_files import open_regular
from gym_capture.stores.frames import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Frame,
    RecordType,
    SegmentHeader,
    read_segment_header,
    scan_segment,
)
from gym_capture.stores.log_records import event_of
from gym_capture.stores.reading import read_record, unreadable
from gym_capture.stores.recovery import masking
from gym_capture.stores.segments import Location, SegmentReader, segment_numbers, segment_path

_PLACE: Final = 4
"""Numbers of a place: segment, offset, size, and what is recorded there (`_mark`)."""
_LOOK_BYTES: Final = 8 << 20
"""Read in one look, but for a record that is longer."""
_LONGEST_RECORD: Final = 1 << 30
_LONGEST_HEAD: Final = 1 << 17
"""A head with its key takes less."""
_COMMITTED: Final = 1
"""Set in the mark of a call's record."""
_MARKS: Final = 1 << 64


@dataclass(slots=True)
class Followed:
    """What is noted of the highest epoch of a rollout."""

    epoch: int
    places: array[int] = field(default_factory=lambda: array("Q"))
    last_at: float = 0.0
    """Unix seconds at which its latest record was made."""
    registration: Registration | None = None
    outcome: Outcome | None = None
    masking: tuple[Event, ...] = ()
    """Facts that stand nowhere: what damage adds."""

    @property
    def calls(self) -> int:
        """Recorded ones. A copy that compaction made is no second one: its original stays for long if the store ended
        before it was deleted."""
        return len({mark for mark in self.places[_PLACE - 1 :: _PLACE] if mark & _COMMITTED})


class Frozen(NamedTuple):
    """A rollout, read."""

    snapshot: Snapshot
    begun: dict[str, float]
    """When its calls began, in Unix seconds."""


class _State(NamedTuple):
    """Of a file: another one, or one that was written to, has another."""

    inode: int
    size: int
    changed_ns: int


@dataclass(slots=True)
class _Segment:
    header: SegmentHeader
    end: int
    """Behind the last record that was noted."""
    scanned: int
    """Where the next look begins: from `end` to here nothing can be read."""
    seen: _State | None = None
    """At a look that came to the end of the file."""


class _Look(NamedTuple):
    """What a look found behind the `end` of a segment; places count from there."""

    found: list[Frame | Damage]
    scanned: int
    is_cut: bool
    """Whether there is more behind it."""


class LogFollower:
    """Follows one log directory. One thread at a time changes it (`advance`); any may `read`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rollouts: dict[str, Followed] = {}
        self._news: dict[str, None] = {}
        self._segments: dict[int, _Segment] = {}
        self._epoch_floor = 1
        self._damages: dict[tuple[int, int], tuple[int, Damage]] = {}

    @property
    def is_damaged(self) -> bool:
        return bool(self._damages)

    def news(self) -> list[str]:
        """The rollouts of which something is new since this was asked last, in the order in which they came."""
        news, self._news = list(self._news), {}
        return news

    def size_bytes(self) -> int:
        """Of the log, as it is now."""
        total = 0
        for number in segment_numbers(self.directory):
            try:
                total += segment_path(self.directory, number).stat().st_size
            except FileNotFoundError:  # compacted
                continue
        return total

    def advance(self) -> bool:
        """Reads on. Returns whether there may be more that was there already.

        Raises `StoreUnavailableError` if the directory cannot be read, `CorruptLogError` if a newer version wrote it.
        """
        try:
            numbers = segment_numbers(self.directory)
            gone = self._segments.keys() - set(numbers)
            if gone:
                self._forget(gone)
            for number in numbers:
                try:
                    is_more = self._read_on(number, is_last=number == numbers[-1])
                except FileNotFoundError:
                    if number in segment_numbers(self.directory):
                        raise  # a link that leads nowhere
                    return True  # compacted while it was looked at
                if is_more:
                    return True
        except OSError as error:
            raise StoreUnavailableError(f"the log directory {self.directory} cannot be read: {error}") from error
        return False

    def read(self, rollout_id: str) -> Frozen | None:
        """A rollout, frozen; None: nothing is known of it. Raises `GymCaptureError` if it cannot be read now."""
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or not (rollout.places or rollout.masking):
            return None
        places, masks = rollout.places[:], rollout.masking
        state = RolloutState(rollout_id, rollout.epoch)
        records: dict[str, bytes] = {}
        begun: dict[str, float] = {}
        problems: list[RecordProblem] = []
        found: set[int] = set()
        compacted: set[int] = set()
        with closing(SegmentReader(self.directory)) as reader:
            for mark, location in _marked(places):
                try:
                    frame = read_record(reader, location)
                except FileNotFoundError:
                    compacted.add(mark)  # its copy stands elsewhere
                    continue
                except OSError as error:
                    raise StoreUnavailableError(f"the log cannot be read: {error}") from error
                found.add(mark)
                if frame is None:
                    problems.append(unreadable(location, None))
                    continue
                state.apply(event_of(frame))
                if frame.type is RecordType.COMMITTED:
                    records[frame.call_id] = frame.payload
                elif frame.type is RecordType.BEGUN:
                    begun[frame.call_id] = decode_intent(frame.payload).created_at
        if compacted - found:
            raise StoreUnavailableError(f"the log was compacted since it was looked at: ask for {rollout_id} again")
        for event in masks:
            state.apply(event)
        frozen = state.freeze()
        snapshot = replace(frozen.snapshot, problems=(*frozen.snapshot.problems, *problems))
        return Frozen(decode_snapshot(join_snapshot(snapshot, list(records.values()), frozen.delivery)), begun)

    # reading on

    def _read_on(self, number: int, *, is_last: bool) -> bool:
        """Whether there was anything new in the segment."""
        path = segment_path(self.directory, number)
        known = self._segments.get(number)
        state = _state(path.stat())
        if known is not None and known.seen == state and (is_last or known.end >= state.size):
            return False
        fd = open_regular(path)
        try:
            state = _state(os.fstat(fd))
            found = read_segment_header(os.pread(fd, SEGMENT_HEADER_BYTES, 0))
            if found is None and is_last and known is None:
                return False  # just made
            header = found or SegmentHeader(0, 0)
            if known is not None and (header != known.header or state.size < known.scanned):
                self._begin_again()
                return True
            if known is None:
                begin = SEGMENT_HEADER_BYTES if found else state.size
                known = self._segments[number] = _Segment(header, begin, begin)
                self._epoch_floor = max(self._epoch_floor, header.epoch_floor)
                if found is None:
                    self._damaged(number, Damage(0, state.size))
                    return True
            look = _look(fd, known, state.size, is_last=is_last)
        finally:
            os.close(fd)
        before = known.end, known.scanned
        known.end = self._note_all(number, known.end, look.found)
        known.scanned = max(look.scanned, known.end)
        known.seen = None if look.is_cut else state
        return (known.end, known.scanned) != before or look.is_cut

    def _begin_again(self) -> None:
        """Nothing that was read counts."""
        self._news |= dict.fromkeys(self.rollouts)
        self.rollouts = {}
        self._segments.clear()
        self._damages.clear()
        self._epoch_floor = 1

    def _note_all(self, number: int, begin: int, found: Sequence[Frame | Damage]) -> int:
        """Notes records, whose places count from `begin`; returns where the next look begins."""
        end = 0
        for each in found:
            if isinstance(each, Frame):
                self._note(each, number, begin)
                end = each.offset + each.size
            else:
                moved = replace(each, start=each.start + begin, end=each.end + begin)
                self._damaged(number, moved)
                end = each.end
        if found and self._damages:
            self._mask()
        return begin + end

    def _note(self, frame: Frame, segment: int, begin: int) -> None:
        self._epoch_floor = max(self._epoch_floor, frame.epoch + 1)
        rollout = self.rollouts.get(frame.rollout_id)
        if rollout is None or rollout.epoch < frame.epoch:
            rollout = self.rollouts[frame.rollout_id] = Followed(frame.epoch)
        if rollout.epoch != frame.epoch:
            return
        self._news[frame.rollout_id] = None
        if frame.type is RecordType.RETIRED:
            return
        rollout.places.extend((segment, frame.offset + begin, frame.size, _mark(frame)))
        try:
            self._tell(rollout, frame)
        except GymCaptureError:
            return  # whoever reads the rollout is told

    def _tell(self, rollout: Followed, frame: Frame) -> None:
        match frame.type:
            case RecordType.COMMITTED:
                rollout.last_at = max(rollout.last_at, peek_time(frame.payload))
            case RecordType.REGISTERED:
                rollout.registration = Registration.from_text(frame.payload.decode("utf-8", "surrogatepass"))
            case RecordType.COMPLETED:
                rollout.outcome = Outcome.from_text(frame.payload.decode("utf-8", "surrogatepass"))

    def _forget(self, gone: set[int]) -> None:
        """Segments were deleted."""
        for number in gone:
            del self._segments[number]
        self._damages = {key: found for key, found in self._damages.items() if key[0] not in gone}
        for rollout in self.rollouts.values():
            places = rollout.places
            if any(segment in gone for segment in places[::_PLACE]):
                kept = [n for n in range(0, len(places), _PLACE) if places[n] not in gone]
                rollout.places = array("Q", [number for n in kept for number in places[n : n + _PLACE]])

    def _damaged(self, number: int, damage: Damage) -> None:
        self._damages[number, damage.start] = (number, damage)

    def _mask(self) -> None:
        """What damage means for the rollouts, as recovery would say it."""
        floors = {number: segment.header.epoch_floor for number, segment in self._segments.items()}
        live = [(name, rollout.epoch) for name, rollout in self.rollouts.items() if rollout.places]
        found: dict[str, list[Event]] = {}
        for rollout_id, event in masking(self._damages.values(), floors, self._epoch_floor, live):
            if isinstance(event, Retired):
                continue
            rollout = self.rollouts.setdefault(rollout_id, Followed(event.epoch))
            if rollout.epoch == event.epoch:
                found.setdefault(rollout_id, []).append(event)
        for rollout_id, events in found.items():
            rollout = self.rollouts[rollout_id]
            if rollout.masking != tuple(events):
                rollout.masking = tuple(events)
                self._news[rollout_id] = None


def _look(fd: int, segment: _Segment, size: int, *, is_last: bool) -> _Look:
    """What stands behind what was scanned, as far as it is whole and one look reads."""
    begin = segment.scanned
    left = size - begin
    for read in (_LOOK_BYTES, _LONGEST_RECORD):
        data = os.pread(fd, min(left, read), begin)
        found = list(scan_segment(data, segment.header, begin=0))
        if len(data) == left:
            found = _moved(found, begin - segment.end)
            return _Look(found[: _whole(found)] if is_last else found, begin, is_cut=False)
        cut = found.pop() if found and isinstance(found[-1], Damage) else None  # by the end of the look
        if found:
            return _Look(_moved(found, begin - segment.end), begin, is_cut=True)
        if cut is not None and cut.rollout_id is None and len(data) > 2 * _LONGEST_HEAD:
            break  # no record begins here, but for one whose head is cut
    return _Look([], begin + max(len(data) - _LONGEST_HEAD, 0), is_cut=bool(data))


def _moved(found: list[Frame | Damage], by: int) -> list[Frame | Damage]:
    """With places that count from `by` bytes before, which cannot be read."""
    if not by:
        return found
    moved = [
        each._replace(offset=each.offset + by)
        if isinstance(each, Frame)
        else replace(each, start=each.start + by, end=each.end + by)
        for each in found
    ]
    return [Damage(0, by), *moved]


def _state(status: os.stat_result) -> _State:
    return _State(status.st_ino, status.st_size, status.st_mtime_ns)


def _whole(found: Sequence[Frame | Damage]) -> int:
    """How many come before a batch that is not whole: damage that no later batch follows."""
    last = max((n for n, each in enumerate(found) if isinstance(each, Frame) and each.starts_batch), default=0)
    return next((n for n in range(last, len(found)) if isinstance(found[n], Damage)), len(found))


def _mark(frame: Frame) -> int:
    """The same for all copies of a record, another one for every other record of the rollout."""
    if frame.type is RecordType.COMMITTED:
        return hash(frame.call_id) % _MARKS | _COMMITTED
    return hash((frame.type, frame.call_id, bytes(frame.payload))) % _MARKS & ~_COMMITTED


def _marked(places: array[int]) -> Iterator[tuple[int, Location]]:
    columns = (places[n::_PLACE] for n in range(_PLACE))
    return ((mark, Location(*location)) for *location, mark in zip(*columns, strict=True))
