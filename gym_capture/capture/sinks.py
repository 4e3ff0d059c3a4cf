"""The sink that calls record through: one attempt at one rollout, on whatever store or actor keeps it.

Invariant: what is said through a sink carries its epoch, which nobody else passes around. So who still holds the sink
of an attempt that was dropped, cleared or closed is refused (`RetiredRolloutError`), and cannot write into the next.

Flow: beginning a call gives a sink (`BegunCall`) -> each of its methods makes one operation and has it written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gym_capture.capture.operations import Abandon, Commit, MarkDelivery, MarkIncomplete, Operation, Replay
from gym_capture.capture.protocols import Resolution
from gym_capture.capture.records import TokenEntry


class Writer(Protocol):
    """The part of a `RecordStore` that a sink needs."""

    async def write(self, operation: Operation) -> int: ...


@dataclass(frozen=True, slots=True)
class TokenSink:
    """A handle of one rollout and epoch. Its methods raise a `StoreError`, and may be repeated."""

    store: Writer
    rollout_id: str
    epoch: int

    async def put(self, entry: TokenEntry) -> None:
        """Returns when the record is durable and lineage finds it. It is an entry of this rollout."""
        await self.store.write(Commit(entry, epoch=self.epoch))

    async def abandon(self, call_id: str) -> None:
        """The call was refused to its client before it generated: there will be no record."""
        await self.store.write(Abandon(self.rollout_id, call_id, epoch=self.epoch))

    async def mark_incomplete(self, reason: str) -> None:
        """The capture of the rollout lacks something (`reasons.join_reason`)."""
        await self.store.write(MarkIncomplete(self.rollout_id, reason, epoch=self.epoch))

    async def mark_delivery(self, call_id: str, *, delivered: bool) -> None:
        """Whether the end of the call's reply was handed to its client's connection."""
        await self.store.write(MarkDelivery(self.rollout_id, call_id, delivered=delivered, epoch=self.epoch))

    async def replay(self, call_id: str, *, recorded: str) -> None:
        """The call is about to be answered from that record of an earlier attempt, as no other call is. Raises
        `ReplayedCallError` if another one was."""
        await self.store.write(Replay(self.rollout_id, call_id, recorded, epoch=self.epoch))


@dataclass(frozen=True, slots=True)
class BegunCall:
    """A call whose intent is durable."""

    sink: TokenSink
    """Where it is recorded."""
    resolution: Resolution
    """The call that it continues, if any."""
    may_be_retry: bool = False
    """Another call may have been recorded for the same request: whether this one's reply is delivered will matter."""
    went_on: tuple[str, ...] = ()
    """The earlier attempts whose records may answer it (`Snapshot.went_on`)."""
