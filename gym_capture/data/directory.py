"""A directory of records into Parquet files, without Ray: NeMo Gym's token files, or what a stopped graph left.

Invariant: every rollout of the directory gets at least one row, however bad its files are. Token files are only read.
A directory that holds something else is refused, lest a wrong path be built as a job without rollouts.

Flow: the rollouts of the directory, or those that are asked for with their groups and rewards -> parts of bounded
size -> `trajectory_files.write_files`: token files in processes of this machine, logs, which have one
owner, in this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from gym_capture.build.builder import BuildOptions
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.data.advantages import Scale
from gym_capture.data.local_runner import LocalRunner
from gym_capture.data.log_directories import holds_logs, logs_in_one_process
from gym_capture.data.nemo_gym import read_rollout, rollout_ids, rollout_sizes
from gym_capture.data.parts import RowOptions, WorkerSource
from gym_capture.data.report import BuildReport
from gym_capture.data.requests import (
    ROLLOUTS_PER_PART,
    check_requests,
    each_alone,
    groups_of,
    groups_recorded,
    split_into_parts,
)
from gym_capture.data.sources import SourceSpec
from gym_capture.data.trajectory_files import write_files
from gym_capture.errors import ConfigError
from gym_capture.stores.base import standings_of

__all__ = ["NemoGymDirectory", "build_directory"]

# A part is a file and a task of a worker. Small rollouts cost less than a file, large ones fill a worker for a while.
_ALONE_PER_PART: Final = 1_000


class NemoGymDirectory:
    """A `TokenSource` over files that NeMo Gym wrote. It reads, and changes nothing."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    @classmethod
    def spec(cls, directory: Path) -> SourceSpec:
        """How workers open it."""
        return SourceSpec(
            import_path="gym_capture.data.directory:NemoGymDirectory", kwargs={"directory": str(directory.absolute())}
        )

    async def freeze(self, rollout_id: str) -> Snapshot:
        return read_rollout(self._directory, rollout_id)

    async def rollout_ids(self) -> Sequence[str]:
        return rollout_ids(self._directory)

    async def close(self) -> None:
        """Nothing stays open."""


def build_directory(
    source: Path,
    *,
    out: str | Path,
    options: BuildOptions,
    scale: Scale = "population_std",
    requests: pa.Table | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_left: Callable[[tuple[str, ...]], None] = lambda names: None,
) -> BuildReport:
    """Builds the records in `source` and writes `part-<number>.parquet` files of `schema.SCHEMA` into `out`.

    `source`: a directory of token files or, without any, one that has logs in it. `requests`: which rollouts, with
    their groups and rewards (`requests.REQUEST_SCHEMA`); None: all there are, by what is on record of them.
    `workers` are for token files. Else as `write_files`. Raises `RecordError` for wrong `requests`, `ConfigError` for a
    `source` with neither token files nor a log among what is in it, `StoreError` if it cannot be listed, is in use or a
    worker died.
    """
    sizes = rollout_sizes(source)
    has_logs = bool(holds_logs(source)) and not sizes
    if not sizes and not has_logs and any(source.iterdir()):
        raise ConfigError(
            f"{source} holds neither files named <rollout id>.tokens.jsonl nor a log: name the folder of the token "
            "files, or the graph's `state.directory`"
        )
    if requests is None:
        parts = (
            split_into_parts(groups_recorded(_logged(source)), rollouts_per_part=ROLLOUTS_PER_PART)
            if has_logs
            else split_into_parts(each_alone(sizes), rollouts_per_part=_ALONE_PER_PART)
        )
    else:
        parts = split_into_parts(groups_of(check_requests(requests)), rollouts_per_part=ROLLOUTS_PER_PART)
    return write_files(
        parts,
        source=logs_in_one_process(source) if has_logs else NemoGymDirectory.spec(source),
        out=out,
        options=RowOptions(build=options, scale=scale),
        runner=LocalRunner(workers=1 if has_logs else workers or os.cpu_count() or 1),
        overwrite=overwrite,
        on_progress=on_progress,
        on_left=on_left,
    )


def _logged(directory: Path) -> Sequence[Standing]:
    """The rollouts of the logs, in order, and what was said of them."""
    with WorkerSource(logs_in_one_process(directory)) as source:
        return source.run(standings_of(source.opened()))
