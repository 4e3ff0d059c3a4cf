"""A call and a rollout as rows: flat, under the names that the files and `/token-records` give their parts.

Invariant: a row has exactly the ids and log probabilities of its record, and of a rollout everything that masks it.
Prompts are as the record has them: without the ids that the parent's record holds (`prompt_offset`).

Half an emoji, which logs of before may hold, is in no JSON that others read: it is written as U+FFFD.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from gym_capture.conversation import json_without_surrogates
from gym_capture.records import Continues, Root, Snapshot, TokenEntry, Unresolved


def call_row(entry: TokenEntry) -> dict[str, Any]:
    """A call under the names of `CALL_SCHEMA`; structured fields as they are, not yet as JSON."""
    entry = entry.as_delta()
    parent, call_id, cum_len, reason = _parent(entry)
    return {
        "rollout_id": entry.rollout_id,
        "model_call_id": entry.model_call_id,
        "model": entry.model,
        "requested_model": entry.requested_model,
        "has_tools": entry.has_tools,
        "parent": parent,
        "parent_call_id": call_id,
        "parent_cum_len": cum_len,
        "parent_reason": reason,
        "prompt_offset": entry.prompt_offset,
        "prompt_token_ids": entry.prompt_token_ids,
        "generation_token_ids": entry.generation_token_ids,
        "generation_log_probs": entry.generation_log_probs,
        "output_items": [dict(item) for item in entry.output_items],
        "token_item_index": entry.token_item_index,
        "turn_key": entry.turn_key,
        "asked_key": entry.asked_key,
        "other_turn_keys": [{"turn_key": key, "rule": rule} for key, rule in entry.other_turn_keys.items()],
        "digest": entry.digest,
        "finish_reason": entry.finish_reason,
        "stop_reason": entry.stop_reason,
        "delivered": entry.delivered,
        "prefix_requested": entry.prefix_requested,
        "prefix_supplied": entry.prefix_supplied,
        "weight_versions": [
            {"start": span.start, "end": span.end, "version": span.version} for span in entry.weight_versions
        ],
        "sampling": dict(entry.sampling),
        "max_tokens": entry.max_tokens,
        "normalized": list(entry.normalized),
        "routed_experts": entry.routed_experts,
        "sampling_mask": entry.sampling_mask,
        "created_at": entry.created_at,
    }


def rollout_row(snapshot: Snapshot) -> dict[str, Any]:
    """A rollout under the names of `ROLLOUT_SCHEMA`."""
    return {
        "rollout_id": snapshot.rollout_id,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "calls": len(snapshot.entries),
        "generated_ids": sum(int(entry.generation_token_ids.size) for entry in snapshot.entries),
        "incomplete": list(snapshot.incomplete),
        "problems": [
            {"reason": p.reason, "call_id": p.call_id, "field": p.field, "detail": p.detail} for p in snapshot.problems
        ],
        "lost_calls": lost_call_rows(snapshot),
    }


def lost_call_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The lost calls of which something is known."""
    return [
        {"model_call_id": lost.model_call_id, "retries": list(lost.retries), "answers": list(lost.answers)}
        for lost in snapshot.lost_calls
    ]


def _parent(entry: TokenEntry) -> tuple[str | None, str | None, int | None, str | None]:
    match entry.parent:
        case None:
            return None, None, None, None
        case Root():
            return "root", None, None, None
        case Continues(call_id, cum_len):
            return "continues", call_id, cum_len, None
        case Unresolved(reason):
            return "unresolved", None, None, reason


def snapshot_json(snapshot: Snapshot) -> bytes:
    """A rollout as one JSON object: `rollout` and `calls` hold the rows that the files have of them."""
    calls = [call_row(entry) for entry in snapshot.entries]
    return row_json({"rollout": rollout_row(snapshot), "calls": calls})


def row_json(value: object) -> bytes:
    """JSON that any parser reads. float32 is written with the digits that give it back."""
    try:
        return orjson.dumps(value, default=_listed, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a lone surrogate, an integer of more than 64 bits
        return json.dumps(json_without_surrogates(value), default=_listed, separators=(",", ":")).encode()


def _listed(value: object) -> object:
    """What the encoders do not know: arrays, for orjson those whose layout is not the plain one."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
