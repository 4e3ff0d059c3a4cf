"""NeMo Gym's own capture, with a store of ours under it: its sink, its source, its lineage.

Invariant: what Gym put comes back with every id and every field that Gym gave it, whole where Gym sent a delta; what
the record has no place for is refused, and the call's capture has failed. What the snapshot lacks, Gym is told of.

Flow: Gym's `TokenEntry` -> `record_of`: a record under our names; by what Gym finds the call again is one text in its
keys (`_FOUND_BY`) -> `RecordStore` -> its snapshot -> `entry_of` -> a `TokenCaptureSnapshot`.

`gym` is NeMo Gym's package `nemo_gym.token_id_capture`, whose models these are: none of its packages is needed here.
Log probabilities are float32 in the store, and come back with the digits that give them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from gym_capture.capture.operations import Begin, Commit, Drop, MarkIncomplete
from gym_capture.capture.protocols import RecordStore
from gym_capture.capture.record_fields import parts
from gym_capture.capture.record_rows import row_json
from gym_capture.capture.records import (
    CallIntent,
    Continues,
    EntrySuffix,
    Parent,
    Root,
    TokenEntry,
    Unresolved,
)
from gym_capture.capture.suffixes import StoredRecord
from gym_capture.data.nemo_gym import gym_digest
from gym_capture.errors import RecordError, StaleSnapshotError
from gym_capture.reasons import CaptureMark, UnresolvedReason, join_reason

__all__ = ["GymLineage", "GymSink", "GymSource"]

_SAME: Final = ("rollout_id", "model_call_id", "model", "created_at", "prefix_requested", "prefix_supplied")
"""Fields that mean the same here and there."""
_FOUND_BY: Final = (
    *("continuation_fingerprint", "continuation_context_len", "continuation_context_digest", "fingerprint_version"),
    *("response_id", "digest"),
)
"""By what Gym finds a call again, and knows its ids: kept as JSON where our own records have their `turn_key`."""
_UNNAMED: Final = "unnamed"
"""The call that has failed where Gym does not say which."""


class GymSink:
    """Gym's `TokenSink`, with its extension `begin_call`."""

    def __init__(self, store: RecordStore) -> None:
        """The store is its opener's to close, and may be shared."""
        self._store = store

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Raises what `RecordStore.write` raises."""
        await self._begin(rollout_id, model_call_id)

    async def put(self, entry: Any) -> None:
        """Raises `RecordError` for an entry that cannot be kept as it is, and what `RecordStore.write` raises."""
        record = record_of(entry)
        epoch = await self._begin(record.rollout_id, record.model_call_id)
        await self._store.write(Commit(record, epoch=epoch))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Raises what `RecordStore.write` raises."""
        epoch = await self._begin(rollout_id, model_call_id or _UNNAMED)
        reason = join_reason(CaptureMark.CAPTURE_FAILED, model_call_id or _UNNAMED)
        await self._store.write(MarkIncomplete(rollout_id, reason, epoch=epoch))

    async def close(self) -> None:
        """Nothing is open but the store."""

    async def _begin(self, rollout_id: str, call_id: str) -> int:
        # Without a time, so that a call may be begun again: that is how a writer learns the epoch.
        return await self._store.write(Begin(CallIntent(rollout_id=rollout_id, model_call_id=call_id, created_at=0.0)))


class GymSource:
    """Gym's `TokenSource`. Records of a graph of ours can be read with it, too."""

    def __init__(self, store: RecordStore, gym: Any) -> None:
        self._store = store
        self._gym = gym

    async def freeze(self, rollout_id: str) -> Any:
        """A `TokenCaptureSnapshot`. Raises what `RecordStore.freeze` raises."""
        found = await self._store.freeze(rollout_id)
        return self._gym.TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(entry_of(record, self._gym) for record in found.records),
            incomplete=bool(found.incomplete or found.problems),
            snapshot_id=found.snapshot_id,
            version=found.version,
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """False if the rollout has changed since. Raises what `RecordStore.write` raises."""
        try:
            await self._store.write(Drop(rollout_id, snapshot_id, version))
        except StaleSnapshotError:
            return False
        return True

    async def close(self) -> None:
        """Nothing is open but the store."""


