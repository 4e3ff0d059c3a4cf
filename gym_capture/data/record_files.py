"""Records as files that others read: NeMo Gym's token files, Parquet, JSON lines.

Invariant: a call is written with exactly the ids and log probabilities of its record, and nothing that masks a rollout
is left out. One rollout is in memory at a time. The files of an export appear together, or not at all.

Flow: `open_files(format, out)` -> `add` a snapshot, rollout by rollout -> leaving the context puts the files in their
places; leaving it by an exception takes them away.

    nemo-gym   <rollout>.tokens.jsonl and the files beside it, as `data.nemo_gym` and NeMo Gym itself read them
    parquet    calls.parquet (`CALL_SCHEMA`, a row for each call) and rollouts.parquet (`ROLLOUT_SCHEMA`)
    jsonl      calls.jsonl and rollouts.jsonl, with the same names

Prompts are written as they are in the log: without the ids that the parent's record holds (`prompt_offset`). Which
fields a call has, and what they are called, is said by `record_fields`.

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

from gym_capture.build.builder import echoes_unknown_turns
from gym_capture.capture.record_fields import FIELDS, Kind, RecordField, of_kinds
from gym_capture.capture.record_rows import call_row, call_rows, lost_call_rows, rollout_row, row_json
from gym_capture.capture.records import SCHEMA_VERSION, Snapshot
from gym_capture.capture.suffixes import stored_form
from gym_capture.conversation import json_without_surrogates
from gym_capture.data.nemo_gym import NEWEST_SCHEMA_VERSION, gym_digest
from gym_capture.data.schema import tensor_value
from gym_capture.data.staged_files import StagedFiles, staged_files
from gym_capture.lineage.index import LineageIndex
from gym_capture.reasons import CaptureMark, ProblemReason, join_reason, split_reason

Format: TypeAlias = Literal["nemo-gym", "parquet", "jsonl"]

VERSION_KEY: Final = b"gym_capture.record_schema_version"

_TENSOR: Final = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("values", pa.large_binary())])
_METADATA: Final = {VERSION_KEY: str(SCHEMA_VERSION).encode()}

_TYPES: Final[Mapping[Kind, pa.DataType]] = {
    Kind.TEXT: pa.string(),
    Kind.OPTIONAL_TEXT: pa.string(),
    Kind.FLAG: pa.bool_(),
    Kind.OPTIONAL_FLAG: pa.bool_(),
    Kind.OPTIONAL_COUNT: pa.int64(),
    Kind.TIME: pa.float64(),
    Kind.PROMPT: pa.list_(pa.int32()),
    Kind.IDS: pa.list_(pa.int32()),
    Kind.LOG_PROBS: pa.list_(pa.float32()),
    Kind.TENSOR: _TENSOR,
    Kind.OBJECT: pa.string(),  # JSON
    Kind.ITEMS: pa.string(),  # JSON: Responses items
    Kind.NAMES: pa.list_(pa.string()),
    Kind.RULES_BY_KEY: pa.list_(pa.struct([("turn_key", pa.string()), ("rule", pa.string())])),
    Kind.SPANS: pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64()), ("version", pa.string())])),
}
_NULLABLE: Final = (Kind.OPTIONAL_TEXT, Kind.OPTIONAL_FLAG, Kind.OPTIONAL_COUNT, Kind.TENSOR)


def _columns(field: RecordField) -> list[pa.Field]:
    if field.kind is Kind.PARENT:
        return [
            # root | continues | unresolved; null: no decision was recorded.
            pa.field("parent", pa.string()),
            pa.field("parent_call_id", pa.string()),
            pa.field("parent_cum_len", pa.int64()),
            pa.field("parent_reason", pa.string()),
        ]
    column = pa.field(field.name, _TYPES[field.kind], nullable=field.kind in _NULLABLE)
    if field.kind is Kind.PROMPT:
        # The whole prompt is the first `prompt_offset` of the parent's prompt and generation, then these.
        return [pa.field("prompt_offset", pa.int64(), nullable=False), column]
    return [column]


CALL_SCHEMA: Final[pa.Schema] = pa.schema(
    [column for field in FIELDS for column in _columns(field)], metadata=_METADATA
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
        # Of rollouts that were registered, and of those that were completed; the task and the outcome as JSON.
        pa.field("group_id", pa.string()),
        pa.field("sample", pa.int64()),
        pa.field("task", pa.string()),
        pa.field("outcome", pa.string()),
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
        if snapshot.lost_calls and not echoes_unknown_turns(snapshot.records):
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
    records = stored_form(snapshot)
    mismatched = {p.call_id for p in index.rebuild(records) if p.reason == ProblemReason.DIGEST_MISMATCH}
    for record in records:
        row = call_row(record)
        ids = index.cumulative_ids(snapshot.rollout_id, record.model_call_id)
        # A digest that is wrong stays wrong: as it is, it is not one of theirs either.
        digest = record.digest if record.model_call_id in mismatched else None
        yield {
            "schema_version": NEWEST_SCHEMA_VERSION,
            **{name: row[name] for name in _SHARED_WITH_NEMO_GYM},
            "parent_call_id": row["parent_call_id"],
            "parent_resolution": "resolved" if row["parent"] == "continues" else row["parent"],
            "parent_resolution_reason": row["parent_reason"],
            "prompt_is_delta": row["prompt_offset"] > 0,
            "cum_len": record.cum_len,
            "digest": digest if ids is None else gym_digest(ids),
            **({"turn_key": record.keys.turn_key} if snapshot.lost_calls else {}),
        }


_SHARED_WITH_NEMO_GYM: Final = tuple(
    field.name for field in FIELDS if field.in_nemo_gym and field.kind is not Kind.PARENT
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
        self._calls.add(pa.Table.from_pylist(list(map(_arrow_row, call_rows(snapshot))), schema=CALL_SCHEMA))
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


def _arrow_row(row: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: row.pop(name) for name in _ARRAYS}
    tensors = {name: tensor_value(row.pop(name)) for name in _TENSORS}
    row = dict(json_without_surrogates(row))
    for name in _AS_JSON:
        row[name] = row_json(row[name]).decode()
    return row | arrays | tensors


_ARRAYS: Final = tuple(field.name for field in of_kinds(Kind.PROMPT, Kind.IDS, Kind.LOG_PROBS))
_TENSORS: Final = tuple(field.name for field in of_kinds(Kind.TENSOR))
_AS_JSON: Final = tuple(field.name for field in of_kinds(Kind.OBJECT, Kind.ITEMS))


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
        self._calls.writelines(row_json(row) + b"\n" for row in call_rows(snapshot))
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
