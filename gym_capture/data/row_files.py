"""Rows of finished rollouts, as lines of JSON while a job runs, and as Parquet once it is over.

Invariant: `rows.jsonl` holds at most one line for each rollout id, each whole and on disk when `add` returns; a last
line that was cut in writing is cut off when the file is opened. `rows.parquet` has the same rows in the same order:
what is flat in columns of its own, what is nested as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from gym_capture.capture.record_rows import row_json
from gym_capture.data.schema import as_pairs, pairs_of
from gym_capture.errors import ConfigError, RecordError

ROWS_FILE: Final = "rows.jsonl"
TABLE_FILE: Final = "rows.parquet"

ROW_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("rollout_id", "task_id", "group_id")),
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("agent_name", pa.string(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("reward_components", pairs_of(pa.float64())),
        pa.field("call_rewards", pairs_of(pa.float64())),
        pa.field("mask_sample", pa.bool_(), nullable=False),
        pa.field("mask_reasons", pa.large_list(pa.string()), nullable=False),
        # JSON
        pa.field("responses_create_params", pa.large_string(), nullable=False),
        pa.field("response", pa.large_string(), nullable=False),
        pa.field("_ng_token_capture", pa.large_string(), nullable=False),
    ]
)

_ROWS_AT_A_TIME: Final = 16


class RowFile:
    """`rows.jsonl` of a job's directory, for one writer."""

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigError` if it cannot be opened, `RecordError` if it is damaged."""
        self._path = directory / ROWS_FILE
        with _writable(self._path):
            self._file = self._path.open("ab", buffering=0)
            self.rollout_ids = _ids(self._path)
            """Of the rows that are there."""

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Those of one group. Raises `ConfigError` if they cannot be written: then none is there."""
        new = {row["rollout_id"]: row_json(row) + b"\n" for row in rows if row["rollout_id"] not in self.rollout_ids}
        with _writable(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                for line in new.values():
                    unwritten = memoryview(line)
                    while unwritten:
                        unwritten = unwritten[self._file.write(unwritten) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                raise
        self.rollout_ids |= new.keys()

    def close(self) -> None:
        """Nothing more is added."""
        self._file.close()


def write_table(directory: Path) -> None:
    """`rows.parquet` from the lines that are there; it appears when it is whole. Raises `ConfigError`."""
    path, new = directory / TABLE_FILE, directory / f".{TABLE_FILE}.new"
    with (
        _writable(path),
        (directory / ROWS_FILE).open("rb") as lines,
        pq.ParquetWriter(new, ROW_SCHEMA, compression="zstd") as writer,
    ):
        rows = map(_flat, lines)
        while some := list(islice(rows, _ROWS_AT_A_TIME)):
            writer.write_table(pa.Table.from_pylist(some, schema=ROW_SCHEMA))
    with _writable(path):
        new.replace(path)


def _flat(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    maps = {name: as_pairs(row[name]) if row.get(name) else None for name in ("reward_components", "call_rewards")}
    nested = ("responses_create_params", "response", "_ng_token_capture")
    return {
        **row,
        **maps,
        **{name: row_json(row[name]).decode() for name in nested},
        "agent_name": row["agent_ref"]["name"],
        "mask_reasons": row["_ng_token_capture"]["mask_reasons"],
    }


def _ids(path: Path) -> set[str]:
    """Of the whole lines; cuts off one that is not."""
    ids: set[str] = set()
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                os.truncate(path, end)
                break
            end += len(line)
            try:
                ids.add(json.loads(line)["rollout_id"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise RecordError(f"{path}: a line cannot be read: {error}", field=ROWS_FILE) from None
    return ids


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"rows cannot be written to {path}: {' '.join(str(error).split())}") from None