class GymLineage:
    """Gym's `LineageResolver`, by its own matcher over all that is recorded of the rollout: the same rules, and a read
    for each request."""

    def __init__(self, store: RecordStore, gym: Any) -> None:
        self._source = GymSource(store, gym)
        self._gym = gym

    async def resolve(self, rollout_id: str, request_items: Sequence[Mapping[str, Any]]) -> Any:
        """A `LineageResolution`."""
        lineage = self._gym.RolloutLineage()
        for entry in (await self._source.freeze(rollout_id)).entries:
            if not entry.prompt_is_delta:  # its parent is lost, and with it the ids that it would supply
                lineage.add_entry(entry)
        return lineage.resolve(list(request_items))

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None:
        """Nothing is open but the store."""


def record_of(entry: Any) -> StoredRecord:
    """The record of a Gym `TokenEntry`. Raises `RecordError` for one that it would not be all of."""
    if entry.model_extra:
        raise _error(entry, next(iter(entry.model_extra)), "is a field that no record here has")
    stored = len(entry.prompt_token_ids) + len(entry.generation_token_ids)
    before = (entry.cum_len or stored) - stored
    if before < 0 or (before > 0) is not entry.prompt_is_delta:
        raise _error(entry, "cum_len", f"must be that of prompt and generation: got {entry.cum_len}, of {stored} ids")
    made = parts(
        {
            **{name: getattr(entry, name) for name in _SAME},
            "generation_token_ids": entry.generation_token_ids,
            "generation_log_probs": entry.generation_log_probs,
            "parent": _parent(entry, before),
            "output_items": tuple(entry.output_items),
            "token_item_index": entry.token_item_index,
            "routed_experts": None if entry.routed_experts is None else np.array(entry.routed_experts),
            "turn_key": row_json({name: getattr(entry, name) for name in _FOUND_BY}).decode(),
        }
    )
    if entry.prompt_is_delta:
        return EntrySuffix(new_prompt_ids=entry.prompt_token_ids, **made)
    record = TokenEntry(prompt_token_ids=entry.prompt_token_ids, **made)
    if entry.digest not in (None, gym_digest(record.cumulative_ids())):
        raise _error(entry, "digest", "is not that of prompt and generation")
    return record


def _parent(entry: Any, cum_len: int) -> Parent | None:
    """`cum_len`: 0 where the prompt is whole, and nothing of the parent is left out."""
    if entry.parent_call_id is not None:
        return Continues(entry.parent_call_id, cum_len)
    match entry.parent_resolution:
        case None:
            return None
        case "root":
            return Root()
    return Unresolved(entry.parent_resolution_reason or UnresolvedReason.NOT_SAID)


def entry_of(record: StoredRecord, gym: Any) -> Any:
    """A Gym `TokenEntry`: whole, or a delta if the parent is lost. Raises what Gym raises for one that cannot be."""
    prompt = record.prompt_token_ids if isinstance(record, TokenEntry) else record.new_prompt_ids
    parent = record.parent
    reason = parent.reason if isinstance(parent, Unresolved) and parent.reason != UnresolvedReason.NOT_SAID else ""
    values = {
        "rollout_id": record.rollout_id,
        "model_call_id": record.model_call_id,
        "model": record.policy.model,
        "created_at": record.created_at,
        "prefix_requested": record.prefix.requested,
        "prefix_supplied": record.prefix.supplied,
        "prompt_token_ids": prompt,
        "generation_token_ids": record.generation_token_ids,
        "generation_log_probs": record.generation_log_probs,
        "routed_experts": record.policy.routed_experts,
        "output_items": record.reply.output_items,
        "token_item_index": record.reply.token_item_index,
        "prompt_is_delta": isinstance(record, EntrySuffix),
        "cum_len": record.cum_len,
        "parent_call_id": parent.call_id if isinstance(parent, Continues) else None,
        "parent_resolution": None if parent is None else _RESOLUTIONS[type(parent)],
        "parent_resolution_reason": reason,
        **_found_by(record),
    }
    return gym.TokenEntry.model_validate_json(row_json(values))


_RESOLUTIONS: Final[Mapping[type, str]] = {Root: "root", Continues: "resolved", Unresolved: "unresolved"}


def _found_by(record: StoredRecord) -> dict[str, Any]:
    key = record.keys.turn_key or ""
    if key.startswith("{"):
        found: dict[str, Any] = json.loads(key)
        return found
    # A record of a graph of ours: Gym's lineage has nothing to find it by, and its builder needs none.
    return {"digest": gym_digest(record.cumulative_ids())} if isinstance(record, TokenEntry) else {}


def _error(entry: Any, field: str, message: str) -> RecordError:
    return RecordError(f"{field} {message}", field=field, rollout_id=entry.rollout_id, call_id=entry.model_call_id)
