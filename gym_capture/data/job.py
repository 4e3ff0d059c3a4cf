"""Trajectories of many rollouts, built in parallel on a Ray cluster.

Invariant: no worker has more than one rollout in memory, and the driver has only what was asked for and a summary of
each rollout. Every rollout asked for gets a row or, if it left no records, is reported as missing. Building the same
snapshots again gives the same files under the same names, so a part that ran twice - its worker died - is there once.

Flow: rollouts -> parts of whole groups -> an actor pool, each actor with its own `TokenSource`: freeze, build, join
the reward, compare within the group (`groups.build_group`) -> `build_trajectories` streams the rows, in order, as a
Ray dataset; `write_trajectories` has each worker write its part as one Parquet file and returns a `BuildReport`.

Files: `part-<number>.parquet`, with row groups of one rollout or of several that together stay below 8 MiB, and
`_report.json`, which is there once all parts are.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from pyarrow import fs
from ray.exceptions import RayTaskError

from gym_capture.builder import BuildOptions
from gym_capture.data.advantages import Scale
from gym_capture.data.groups import RolloutSummary, build_group
from gym_capture.data.report import BuildReport, report
from gym_capture.data.requests import REQUEST_SCHEMA, check_requests, conform, groups_of, split_into_parts
from gym_capture.data.schema import SCHEMA
from gym_capture.errors import (
    ConfigError,
    GymCaptureError,
    RecordError,
    StaleSnapshotError,
    StoreError,
    StoreUnavailableError,
)
from gym_capture.imports import load
from gym_capture.protocols import TokenSource
from gym_capture.records import RecordProblem, Snapshot

REPORT_FILE: Final = "_report.json"

_PART: Final = "part"
_ROW_GROUP_BYTES: Final = 8 * 2**20
_RETRY_AFTER_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits between attempts at a source that cannot answer now, e.g. while its actor restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """How each worker opens its `TokenSource`: what `import_path` names, called with `kwargs`."""

    import_path: str
    """`package.module:factory`; the factory may be a coroutine function."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    async def open(self) -> TokenSource:
        """Raises `ConfigError` if there is nothing under the import path."""
        opened = load(self.import_path)(**self.kwargs)
        return cast(TokenSource, await opened if inspect.isawaitable(opened) else opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How to build, and on how much of the cluster."""

    build: BuildOptions = field(default_factory=BuildOptions)
    scale: Scale = "population_std"
    """What a group's centered rewards are divided by."""
    rollouts_per_part: int = 64
    """A part is one task and one file; it holds whole groups, so a larger group makes a larger part."""
    workers: int | None = None
    """Actors of the pool; None: as many as the cluster has room for and there are parts."""
    worker_cpus: float = 1.0
    """Logical CPUs that a worker takes up."""


def build_trajectories(
    rollouts: pa.Table | ray.data.Dataset, *, source: SourceSpec, options: JobOptions | None = None
) -> ray.data.Dataset:
    """A dataset of `schema.SCHEMA`, built as it is read; the rows of a rollout, and of a group, stand together.

    `rollouts` has the columns `rollout_id` and `group_id`, and `reward`, `reward_components`, `failure` where they are
    known (`requests.REQUEST_SCHEMA`).
    """
    return _map_parts(_requests(rollouts), _PartStreamer, source, options or JobOptions(), {})


def write_trajectories(
    rollouts: pa.Table | ray.data.Dataset,
    *,
    source: SourceSpec,
    out: str | Path,
    options: JobOptions | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda rollouts_done: None,
) -> BuildReport:
    """Writes the trajectories of `rollouts` (see `build_trajectories`) as Parquet into the directory `out`.

    `out` is a path or URI that every worker can write to. Trajectories that are there already are an error, unless
    `overwrite` says to remove them first. `on_progress` gets the number of rollouts that are written.

    Raises `StoreUnavailableError` if the source is down for longer than a restart takes: the job can be run again.
    """
    requests = _requests(rollouts)
    uri = str(out) if "://" in str(out) else Path(out).absolute().as_uri()
    try:
        filesystem, directory = fs.FileSystem.from_uri(uri)
        _make_room(filesystem, directory, overwrite=overwrite)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot write trajectories to {out}: {' '.join(str(error).split())}") from None
    summaries: list[RolloutSummary] = []
    dataset = _map_parts(requests, _PartWriter, source, options or JobOptions(), {"uri": uri})
    try:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            summaries += [_decode_summary(text) for text in batch.column("summary").to_pylist()]
            on_progress(len(summaries))
    except RayTaskError as error:
        if isinstance(error.cause, GymCaptureError):
            raise error.cause from None
        raise
    result = report(requests.column("rollout_id").to_pylist(), summaries)
    for leftover in _files(filesystem, directory, prefix=f".{_PART}-"):
        filesystem.delete_file(leftover)
    with filesystem.open_output_stream(f"{directory}/{REPORT_FILE}") as stream:
        stream.write(json.dumps(asdict(result), indent=2).encode() + b"\n")
    return result


async def retire(source: SourceSpec, consumed: BuildReport) -> tuple[str, ...]:
    """Drops the snapshots that a build consumed. Returns the rollouts that have changed since, which are kept."""
    opened = await source.open()
    changed: list[str] = []
    try:
        for rollout_id, (snapshot_id, version) in consumed.snapshots.items():
            try:
                await opened.drop(rollout_id, snapshot_id, version)
            except StaleSnapshotError:
                changed.append(rollout_id)
    finally:
        await opened.close()
    return tuple(changed)


def _requests(rollouts: pa.Table | ray.data.Dataset) -> pa.Table:
    if isinstance(rollouts, pa.Table):
        return check_requests(rollouts)
    # Block by block: one whose values are all missing has columns of type null.
    blocks = [conform(block) for block in rollouts.iter_batches(batch_size=None, batch_format="pyarrow")]
    return check_requests(pa.concat_tables(blocks) if blocks else REQUEST_SCHEMA.empty_table())


def _map_parts(
    requests: pa.Table, worker: type[_Worker], source: SourceSpec, options: JobOptions, extra: Mapping[str, Any]
) -> ray.data.Dataset:
    parts = split_into_parts(requests, rollouts_per_part=options.rollouts_per_part)
    if not parts:
        raise ConfigError("there are no rollouts to build trajectories of")
    numbered = [part.append_column(_PART, pa.array([i] * part.num_rows, pa.int64())) for i, part in enumerate(parts)]
    most = len(parts) if options.workers is None else options.workers
    dataset = ray.data.from_arrow(numbered)  # a block for each part
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.raise_original_map_exception = True
    # Blocks that overtake one another would tear groups apart.
    dataset.context.execution_options.preserve_order = True
    return dataset.map_batches(
        worker,
        fn_constructor_kwargs={"source": source, "options": options, **extra},
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
        num_cpus=options.worker_cpus,
    )


class _Worker:
    """One actor of the pool: an event loop and a source that stay open from part to part.

    The source is opened with the first part, for what fails in an actor's constructor looks like a fault of Ray's.
    """

    def __init__(self, *, source: SourceSpec, options: JobOptions) -> None:
        self._options = options
        self._spec = source
        self._runner = asyncio.Runner()
        self._source: TokenSource | None = None

    def _build(self, part: pa.Table) -> Iterator[tuple[RolloutSummary, pa.Table]]:
        for group in groups_of(part):
            yield from build_group(group, self._freeze, options=self._options.build, scale=self._options.scale)

    def _freeze(self, rollout_id: str) -> Snapshot:
        if self._source is None:
            self._source = self._runner.run(self._spec.open())
        return self._runner.run(_freeze(self._source, rollout_id))


class _PartStreamer(_Worker):
    """Parts to rows."""

    def __call__(self, part: pa.Table) -> Iterator[pa.Table]:
        for _, table in self._build(part):
            yield table


class _PartWriter(_Worker):
    """Parts to files; what comes back is a summary of each rollout."""

    def __init__(self, *, source: SourceSpec, options: JobOptions, uri: str) -> None:
        super().__init__(source=source, options=options)
        self._filesystem, self._directory = fs.FileSystem.from_uri(uri)

    def __call__(self, part: pa.Table) -> pa.Table:
        name = f"{_PART}-{part.column(_PART)[0].as_py():05d}.parquet"
        unfinished = f"{self._directory}/.{name}.{uuid.uuid4().hex}"
        summaries: list[RolloutSummary] = []
        with (
            self._filesystem.open_output_stream(unfinished) as stream,
            pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer,
        ):
            waiting: list[pa.Table] = []
            waiting_bytes = 0
            for summary, table in self._build(part):
                summaries.append(summary)
                if waiting and waiting_bytes + table.nbytes > _ROW_GROUP_BYTES:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting, waiting_bytes = [], 0
                waiting.append(table)
                waiting_bytes += table.nbytes
            writer.write_table(pa.concat_tables(waiting))
        self._filesystem.move(unfinished, f"{self._directory}/{name}")
        return pa.table({"summary": [json.dumps(asdict(summary)) for summary in summaries]})


async def _freeze(source: TokenSource, rollout_id: str) -> Snapshot:
    """The snapshot. A rollout that cannot be read gets one that says so; a source that is down ends the job."""
    try:
        for wait_s in _RETRY_AFTER_S:
            try:
                return await source.freeze(rollout_id)
            except StoreUnavailableError:
                await asyncio.sleep(wait_s)
        return await source.freeze(rollout_id)
    except StoreUnavailableError:
        raise
    except (StoreError, RecordError) as error:
        problem = RecordProblem(reason="unreadable", call_id=error.call_id, field=None, detail=str(error))
        return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=(), problems=(problem,))


def _decode_summary(text: str) -> RolloutSummary:
    fields = json.loads(text)
    return RolloutSummary(**(fields | {"mask_reasons": tuple(fields["mask_reasons"])}))


def _make_room(filesystem: fs.FileSystem, directory: str, *, overwrite: bool) -> None:
    filesystem.create_dir(directory, recursive=True)
    present = _files(filesystem, directory, prefix=f"{_PART}-")
    present += _files(filesystem, directory, prefix=REPORT_FILE)
    if present and not overwrite:
        raise ConfigError(f"{directory} already holds trajectories: choose another directory, or pass --overwrite")
    for path in present:
        filesystem.delete_file(path)


def _files(filesystem: fs.FileSystem, directory: str, *, prefix: str) -> list[str]:
    found = filesystem.get_file_info(fs.FileSelector(directory))
    return [each.path for each in found if each.type == fs.FileType.File and each.base_name.startswith(prefix)]
