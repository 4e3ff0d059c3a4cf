"""The seams of the state: where records are written, read and looked up.

Invariant: a `Commit` is acknowledged only when the record is durable (as far as the implementation promises) *and* a
`resolve` that starts afterwards, anywhere, sees it. Every write carries the epoch that `Begin` gave: dropping, clearing
or closing a rollout starts a new epoch, so a late writer of an old attempt gets `RetiredRolloutError` instead of
polluting a newer one.

Methods are coroutines; all raise `StoreUnavailableError` when they cannot answer now (safe to repeat: each is
idempotent for equal arguments). `gym_capture.conformance` puts any implementation through the same suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gym_capture.capture.operations import Operation
from gym_capture.capture.records import IdArray, Root, Snapshot, Unresolved

__all__ = ["LineageStore", "RecordStore", "Resolution", "Resolved", "TokenSource"]


class TokenSource(Protocol):
    """Where records are read through."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        """One immutable snapshot. Idempotent: the same content gives the same `snapshot_id` and `version`.

        Later writes bump the version. An intent without an entry makes the snapshot incomplete; what is known of such
        calls is in its `lost_calls`. A rollout that is unknown gives an empty snapshot at version 0.
        """
        ...

    async def rollout_ids(self) -> Sequence[str]:
        """The live rollouts, sorted."""
        ...

    async def close(self) -> None: ...


class RecordStore(TokenSource, Protocol):
    """A store: records written through it are read back through it, also after a restart."""

    async def write(self, operation: Operation) -> int:
        """Makes what is said of a rollout durable (`operations` says what there is to say, and what is refused).

        Returns the epoch that writes of this rollout carry from now on, as its calls' `Begin` gives it; 0 if nothing is
        known of the rollout. The same operation again is a no-op with the same answer. Raises `RetiredRolloutError` for
        an old epoch, `RecordError` for what is not well-formed.
        """
        ...


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
