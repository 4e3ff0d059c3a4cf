"""A directory of token files into Parquet files of trajectories.

Invariant: every rollout of the directory gets at least one row, however bad its files are, and the same directory
gives the same files with any number of workers. The files appear when all of them are written, or not at all. A worker
has one rollout in memory at a time, and the rows of one row group.

Flow: the rollouts of the directory, or those that are asked for with their groups and rewards -> parts of bounded
size -> each part, in a process of the pool, is read, built and written as one file -> `_report.json`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from gym_capture.builder import BuildOptions, build
from gym_capture.data.collector import collector_paused
from gym_capture.data.groups import RolloutSummary, build_group, built_or_masked, summarize
from gym_capture.data.nemo_gym import read_rollout, rollout_sizes, shown_id
from gym_capture.data.report import BuildReport, report
from gym_capture.data.requests import Request, check_requests, groups_of, split_into_parts
from gym_capture.data.schema import SCHEMA, Row, row_nbytes, rows, to_table
from gym_capture.data.staged_files import staged_files
from gym_capture.errors import StoreError
from gym_capture.records import Snapshot

REPORT_FILE: Final = "_report.json"

# A part is a file and a task of a worker. Small rollouts cost less than a file, large ones fill a worker for a while.
_ROLLOUTS_PER_PART: Final = 1_000
_BYTES_PER_PART: Final = 64 * 2**20
_REQUESTS_PER_PART: Final = 64
_ROW_GROUP_BYTES: Final = 8 * 2**20
_SUMMARIES_PER_STEP: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one task reads, builds and writes."""

    file: Path
    rollout_ids: tuple[str, ...] = ()
    """Rollouts of which nothing but the records is known: each its own group, without a reward."""
    groups: tuple[tuple[Request, ...], ...] = ()
    """Rollouts with groups and rewards."""


