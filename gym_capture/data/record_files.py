"""Records as files that others read: NeMo Gym's token files, Parquet, JSON lines.

Invariant: a call is written with exactly the ids and log probabilities of its record, and nothing that masks a rollout
is left out. One rollout is in memory at a time. The files of an export appear together, or not at all.

Flow: `open_files(format, out)` -> `add` a snapshot, rollout by rollout -> leaving the context puts the files in their
places; leaving it by an exception takes them away.

    nemo-gym   <rollout>.tokens.jsonl and the files beside it, as `data.nemo_gym` and NeMo Gym itself read them
    parquet    calls.parquet (`CALL_SCHEMA`, a row for each call) and rollouts.parquet (`ROLLOUT_SCHEMA`)
    jsonl      calls.jsonl and rollouts.jsonl, with the same names

Prompts are stored as they are in the log: without the ids that the parent's record holds (`prompt_offset`).

Half an emoji, which logs of before may hold, is in no format that others read: it is written as U+FFFD.
That is about texts; ids are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from gym_capture.builder import echoes_unknown_turns
from gym_capture.conversation import json_without_surrogates
from gym_capture.data.nemo_gym import NEWEST_SCHEMA_VERSION, gym_digest
from gym_capture.data.schema import tensor_value
from gym_capture.data.staged_files import StagedFiles, staged_files
from gym_capture.lineage import LineageIndex
from gym_capture.reasons import CaptureMark, ProblemReason, join_reason, split_reason
from gym_capture.record_rows import call_row, lost_call_rows, rollout_row, row_json
from gym_capture.records import SCHEMA_VERSION, Snapshot, TokenEntry

Format: TypeAlias = Literal["nemo-gym", "parquet", "jsonl"]

VERSION_KEY: Final = b"gym_capture.record_schema_version"

_TENSOR: Final = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("values", pa.large_binary())])
_METADATA: Final = {VERSION_KEY: str(SCHEMA_VERSION).encode()}

CALL_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("model_call_id", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("requested_model", pa.string(), nullable=False),
        pa.field("has_tools", pa.bool_(), nullable=False),
        # root | continues | unresolved; null: no decision was recorded.
        pa.field("parent", pa.string()),
        pa.field("parent_call_id", pa.string()),
        pa.field("parent_cum_len", pa.int64()),
        pa.field("parent_reason", pa.string()),
        # The whole prompt is the first `prompt_offset` of the parent's prompt and generation, then these.
        pa.field("prompt_offset", pa.int64(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        # Generated ids and their log probabilities, aligned.
        pa.field("generation_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("generation_log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("output_items", pa.string(), nullable=False),  # JSON: Responses items
        pa.field("token_item_index", pa.int64()),
        pa.field("turn_key", pa.string()),
        pa.field("asked_key", pa.string()),
        pa.field(
            "other_turn_keys",
            pa.list_(pa.struct([("turn_key", pa.string()), ("rule", pa.string())])),
            nullable=False,
        ),
        pa.field("digest", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("delivered", pa.bool_()),
        pa.field("prefix_requested", pa.bool_(), nullable=False),
        pa.field("prefix_supplied", pa.bool_(), nullable=False),
        pa.field(
            "weight_versions",
            pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64()), ("version", pa.string())])),
            nullable=False,
        ),
        pa.field("sampling", pa.string(), nullable=False),  # JSON: an object
        pa.field("max_tokens", pa.int64()),
        pa.field("normalized", pa.list_(pa.string()), nullable=False),
        pa.field("routed_experts", _TENSOR),
        pa.field("sampling_mask", _TENSOR),
        pa.field("created_at", pa.float64(), nullable=False),
    ],
    metadata=_METADATA,
)

ROLLOUT_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("snapshot_id", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("calls", pa.int64(), nullable=False),
        pa.field("generated_ids", pa.int64(), nullable=False),
        # What masks the rollout: what its capture lacks, and what is wrong with its records.
        pa.field("incomplete", pa.list_(pa.string()), nullable=False),
        pa.field(
            "problems",
            pa.list_(pa.struct([(name, pa.string()) for name in ("reason", "call_id", "field", "detail")])),
            nullable=False,
        ),
        # Of the calls that are `dangling_intent` above: those that the same body was sent for, and the turn keys that
        # later requests echo in answer to the same request (`records.LostCall`).
        pa.field(
            "lost_calls",
            pa.list_(
                pa.struct(
                    [
                        ("model_call_id", pa.string()),
                        ("retries", pa.list_(pa.string())),
                        ("answers", pa.list_(pa.string())),
                    ]
                )
            ),
            nullable=False,
        ),
    ],
    metadata=_METADATA,
)

_ROW_GROUP_BYTES: Final = 8 * 2**20
_ROLLOUTS_PER_ROW_GROUP: Final = 10_000


class RecordFiles(Protocol):
    """Where snapshots go."""

    def add(self, snapshot: Snapshot) -> None:
        """Writes one rollout."""
        ...


@contextmanager
def open_files(format_: Format, out: Path, *, overwrite: bool = False) -> Iterator[RecordFiles]:
    """Files of a format in the directory `out`, which is made if it is not there.

    Raises `ConfigError` if it holds an earlier export and `overwrite` is false, or cannot be written to.
    """
    with (
        staged_files(out, _PATTERNS[format_], what="an export", overwrite=overwrite) as staged,
        _OPEN[format_](staged) as files,
    ):
        yield files


# --- NeMo Gym's token files ----------------------------------------------------------------------------------------


class _NemoGymFiles:
    def __init__(self, staged: StagedFiles) -> None:
        self._staged = staged

    @classmethod
    @contextmanager
    def open(cls, staged: StagedFiles) -> Iterator[_NemoGymFiles]:
        yield cls(staged)

    def add(self, snapshot: Snapshot) -> None:
        lost, dangling = _lost_calls(snapshot)
        state = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version, "incomplete": bool(lost)}
        # A field that their reader leaves out: to them, a lost call masks in any case. It does so where turns are of
        # unknown origin, which these files do not tell of every request.
        if snapshot.lost_calls and not echoes_unknown_turns(snapshot.entries):
            state["lost_calls"] = lost_call_rows(snapshot)
        # The records come last: a rollout of which somebody finds records has what masks it beside them.
        if lost:
            self._write(snapshot, ".tokens.incomplete", [line.encode() for line in lost])
        if dangling:
            self._write(snapshot, ".tokens.intents", [line.encode() for line in dangling])
        self._write(snapshot, ".tokens.state.json", [row_json(state)])
        self._write(snapshot, ".tokens.jsonl", map(row_json, _nemo_gym_records(snapshot)))

    def _write(self, snapshot: Snapshot, suffix: str, lines: Any) -> None:
        with self._staged.path(f"{snapshot.rollout_id}{suffix}").open("wb") as file:
            file.writelines(line + b"\n" for line in lines)


def _nemo_gym_records(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    index = LineageIndex()
    mismatched = {p.call_id for p in index.rebuild(snapshot.entries) if p.reason == ProblemReason.DIGEST_MISMATCH}
    for entry in snapshot.entries:
        row = call_row(entry)
        ids = index.cumulative_ids(snapshot.rollout_id, entry.model_call_id)
        # A digest that is wrong stays wrong: as it is, it is not one of theirs either.
        digest = entry.digest if entry.model_call_id in mismatched else None
        yield {
            "schema_version": NEWEST_SCHEMA_VERSION,
            **{name: row[name] for name in _SHARED_WITH_NEMO_GYM},
            "parent_resolution": "resolved" if row["parent"] == "continues" else row["parent"],
            "parent_resolution_reason": row["parent_reason"],
            "prompt_is_delta": row["prompt_offset"] > 0,
            "cum_len": entry.cum_len,
            "digest": digest if ids is None else gym_digest(ids),
            **({"turn_key": entry.turn_key} if snapshot.lost_calls else {}),
        }


_SHARED_WITH_NEMO_GYM: Final = (
    *("rollout_id", "model_call_id", "model", "requested_model", "has_tools", "prompt_token_ids"),
    *("generation_token_ids", "generation_log_probs", "output_items", "token_item_index", "created_at"),
    *("parent_call_id", "prefix_requested", "prefix_supplied", "finish_reason", "stop_reason", "delivered"),
    *("max_tokens", "sampling", "weight_versions", "routed_experts", "sampling_mask"),
)


def _lost_calls(snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """The lines of `.tokens.incomplete` and of `.tokens.intents`: whatever masks the rollout masks it there too.

    The format has ids of calls and no reasons. A reason that is not about a lost call stands in place of an id.
    """
    lost: list[str] = []
    dangling: list[str] = []
    for reason in snapshot.incomplete:
        name, call_id = split_reason(reason)
        if name == CaptureMark.DANGLING_INTENT and _is_a_line(call_id):
            dangling.append(call_id)
        elif name == CaptureMark.CAPTURE_FAILED and _is_a_line(call_id):
            lost.append(call_id)
        else:
            lost.append(reason)
    lost += [join_reason(p.reason, p.call_id) for p in snapshot.problems]
    return [" ".join(json_without_surrogates(line).split()) for line in dict.fromkeys(lost)], dangling


def _is_a_line(call_id: str) -> bool:
    """A leading minus would call the intent off."""
    return call_id.isascii() and call_id.isprintable() and call_id.strip() == call_id != "" and call_id[0] != "-"


# --- Parquet -------------------------------------------------------------------------------------------------------


class _ParquetFiles:
    def __init__(self, calls: pq.ParquetWriter, rollouts: pq.ParquetWriter) -> None:
        self._calls = _Buffer(calls)
        self._rollouts = _Buffer(rollouts)

    @classmethod
    @contextmanager
    def open(cls, staged: StagedFiles) -> Iterator[_ParquetFiles]:
        with (
            staged.path("calls.parquet").open("wb") as calls_file,
            staged.path("rollouts.parquet").open("wb") as rollouts_file,
            pq.ParquetWriter(calls_file, CALL_SCHEMA, compression="zstd") as calls,
            pq.ParquetWriter(rollouts_file, ROLLOUT_SCHEMA, compression="zstd") as rollouts,
        ):
            files = cls(calls, rollouts)
            yield files
            files._calls.flush()
            files._rollouts.flush()

    def add(self, snapshot: Snapshot) -> None:
        self._calls.add(pa.Table.from_pylist([_arrow_row(entry) for entry in snapshot.entries], schema=CALL_SCHEMA))
        row = json_without_surrogates(rollout_row(snapshot))
        self._rollouts.add(pa.Table.from_pylist([row], schema=ROLLOUT_SCHEMA))


class _Buffer:
    """Gathers small tables into row groups."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._tables: list[pa.Table] = []
        self._nbytes = 0

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._nbytes += table.nbytes
        if self._nbytes > _ROW_GROUP_BYTES or len(self._tables) == _ROLLOUTS_PER_ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables))
        self._tables, self._nbytes = [], 0


