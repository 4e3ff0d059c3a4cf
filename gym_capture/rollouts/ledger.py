"""What a rollout job has done so far, on disk: one directory, one writer.

Invariant: `rollouts.jsonl` holds at most one line for each rollout id, and only of rollouts that are over; a line is
on disk before `add_row` returns. Whatever instant the job dies at, opening the directory again gives exactly the rows
that were added: a last line that was cut is removed, a line in the middle that cannot be read is an error.

Files: `job.json` (what the job is; another job is refused), `rollouts.jsonl` (one `RolloutRow` a line),
`failures.jsonl` (one `FailureRow` for each failed attempt), `lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Literal, Self, TypeVar

from gym_capture.durable_files import replace_file, sync_directory
from gym_capture.errors import ConfigError, RecordError

_Row = TypeVar("_Row")

ROWS_FILE: Final = "rollouts.jsonl"
FAILURES_FILE: Final = "failures.jsonl"
_JOB_FILE: Final = "job.json"
_OPTIONS: Final = {"job_id": "--job-id", "samples": "--samples", "tasks": "--tasks (or --generate and --seed)"}
"""Where `gym-capture rollouts run` takes what a job is from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout that is over. A failed one has reward 0 and says why."""

    rollout_id: str
    task_id: str
    group_id: str
    """The rollouts that GRPO compares: those of one task."""
    sample: int
    status: Literal["finished", "failed"]
    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    n_calls: int
    attempts: int
    error: str | None = None
    detail: str | None = None
    retryable: bool = True
    """Whether another attempt at a failed rollout could end differently."""
    answer: str | None = None
    started_at: float
    """Unix seconds of the start of the last attempt."""
    wall_s: float
    """Seconds that the last attempt took, without the wait for a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """One attempt that failed."""

    rollout_id: str
    task_id: str
    sample: int
    attempt: int
    """From 1."""
    reason: str
    detail: str
    retryable: bool
    n_calls: int
    at: float
    """Unix seconds."""


class Ledger:
    """An open job directory. Use as a context manager."""

    def __init__(self, directory: Path, job: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if the directory belongs to another job or is in use, `RecordError` if it is damaged."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / "lock").open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"a rollout job cannot be kept in {directory}: {error.strerror}") from None
        self._directory = directory
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"{directory}: another rollout job is writing here; wait for it, or choose another --out"
            ) from None
        try:
            self._check_job(job)
            self.rows = {row.rollout_id: row for row in _read(directory / ROWS_FILE, RolloutRow)}
            self.failures = _read(directory / FAILURES_FILE, FailureRow)
            self._rows_file = (directory / ROWS_FILE).open("a", encoding="utf-8")
            self._failures_file = (directory / FAILURES_FILE).open("a", encoding="utf-8")
            sync_directory(directory)
        except BaseException:
            self._lock.close()
            raise

    def add_row(self, row: RolloutRow) -> None:
        self.rows[row.rollout_id] = row
        _append(self._rows_file, row)

    def add_failure(self, failure: FailureRow) -> None:
        self.failures.append(failure)
        _append(self._failures_file, failure)

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Takes the rows of rollouts that are to run again out of the file."""
        if not rollout_ids:
            return
        for rollout_id in rollout_ids:
            del self.rows[rollout_id]
        replace_file(self._directory / ROWS_FILE, "".join(map(_line, self.rows.values())).encode())
        self._rows_file.close()
        self._rows_file = (self._directory / ROWS_FILE).open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rows_file.close()
        self._failures_file.close()
        self._lock.close()

    def _check_job(self, job: Mapping[str, Any]) -> None:
        path = self._directory / _JOB_FILE
        if not path.exists():
            replace_file(path, json.dumps(job, indent=2, sort_keys=True).encode() + b"\n")
            return
        found = read_job(self._directory) or {}
        differing = sorted(key for key in {*job, *found} if job.get(key) != found.get(key))
        if differing:
            options = ", ".join(_OPTIONS.get(key, key) for key in differing)
            raise ConfigError(
                f"{self._directory} holds a job with other {', '.join(differing)}: give {options} the values it was "
                "started with to resume it, or choose another directory with --out"
            )


def read_job(directory: Path) -> dict[str, Any] | None:
    """What the job in a directory is; None if there is none. Raises `RecordError` if that cannot be read."""
    path = directory / _JOB_FILE
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict) or "job_id" not in found:
        raise _damaged(path, "it is not a job")
    return found


def _damaged(path: Path, why: str) -> RecordError:
    return RecordError(
        f"{path} cannot be read: {why}. Choose another directory with --out, or remove that one", field=path.name
    )


def _line(row: RolloutRow | FailureRow) -> str:
    return json.dumps(asdict(row), separators=(",", ":")) + "\n"


def _append(file: IO[str], row: RolloutRow | FailureRow) -> None:
    file.write(_line(row))
    file.flush()
    os.fsync(file.fileno())


def _read(path: Path, make: Callable[..., _Row]) -> list[_Row]:
    """The rows of a file; cuts off a last line that has no newline, which no finished write leaves."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            rows.append(make(**json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise RecordError(f"{path}, line {number}: cannot be read: {error}", field=f"line {number}") from None
    return rows
