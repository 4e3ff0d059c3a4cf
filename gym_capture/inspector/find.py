"""What a path or a URL leads to.

Invariant: nothing is opened for writing, and nothing is taken for what it is not: what is neither of the known things
is refused with what was looked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from gym_capture.data.log_directories import holds_logs
from gym_capture.data.nemo_gym import RECORDS_SUFFIX, rollout_sizes
from gym_capture.errors import ConfigError, StoreError
from gym_capture.inspector.source import NOTHING_KNOWN, Options, Source

JOB_FILE: Final = "job.json"
_CALLS_WITHOUT_IDS: Final = ".capture.jsonl"
_KNOWN: Final = (
    "a graph's records (segment-*.log, or shard-* with them), a job's directory (job.json), built trajectories "
    "(part-*.parquet) or NeMo Gym's captures (*.tokens.jsonl)"
)


def open_path(path: Path, options: Options = NOTHING_KNOWN, *, records: Path | None = None) -> Source:
    """Opens what a path leads to. `records`: of a job, where the graph keeps them. Raises `ConfigError`."""
    try:
        if not path.exists():
            raise ConfigError(f"there is no {path}: name a directory with {_KNOWN}, or the URL of a graph")
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
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    raise ConfigError(f"{path} holds nothing to look into: {_instead(path)}")


def _instead(path: Path) -> str:
    """What to name in the place of a path that leads to nothing."""
    if not path.is_dir():
        return (
            f"name its directory, {path.parent}"
            if path.name.endswith(RECORDS_SUFFIX)
            else f"name a directory with {_KNOWN}"
        )
    names = sorted(each.name for each in path.iterdir())
    if any(name.endswith(f"{RECORDS_SUFFIX}.gz") for name in names):
        return f"its {RECORDS_SUFFIX}.gz are compressed: gunzip them"
    if any(name.endswith(_CALLS_WITHOUT_IDS) for name in names):
        return (
            f"its *{_CALLS_WITHOUT_IDS} are NeMo Gym's captures without token ids; those with ids are *{RECORDS_SUFFIX}"
        )
    below = next((path / name for name in names if (path / name).is_dir() and _is_source(path / name)), None)
    return f"name a directory with {_KNOWN}" if below is None else f"did you mean {below}?"


def _is_source(path: Path) -> bool:
    try:
        return (
            (path / JOB_FILE).is_file()
            or any(path.glob("*.parquet"))
            or bool(holds_logs(path))
            or bool(rollout_sizes(path))
        )
    except (OSError, StoreError):
        return False
