"""Trajectories as files: the one way from rollouts to Parquet, whoever does the work.

Invariant: a directory holds all parts of a build or none, and what was there before until then. The same snapshots
with the same options give the same files under the same names, on any runner. Every rollout asked for gets a row; one
that left no records is reported as missing.

Flow: groups of rollouts -> parts of whole groups -> a `Runner` has each part built and written (`parts.write_part`)
where readers do not look -> `_report.json` -> all of it appears.

Files: `part-<number>.parquet` of `schema.SCHEMA`, and `_report.json` (`BuildReport`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

import pyarrow.parquet as pq

from gym_capture.data.groups import RolloutSummary
from gym_capture.data.nemo_gym import shown_id
from gym_capture.data.parts import Part, RowOptions, Written
from gym_capture.data.report import BuildReport, report
from gym_capture.data.requests import Request
from gym_capture.data.schema import SCHEMA
from gym_capture.data.sources import SourceSpec
from gym_capture.data.staged_files import Staging, staged_files

REPORT_FILE: Final = "_report.json"
PART_FILES: Final = "part-*.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work to do on each part, as a value that any worker can be given."""

    source: SourceSpec
    options: RowOptions
    staging: Staging


class Runner(Protocol):
    """Who does the work."""

    def run(self, work: Work, parts: Sequence[Part]) -> Generator[Written]:
        """Writes the parts, in any order; says of each rollout once that it is written, in the order of the parts.

        Raises what `parts.built_part` raises and `ConfigError` for what cannot be written. Whoever closes the generator
        before its end wants nothing of the rest: what still works on it ends.
        """
        ...


def write_files(
    groups_of_parts: Sequence[tuple[tuple[Request, ...], ...]],
    *,
    source: SourceSpec,
    out: str | Path,
    options: RowOptions,
    runner: Runner,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_left: Callable[[tuple[str, ...]], None] = lambda names: None,
) -> BuildReport:
    """Builds the rollouts and writes their trajectories into the directory `out`, a file for each part.

    `out` is a path or URI that every worker can write to. Trajectories that are there already are an error, unless
    `overwrite` says to replace them. Where there are no rollouts, one file without rows is written. `on_progress` gets
    the number of rollouts that are written, and of all. `on_left` gets the names of hidden directories in `out` of
    which nobody can tell whether a build that was killed left them.

    Raises `ConfigError` if `out` cannot be written to, and what the runner raises: then nothing of it is left in `out`.
    """
    parts = [Part(number=number, groups=groups) for number, groups in enumerate(groups_of_parts)]
    total = sum(part.rollouts for part in parts)
    on_progress(0, total)
    summaries: list[RolloutSummary] = []
    files: dict[int, str] = {}
    with staged_files(out, (PART_FILES, REPORT_FILE), what="trajectories", overwrite=overwrite) as staged:
        if staged.left:
            on_left(staged.left)
        if not parts:
            files[0] = _write_nothing(staged.staging)
        else:
            work = Work(source=source, options=options, staging=staged.staging)
            with closing(runner.run(work, parts)) as written:
                for some in written:
                    files[some.part] = some.file
                    summaries += some.summaries
                    on_progress(len(summaries), total)
        for number, file in sorted(files.items()):
            staged.add(file, f"part-{number:05d}.parquet")
        asked = (shown_id(request.rollout_id) for part in parts for group in part.groups for request in group)
        built = report(asked, summaries)
        with staged.staging.create(REPORT_FILE) as stream:
            stream.write(json.dumps(asdict(built), indent=2).encode() + b"\n")
        staged.add(REPORT_FILE, REPORT_FILE)
    return built


def _write_nothing(staging: Staging) -> str:
    """A file of no rows: readers of an empty build find its columns."""
    name = "nothing"
    with staging.create(name) as stream, pq.ParquetWriter(stream, SCHEMA, compression="zstd"):
        return name
