"""The trajectory table: one schema for every writer and reader of trajectories.

Invariant: every table of trajectories, from whichever path and however empty, has exactly `SCHEMA`, so blocks can
always be put together; a row is either trainable as it stands, or says `masked` and why. No rollout is without a row.

Flow: `build` -> `rows` (one a trajectory, or a single one with empty lists if nothing could be built) -> `to_table` ->
Parquet or Arrow batches -> `copies.check_schema` and `copies.conformed` in the reader.

Lists have 64-bit offsets (`large_list`): a chunk of 32-bit ones holds at most 2**31 ids, and concatenating past that
fails. The schema's metadata carries its version, which Parquet and Arrow IPC keep. Other tools lose it: a table
without one is known by its columns, so a later version must not give a column of this one another meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gym_capture.build.builder import BuiltRollout
from gym_capture.build.sampling import Sampling
from gym_capture.build.trajectories import Span, Trajectory
from gym_capture.capture.record_rows import row_json
from gym_capture.capture.records import Snapshot
from gym_capture.errors import RecordError
from gym_capture.reasons import reason_name

__all__ = ["OPTIONAL", "SCHEMA", "TRAJECTORY_SCHEMA_VERSION", "VERSION_KEY", "read_pairs", "read_spans", "read_tensor"]

Row: TypeAlias = dict[str, Any]

TRAJECTORY_SCHEMA_VERSION: Final = 2
"""In tables of version 1 the columns of pairs were maps."""

_BYTES_PER_ID: Final = 4 + 1 + 4  # its id, its mask and its log probability
_MOST_REPEATED_REASONS: Final = 1_000_000

VERSION_KEY: Final = b"gym_capture.trajectory_schema_version"

_SPAN: Final = pa.struct(
    [("start", pa.int64()), ("end", pa.int64()), ("call_id", pa.string()), ("weight_version", pa.string())]
)
_SAMPLING: Final = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("presence_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("constrained", pa.bool_()),
    ]
)
"""`build.sampling.Sampling`."""
_TENSOR: Final = pa.struct(
    [("dtype", pa.string()), ("shape", pa.large_list(pa.int64())), ("values", pa.large_binary())]
)


def pairs_of(value: pa.DataType) -> pa.DataType:
    """Names with a value each. No map: Hugging Face's `datasets` refuses a file that has one, and pandas makes tuples
    of its pairs that it cannot write."""
    return pa.large_list(pa.struct([("key", pa.string()), ("value", value)]))


SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        # <rollout id>/<last call id>; of a rollout with nothing to train on, the rollout id alone.
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("is_main", pa.bool_(), nullable=False),
        pa.field("call_ids", pa.large_list(pa.string()), nullable=False),
        # T ids; the mask and the log probabilities are aligned with them, the latter 0 where the mask is false.
        pa.field("token_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.large_list(pa.bool_()), nullable=False),
        pa.field("log_probs", pa.large_list(pa.float32()), nullable=False),
        # The generated segments with loss, as [start, end) over token_ids.
        pa.field("spans", pa.large_list(_SPAN), nullable=False),
        pa.field("finish_reason", pa.string()),
        # Of the rollout: the same on each of its rows.
        pa.field("reward", pa.float64()),
        pa.field("reward_components", pairs_of(pa.float64())),
        pa.field("advantage", pa.float64()),
        pa.field("masked", pa.bool_(), nullable=False),
        pa.field("mask_reasons", pa.large_list(pa.string()), nullable=False),
        # Counts of the build of the rollout, the same on each of its rows: count a rollout once.
        pa.field("n_calls", pa.int64(), nullable=False),
        pa.field("chains", pa.int64(), nullable=False),
        pa.field("roots", pa.int64(), nullable=False),
        pa.field("quarantined_calls", pa.int64(), nullable=False),
        pa.field("side_calls_excluded", pa.int64(), nullable=False),
        pa.field("unresolved_parent_calls", pa.int64(), nullable=False),
        pa.field("eligible_links", pa.int64(), nullable=False),
        pa.field("contiguous_links", pa.int64(), nullable=False),
        pa.field("generated_tokens_captured", pa.int64(), nullable=False),
        pa.field("generated_tokens_delivered", pa.int64(), nullable=False),
        pa.field("delivered_fraction", pa.float64(), nullable=False),
        pa.field("excluded_tokens", pairs_of(pa.int64()), nullable=False),
        # Arrays that ride along, as recorded; null where the engine gave none.
        pa.field("routed_experts", _TENSOR),
        pa.field("sampling_mask", _TENSOR),
        # What exporters want beside the ids. Null in tables of before these columns were.
        # Aligned with `call_ids`: JSON of the turn's Responses items, and which of them the generated ids belong to.
        pa.field("output_items", pa.large_list(pa.string())),
        pa.field("token_item_indices", pa.large_list(pa.int64())),
        # Of the rollout: the policy that generated, who played it, and JSON of the task as it was given to the agent.
        pa.field("model", pa.string()),
        pa.field("agent_name", pa.string()),
        pa.field("input", pa.string()),
        pa.field("lost_tries", pa.int64()),
        # Of the rollout: whether its conversation outgrew the model's context.
        pa.field("truncated", pa.bool_()),
        # Of the rollout: what the agent itself gave to single calls, by call id, as `spans` name them. No part of the
        # reward, and never spread over other calls. Null where it gave none.
        pa.field("call_rewards", pairs_of(pa.float64())),
        # Aligned with `spans`: how the call sampled; null: not on record.
        pa.field("span_sampling", pa.large_list(_SAMPLING)),
        # Of the rollout: which sample of its task it is, from 0, and which attempt at it, from 1. Null: nobody said.
        pa.field("sample", pa.int64()),
        pa.field("attempt", pa.int64()),
        # The earlier row of the group that has the same first ids, and how many: `data/prefixes.py`.
        pa.field("prefix_trajectory_id", pa.string()),
        pa.field("prefix_length", pa.int64()),
    ],
    metadata={VERSION_KEY: str(TRAJECTORY_SCHEMA_VERSION).encode()},
)


OPTIONAL: Final = frozenset(
    {
        *("output_items", "token_item_indices", "model", "agent_name", "input", "lost_tries", "truncated"),
        *("call_rewards", "span_sampling", "sample", "attempt", "prefix_trajectory_id", "prefix_length"),
    }
)
"""Columns that a table of trajectories may lack: it was built before they were."""


def rows(
    built: BuiltRollout,
    *,
    snapshot: Snapshot | None = None,
    group_id: str,
    reward: float | None,
    reward_components: Mapping[str, float] | None = None,
    advantage: float | None = None,
    agent_name: str | None = None,
    input_json: str | None = None,
    truncated: bool = False,
    call_rewards: Mapping[str, float] | None = None,
    sample: int | None = None,
    attempt: int | None = None,
    extra_mask_reasons: Sequence[str] = (),
) -> list[Row]:
    """The rows of one rollout: one for each trajectory, or one with empty lists if there is none.

    `snapshot`: what it was built from, for the texts that go with the ids; None: they are not wanted.

    `extra_mask_reasons` are reasons to mask it that the records cannot show, e.g. an agent that crashed. Where
    thousands of trajectories would repeat thousands of reasons, those behind the first have their names only.
    """
    counts = built.counts
    shared: Row = {
        "rollout_id": built.rollout_id,
        "group_id": group_id,
        "reward": reward,
        "reward_components": None if reward_components is None else as_pairs(reward_components),
        "advantage": advantage,
        "masked": built.masked or bool(extra_mask_reasons),
        "mask_reasons": [*built.mask_reasons, *extra_mask_reasons],
        "n_calls": counts.n_calls,
        "chains": counts.chains,
        "roots": counts.roots,
        "quarantined_calls": counts.quarantined_calls,
        "side_calls_excluded": counts.side_calls_excluded,
        "unresolved_parent_calls": counts.unresolved_parent_calls,
        "eligible_links": counts.eligible_links,
        "contiguous_links": counts.contiguous_links,
        "generated_tokens_captured": counts.generated_tokens_captured,
        "generated_tokens_delivered": counts.generated_tokens_delivered,
        "delivered_fraction": counts.delivered_fraction,
        "excluded_tokens": as_pairs(counts.excluded_tokens),
        "lost_tries": counts.lost_tries,
        "model": None if snapshot is None else next((entry.policy.model for entry in snapshot.entries), None),
        "agent_name": agent_name,
        "input": input_json,
        "truncated": truncated,
        "call_rewards": None if call_rewards is None else as_pairs(call_rewards),
        "sample": sample,
        "attempt": attempt,
        "prefix_trajectory_id": None,
        "prefix_length": None,
    }
    if not built.trajectories:
        return [_nothing(built.rollout_id) | shared]
    turns = None if snapshot is None else _turns(snapshot)
    first, *others = [_sequence(trajectory, turns) for trajectory in built.trajectories]
    repeated = shared
    if len(others) * len(shared["mask_reasons"]) > _MOST_REPEATED_REASONS:
        repeated = shared | {"mask_reasons": sorted(set(map(reason_name, shared["mask_reasons"])))}
    return [first | shared, *(each | repeated for each in others)]


def to_table(table_rows: Sequence[Row]) -> pa.Table:
    """A table of `SCHEMA`. Raises `RecordError` for a row whose arrays are not aligned."""
    for row in table_rows:
        lengths = {name: len(row[name]) for name in ("token_ids", "loss_mask", "log_probs")}
        if len(set(lengths.values())) != 1:
            raise RecordError(
                f"loss_mask and log_probs must align with token_ids: got {lengths}",
                field="token_ids",
                rollout_id=row["rollout_id"],
            )
    columns = [pa.array([row[field.name] for row in table_rows], type=field.type) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def row_nbytes(row: Row) -> int:
    """About the bytes that a row takes up in a table."""
    tensors = [row[name] for name in ("routed_experts", "sampling_mask") if row[name] is not None]
    texts = sum(map(len, row["output_items"] or ())) + len(row["input"] or "")
    return len(row["token_ids"]) * _BYTES_PER_ID + sum(len(tensor["values"]) for tensor in tensors) + texts


def with_advantages(table: pa.Table, advantages: npt.NDArray[np.float64]) -> pa.Table:
    """The same rows, each with its advantage; NaN: it has none."""
    values = pa.array(advantages, type=SCHEMA.field("advantage").type, from_pandas=True)
    return table.set_column(SCHEMA.get_field_index("advantage"), SCHEMA.field("advantage"), values)


def with_prefixes(table: pa.Table, names: pa.Array, lengths: pa.Array) -> pa.Table:
    """The same rows, each with what it shares with an earlier row of its group."""
    for name, values in (("prefix_trajectory_id", names), ("prefix_length", lengths)):
        table = table.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), values)
    return table


def read_tensor(value: Mapping[str, Any] | None) -> npt.NDArray[Any] | None:
    """An array that rode along (`routed_experts`, `sampling_mask`) as it was recorded; None where there is none."""
    if value is None:
        return None
    array: npt.NDArray[Any] = np.frombuffer(value["values"], dtype=np.dtype(value["dtype"]))
    return array.reshape(value["shape"])


def read_spans(
    spans: Sequence[Mapping[str, Any]], sampling: Sequence[Mapping[str, Any] | None] | None
) -> tuple[Span, ...]:
    """The spans of a row, with its `span_sampling`; None: a table of before that column. Raises `RecordError`."""
    known = [None if how is None else Sampling(**how) for how in sampling or [None] * len(spans)]
    if len(known) != len(spans):
        raise RecordError(
            f"span_sampling must align with spans: got {len(known)} and {len(spans)}", field="span_sampling"
        )
    return tuple(
        Span(span["start"], span["end"], span["call_id"], span["weight_version"], how)
        for span, how in zip(spans, known, strict=True)
    )


_Turns: TypeAlias = Mapping[str, tuple[str, int | None]]
"""By call id: JSON of the output items, and which of them the generated ids belong to."""


def _turns(snapshot: Snapshot) -> _Turns:
    return {
        entry.model_call_id: (row_json(entry.reply.output_items).decode(), entry.reply.token_item_index)
        for entry in snapshot.entries
        if entry.rollout_id == snapshot.rollout_id
    }


def _sequence(trajectory: Trajectory, turns: _Turns | None) -> Row:
    own_turns = None if turns is None else [turns[call_id] for call_id in trajectory.call_ids]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "is_main": trajectory.is_main,
        "call_ids": trajectory.call_ids,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "log_probs": trajectory.log_probs,
        "spans": [
            {"start": s.start, "end": s.end, "call_id": s.call_id, "weight_version": s.weight_version}
            for s in trajectory.spans
        ],
        "span_sampling": [None if s.sampling is None else asdict(s.sampling) for s in trajectory.spans],
        "finish_reason": trajectory.finish_reason,
        "routed_experts": tensor_value(trajectory.routed_experts),
        "sampling_mask": tensor_value(trajectory.sampling_mask),
        "output_items": None if own_turns is None else [items for items, _ in own_turns],
        "token_item_indices": None if own_turns is None else [index for _, index in own_turns],
    }


def _nothing(rollout_id: str) -> Row:
    return {
        "trajectory_id": rollout_id,
        "is_main": True,
        "call_ids": (),
        "token_ids": np.zeros(0, dtype=np.int32),
        "loss_mask": np.zeros(0, dtype=np.bool_),
        "log_probs": np.zeros(0, dtype=np.float32),
        "spans": (),
        "span_sampling": (),
        "finish_reason": None,
        "routed_experts": None,
        "sampling_mask": None,
        "output_items": (),
        "token_item_indices": (),
    }


def read_pairs(pairs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a row of a column of pairs (`reward_components`, ...) says, by name."""
    return {pair["key"]: pair["value"] for pair in pairs}


def as_pairs(values: Mapping[str, float]) -> list[Row]:
    """`read_pairs` undoes it."""
    return [{"key": key, "value": value} for key, value in values.items()]


def tensor_value(array: npt.NDArray[Any] | None) -> Row | None:
    """An array that rides along as a table has it; `read_tensor` undoes it."""
    if array is None:
        return None
    return {"dtype": array.dtype.str, "shape": array.shape, "values": array.tobytes()}
