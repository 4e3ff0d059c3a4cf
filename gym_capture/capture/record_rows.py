"""A call and a rollout as rows: flat, under the names that the files and `/token-records` give their parts.

Invariant: a row has exactly the ids and log probabilities of its record, and of a rollout everything that masks it.
Prompts are without the ids that the parent's record beside it holds (`prompt_offset`), as they are stored.

Half an emoji, which logs of before may hold, is in no JSON that others read: it is written as U+FFFD.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import orjson

from gym_capture.capture.record_fields import FIELDS, Kind, reader
from gym_capture.capture.records import Continues, Parent, Root, Snapshot, Unresolved
from gym_capture.capture.suffixes import StoredRecord, prompt_part, stored_form
from gym_capture.conversation import json_without_surrogates

__all__ = ["call_row", "call_rows", "lost_call_rows", "rollout_row", "row_json", "snapshot_json"]


def call_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The calls of a rollout, each as `call_row`."""
    return [call_row(record) for record in stored_form(snapshot)]


def call_row(record: StoredRecord) -> dict[str, Any]:
    """A call under the names of `CALL_SCHEMA`; structured fields as they are, not yet as JSON."""
    row: dict[str, Any] = {}
    values = iter(_read(record))
    for field in FIELDS:
        if field.kind is Kind.PROMPT:
            row["prompt_offset"], row[field.name] = prompt_part(record)
        elif field.kind is Kind.PARENT:
            row["parent"], row["parent_call_id"], row["parent_cum_len"], row["parent_reason"] = _parent(next(values))
        else:
            value = next(values)
            row[field.name] = _PLAIN[field.kind](value) if field.kind in _PLAIN else value
    return row


_PLAIN: Final[Mapping[Kind, Callable[[Any], object]]] = {
    Kind.ITEMS: lambda items: [dict(item) for item in items],
    Kind.OBJECT: dict,
    Kind.NAMES: list,
    Kind.RULES_BY_KEY: lambda rules: [{"turn_key": key, "rule": rule} for key, rule in rules.items()],
    Kind.SPANS: lambda spans: [{"start": span.start, "end": span.end, "version": span.version} for span in spans],
}
"""How values are made of what any writer knows; those of other kinds are that."""
_read: Final = reader(field for field in FIELDS if field.kind is not Kind.PROMPT)


def rollout_row(snapshot: Snapshot) -> dict[str, Any]:
    """A rollout under the names of `ROLLOUT_SCHEMA`."""
    return {
        "rollout_id": snapshot.rollout_id,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "calls": len(snapshot.records),
        "generated_ids": sum(int(record.generation_token_ids.size) for record in snapshot.records),
        "incomplete": list(snapshot.incomplete),
        "problems": [
            {"reason": p.reason, "call_id": p.call_id, "field": p.field, "detail": p.detail} for p in snapshot.problems
        ],
        "lost_calls": lost_call_rows(snapshot),
        "group_id": None if (said := snapshot.registration) is None else said.group_id,
        "sample": None if said is None else said.sample,
        "task": None if said is None else said.task,
        "outcome": None if snapshot.outcome is None else row_json(snapshot.outcome.as_dict()).decode(),
    }


def lost_call_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The lost calls of which something is known."""
    return [
        {"model_call_id": lost.model_call_id, "retries": list(lost.retries), "answers": list(lost.answers)}
        for lost in snapshot.lost_calls
    ]


def _parent(parent: Parent | None) -> tuple[str | None, str | None, int | None, str | None]:
    match parent:
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
    return row_json({"rollout": rollout_row(snapshot), "calls": call_rows(snapshot)})


def row_json(value: object) -> bytes:
    """JSON that any parser reads. float32 is written with the digits that give it back."""
    try:
        return orjson.dumps(value, default=_listed, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a lone surrogate, an integer of more than 64 bits
        return json.dumps(json_without_surrogates(value), default=_listed, separators=(",", ":")).encode()


def _listed(value: object) -> object:
    """Values that the encoders do not know: arrays, for orjson those whose layout is not the plain one."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
