"""The live rollouts of a log that nobody writes to: what a build reads.

Invariant: a rollout frozen here is the one that a `LogStore` on the same directory would freeze, under the same id and
version, and nothing in the directory is changed: a torn tail is passed over, what damage masks is only known here.
Memory holds 24 bytes for each record, whatever it says, and one segment while the log is opened.

Flow: `LogReader` takes the directory's lock, reads it from end to end and notes where the records of each rollout's
highest epoch stand -> `freeze_encoded` reads those of one rollout and has its state made of them (`rollout_state`).
Intents, half of all records, are read only where they say something: where each has its record or refusal behind it,
which calls were begun is known, and what for is of no use.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gym_capture.capture.facts import Abandoned, Begun, Committed, Event, Retired
from gym_capture.capture.operations import check_text
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import RecordProblem
from gym_capture.capture.rollout_state import RolloutState
from gym_capture.capture.snapshot_codec import join_snapshot
from gym_capture.errors import StoreUnavailableError
from gym_capture.rollout_ids import check_rollout_id
from gym_capture.stores.frames import Damage, Frame, RecordType
from gym_capture.stores.log_records import event_of
from gym_capture.stores.reading import read_record, unreadable
from gym_capture.stores.recovery import masking
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import Location, SegmentReader, lock_directory

_TELLING: Final = (RecordType.REGISTERED, RecordType.COMPLETED)
_OVER: Final = (RecordType.COMMITTED, RecordType.ABANDONED)


@dataclass(slots=True)
class _Rollout:
    """What is noted of the highest epoch of a rollout. Retired and not begun again, it has nothing."""

    epoch: int
    calls: array[int] = field(default_factory=lambda: array("Q"))
    """Segment, offset and size of each record but those of the next two."""
    intents: array[int] = field(default_factory=lambda: array("Q"))
    telling: array[int] = field(default_factory=lambda: array("Q"))
    """Of those that say which rollout it is and how it ended."""
    open_calls: set[str] | None = None
    """Begun, and not over yet; None for none."""
    is_in_order: bool = True
    """Whether every call that is over was open before."""
    masking: list[Event] = field(default_factory=list)
    """Facts that stand nowhere: what damage adds."""

    @property
    def is_live(self) -> bool:
        return bool(self.calls or self.intents or self.telling or self.masking)

    @property
    def needs_intents(self) -> bool:
        return bool(self.open_calls) or not self.is_in_order

    def begin(self, call_id: str) -> None:
        self.open_calls = self.open_calls or set()
        self.open_calls.add(call_id)

    def end(self, call_id: str) -> None:
        if self.open_calls and call_id in self.open_calls:
            self.open_calls.remove(call_id)
            self.open_calls = self.open_calls or None  # an empty set takes more than all else here
        else:
            self.is_in_order = False


class LogReader:
    """Reads one log directory. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises `StoreUnavailableError` if another process holds the directory or it cannot be read,
        `CorruptLogError` if a newer version wrote it."""
        self._rollouts: dict[str, _Rollout] = {}
        self._reader = SegmentReader(directory)
        try:
            self._lock = lock_directory(directory)
            try:
                self._note_all(directory)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise StoreUnavailableError(f"the log directory {directory} cannot be opened: {error}") from error

    def rollout_ids(self) -> list[str]:
        """Of the live rollouts, sorted."""
        return sorted(rollout_id for rollout_id, rollout in self._rollouts.items() if rollout.is_live)

    def __contains__(self, rollout_id: object) -> bool:
        return rollout_id in self._rollouts and self._rollouts[str(rollout_id)].is_live

    def standings(self) -> Sequence[Standing]:
        """Of the live rollouts, sorted by their ids. Raises `StoreUnavailableError` if the log cannot be read."""
        states = (self._state(rollout_id, calls=False)[0] for rollout_id in self.rollout_ids())
        return [Standing(state.rollout_id, state.registration, state.outcome) for state in states]

    def freeze_encoded(self, rollout_id: str) -> bytes:
        """The rollout as `snapshot_codec.decode_snapshot` reads it; one of which nothing is recorded is empty.

        Raises `StoreUnavailableError` if the log cannot be read, `CorruptLogError` for a record that is whole and says
        nothing that this version reads.
        """
        check_text("rollout_id", rollout_id)
        check_rollout_id(rollout_id)
        state, records, problems = self._state(rollout_id, calls=True)
        frozen = state.freeze()
        snapshot = replace(frozen.snapshot, problems=(*frozen.snapshot.problems, *problems))
        return join_snapshot(snapshot, list(records.values()), frozen.delivery)

    def close(self) -> None:
        """Lets go of the directory."""
        self._reader.close()
        os.close(self._lock)

    def _state(self, rollout_id: str, *, calls: bool) -> tuple[RolloutState, dict[str, bytes], Sequence[RecordProblem]]:
        """The facts of a rollout - without `calls`, those alone that say which it is and how it ended -, its encoded
        records in the order of the log, and what of it cannot be read any more."""
        rollout = self._rollouts.get(rollout_id) or _Rollout(0)
        state = RolloutState(rollout_id, rollout.epoch)
        records: dict[str, bytes] = {}
        problems: list[RecordProblem] = []
        places = rollout.telling
        if calls:
            places = places + rollout.calls
            if rollout.needs_intents:
                places = places + rollout.intents
        for location in _locations(places):
            try:
                frame = read_record(self._reader, location)
            except OSError as error:
                raise StoreUnavailableError(f"the log cannot be read: {error}") from error
            if frame is None:
                problems.append(unreadable(location, None))
                continue
            state.apply(event_of(frame))
            if frame.type is RecordType.COMMITTED:
                records.pop(frame.call_id, None)  # of several copies the last counts
                records[frame.call_id] = frame.payload
        for event in rollout.masking:
            state.apply(event)
        if calls and rollout.intents and not rollout.needs_intents:
            over = (*state.of(Committed.kind), *state.of(Abandoned.kind))
            state.facts[Begun.kind] = dict.fromkeys(over, b"")
        return state, records, problems

    # opening

    def _note_all(self, directory: Path) -> None:
        damages: list[tuple[int, Damage]] = []
        floors: dict[int, int] = {}
        epoch_floor = 1
        for segment in read_segments(directory, payloads=False):
            if segment.header is not None:
                floors[segment.number] = segment.header.epoch_floor
                epoch_floor = max(epoch_floor, segment.header.epoch_floor)
            for frame in segment.frames:
                self._note(frame, segment.number)
                epoch_floor = max(epoch_floor, frame.epoch + 1)
            damages += [(segment.number, damage) for damage in segment.damage]
        if damages:
            live = [(rollout_id, self._rollouts[rollout_id].epoch) for rollout_id in self.rollout_ids()]
            for rollout_id, event in masking(damages, floors, epoch_floor, live):
                rollout = self._of_epoch(rollout_id, event.epoch)
                if rollout is not None and not isinstance(event, Retired):
                    rollout.masking.append(event)

    def _note(self, frame: Frame, segment: int) -> None:
        rollout = self._of_epoch(frame.rollout_id, frame.epoch)
        if rollout is not None and frame.type is not RecordType.RETIRED:
            places = rollout.calls
            if frame.type is RecordType.BEGUN:
                places = rollout.intents
                rollout.begin(frame.call_id)
            elif frame.type in _OVER:
                rollout.end(frame.call_id)
            elif frame.type in _TELLING:
                places = rollout.telling
            places.extend((segment, frame.offset, frame.size))

    def _of_epoch(self, rollout_id: str, epoch: int) -> _Rollout | None:
        """The rollout, at this epoch; None if it is at a higher one."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None or rollout.epoch < epoch:
            rollout = self._rollouts[rollout_id] = _Rollout(epoch)
        return rollout if rollout.epoch == epoch else None


def _locations(places: array[int]) -> Iterator[Location]:
    numbers = iter(places)
    return (Location(*place) for place in zip(numbers, numbers, numbers, strict=True))
