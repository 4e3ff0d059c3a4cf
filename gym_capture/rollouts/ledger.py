"""The state of a rollout job, on disk: one directory, one writer.

Invariant: `rollouts.jsonl` holds at most one line for each rollout, and only of rollouts that are over; a line is on
disk before `add_row` returns. An attempt is on disk before it plays, so no number of one is given twice. Whatever
instant the job dies at, opening the directory again gives exactly the rows that were added: a last line that was cut is
removed, a line in the middle that cannot be read is an error. A line that a full disk does not take leaves nothing
behind.

Files: `job.json` (what the job is; another job is refused, with what differs), `attempts.jsonl` (one `AttemptRow` for
each that began), `failures.jsonl` (one `FailureRow` for each that failed), `rollouts.jsonl` (one `RolloutRow` a line),
`lock`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Literal, NamedTuple, Self, TypeAlias, TypeVar

from gym_capture.durable_files import replace_file, sync_directory
from gym_capture.errors import ConfigError, RecordError
from gym_capture.reasons import AttemptFailure
from gym_capture.regular_files import read_regular

_Row = TypeVar("_Row", "RolloutRow", "AttemptRow", "FailureRow")

ROWS_FILE: Final = "rollouts.jsonl"
FAILURES_FILE: Final = "failures.jsonl"
ATTEMPTS_FILE: Final = "attempts.jsonl"
FORMAT_VERSION: Final = 2
"""Of the directory. Version 1, which did not say so, had one rollout id for all attempts."""
LOST: Final = frozenset({AttemptFailure.NODE_LOST, AttemptFailure.GRAPH_LOST})
"""Failures of attempts that were lost with what they ran on."""
_NO_END: Final = LOST | {AttemptFailure.NOT_CLEARED, AttemptFailure.ENVIRONMENT_START}
"""Failures of attempts whose agent came to no end, or did not begin."""
_JOB_FILE: Final = "job.json"
_KEPT: Final = ". The rollouts that were over until now are kept: make room, and start the job again to go on"
_LONGEST_DIFFERENCE: Final = 200
_MOST_DIFFERENCES: Final = 8

Place: TypeAlias = tuple[str, int]
"""Which rollout of a job: its task's id, and the number of the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout that is over. A failed one has no reward - none was earned, and 0 would be one - and says why."""

    rollout_id: str
    """That of the attempt that counts, by which its records are found."""
    task_id: str
    group_id: str
    """The rollouts that GRPO compares: those of one task."""
    sample: int
    status: Literal["finished", "failed"]
    reward: float | None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """The agent's own rewards of single calls, by call id. No part of the reward."""
    n_calls: int
    attempt: int
    """The number of the attempt that counts, from 1. Those before it failed, or were cut off with the job."""
    truncated: bool = False
    """The conversation outgrew the model's context. The rollout was scored as it stood by then."""
    error: str | None = None
    """An `AttemptFailure`, or a name of the harness's own."""
    detail: str | None = None
    failed_call: int | None = None
    """Which model call failed, or was one too many for the context, from 1; None if none did, or if that is not known.
    """
    retryable: bool = True
    """Whether another attempt at a failed rollout could end differently."""
    answer: str | None = None
    replayed_calls: int = 0
    """Its calls that were answered from the records of attempts that were cut."""
    diverged_at: int | None = None
    """Which of its calls, from 1, was generated, although those attempts had records left that none of its calls asked
    for; None: it repeated all of them, or came to its end before."""
    note: str | None = None
    """Trouble in the tear-down, without a consequence for the row."""
    recorded: Mapping[str, float] | None = None
    """What the graph had recorded of it when it was over: fields of `RolloutCounts`. None: not known, as in rows of
    earlier versions."""
    started_at: float
    """Unix seconds of the start of the attempt."""
    wall_s: float
    """Seconds that the attempt took, without the wait for a slot."""

    @property
    def place(self) -> Place:
        return self.task_id, self.sample


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """An attempt that began. If it has no other row, it was cut off with the job."""

    rollout_id: str
    """Its own: no two attempts share one."""
    task_id: str
    sample: int
    attempt: int
    """From 1."""
    at: float
    """Unix seconds."""

    @property
    def place(self) -> Place:
        return self.task_id, self.sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """One attempt that failed."""

    rollout_id: str
    """The attempt's own."""
    task_id: str
    sample: int
    attempt: int
    """From 1."""
    reason: str
    detail: str
    failed_call: int | None = None
    retryable: bool
    n_calls: int
    note: str | None = None
    at: float
    """Unix seconds."""

    @property
    def place(self) -> Place:
        return self.task_id, self.sample


