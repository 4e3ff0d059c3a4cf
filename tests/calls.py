"""Small calls and rollouts for tests, and what a build made of them in plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_capture.build.builder import BuildOptions, BuiltRollout, Trajectory
from gym_capture.capture.record_fields import parts
from gym_capture.capture.records import Parent, Snapshot, TokenEntry
from gym_capture.capture.suffixes import StoredRecord, complete

ALL_CHAINS = BuildOptions(delivery="all_chains")
PER_REQUEST = BuildOptions(strategy="per_request", delivery="all_chains")


def call(
    call_id: str,
    prompt: Sequence[int],
    generation: Sequence[int],
    *,
    parent: Parent | None = None,
    log_probs: Sequence[float] | None = None,
    **fields: Any,
) -> TokenEntry:
    """A call of rollout r1 with a whole prompt; log probabilities -0.1, -0.2, ... unless given.

    Fields as `entry_of`.
    """
    fields = {"rollout_id": "r1", "requested_model": "policy", "has_tools": True, "finish_reason": "stop", **fields}
    if log_probs is None:
        log_probs = [-0.1 * (position + 1) for position in range(len(generation))]
    return entry_of(
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        generation_token_ids=np.array(generation, dtype=np.int32),
        generation_log_probs=np.array(log_probs, dtype=np.float32),
        parent=parent,
        **{"model_call_id": call_id, "model": "served", **fields},
    )


def entry_of(**fields: Any) -> TokenEntry:
    """A record of fields by their names in files, which find their parts; those not given have their defaults."""
    return TokenEntry(**parts(fields))


def snapshot(*records: StoredRecord, **fields: Any) -> Snapshot:
    """Of rollout r1, its records made whole as when it is read from a store."""
    entries, orphans = complete(records)
    made = {"rollout_id": "r1", "snapshot_id": "s", "version": 1, "entries": entries, "orphans": orphans}
    return Snapshot(**{**made, **fields})


def rows(built: BuiltRollout) -> list[dict[str, Any]]:
    """Every trajectory as plain lists, in the order of its calls."""
    return sorted(
        (
            {
                "calls": list(trajectory.call_ids),
                "token_ids": trajectory.token_ids.tolist(),
                "loss_mask": trajectory.loss_mask.astype(int).tolist(),
                "logprobs": [round(float(value), 4) for value in trajectory.log_probs],
            }
            for trajectory in built.trajectories
        ),
        key=lambda row: row["calls"],
    )


def excluded(built: BuiltRollout) -> dict[str, str]:
    return {call.call_id: call.reason for call in built.excluded}


def only(built: BuiltRollout) -> Trajectory:
    (trajectory,) = built.trajectories
    return trajectory
