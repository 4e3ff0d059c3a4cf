"""Trajectories that were built, in Parquet files, also while a job still adds to them.

Invariant: of each file what the table shows is read once, a row group at a time; the ids of a rollout only when it is
looked at. Files that are not of trajectories are refused by name; one that cannot be read any more is passed over.

Flow: `look` takes one row group -> notes where the rows of each rollout are -> `read` reads that group again, of which
the last few are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gym_capture.data.copies import check_schema, conformed
from gym_capture.data.schema import SCHEMA
from gym_capture.errors import ConfigError, RecordError
from gym_capture.inspector.from_rows import see_rows
from gym_capture.inspector.seen import SeenRollout
from gym_capture.inspector.source import NOTHING_KNOWN, Basics, Look, Options, Shows, Source, State
from gym_capture.inspector.table import in_order

_SUFFIX: Final = ".parquet"
_KEPT_GROUPS: Final = 2
_SHOWN: Final = (
    *("rollout_id", "group_id", "is_main", "call_ids", "spans", "reward", "masked", "mask_reasons", "chains"),
    *("n_calls", "eligible_links", "contiguous_links", "generated_tokens_captured", "generated_tokens_delivered"),
    *("agent_name", "sample", "attempt"),
)
_ARRAYS: Final = ("token_ids", "loss_mask", "log_probs")
_LEFT_OUT: Final = frozenset({"routed_experts", "sampling_mask", *_ARRAYS})


class _Place(NamedTuple):
    file: Path
    row_group: int


class ParquetSource(Source):
    """A folder of Parquet files, or one of them."""

    kind = "parquet"
    is_read_whole = False

    def __init__(self, path: Path, options: Options = NOTHING_KNOWN) -> None:
        """Raises `ConfigError` if there is no file, or one is not of trajectories."""
        self.directory = path if path.is_dir() else path.parent
        self._path = path
        self.title = str(path)
        self.shows = Shows(trajectories=True)
        self._places: dict[str, list[_Place]] = {}
        self._unread: list[_Place] = []
        self._files: dict[Path, tuple[int, int]] = {}
        self._kept: OrderedDict[_Place, pa.Table] = OrderedDict()
        self._lock = threading.Lock()
        for file in self._paths()[:1]:  # the others are looked at one by one
            with _explained(file):
                check_schema(pq.read_schema(file))

    def _paths(self) -> list[Path]:
        return parquet_files(self._path)

    def found(self) -> str:
        files = self._paths()
        rows = 0
        for file in files:
            with _explained(file):
                rows += pq.read_metadata(file).num_rows
        return f"{rows:,} trajectories in {len(files):,} Parquet files in {self._path}"

    def look(self) -> Look:
        gone: list[str] = []
        if not self._unread:
            gone = self._find_new()
        if not self._unread:
            return Look(gone=gone)
        place = self._unread.pop(0)
        try:
            table = self._table(place, (*_SHOWN, "loss_mask"))
        except ConfigError:
            return Look(gone=gone, is_more=bool(self._unread))
        changed = list(_basics(table))
        with self._lock:
            for each in changed:
                places = self._places.setdefault(each.rollout_id, [])
                if place not in places:
                    places.append(place)
        return Look(changed=changed, gone=gone, is_more=True)

    def _find_new(self) -> list[str]:
        """Files that are new, or are others under the same names. Returns the rollouts that went with old ones."""
        found: dict[Path, tuple[int, int]] = {}
        for file in self._paths():
            try:
                status = file.stat()
            except OSError:
                continue  # it went away
            found[file] = (status.st_mtime_ns, status.st_size)
        old = {file for file, version in self._files.items() if found.get(file) != version}
        new = [file for file, version in found.items() if self._files.get(file) != version]
        self._files = found
        for file in new:
            try:
                with _explained(file):
                    metadata = pq.read_metadata(file)
            except ConfigError:
                continue  # it is not whole
            self._unread += [_Place(file, n) for n in range(metadata.num_row_groups)]
        return self._forget(old)

    def _forget(self, files: Set[Path]) -> list[str]:
        if not files:
            return []
        with self._lock:
            self._kept.clear()
            for rollout_id, places in self._places.items():
                self._places[rollout_id] = [place for place in places if place.file not in files]
            gone = [rollout_id for rollout_id, places in self._places.items() if not places]
            for rollout_id in gone:
                del self._places[rollout_id]
        return gone

    def read(self, rollout_id: str) -> SeenRollout | None:
        rows = self.rows(rollout_id)
        return see_rows(rows) if rows else None

    def rows(self, rollout_id: str) -> list[dict[str, Any]]:
        """Of one rollout, its main trajectory first; none if there is no such. Raises `ConfigError`."""
        with self._lock:
            places = list(self._places.get(rollout_id, ()))
        rows: list[dict[str, Any]] = []
        for place in places:
            table = self._whole(place)
            own = table.filter(pc.equal(table.column("rollout_id"), rollout_id))
            rows += _rows(own)
        return sorted(rows, key=lambda row: not row["is_main"])

    def _whole(self, place: _Place) -> pa.Table:
        with self._lock:
            kept = self._kept.get(place)
            if kept is not None:
                self._kept.move_to_end(place)
                return kept
        table = self._table(place, None)
        with self._lock:
            self._kept[place] = table
            while len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        return table

    @staticmethod
    def _table(place: _Place, columns: Sequence[str] | None) -> pa.Table:
        with _explained(place.file), pq.ParquetFile(place.file) as file:
            check_schema(file.schema_arrow)
            there = set(file.schema_arrow.names)
            wanted = [name for name in columns or SCHEMA.names if name in there]
            return conformed(file.read_row_group(place.row_group, columns=wanted))


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files of a folder, in the order of their names; of a file, itself."""
    if not path.is_dir():
        return [path] if path.name.endswith(_SUFFIX) else []
    return sorted(each for each in path.iterdir() if each.name.endswith(_SUFFIX) and not each.name.startswith("."))


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Makes a `ConfigError` that names the file of what a Parquet file is at fault with."""
    try:
        yield
    except RecordError as error:
        raise ConfigError(f"{file}: {error.message}") from None
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def _basics(table: pa.Table) -> Iterator[Basics]:
    """Of the rollouts of some rows."""
    lengths = pc.list_value_length(table.column("loss_mask")).to_pylist()
    by_rollout: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for row, length in zip(table.select(_there(table, _SHOWN)).to_pylist(), lengths, strict=True):
        by_rollout.setdefault(row["rollout_id"], []).append((row, length))
    for rollout_id, rows in by_rollout.items():
        first = next((row for row, _ in rows if row["is_main"]), rows[0][0])
        spans = [span for row, _ in rows for span in row["spans"]]
        versions = sorted({each["weight_version"] for each in spans} - {None}, key=in_order)
        yield Basics(
            rollout_id=rollout_id,
            group=first["group_id"],
            sample=first.get("sample"),
            attempt=first.get("attempt"),
            state=State.FINISHED,
            reward=first["reward"],
            mask_reason=first["mask_reasons"][0] if first["mask_reasons"] else None,
            harness=first.get("agent_name"),
            calls=first["n_calls"],
            turns=len(first["call_ids"]),
            chains=first["chains"],
            prompt_tokens=sum(length for _, length in rows) - sum(each["end"] - each["start"] for each in spans),
            generated_tokens=first["generated_tokens_captured"],
            trained_tokens=0 if first["masked"] else first["generated_tokens_delivered"],
            weight_version_min=versions[0] if versions else None,
            weight_version_max=versions[-1] if versions else None,
            eligible_links=first["eligible_links"],
            exact_links=first["contiguous_links"],
        )


def _there(table: pa.Table, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in table.column_names]


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with their arrays as arrays."""
    small = [name for name in table.column_names if name not in _LEFT_OUT]
    rows: list[dict[str, Any]] = table.select(small).to_pylist()
    for n, row in enumerate(rows):
        for name in _ARRAYS:
            row[name] = np.asarray(table.column(name)[n].values.to_numpy(zero_copy_only=False))
    return rows
