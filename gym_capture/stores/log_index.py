"""A log store's memory: the facts of every rollout, where its records stand, which bytes are alive.

Invariant: `needs` is true of every record that a replay could not do without, so a segment may be deleted once those
records have been copied elsewhere.

A tombstone must outlive the records that it retires: it is always written after them, and only the oldest segment,
behind which there are none left, may lose it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from gym_capture.capture.facts import Committed, Event, Retired
from gym_capture.stores.frames import Frame, RecordType
from gym_capture.stores.group_commit import Write
from gym_capture.stores.log_records import event_of
from gym_capture.stores.rollout_states import RolloutStates
from gym_capture.stores.segments import Location


@dataclass(slots=True)
class _LiveRollout:
    epoch: int
    entries: dict[str, Location] = field(default_factory=dict)
    bytes_in: Counter[int] = field(default_factory=Counter)
    """Bytes of its records, by segment."""


class LogIndex:
    """The index of one log directory."""

    def __init__(self, *, keep_records: bool = False) -> None:
        self.states = RolloutStates(keep_records=keep_records)
        self.sizes: dict[int, int] = {}
        """Bytes of each segment."""
        self.damaged: set[int] = set()
        """Segments of which something cannot be read."""
        self._live_bytes: Counter[int] = Counter()
        self._rollouts: dict[str, _LiveRollout] = {}
        self._tombstones: dict[str, tuple[Retired, Location]] = {}
        self._sweepable: dict[str, float] = {}
        """When each rollout was retired whose tombstone may be swept one day; the longest ago first, about."""
        self._kept: dict[str, set[int]] = {}
        """Epochs that were consumed but whose records stay."""

    # changing

    def open_segment(self, number: int, size: int, epoch_floor: int) -> None:
        """There is a segment; its epoch floor says which epochs were given out before it, records of them or not."""
        self.sizes[number] = size
        self.states.next_epoch = max(self.states.next_epoch, epoch_floor)

    def apply(self, write: Write, event: Event, location: Location) -> None:
        self.add(write.rollout_id, event, location)

    def give_up(self, write: Write) -> None:
        self.states.give_up(write.rollout_id)

    def epoch_floor(self) -> int:
        return self.states.next_epoch

    def add(self, rollout_id: str, event: Event, location: Location) -> None:
        """The record of `event` stands at `location`; it may be a copy of one that is known."""
        self.sizes[location.segment] = max(self.sizes.get(location.segment, 0), location.offset + location.size)
        self.states.apply(rollout_id, event)
        if isinstance(event, Retired) and event.keeps_records and event.consumed_epoch is not None:
            self._kept.setdefault(rollout_id, set()).add(event.consumed_epoch)
        state = self.states.live(rollout_id)
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None and (state is None or state.epoch != rollout.epoch):
            self._release(rollout_id, self._rollouts.pop(rollout_id))
        if isinstance(event, Retired):
            self._add_tombstone(rollout_id, event, location)
        elif state is not None and event.epoch == state.epoch:
            rollout = self._rollouts.setdefault(rollout_id, _LiveRollout(state.epoch))
            rollout.bytes_in[location.segment] += location.size
            self._live_bytes[location.segment] += location.size
            if isinstance(event, Committed):
                rollout.entries[event.call_id] = location
        elif event.epoch in self._kept.get(rollout_id, ()):
            self._live_bytes[location.segment] += location.size

    def forget_segment(self, number: int) -> None:
        """The segment was deleted."""
        self.sizes.pop(number, None)
        self._live_bytes.pop(number, None)
        for rollout in self._rollouts.values():
            rollout.bytes_in.pop(number, None)

    def sweep(self, frame: Frame, location: Location, *, before: float) -> None:
        """Forgets a tombstone that stands in the oldest segment, if it has served its time."""
        event, current = self._tombstones.get(frame.rollout_id, (None, None))
        if event is not None and current == location and event.retired_at < before and not event.keeps_records:
            self.states.sweep(frame.rollout_id)
            self._drop_tombstone(frame.rollout_id)

    def overdue(self, count: int, *, before: float) -> bool:
        """Whether so many tombstones have served their time."""
        return next(itertools.islice(self._sweepable.values(), count - 1, None), before) < before

    def _add_tombstone(self, rollout_id: str, event: Retired, location: Location) -> None:
        if self.states.tombstone(rollout_id) == event:
            self._drop_tombstone(rollout_id)
            self._tombstones[rollout_id] = (event, location)
            if not event.keeps_records:
                self._sweepable[rollout_id] = event.retired_at
            self._live_bytes[location.segment] += location.size
        elif event.keeps_records:
            self._live_bytes[location.segment] += location.size

    def _drop_tombstone(self, rollout_id: str) -> None:
        if rollout_id in self._tombstones:
            event, location = self._tombstones.pop(rollout_id)
            self._sweepable.pop(rollout_id, None)
            if not event.keeps_records:
                self._live_bytes[location.segment] -= location.size

    def _release(self, rollout_id: str, rollout: _LiveRollout) -> None:
        if rollout.epoch not in self._kept.get(rollout_id, ()):
            self._live_bytes.subtract(rollout.bytes_in)

    # reading

    def entries(self, rollout_id: str) -> list[tuple[str, Location]]:
        """Call id and location of each record of a live rollout, in the order of the log."""
        rollout = self._rollouts.get(rollout_id)
        return [] if rollout is None else sorted(rollout.entries.items(), key=lambda item: item[1])

    def bytes_of(self, rollout_id: str) -> int:
        """Bytes that the records of a live rollout take up."""
        rollout = self._rollouts.get(rollout_id)
        return 0 if rollout is None else rollout.bytes_in.total()

    def kept_epochs(self) -> list[tuple[str, int]]:
        """Rollout and epoch of what was consumed and kept, sorted."""
        return sorted((rollout_id, epoch) for rollout_id, epochs in self._kept.items() for epoch in epochs)

    def needs(self, frame: Frame, location: Location) -> bool:
        """Whether the record that stands there must be copied before its segment can be deleted."""
        if frame.type is RecordType.RETIRED:
            _, current = self._tombstones.get(frame.rollout_id, (None, None))
            return current == location or _retired(frame).keeps_records
        if frame.epoch in self._kept.get(frame.rollout_id, ()):
            return True
        rollout = self._rollouts.get(frame.rollout_id)
        if rollout is None or rollout.epoch != frame.epoch:
            return False
        return frame.type is not RecordType.COMMITTED or rollout.entries.get(frame.call_id) == location

    def live_bytes(self, number: int) -> int:
        return self._live_bytes[number]


def _retired(frame: Frame) -> Retired:
    event = event_of(frame)
    if not isinstance(event, Retired):
        raise TypeError(f"a {frame.type.name} record retires nothing")
    return event
