"""The seams of the state: where records are written, read and looked up.

Invariant: `put` returns only when the record is durable (as far as the implementation promises) *and* a `resolve`
that starts afterwards, anywhere, sees it. Every write carries the epoch that `begin_call` gave: dropping or clearing
a rollout starts a new epoch, so a late writer of an old attempt gets `RetiredRolloutError` instead of polluting a
newer one.

Methods are coroutines; all raise `StoreUnavailableError` when they cannot answer now (safe to repeat: each is
idempotent for equal arguments). `gym_capture.conformance` puts any implementation through the same suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from gym_capture.records import CallIntent, IdArray, Root, Snapshot, Unresolved
from gym_capture.suffixes import StoredRecord


class TokenSink(Protocol):
    """Where records are written through. One sink may serve many rollouts."""

    async def begin_call(self, intent: CallIntent) -> int:
        """Makes the intent of a call durable; returns the rollout's epoch, which the call's later writes carry.

        Repeating an intent is a no-op that returns the same epoch. Raises `RetiredRolloutError` for a rollout that was
        dropped and not cleared since: its agent may still be running.
        """
        ...

    async def put(self, entry: StoredRecord, *, epoch: int) -> None:
        """Makes the record of a call durable and closes its intent. It may be whole or a suffix.

        The same call with the same content again is a no-op. Raises `ConflictingCallError` for other content (the
        first stays, the rollout becomes incomplete), `RetiredRolloutError` for an old epoch.
        """
        ...

    async def abandon_call(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        """Closes an intent that generated nothing and was refused to the client (e.g. too long): no record."""
        ...

    async def mark_incomplete(self, rollout_id: str, reason: str, *, epoch: int) -> None:
        """Records that the capture of this rollout is not complete. `reason` is a name, then optionally `:detail`."""
        ...

    async def mark_delivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        """Records that the end of the call's reply was handed to its client's connection.

        `TokenEntry.delivered` says so in snapshots from now on. Silence proves nothing (None).
        """
        ...

    async def mark_undelivered(self, rollout_id: str, call_id: str, *, epoch: int) -> None:
        """Records that it could not be. If both is said of a call, it was not delivered."""
        ...

    async def close(self) -> None: ...


class EncodedPut(NamedTuple):
    """A `put` that reaches a store in the bytes in which its record travelled."""

    entry: StoredRecord
    data: bytes
    """What `entry` was decoded from: its suffix, as `codec.encode_suffix` makes it."""
    epoch: int


class TokenSource(Protocol):
    """Where records are read through."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        """One immutable snapshot. Idempotent: the same content gives the same `snapshot_id` and `version`.

        Later writes bump the version. An intent without an entry makes the snapshot incomplete; what is known of such
        calls is in its `lost_calls`. A rollout that is unknown gives an empty snapshot at version 0.
        """
        ...

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        """Retires exactly the snapshot that was consumed and leaves a tombstone. Repeating it is a no-op.

        Raises `StaleSnapshotError` if the rollout has changed since.
        """
        ...

    async def clear(self, rollout_id: str) -> None:
        """Forgets whatever an earlier attempt left, before the same rollout id is dispatched again."""
        ...

    async def rollout_ids(self) -> Sequence[str]:
        """The live rollouts, sorted."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Resolved:
    """The one call that a request provably continues."""

    call_id: str
    turn: int
    """Which of the request's assistant turns, from 0, is that call's own generated turn."""
    cumulative_ids: IdArray
    """int32. That call's prompt and generated ids: the exact prefix to supply."""
    rule: str | None = None
    """Name of the rule by which the turn counts as that call's, if it is not the turn as it was sent."""


Resolution: TypeAlias = Root | Resolved | Unresolved


class LineageStore(Protocol):
    """Finds at request time which earlier call of the same rollout a request continues."""

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        """`turn_keys`: for each assistant turn of the request, in order, the fingerprint of everything up to and
        including it (`fingerprint.turn_keys`). The latest one that a recorded call owns decides; a call owns its
        `turn_key`, and its `other_turn_keys`, of which `Resolved.rule` then tells. Candidates that differ in ids give
        `Unresolved("ambiguous")`. Never answers with another rollout's ids.
        """
        ...
