"""Trajectories of many rollouts, built in parallel on a Ray cluster.

Invariant: no worker has more than one rollout in memory, and the rows of one row group; the driver has only what was
asked for and a summary of each rollout. Every rollout asked for gets a row or, if it left no records, is reported as
missing. Building the same snapshots again gives the same files under the same names, so a part that ran twice - its
worker died - is there once. A directory holds all parts of a build or none: what a build writes is hidden until
everything is written.

Flow: rollouts -> parts of whole groups -> a task each, with its own `TokenSource`: freeze, build, join the reward,
compare within the group (`groups.build_group`) -> `build_trajectories` streams the rows, in order, as a Ray dataset;
`write_trajectories` has each task write its part as one Parquet file and returns a `BuildReport`.

A worker may die of a rollout - out of memory, most likely. Ray runs its task again; which rollout it was is known
(`watch`), and after some deaths its row says `worker_died` and the job goes on.

Files: `part-<number>.parquet`, with row groups of one rollout or of several that together stay below 8 MiB, and
`_report.json`, which is there once all parts are.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from pyarrow import fs

from gym_capture.builder import BuildOptions
from gym_capture.data.advantages import Scale
from gym_capture.data.groups import RolloutSummary, build_group, unusable
from gym_capture.data.report import BuildReport, report
from gym_capture.data.requests import REQUEST_SCHEMA, check_requests, conform, groups_of, split_into_parts
from gym_capture.data.schema import SCHEMA
from gym_capture.data.watch import MOST_DEATHS, Post, start_watch
from gym_capture.errors import (
    ConfigError,
    GymCaptureError,
    JobError,
    RecordError,
    StaleSnapshotError,
    StoreError,
    StoreUnavailableError,
)
from gym_capture.imports import load
from gym_capture.operations import Drop
from gym_capture.protocols import RecordStore, TokenSource
from gym_capture.reasons import ProblemReason
from gym_capture.records import Snapshot

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
    """Parts that are built at the same time, at most; None: as many as the cluster has room for."""
    worker_cpus: float = 1.0
    """Logical CPUs that a worker takes up."""


def build_trajectories(
    rollouts: pa.Table | ray.data.Dataset, *, source: SourceSpec, options: JobOptions | None = None
) -> ray.data.Dataset:
    """A dataset of `schema.SCHEMA`, built as it is read; the rows of a rollout, and of a group, stand together.

    `rollouts` has the columns `rollout_id` and `group_id`, and `reward`, `reward_components`, `failure` where they are
    known (`requests.REQUEST_SCHEMA`).
    """
    requests = _requests(rollouts)
    if not requests.num_rows:
        return ray.data.from_arrow(SCHEMA.empty_table())
    return _map_parts(requests, _stream_part, source, options or JobOptions(), {})


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

    Raises `ConfigError` if `out` cannot be written, `StoreUnavailableError` if the source is down for longer than a
    restart takes, `JobError` if workers die of something else than a rollout: the job can be run again. Whatever ends
    it, an interrupt included, nothing of it is left in `out`.
    """
    requests = _requests(rollouts)
    with _output(str(out), overwrite=overwrite) as output:
        files, summaries = [], list[RolloutSummary]()
        if requests.num_rows:
            # The location alone: it is all that a task needs of the output.
            dataset = _map_parts(requests, _write_part, source, options or JobOptions(), {"location": output.staging})
            for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                written = pickle.loads(batch.column("part")[0].as_py())
                if isinstance(written, GymCaptureError):
                    raise written
                files.append(written.file)
                summaries += written.summaries
                on_progress(len(summaries))
        else:
            files.append(_write_nothing(output.staging))
        result = report(requests.column("rollout_id").to_pylist(), summaries)
        output.publish(files, json.dumps(asdict(result), indent=2).encode() + b"\n")
    return result


