"""Where the logs of a graph are: in the directory that its state was kept in.

Invariant: nothing is opened, locked or changed here. A directory that may not be read is not taken for an empty one.
"""

from __future__ import annotations

from pathlib import Path

from gym_capture.data.sources import SourceSpec
from gym_capture.errors import ConfigError
from gym_capture.stores.segments import segment_numbers


def log_directories(directory: Path) -> list[Path]:
    """The log directory itself, or all log directories below it, one level down. Raises `ConfigError` without any."""
    found = holds_logs(directory)
    if not found:
        raise ConfigError(f"{directory} holds no records: name the directory that the graph kept them in")
    return found


def holds_logs(directory: Path) -> list[Path]:
    """As `log_directories`; none, if there is none. Raises `ConfigError` if one may not be read."""
    try:
        return [path for path in (directory, *sorted(directory.glob("*/"))) if path.is_dir() and segment_numbers(path)]
    except PermissionError as error:
        raise ConfigError(f"{error.filename} may not be read: {error.strerror}") from None


def logs_in_one_process(directory: Path) -> SourceSpec:
    """The source of all logs of a directory, for one worker: `logs.Logs`."""
    return SourceSpec(import_path="gym_capture.data.logs:Logs.open", kwargs={"directory": str(directory.absolute())})
