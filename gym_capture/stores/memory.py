"""A store in memory: for tests, for imported files, and for graphs that may lose records when they stop.

Invariant: that of `gym_capture.capture.protocols`, without durability. Nothing happens between deciding and applying,
so each operation is atomic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gym_capture.capture.facts import Committed
from gym_capture.capture.operations import Commit, Operation
from gym_capture.capture.records import Snapshot, suffix_of
from gym_capture.capture.snapshot_codec import with_delivery
from gym_capture.capture.suffixes import StoredRecord, complete
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.rollout_states import RolloutStates, prepared

__all__ = ["MemoryStore"]


class MemoryStore:
    """A `RecordStore`."""

    def __init__(self) -> None:
        self._states = RolloutStates()
        self._entries: dict[str, dict[str, StoredRecord]] = {}
        self._is_closed = False

    @classmethod
    async def open(cls, **_: Any) -> MemoryStore:
        """Opened as a `LogStore` is; of its arguments there is none that matters here."""
        return cls()

    async def write(self, operation: Operation) -> int:
        self._check_open()
        event, error, epoch = self._states.decide(prepared(operation))
        rollout_id = operation.rollout_id
        if event is not None:
            self._states.apply(rollout_id, event)
            if self._states.live(rollout_id) is None:
                self._entries.pop(rollout_id, None)
        if isinstance(operation, Commit) and isinstance(event, Committed):
            self._entries.setdefault(rollout_id, {})[event.call_id] = suffix_of(operation.entry)
        if error is not None:
            raise error
        return epoch

    async def freeze(self, rollout_id: str) -> Snapshot:
        self._check_open()
        snapshot, delivery = self._states.freeze(rollout_id)
        entries, orphans = complete(with_delivery(self._entries.get(rollout_id, {}).values(), delivery))
        return replace(snapshot, entries=entries, orphans=orphans)

    async def rollout_ids(self) -> Sequence[str]:
        self._check_open()
        return self._states.live_ids()

    async def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("this store is closed")
