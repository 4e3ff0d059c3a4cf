"""What a path or a URL leads to.

Invariant: nothing is opened for writing, and nothing is taken for what it is not: what is neither of the known things
is refused with what was looked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gym_capture.data.log_directories import holds_logs
from gym_capture.data.nemo_gym import rollout_sizes
from gym_capture.errors import ConfigError
from gym_capture.inspector.source import Options, Source

_KNOWN: Final = (
    "a graph's records (segment-*.log, or shard-* with them), a job's directory (job.json), built trajectories "
    "(part-*.parquet) or NeMo Gym's captures (*.tokens.jsonl)"
)


def open_path(path: Path, options: Options = Options()) -> Source:
    """Opens what a path leads to. Raises `ConfigError`."""
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    try:
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