class Ledger:
    """An open job directory. Use as a context manager."""

    def __init__(self, directory: Path, job: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if the directory belongs to another job, is in use or cannot be written, `RecordError`
        if it is damaged."""
        self._directory = directory
        self._opened: list[IO[bytes]] = []
        self._beginning: list[bytes] = []
        """Attempts that are not on disk yet."""
        try:
            with _writable(directory):
                directory.mkdir(parents=True, exist_ok=True)
                self._lock()
                self._check_job(job)
                self._rows_file = self._open(ROWS_FILE)
                self._failures_file = self._open(FAILURES_FILE)
                self._attempts_file = self._open(ATTEMPTS_FILE)
                sync_directory(directory)
            self.rows = {row.place: row for row in _read(directory / ROWS_FILE, RolloutRow)}
            self.failures = _read(directory / FAILURES_FILE, FailureRow)
            self.attempts: dict[Place, int] = {}
            """The number of the last attempt at each rollout that was begun."""
            begun: list[AttemptRow] = _read(directory / ATTEMPTS_FILE, AttemptRow)
            numbered: list[AttemptRow | FailureRow | RolloutRow] = [*begun, *self.failures, *self.rows.values()]
            for each in numbered:  # should one file be lost, no number comes twice
                self.attempts[each.place] = max(each.attempt, self.attempts.get(each.place, 0))
            self._failed = {(failure.place, failure.attempt): failure.reason for failure in self.failures}
        except BaseException:
            self._close()
            raise

    async def begin(self, attempt: AttemptRow) -> None:
        """Returns when it is on disk; those that begin in the same turn of the event loop share one write.

        Raises `ConfigError` as `add_row` does.
        """
        self._beginning.append(_line(attempt))
        self.attempts[attempt.place] = attempt.attempt
        await asyncio.sleep(0)
        if self._beginning:  # else another one of them wrote it
            self._append(self._attempts_file, b"".join(self._beginning))
            self._beginning.clear()

    def add_row(self, row: RolloutRow) -> None:
        """Raises `ConfigError` if it cannot be written: then it is not there."""
        self._append(self._rows_file, _line(row))
        self.rows[row.place] = row

    def add_failure(self, failure: FailureRow) -> None:
        """Raises `ConfigError` as `add_row` does."""
        self._append(self._failures_file, _line(failure))
        self.failures.append(failure)
        self._failed[failure.place, failure.attempt] = failure.reason

    def last_uncut(self, place: Place) -> int:
        """The number of the last attempt at a rollout whose agent came to an end; 0: none did. Those after it were cut,
        with the job, or with the node or the graph that they were played on; or their agent did not even begin."""
        attempt = self.attempts.get(place, 0)
        while attempt and self._failed.get((place, attempt), AttemptFailure.NODE_LOST) in _NO_END:  # no row: no end
            attempt -= 1
        return attempt

    def forget(self, places: Collection[Place]) -> None:
        """Takes the rows of rollouts that are to run again out of the file."""
        if not places:
            return
        for place in places:
            del self.rows[place]
        with _writable(self._directory, _KEPT):
            replace_file(self._directory / ROWS_FILE, b"".join(map(_line, self.rows.values())))
            self._opened.remove(self._rows_file)
            self._rows_file.close()
            self._rows_file = self._open(ROWS_FILE)

    def _append(self, file: IO[bytes], line: bytes) -> None:
        with _writable(self._directory, _KEPT):
            end = file.seek(0, os.SEEK_END)
            try:
                unwritten = memoryview(line)
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # else a later line would go on after half of this one
                raise

    def _lock(self) -> None:
        lock = self._open("lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._directory}: another rollout job is writing here; wait for it, or choose another --out"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
        os.fsync(lock.fileno())  # a disk that is full says so here, before anything is played

    def _open(self, name: str) -> IO[bytes]:
        file = (self._directory / name).open("ab", buffering=0)
        self._opened.append(file)
        return file

    def _close(self) -> None:
        for file in self._opened:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _check_job(self, job: Mapping[str, Any]) -> None:
        found = read_job(self._directory)
        if found is None:
            for name in (ROWS_FILE, ATTEMPTS_FILE):
                path = self._directory / name
                if path.is_file() and path.stat().st_size:
                    raise ConfigError(
                        f"{self._directory} holds {name} and no {_JOB_FILE}: nobody knows which job that is of; "
                        "bring that back, or choose another directory with --out"
                    )
            kept = {"format_version": FORMAT_VERSION, **job}
            text = json.dumps(kept, indent=2, sort_keys=True, default=str) + "\n"
            replace_file(self._directory / _JOB_FILE, text.encode())
            return
        differing = differences(found, job)
        if differing:
            shown = "; ".join(map(_cut, differing[:_MOST_DIFFERENCES]))
            more = len(differing) - _MOST_DIFFERENCES
            raise ConfigError(
                f"{self._directory} holds another job: {shown}{f'; and {more} more' if more > 0 else ''}. Its rows do "
                "not count for this one: give what differs the values that it was started with to resume it, or choose "
                "another directory with --out"
            )


def check_writable(directory: Path, cannot: str = "a rollout job cannot be kept in") -> None:
    """Raises `ConfigError` if nothing could be written there. Leaves nothing, and does not make the directory."""
    there = directory.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as probe:
            probe.write(b"\n")  # a disk that is full takes the name of a file, and no byte of it
    except OSError as error:
        raise ConfigError(f"{cannot} {directory}: {error.strerror}") from None


class Found(NamedTuple):
    """The findings of a look at a job's directory; nothing is changed by it."""

    differences: list[str]
    """From the job that is there, if there is one: `key: old -> new`."""
    over: int
    """Rollouts that have a row."""


def look(directory: Path, job: Mapping[str, Any]) -> Found:
    """Raises as `read_job`."""
    found = read_job(directory)
    path = directory / ROWS_FILE
    over = path.read_bytes().count(b"\n") if path.is_file() else 0
    return Found([] if found is None else differences(found, job), over)


_OTHER_TASKS = "tasks: other ones (count, seed, file, or an option of the environment)"
"""A job keeps a digest of its tasks only: these are what they come from."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences of two jobs, each as `key: old -> new` with its dotted key."""
    # The new one as it would be read back: tuples are lists, keys are text.
    before, after = dict(_flat(old)), dict(_flat(json.loads(json.dumps(new, default=str))))
    return [
        _OTHER_TASKS if key == "tasks" else f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for key in sorted({*before, *after})
        if _shown(before, key) != _shown(after, key) and not (key in before and before[key] == after.get(key))
    ]


def _flat(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in job.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "nothing"
    return json.dumps(values[key], ensure_ascii=False)


def read_job(directory: Path) -> dict[str, Any] | None:
    """The description of the job in a directory; None if there is none.

    Raises `RecordError` if that cannot be read, `ConfigError` if another version of this package played it.
    """
    path = directory / _JOB_FILE
    try:
        found = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict) or "job_id" not in found:
        raise _damaged(path, "it is not a job")
    version = found.pop("format_version", 1)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{directory} holds a job of another version of gym-capture: its format is {version}, this one plays "
            f"{FORMAT_VERSION}. Play in another directory; the {ROWS_FILE} in it can be built as it is"
        )
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_DIFFERENCE else f"{text[: _LONGEST_DIFFERENCE - 3]}..."


def _damaged(path: Path, why: str) -> RecordError:
    return RecordError(
        f"{path} cannot be read: {why}. To play there again, remove it, or choose another directory", field=path.name
    )


@contextmanager
def _writable(directory: Path, further: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"a rollout job cannot be kept in {directory}: {error.strerror}{further}") from None


def _line(row: RolloutRow | FailureRow | AttemptRow) -> bytes:
    """An answer that is no JSON, as its text."""
    return json.dumps(asdict(row), separators=(",", ":"), default=str).encode() + b"\n"


def _read(path: Path, make: Callable[..., _Row]) -> list[_Row]:
    """The rows of a file; cuts off a last line that has no newline, which no finished write leaves."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = make(**json.loads(line))
            if not isinstance(row.task_id, str) or (type(row.sample), type(row.attempt)) != (int, int):
                raise TypeError("task_id must be a string, sample and attempt whole numbers")
            rows.append(row)
        except (ValueError, TypeError, RecursionError) as error:
            raise RecordError(f"{path}, line {number}: cannot be read: {error}", field=f"line {number}") from None
    return rows