def build_directory(
    source: Path,
    *,
    out: Path,
    options: BuildOptions,
    requests: pa.Table | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> BuildReport:
    """Builds the captures in `source` and writes `part-<number>.parquet` files of `schema.SCHEMA` into `out`.

    `requests`: which rollouts, with their groups and rewards (`requests.REQUEST_SCHEMA`); None: all there are, each
    its own group and without a reward. If there is none, one file without rows is written. `on_progress` gets the
    number of rollouts that are built, and of all. Raises `ConfigError` if `out` holds trajectories already or cannot
    be written to, `RecordError` for wrong `requests`, `StoreError` if `source` cannot be listed or a worker died.
    """
    rollout_ids: list[tuple[str, ...]] = []
    groups: list[tuple[tuple[Request, ...], ...]] = []
    if requests is None:
        rollout_ids = _split(rollout_sizes(source)) or [()]
    else:
        tables = split_into_parts(check_requests(requests), rollouts_per_part=_REQUESTS_PER_PART)
        groups = [tuple(tuple(group) for group in groups_of(table)) for table in tables] or [()]
    total = sum(map(len, rollout_ids)) + sum(len(group) for part in groups for group in part)
    on_progress(0, total)
    summaries: list[RolloutSummary] = []
    with staged_files(out, ("part-*.parquet", REPORT_FILE), what="trajectories", overwrite=overwrite) as staged:
        names = (f"part-{number:05d}.parquet" for number in range(len(rollout_ids) + len(groups)))
        parts = [_Part(file=staged.path(next(names)), rollout_ids=ids) for ids in rollout_ids]
        parts += [_Part(file=staged.path(next(names)), groups=part) for part in groups]
        for some in _run(partial(_write_part, source=source, options=options), parts, workers or os.cpu_count() or 1):
            summaries += some
            on_progress(len(summaries), total)
        built = report((summary.rollout_id for summary in summaries), summaries)
        staged.path(REPORT_FILE).write_text(json.dumps(asdict(built), indent=2) + "\n", encoding="utf-8")
    return built


def _split(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Parts of so many rollouts or so many bytes, whichever is reached first."""
    parts: list[tuple[str, ...]] = []
    ids: list[str] = []
    nbytes = 0
    for rollout_id, size in sizes.items():
        if ids and (len(ids) == _ROLLOUTS_PER_PART or nbytes + size > _BYTES_PER_PART):
            parts.append(tuple(ids))
            ids, nbytes = [], 0
        ids.append(rollout_id)
        nbytes += size
    return [*parts, tuple(ids)] if ids else parts


# --- workers ---------------------------------------------------------------------------------------------------------


def _run(
    write: Callable[[_Part], Iterator[RolloutSummary]], parts: Sequence[_Part], workers: int
) -> Iterator[list[RolloutSummary]]:
    """What became of the rollouts, in the order of the parts. One part is not worth a process."""
    if min(workers, len(parts)) == 1:
        some: list[RolloutSummary] = []
        for part in parts:
            for summary in write(part):
                some.append(summary)
                if len(some) == _SUMMARIES_PER_STEP:
                    yield some
                    some = []
        yield some
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(parts)), mp_context=context, initializer=_begin_worker)
    try:
        yield from pool.map(partial(_all_of, write), parts)
    except BrokenProcessPool:
        raise StoreError("a worker process died, perhaps for lack of memory: try again with fewer workers") from None
    except BaseException:
        # Nothing that they write will be used: what an interrupt ends need not be waited for.
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """A terminal interrupts the whole process group; only the parent has something to say of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed tells nobody, and a worker would wait for its next part for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _all_of(write: Callable[[_Part], Iterator[RolloutSummary]], part: _Part) -> list[RolloutSummary]:
    return list(write(part))


def _write_part(part: _Part, *, source: Path, options: BuildOptions) -> Iterator[RolloutSummary]:
    """Writes the file of a part. It is whole when the last summary was taken."""
    with pq.ParquetWriter(part.file, SCHEMA, compression="zstd") as writer:
        group = _RowGroup(writer)
        for rollout_id in part.rollout_ids:
            summary, built_rows = _build_one(rollout_id, source, options)
            group.add(built_rows)
            yield summary
        for requests in part.groups:
            for summaries, table in build_group(
                requests, partial(read_rollout, source), options=options, scale="population_std"
            ):
                group.add_table(table)
                yield from summaries
        group.write()


def _build_one(rollout_id: str, source: Path, options: BuildOptions) -> tuple[RolloutSummary, list[Row]]:
    def make(snapshot: Snapshot) -> tuple[RolloutSummary, list[Row]]:
        built = build(snapshot, options)
        request = Request(
            rollout_id=built.rollout_id, group_id=built.rollout_id, reward=None, reward_components=None, failure=None
        )
        summary = summarize(request, snapshot, built, built.mask_reasons)
        return summary, rows(built, group_id=request.group_id, reward=None)

    def read_and_make() -> tuple[RolloutSummary, list[Row]]:
        with collector_paused():
            return make(read_rollout(source, rollout_id))

    return built_or_masked(shown_id(rollout_id), read_and_make, make)


class _RowGroup:
    """Gathers rows for one row group. Making a table costs as much for one row as for many."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[Row] = []
        self._tables: list[pa.Table] = []
        self._nbytes = 0

    def add(self, new_rows: list[Row]) -> None:
        self._make_room(sum(map(row_nbytes, new_rows)))
        self._rows += new_rows

    def add_table(self, table: pa.Table) -> None:
        self._make_room(table.nbytes)
        self._tables.append(table)

    def write(self) -> None:
        tables = [to_table(self._rows), *self._tables] if self._rows else self._tables
        if tables:
            self._writer.write_table(pa.concat_tables(tables))
        self._rows, self._tables, self._nbytes = [], [], 0

    def _make_room(self, nbytes: int) -> None:
        if self._nbytes and self._nbytes + nbytes > _ROW_GROUP_BYTES:
            self.write()
        self._nbytes += nbytes