async def retire(source: SourceSpec, consumed: BuildReport) -> tuple[str, ...]:
    """Drops the snapshots that a build consumed. Returns the rollouts that have changed since, which are kept."""
    opened = cast(RecordStore, await source.open())
    changed: list[str] = []
    try:
        for rollout_id, (snapshot_id, version) in consumed.snapshots.items():
            try:
                await opened.write(Drop(rollout_id, snapshot_id, version))
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
    requests: pa.Table, task: Callable[..., Any], source: SourceSpec, options: JobOptions, extra: Mapping[str, Any]
) -> ray.data.Dataset:
    parts = split_into_parts(requests, rollouts_per_part=options.rollouts_per_part)
    numbered = [part.append_column(_PART, pa.array([i] * part.num_rows, pa.int64())) for i, part in enumerate(parts)]
    dataset = ray.data.from_arrow(numbered)  # a block for each part
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.raise_original_map_exception = True
    # Blocks that overtake one another would tear groups apart.
    dataset.context.execution_options.preserve_order = True
    # Ray Data runs a task whose worker died again without end; the watch ends that.
    return dataset.map_batches(
        task,
        fn_kwargs={"source": source, "options": options, "watch": start_watch(), **extra},
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(options.workers),
        num_cpus=options.worker_cpus,
    )


# --- in a worker -----------------------------------------------------------------------------------------------------


def _stream_part(part: pa.Table, *, source: SourceSpec, options: JobOptions, watch: Any) -> Iterator[pa.Table]:
    """A part to rows."""
    for _, table in _built(part, source, options, watch):
        yield table


def _write_part(
    part: pa.Table, *, source: SourceSpec, options: JobOptions, watch: Any, location: _Location
) -> pa.Table:
    """A part to a file; what comes back, pickled, is what was written, or the error that ends the job.

    As an answer, because Ray prints the trace of whatever a task raises.
    """
    outcome: _WrittenPart | GymCaptureError
    try:
        with closing(_built(part, source, options, watch)) as built:
            outcome = _written(part, built, location)
    except GymCaptureError as error:
        outcome = error
    return pa.table({"part": [pickle.dumps(outcome)]})


@dataclass(frozen=True, slots=True)
class _WrittenPart:
    file: str
    """Its name, which is another one each time the part is written."""
    summaries: list[RolloutSummary]


def _written(
    part: pa.Table, built: Iterator[tuple[tuple[RolloutSummary, ...], pa.Table]], location: _Location
) -> _WrittenPart:
    number = part.column(_PART)[0].as_py()
    name = f"{_part_name(number)}.{uuid.uuid4().hex}"
    summaries: list[RolloutSummary] = []
    with location.writer(name) as writer:
        waiting: list[pa.Table] = []
        waiting_bytes = 0
        for some, table in built:
            summaries += some
            if waiting and waiting_bytes + table.nbytes > _ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting, waiting_bytes = [], 0
            waiting.append(table)
            waiting_bytes += table.nbytes
        writer.write_table(pa.concat_tables(waiting))
    return _WrittenPart(name, summaries)


def _built(
    part: pa.Table, source: SourceSpec, options: JobOptions, watch: Any
) -> Generator[tuple[tuple[RolloutSummary, ...], pa.Table]]:
    """Builds a part, with an event loop and a source that stay open from rollout to rollout."""
    post = Post(watch)
    whole = f"part {part.column(_PART)[0].as_py()}"

    def enter_whole() -> None:
        deaths = post.enter(whole)
        if deaths >= MOST_DEATHS:
            raise JobError(f"workers died {deaths} times while they read, compared or wrote {whole}, of no one rollout")

    def freeze(rollout_id: str) -> Snapshot:
        deaths = post.enter(f"rollout {rollout_id}")
        if deaths < MOST_DEATHS:
            return runner.run(_freeze(opened, rollout_id))
        enter_whole()
        detail = f"{deaths} workers died while they built it, most likely for want of memory"
        return unusable(rollout_id, ProblemReason.WORKER_DIED, detail)

    enter_whole()
    with asyncio.Runner() as runner:
        try:
            opened = runner.run(source.open())
        except OSError as error:
            raise ConfigError(f"the source {source.import_path} cannot be opened: {error}") from None
        try:
            for group in groups_of(part):
                yield from build_group(group, freeze, options=options.build, scale=options.scale, on_built=enter_whole)
        finally:
            runner.run(opened.close())
    post.leave()


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
        return unusable(rollout_id, ProblemReason.UNREADABLE, str(error), call_id=error.call_id)
    except OSError as error:
        return unusable(rollout_id, ProblemReason.UNREADABLE, str(error))