def _arrow_row(entry: TokenEntry) -> dict[str, Any]:
    row: dict[str, Any] = call_row(entry)
    arrays = {name: row.pop(name) for name in _ARRAYS}
    tensors = {name: tensor_value(row.pop(name)) for name in ("routed_experts", "sampling_mask")}
    row = dict(json_without_surrogates(row))
    for name in ("output_items", "sampling"):
        row[name] = row_json(row[name]).decode()
    return row | arrays | tensors


_ARRAYS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


# --- JSON ----------------------------------------------------------------------------------------------------------


class _JsonLines:
    def __init__(self, calls: BinaryIO, rollouts: BinaryIO) -> None:
        self._calls = calls
        self._rollouts = rollouts

    @classmethod
    @contextmanager
    def open(cls, staged: StagedFiles) -> Iterator[_JsonLines]:
        with staged.path("calls.jsonl").open("wb") as calls, staged.path("rollouts.jsonl").open("wb") as rollouts:
            yield cls(calls, rollouts)

    def add(self, snapshot: Snapshot) -> None:
        self._calls.writelines(row_json(call_row(entry)) + b"\n" for entry in snapshot.entries)
        self._rollouts.write(row_json(rollout_row(snapshot)) + b"\n")


_OPEN: Final[Mapping[Format, Callable[[StagedFiles], AbstractContextManager[RecordFiles]]]] = {
    "nemo-gym": _NemoGymFiles.open,
    "parquet": _ParquetFiles.open,
    "jsonl": _JsonLines.open,
}
_PATTERNS: Final[Mapping[Format, tuple[str, ...]]] = {
    "nemo-gym": ("*.tokens.jsonl", "*.tokens.incomplete", "*.tokens.intents", "*.tokens.state.json"),
    "parquet": ("calls.parquet", "rollouts.parquet"),
    "jsonl": ("calls.jsonl", "rollouts.jsonl"),
}
