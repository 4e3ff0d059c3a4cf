"""Trajectories of many rollouts, built in parallel on a Ray cluster.

Invariant: what a part gives is what it gives without Ray (`parts`); a part that ran twice - its worker died - is there
once. The driver has only what was asked for and a summary of each rollout.

Flow: rollouts -> parts of whole groups -> a task each, with its own `TokenSource` -> `build_trajectories` streams the
rows, in order, as a Ray dataset; `write_trajectories` has each task write its part as one Parquet file
(`trajectory_files`) and returns a `BuildReport`.

A worker may die of a rollout - out of memory, most likely. Ray runs its task again; which rollout it was is known
(`watch`), and after some deaths its row says `worker_died` and the job goes on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import ray
import ray.data

from gym_capture.build.builder import BuildOptions
from gym_capture.data.advantages import Scale
from gym_capture.data.parts import Part, RowOptions, WorkerSource, Written, built_part, write_part
from gym_capture.data.report import BuildReport
from gym_capture.data.requests import (
    REQUEST_SCHEMA,
    ROLLOUTS_PER_PART,
    Request,
    check_requests,
    conform,
    groups_of,
    split_into_parts,
)
from gym_capture.data.schema import SCHEMA
from gym_capture.data.sources import SourceSpec
from gym_capture.data.trajectory_files import Work, write_files
from gym_capture.data.watch import RayPost, start_watch
from gym_capture.errors import GymCaptureError

Rollouts: TypeAlias = pa.Table | ray.data.Dataset | list[tuple[Request, ...]]
"""A table, in one piece or in blocks, or groups as `requests.groups_recorded` makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How to build, and on how much of the cluster."""

    build: BuildOptions = field(default_factory=BuildOptions)
    scale: Scale = "population_std"
    """The divisor of a group's centered rewards."""
    rollouts_per_part: int = ROLLOUTS_PER_PART
    """A part is one task and one file; it holds whole groups, so a larger group makes a larger part."""
    workers: int | None = None
    """Parts that are built at the same time, at most; None: as many as the cluster has room for."""
    worker_cpus: float = 1.0
    """Logical CPUs that a worker takes up."""

    @property
    def rows(self) -> RowOptions:
        return RowOptions(build=self.build, scale=self.scale)


def build_trajectories(
    rollouts: Rollouts, *, source: SourceSpec, options: JobOptions | None = None
) -> ray.data.Dataset:
    """A dataset of `schema.SCHEMA`, built as it is read; the rows of a rollout, and of a group, stand together.

    `rollouts` has the columns `rollout_id` and `group_id`, and `reward`, `reward_components`, `failure`, `agent_name`,
    `input` where they are known (`requests.REQUEST_SCHEMA`); or it is groups that are made already.
    """
    options = options or JobOptions()
    parts = [Part(number=number, groups=groups) for number, groups in enumerate(_parts(rollouts, options))]
    if not parts:
        return ray.data.from_arrow(SCHEMA.empty_table())
    return _map_parts(parts, _stream_part, options, {"source": source, "options": options.rows, "watch": start_watch()})


def write_trajectories(
    rollouts: Rollouts,
    *,
    source: SourceSpec,
    out: str | Path,
    options: JobOptions | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda rollouts_done: None,
    on_left: Callable[[tuple[str, ...]], None] = lambda names: None,
) -> BuildReport:
    """Writes the trajectories of `rollouts` (see `build_trajectories`) as Parquet into the directory `out`.

    As `write_files`, with tasks on Ray. Raises `StoreUnavailableError` if the source is down for longer than a restart
    takes, `JobError` if workers die of something else than a rollout: the job can be run again. Whatever ends it, an
    interrupt included, nothing of it is left in `out`.
    """
    options = options or JobOptions()
    return write_files(
        _parts(rollouts, options),
        source=source,
        out=out,
        options=options.rows,
        runner=RayRunner(options),
        overwrite=overwrite,
        on_progress=lambda done, total: on_progress(done),
        on_left=on_left,
    )


class RayRunner:
    """A `Runner` of Ray Data tasks."""

    def __init__(self, options: JobOptions) -> None:
        self._options = options

    def run(self, work: Work, parts: Sequence[Part]) -> Generator[Written]:
        watch = start_watch()
        try:
            dataset = _map_parts(parts, _write_part, self._options, {"work": work, "watch": watch})
            for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                written = pickle.loads(batch.column(_ANSWER)[0].as_py())
                if isinstance(written, GymCaptureError):
                    raise written
                yield from written
        finally:
            ray.kill(watch)  # Ray Data keeps handles of it for as long as this process lives


def _parts(rollouts: Rollouts, options: JobOptions) -> list[tuple[tuple[Request, ...], ...]]:
    if isinstance(rollouts, list):
        return split_into_parts(rollouts, rollouts_per_part=options.rollouts_per_part)
    if not isinstance(rollouts, pa.Table):
        # Block by block: one whose values are all missing has columns of type null.
        blocks = [conform(block) for block in rollouts.iter_batches(batch_size=None, batch_format="pyarrow")]
        rollouts = pa.concat_tables(blocks) if blocks else REQUEST_SCHEMA.empty_table()
    return split_into_parts(groups_of(check_requests(rollouts)), rollouts_per_part=options.rollouts_per_part)


_PART = "part"
_ANSWER = "answer"


def _map_parts(
    parts: Sequence[Part], task: Callable[..., Any], options: JobOptions, arguments: Mapping[str, Any]
) -> ray.data.Dataset:
    dataset = ray.data.from_arrow([pa.table({_PART: [pickle.dumps(part)]}) for part in parts])  # a block for each
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.raise_original_map_exception = True
    # Blocks that overtake one another would tear groups apart.
    dataset.context.execution_options.preserve_order = True
    # Ray Data runs a task whose worker died again without end; the watch ends that.
    return dataset.map_batches(
        task,
        fn_kwargs=dict(arguments),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(_tasks(len(parts), options.workers)),
        num_cpus=options.worker_cpus,
    )


def _tasks(parts: int, workers: int | None) -> int | None:
    """At a time: of more than there are parts Ray warns."""
    return None if workers is None or parts == 0 else min(workers, parts)


# --- in a worker -----------------------------------------------------------------------------------------------------


def _stream_part(block: pa.Table, *, source: SourceSpec, options: RowOptions, watch: Any) -> Iterator[pa.Table]:
    """A part to rows."""
    with WorkerSource(source) as opened:
        for _, table in built_part(_part_of(block), source=opened, options=options, post=RayPost(watch)):
            yield table


def _write_part(block: pa.Table, *, work: Work, watch: Any) -> pa.Table:
    """A part to a file; what comes back, pickled, is what was written, or the error that ends the job.

    As an answer, because Ray prints the trace of whatever a task raises.
    """
    outcome: list[Written] | GymCaptureError
    try:
        with WorkerSource(work.source) as source:
            written = write_part(
                _part_of(block), source=source, options=work.options, post=RayPost(watch), staging=work.staging
            )
            outcome = list(written)
    except GymCaptureError as error:
        outcome = error
    return pa.table({_ANSWER: [pickle.dumps(outcome)]})


def _part_of(block: pa.Table) -> Part:
    part: Part = pickle.loads(block.column(_PART)[0].as_py())
    return part