# --- the output ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Location:
    """A directory, from wherever it is written to."""

    out: str
    """As the user named the output."""
    uri: str

    @contextmanager
    def writer(self, name: str) -> Iterator[pq.ParquetWriter]:
        """A new file. What cannot be written is a `ConfigError`."""
        with _as_config_error(self.out):
            filesystem, directory = fs.FileSystem.from_uri(self.uri)
            with (
                filesystem.open_output_stream(f"{directory}/{name}") as stream,
                pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer,
            ):
                yield writer


class _Output:
    """The directory that trajectories go to. Tasks write to one inside it, which readers do not see."""

    def __init__(self, out: str, uri: str, *, overwrite: bool) -> None:
        self._out = out
        self._filesystem, self._directory = fs.FileSystem.from_uri(uri)
        self._overwrite = overwrite
        self._is_new = self._filesystem.get_file_info(self._directory).type == fs.FileType.NotFound
        self._hidden = f".{_PART}s-{uuid.uuid4().hex}"
        self._published: list[str] = []
        self.staging = _Location(out, f"{uri.rstrip('/')}/{self._hidden}")

    def prepare(self) -> None:
        with _as_config_error(self._out):
            self._filesystem.create_dir(self._directory, recursive=True)
            self._refuse_present()
            self._filesystem.create_dir(f"{self._directory}/{self._hidden}")

    def publish(self, files: list[str], report: bytes) -> None:
        """Makes the parts visible, then the report; what was there before goes first."""
        with _as_config_error(self._out):
            for path in self._refuse_present():
                self._filesystem.delete_file(path)
            for number, name in enumerate(files):
                self._published.append(f"{self._directory}/{_part_name(number)}")
                self._filesystem.move(f"{self._directory}/{self._hidden}/{name}", self._published[-1])
            self._published.append(f"{self._directory}/{REPORT_FILE}")
            with self._filesystem.open_output_stream(self._published[-1]) as stream:
                stream.write(report)
            self._filesystem.delete_dir(f"{self._directory}/{self._hidden}")

    def remove(self) -> None:
        """What a build that did not come to its end has written."""
        for path in self._published:
            with suppress(OSError):
                self._filesystem.delete_file(path)
        with suppress(OSError):
            self._filesystem.delete_dir(f"{self._directory}/{self._hidden}")
        with suppress(OSError):
            if self._is_new and not self._filesystem.get_file_info(fs.FileSelector(self._directory)):
                self._filesystem.delete_dir(self._directory)

    def _refuse_present(self) -> list[str]:
        found = self._filesystem.get_file_info(fs.FileSelector(self._directory))
        present = [
            each.path
            for each in found
            if each.type == fs.FileType.File and each.base_name.startswith((f"{_PART}-", REPORT_FILE))
        ]
        if present and not self._overwrite:
            raise ConfigError(f"{self._out} already holds trajectories: choose another directory, or pass --overwrite")
        return present


@contextmanager
def _output(out: str, *, overwrite: bool) -> Iterator[_Output]:
    uri = out if "://" in out else Path(out).absolute().as_uri()
    with _as_config_error(out):
        output = _Output(out, uri, overwrite=overwrite)
    try:
        output.prepare()
        yield output
    except BaseException:
        output.remove()
        raise


@contextmanager
def _as_config_error(out: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot write trajectories to {out}: {' '.join(str(error).split())}") from None


def _write_nothing(location: _Location) -> str:
    """A file of no rows: readers of an empty build find its columns."""
    name = _part_name(0)
    with location.writer(name):
        return name


def _part_name(number: int) -> str:
    return f"{_PART}-{number:05d}.parquet"
