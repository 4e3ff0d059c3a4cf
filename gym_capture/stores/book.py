"""The rollouts of one store: which are live, which are retired, and the next epoch.

Invariant: no epoch is given out twice, whatever is forgotten in between. What a retired rollout leaves is one
tombstone; it answers a repeated `drop` and refuses late calls until the store sweeps it.

Flow: as in `rollout_state` - decide, make the event durable, `apply` - with the types of what is written checked and
the rollout looked up first. A fact of another type would be an error to whoever reads it, long after its writer has
gone, or to writers that share its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gym_capture.errors import RecordError
from gym_capture.records import CallIntent, check_rollout_id
from gym_capture.rollout_state import (
    Decision,
    Event,
    FrozenFacts,
    Retired,
    RolloutState,
    empty_snapshot_id,
    retired_error,
)


@dataclass(slots=True)
class RolloutBook:
    """States of all rollouts of a store."""

    next_epoch: int = 1
    _states: dict[str, RolloutState] = field(default_factory=dict)
    """Rollouts of which something is recorded, and those whose first call is being made durable."""
    _tombstones: dict[str, Retired] = field(default_factory=dict)

    # deciding

    def begin(self, intent: CallIntent) -> tuple[int, Decision]:
        """The epoch that the call's writes carry, and the decision. A rollout that is unknown gets a new epoch."""
        _check_texts(
            rollout_id=intent.rollout_id, model_call_id=intent.model_call_id, request_digest=intent.request_digest
        )
        _check_number("created_at", intent.created_at)
        rollout_id = check_rollout_id(intent.rollout_id)
        state = self._find(rollout_id)
        if state is None:
            # Kept at once, empty: the next call of this rollout gets the same epoch although this one is not durable.
            state = self._states[rollout_id] = RolloutState(rollout_id, self.next_epoch)
            self.next_epoch += 1
        return state.epoch, state.begin(intent)

    def put(self, rollout_id: str, call_id: str, payload_digest: bytes, *, epoch: int) -> Decision:
        _check_epoch(epoch)
        state = self._find(rollout_id)
        if state is None:
            return Decision(error=retired_error(rollout_id, call_id))
        return state.put(call_id, payload_digest, epoch=epoch)

    def abandon(self, rollout_id: str, call_id: str, *, epoch: int) -> Decision:
        _check_texts(rollout_id=rollout_id, model_call_id=call_id)
        _check_epoch(epoch)
        state = self._find(rollout_id)
        if state is None:
            return Decision(error=retired_error(rollout_id, call_id))
        return state.abandon(call_id, epoch=epoch)

    def mark_incomplete(self, rollout_id: str, reason: str, *, epoch: int) -> Decision:
        _check_texts(rollout_id=rollout_id, reason=reason)
        _check_epoch(epoch)
        state = self._find(rollout_id)
        if state is None:
            return Decision(error=retired_error(rollout_id, None))
        return state.mark_incomplete(reason, epoch=epoch)

    def mark_delivery(self, rollout_id: str, call_id: str, delivered: bool, *, epoch: int) -> Decision:
        _check_texts(rollout_id=rollout_id, model_call_id=call_id)
        _check_epoch(epoch)
        state = self._find(rollout_id)
        if state is None:
            return Decision(error=retired_error(rollout_id, call_id))
        return state.mark_delivery(call_id, delivered, epoch=epoch)

    def drop(self, rollout_id: str, snapshot_id: str, version: int, *, now: float, keep: bool = False) -> Decision:
        """Of a rollout that is unknown there is nothing to retire: it never was, or its tombstone was swept."""
        _check_texts(rollout_id=rollout_id, snapshot_id=snapshot_id)
        _check_number("version", version)
        state = self._find(rollout_id)
        if state is None:
            return Decision()
        return state.drop(snapshot_id, version, next_epoch=self.next_epoch, now=now, keep=keep)

    def clear(self, rollout_id: str, *, now: float) -> Decision:
        _check_texts(rollout_id=rollout_id)
        state = self._find(rollout_id)
        return Decision() if state is None else state.clear(next_epoch=self.next_epoch, now=now)

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

    def tombstone(self, rollout_id: str) -> Retired | None:
        return self._tombstones.get(rollout_id)

    def freeze(self, rollout_id: str) -> FrozenFacts:
        _check_texts(rollout_id=rollout_id)
        state = self.live(check_rollout_id(rollout_id))
        if state is None:
            return FrozenFacts(
                empty_snapshot_id(rollout_id), version=0, incomplete=(), problems=(), delivery={}, lost_calls=()
            )
        return state.freeze()

    def _find(self, rollout_id: str) -> RolloutState | None:
        state = self._states.get(rollout_id)
        if state is None and (tombstone := self._tombstones.get(rollout_id)) is not None:
            return RolloutState(rollout_id, tombstone.epoch, retired=tombstone)
        return state


def _check_texts(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise RecordError(f"{name} must be a string: got {value!r}", field=name)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{name} must be a number: got {value!r}", field=name)


def _check_epoch(epoch: object) -> None:
    # Exactly: 1.0 and True equal an epoch, but the log has no place for them.
    if type(epoch) is not int:
        raise RecordError(f"epoch must be the number that `begin_call` gave: got {epoch!r}", field="epoch")
