"""Rollouts as NeMo-RL's asynchronous GRPO takes them: a receipt without tokens, and the staged deltas it vouches for.

Invariant: NeMo Gym's `verify_and_linearize` gives back the main chain id by id, with its mask and log probabilities, or
refuses. A masked rollout's receipt is poisoned, and says why; it keeps its reward and its place in the group.

Flow: a rollout -> the main chain's calls -> for each, what it adds to the ids before it (`StagedCallBaseSnapshot`) and
the row that names it by digest (`CallRecord`) -> a `RolloutReceipt` over all rows.

`staging` is NeMo Gym's module `nemo_gym.token_id_capture.staging`, whose digests and models these are: none of its
packages is needed here.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np

from gym_capture.build.trajectories import Span
from gym_capture.errors import RecordError
from gym_capture.reasons import LeftOutReason, MaskReason
from trainer_bridge.samples import Delivery, Sample
from trainer_bridge.stream import TrainRollout

__all__ = ["Staged", "stage"]

_ROOT_MODE: Final = "text"
_CHILD_MODE: Final = "token_in"


class Staged(NamedTuple):
    """One rollout, as it is handed over."""

    receipt: Any
    """A `RolloutReceipt`."""
    snapshots: list[Any]
    """A `StagedCallBaseSnapshot` for each row of its manifest, in order."""


def stage(rollout: TrainRollout, delivery: Delivery, staging: Any) -> Staged:
    """The receipt of a rollout and what it stands for.

    A call that ran under several versions of the weights says the lowest, as a row has room for one; 0 if none is on
    record. A call with an id whose log probability is unknown has no place in a chain of these, so such a rollout is
    poisoned. Raises `RecordError` for versions that are no numbers.
    """
    unknown = any((each.loss_mask & ~np.isfinite(each.log_probs)).any() for each in rollout.sequences[:1])
    if unknown and not rollout.masked:
        delivery.left_out[LeftOutReason.NO_TRAINED_TOKENS] += 1
        return Staged(_poisoned(rollout, MaskReason.NO_TRAINABLE_TOKENS, staging), [])
    found = delivery.samples([rollout], main_only=True)
    if not found:
        reasons = rollout.mask_reasons or (MaskReason.NO_TRAINABLE_TOKENS,)
        return Staged(_poisoned(rollout, ", ".join(reasons), staging), [])
    snapshots = _snapshots(found[0], staging)
    manifest = [_row(snapshot, staging) for snapshot in snapshots]
    receipt = staging.RolloutReceipt(
        rollout_id=rollout.rollout_id,
        reward=rollout.reward,
        terminal_model_call_id=snapshots[-1].model_call_id,
        manifest=manifest,
        terminal_selection="declared",
    )
    return Staged(receipt, snapshots)


def _poisoned(rollout: TrainRollout, reason: str, staging: Any) -> Any:
    return staging.RolloutReceipt(
        rollout_id=rollout.rollout_id, reward=rollout.reward, capture_poisoned=True, failure_reason=reason
    )


def _snapshots(sample: Sample, staging: Any) -> list[Any]:
    made: list[Any] = []
    begin, parent, chain_hash = 0, None, None
    ids = sample.token_ids.tolist()
    for call_id, parts in groupby(sample.sequence.spans, key=lambda span: span.call_id):
        spans = list(parts)
        end = spans[-1].end
        chain_hash = staging.compute_chain_hash(chain_hash, ids[begin:end])
        fields: dict[str, Any] = {
            "schema_version": staging.STAGING_SCHEMA_VERSION,
            "digest_version": staging.STAGING_DIGEST_VERSION,
            "extras_digest_version": staging.EXTRAS_DIGEST_VERSION,
            "rollout_id": sample.rollout.rollout_id,
            "model_call_id": call_id,
            "parent_call_id": parent,
            "mode": _ROOT_MODE if parent is None else _CHILD_MODE,
            "prev_len": begin,
            "delta_len": end - begin,
            "cum_len": end,
            "weight_version": min(_version(span, sample.rollout) for span in spans),
            "token_ids_delta": ids[begin:end],
            "token_mask_delta": sample.mask[begin:end].astype(float).tolist(),
            "generation_log_probs_delta": sample.log_probs[begin:end].tolist(),
            "extras_digest": staging.EMPTY_EXTRAS_DIGEST,
            "chain_hash": chain_hash,
            "cumulative_hash": staging.hash_token_ids(ids[:end]),
        }
        made.append(staging.StagedCallBaseSnapshot(**fields, digest=staging.compute_staging_digest(**fields)))
        begin, parent = end, call_id
    return made


def _version(span: Span, rollout: TrainRollout) -> int:
    version = span.weight_version or "0"
    if not version.isdecimal():
        raise RecordError(
            f"a receipt has versions of the weights as numbers: got {version!r}",
            field="weight_version",
            rollout_id=rollout.rollout_id,
            call_id=span.call_id,
        )
    return int(version)


def _row(snapshot: Any, staging: Any) -> Any:
    """`response_id` is the call's: a declared terminal is not looked for by it."""
    names = (
        *("model_call_id", "parent_call_id", "prev_len", "delta_len", "cum_len", "weight_version", "digest", "mode"),
        *("extras_digest", "staging_key", "chain_hash", "cumulative_hash"),
    )
    said = snapshot.model_dump() | {"staging_key": snapshot.staging_key}
    return staging.CallRecord(**{name: said[name] for name in names}, response_id=snapshot.model_call_id)
