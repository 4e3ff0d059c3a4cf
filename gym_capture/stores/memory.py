"""Sink and source in memory: for tests, for imported files, and for graphs that may lose records when they stop.

Invariant: that of `gym_capture.protocols`, without durability. Nothing happens between deciding and applying, so
each operation is atomic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gym_capture.codec import encode_suffix, payload_digest, with_delivery
from gym_capture.errors import StoreUnavailableError
from gym_capture.records import CallIntent, Snapshot, suffix_of
from gym_capture.rollout_state import Committed, Decision
from gym_capture.stores.book import RolloutBook
from gym_capture.suffixes import StoredRecord, complete


class MemoryStore:
    """A `TokenSink` and a `TokenSource`."""

    def __init__(self) -> None:
        self._book = RolloutBook()
        self._entries: dict[str, dict[str, StoredRecord]] = {}
        self._is_closed = False

    @classmethod
    async def open(cls, **_: Any) -> MemoryStore:
        """Opened as a `LogStore` is; of its arguments there is none that matters here."""
        return cls()

    async def begin_call(self, intent: CallIntent) -> int:
        self._check_open()
        epoch, decision = self._book.begin(intent)
        self._settle(intent.rollout_id, decision)
        return epoch

    async def put(self, entry: StoredRecord, *, epoch: int) -> None:
        self._check_open()
        digest = payload_digest(encode_suffix(entry))
        decision = self._book.put(entry.rollout_id, entry.model_call_id, digest, epoch=epoch)
        self._settle(entry.rollout_id, decision)
        if isinstance(decision.event, Committed):
            self._entries.setdefault(entry.rollout_id, {})[entry.model_call_id] = suffix_of(entry)

    async def abandon_call(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        self._check_open()
        self._settle(rollout_id, self._book.abandon(rollout_id, call_id, epoch=epoch))

    async def mark_incomplete(self, rollout_id: str, reason: str, *, epoch: int) -> None:
        self._check_open()
        self._settle(rollout_id, self._book.mark_incomplete(rollout_id, reason, epoch=epoch))

    async def mark_delivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        self._check_open()
        self._settle(rollout_id, self._book.mark_delivery(rollout_id, call_id, True, epoch=epoch))

    async def mark_undelivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        self._check_open()
        self._settle(rollout_id, self._book.mark_delivery(rollout_id, call_id, False, epoch=epoch))

    async def freeze(self, rollout_id: str) -> Snapshot:
        self._check_open()
        facts = self._book.freeze(rollout_id)
        records = with_delivery(self._entries.get(rollout_id, {}).values(), facts.delivery)
        entries, orphans = complete(records)
        return Snapshot(
            rollout_id=rollout_id,
            snapshot_id=facts.snapshot_id,
            version=facts.version,
            entries=entries,
            orphans=orphans,
            incomplete=facts.incomplete,
            problems=facts.problems,
            lost_calls=facts.lost_calls,
        )

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        self._check_open()
        self._settle(rollout_id, self._book.drop(rollout_id, snapshot_id, version, now=time.time()))

    async def clear(self, rollout_id: str) -> None:
        self._check_open()
        self._settle(rollout_id, self._book.clear(rollout_id, now=time.time()))

    async def rollout_ids(self) -> Sequence[str]:
        self._check_open()
        return self._book.live_ids()

    async def close(self) -> None:
        self._is_closed = True

    def _settle(self, rollout_id: str, decision: Decision) -> None:
        if decision.event is not None:
            self._book.apply(rollout_id, decision.event)
            if self._book.live(rollout_id) is None:
                self._entries.pop(rollout_id, None)
        if decision.error is not None:
            raise decision.error

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("this store is closed")
