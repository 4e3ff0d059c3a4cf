"""The rollouts of one store: which are live, which are retired, and the next epoch.

Invariant: no epoch is given out twice, whatever is forgotten in between. What a retired rollout leaves is one
tombstone, and so does closing one of which nothing is known; it answers a repeated `Drop` and refuses late calls until
the store sweeps it.

Flow: `prepared` checks and encodes an operation, for its caller alone -> `decide` looks the rollout up and asks its
state (`rollout_state`) -> the store makes the event durable -> `apply`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gym_capture.capture.codec import encode_intent, encode_suffix, payload_digest
from gym_capture.capture.facts import Event, Retired
from gym_capture.capture.operations import (
    Begin,
    Clear,
    Close,
    Commit,
    Complete,
    Drop,
    GoOn,
    HandOn,
    Operation,
    Register,
    check,
    check_text,
)
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.rollout_state import (
    Decision,
    Frozen,
    Retirement,
    RolloutState,
    RolloutStatus,
    retired_error,
)
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollout_ids import check_rollout_id

__all__ = ["Prepared", "RolloutStates", "prepared"]


class Prepared(NamedTuple):
    """An operation that is well-formed."""

    operation: Operation
    encoded: bytes
    """The bytes to keep of an intent or a record; of others none: their event says it all."""


def prepared(operation: Operation) -> Prepared:
    """Raises `RecordError` or `InvalidRolloutIdError` for what cannot be written."""
    check(operation)
    match operation:
        case Begin(intent):
            return Prepared(operation, encode_intent(intent))
        case Commit(entry):
            return Prepared(operation, encode_suffix(entry) if operation.encoded is None else operation.encoded)
        case _:
            return Prepared(operation, b"")


@dataclass(slots=True)
class RolloutStates:
    """States of all rollouts of a store."""

    next_epoch: int = 1
    keep_records: bool = False
    """Whether the records that a `Drop` consumed stay readable."""
    clock: Callable[[], float] = time.time
    _states: dict[str, RolloutState] = field(default_factory=dict)
    """Rollouts of which something is recorded, and those whose first call is being made durable."""
    _tombstones: dict[str, Retired] = field(default_factory=dict)

    # deciding

    def decide(self, write: Prepared) -> Decision:
        """Decides an operation; nothing changes yet. What is said first of an unknown rollout gives it an epoch."""
        operation = write.operation
        state = self._find(operation.rollout_id)
        if state is None:
            match operation:
                case Begin() | Register() | GoOn():
                    # Kept at once, empty: the next call gets the same epoch although this one is not durable yet.
                    state = self._states[operation.rollout_id] = RolloutState(operation.rollout_id, self.next_epoch)
                    self.next_epoch += 1
                case Drop() | Clear():
                    # There is nothing to retire: it never was, or its tombstone was swept.
                    return Decision()
                case Complete() | Close() | HandOn():
                    # Not kept: of one that is closed, its tombstone is there once it is durable.
                    state = RolloutState(operation.rollout_id, 0)
                case _:
                    return Decision(error=retired_error(operation.rollout_id, operation.call_id))
        digest = payload_digest(write.encoded) if isinstance(operation, Commit) else b""
        return state.decide(operation, digest, Retirement(self.next_epoch, self.clock(), self.keep_records))

    # applying

    def apply(self, rollout_id: str, event: Event) -> None:
        """Adds a fact, in whatever order facts come."""
        state = self._find(rollout_id) or RolloutState(rollout_id, event.epoch)
        state.apply(event)
        self.next_epoch = max(self.next_epoch, event.epoch + 1)
        if state.retired is not None:
            self._tombstones[rollout_id] = state.retired
        if state.is_live:
            self._states[rollout_id] = state
        else:
            self._states.pop(rollout_id, None)

    def give_up(self, rollout_id: str) -> None:
        """Forgets the epoch of a rollout whose first call could not be made durable: nobody was told of it."""
        state = self._states.get(rollout_id)
        if state is not None and not state.is_live:
            del self._states[rollout_id]

    def sweep(self, rollout_id: str) -> None:
        """Forgets the tombstone of a rollout."""
        self._tombstones.pop(rollout_id, None)

    # reading

    def live(self, rollout_id: str) -> RolloutState | None:
        """The state of a rollout of which something is recorded."""
        state = self._states.get(rollout_id)
        return state if state is not None and state.is_live else None

    def knows(self, rollout_id: str, event: Event) -> bool:
        """Whether applying the event would change nothing."""
        state = self._find(rollout_id)
        return state is not None and state.knows(event)

    @property
    def known_rollouts(self) -> int:
        """The live rollouts, and those whose first call is being made durable."""
        return len(self._states)

    def live_ids(self) -> list[str]:
        return sorted(rollout_id for rollout_id, state in self._states.items() if state.is_live)

    def standings(self) -> list[Standing]:
        """The standings of the live rollouts, sorted by their ids."""
        live = ((rollout_id, self._states[rollout_id]) for rollout_id in self.live_ids())
        return [Standing(rollout_id, state.registration, state.outcome) for rollout_id, state in live]

    def counts(self, rollout_id: str) -> RolloutCounts:
        """Zero for a rollout of which nothing is recorded."""
        state = self._states.get(rollout_id)
        return RolloutCounts() if state is None else state.counts

    def status(self, rollout_id: str) -> RolloutStatus:
        """Raises as `freeze`."""
        return RolloutStatus(self.freeze(rollout_id).snapshot, self.counts(rollout_id))

    def tombstone(self, rollout_id: str) -> Retired | None:
        return self._tombstones.get(rollout_id)

    def freeze(self, rollout_id: str) -> Frozen:
        """Raises `RecordError` or `InvalidRolloutIdError` for what is no rollout id."""
        check_text("rollout_id", rollout_id)
        state = self.live(check_rollout_id(rollout_id))
        return (state or RolloutState(rollout_id, 0)).freeze()

    def _find(self, rollout_id: str) -> RolloutState | None:
        state = self._states.get(rollout_id)
        if state is None and (tombstone := self._tombstones.get(rollout_id)) is not None:
            return RolloutState(rollout_id, tombstone.epoch, retired=tombstone)
        return state
