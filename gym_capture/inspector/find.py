"""What a path or a URL leads to.

Invariant: nothing is opened for writing, and nothing is taken for what it is not: what is neither of the known things
is refused with what was looked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from gym_capture.data.log_directories import holds_logs
from gym_capture.data.nemo_gym import rollout_sizes
from gym_capture.errors import ConfigError
from gym_capture.inspector.source import NOTHING_KNOWN, Options, Source

JOB_FILE: Final = "job.json"
_KNOWN: Final = (
    "a graph's records (segment-*.log, or shard-* with them), a job's directory (job.json), built trajectories "
    "(part-*.parquet) or NeMo Gym's captures (*.tokens.jsonl)"
)


def open_path(path: Path, options: Options = NOTHING_KNOWN, *, records: Path | None = None) -> Source:
    """Opens what a path leads to. `records`: of a job, where the graph keeps them. Raises `ConfigError`."""
    if not path.exists():
        raise ConfigError(f"there is no {path}: name a directory with {_KNOWN}, or the URL of a graph")
    try:
        if (path / JOB_FILE).is_file():
            from gym_capture.inspector.job_source import JobSource

            of_job = replace(options, ends_elsewhere=True)
            return JobSource(path, options, records=None if records is None else open_path(records, of_job))
        if records is not None:
            raise ConfigError(f"--records goes with a job's directory, and {path} is none")
        if path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
            from gym_capture.inspector.parquet_source import ParquetSource

            return ParquetSource(path, options)
        if path.is_dir():
            if holds_logs(path):
                from gym_capture.inspector.log_source import LogSource

                return LogSource(path, options)
            if rollout_sizes(path):
                from gym_capture.inspector.gym_source import GymSource

                return GymSource(path, options)
    except PermissionError as error:
        raise ConfigError(f"{error.filename} may not be read: {error.strerror}") from None
    raise ConfigError(f"{path} holds nothing to look into: name a directory with {_KNOWN}")
