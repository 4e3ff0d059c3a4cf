"""What trainers and people say of calls and tokens: lines of JSON beside the records, only ever added to.

Invariant: a line that `add` returned from is on disk, whole; a line that was cut, or that nobody understands, is passed
over. Nothing is changed or taken away. The file has a largest size: what would go beyond it is refused. Any number of
processes may add at once.

    {"rollout": "r", "call": "c", "token": 3, "name": "note", "note": "odd", "by": "ada", "at": 1795000000.5}
    {"rollout": "r", "call": "c", "name": "entropy", "values": [0.5, null, 1.25], "by": "trainer step 7", "at": ...}

`token` and the places of `values` count the call's generated ids, from 0; without either a line is of the call. Of
several lines of one name for the same token, the latest counts.

Flow: `Annotator.add` -> `AnnotationFile.of(rollout)` reads what was added behind the last look, and keeps in memory
only where the lines of each rollout stand. Of a rollout that very much is said of, what was said last is read.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from gym_capture.data.added_lines import AddedLines
from gym_capture.durable_files import sync_directory
from gym_capture.errors import ConfigError, GymCaptureError, RecordError
from gym_capture.regular_files import open_regular
from gym_capture.rollout_ids import check_rollout_id

__all__ = ["Annotation", "Annotator"]

FILE: Final = "_annotations.jsonl"
"""Readers of Parquet folders pass over names that begin like this."""
MAX_FILE_BYTES: Final = 1 << 30
MAX_TEXT: Final = 4_000
"""Characters of a note; of the other texts a tenth."""
MAX_VALUES: Final = 1_000_000
_LONGEST_LINE: Final = 32 << 20
_MOST_LINES: Final = 20_000
_MOST_BYTES: Final = 16 << 20
"""Of one rollout that are read, the latest of them; one line at least."""
_PLACE: Final = 2
"""Numbers of a place: begin, size."""
_MOST_INTEGER: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A value or a note, of a call or of tokens of it."""

    rollout: str
    call: str
    name: str
    token: int | None = None
    """Which of the call's generated ids; None: the call, or with `values` all of them."""
    value: float | None = None
    values: Sequence[float | None] | None = None
    """One for each generated id of the call; None where there is none."""
    note: str | None = None
    by: str = ""
    at: float = 0.0
    """Unix seconds; 0: now."""

    def __post_init__(self) -> None:
        check_rollout_id(self.rollout)
        for name, limit in (("call", MAX_TEXT // 10), ("name", MAX_TEXT // 10), ("by", MAX_TEXT // 10)):
            self._check_text(name, getattr(self, name), limit)
        if not self.call or not self.name:
            raise RecordError("an annotation names a call, and what it says of it", field="call")
        if self.token is not None and (type(self.token) is not int or not 0 <= self.token < MAX_VALUES):
            raise RecordError(f"token must be a number from 0 on: got {self.token!r:.40}", field="token")
        _check_number("at", self.at)
        given = [name for name in ("value", "values", "note") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RecordError(f"an annotation has either a value, values or a note: got {given}", field="value")
        if self.note is not None:
            self._check_text("note", self.note, MAX_TEXT)
        if self.value is not None:
            _check_number("value", self.value)
        if self.values is not None:
            if len(self.values) > MAX_VALUES or self.token is not None:
                raise RecordError(f"values are at most {MAX_VALUES:,}, of the whole call", field="values")
            for value in self.values:
                if value is not None:
                    _check_number("values", value)

    def _check_text(self, name: str, value: object, limit: int) -> None:
        if not isinstance(value, str) or len(value) > limit:
            raise RecordError(f"{name} must be text of at most {limit:,} characters", field=name)
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise RecordError(f"{name} must be text that can be written: it has halves of characters", field=name)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: what is not said is left out."""
        found = {name: getattr(self, name) for name in self.__slots__}
        if self.values is not None:
            found["values"] = list(self.values)
        if not self.at:
            del found["at"]
        return {name: value for name, value in found.items() if value is not None and value != ""}


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, float) or (type(value) is int and abs(value) < _MOST_INTEGER)
    if not is_number or not math.isfinite(value):
        raise RecordError(f"{name} must be finite numbers: got {value!r:.40}", field=name)


class Annotator:
    """Adds to the file of a directory."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = directory / FILE
        self._clock = clock

    def add(self, annotations: Iterable[Annotation]) -> int:
        """All of them with one wait for the disk; returns how many. Raises `ConfigError` if they cannot be written:
        then none is there."""
        lines = [orjson.dumps({"at": self._clock(), **each.as_dict()}) + b"\n" for each in annotations]
        if not lines:
            return 0
        try:
            self._append(b"".join(lines))
        except OSError as error:
            raise ConfigError(f"annotations cannot be written to {self._path}: {error.strerror}") from None
        return len(lines)

    def _append(self, data: bytes) -> None:
        is_new = not self._path.exists()
        # A link that somebody put there would have this write into whatever the link leads to.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            fcntl.flock(fd, fcntl.LOCK_EX)  # for as long as one write takes
            end = os.fstat(fd).st_size
            if end and os.pread(fd, 1, end - 1) != b"\n":  # whoever wrote that was cut off: its line is its own
                data = b"\n" + data
            if end + len(data) > MAX_FILE_BYTES:
                raise ConfigError(
                    f"{self._path} would have more than {MAX_FILE_BYTES:,} bytes: move it away to begin another"
                )
            try:
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[os.write(fd, unwritten) :]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, end)
                raise
        finally:
            os.close(fd)
        if is_new:
            sync_directory(self._path.parent)


class AnnotationFile:
    """Reads the file of a directory. For any number of threads."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._places: dict[str, array[int]] = {}
        self._lines = AddedLines(self._path, self._note, longest=_LONGEST_LINE, begin_again=self._forget)
        self._lock = threading.Lock()
        self._differences: dict[str, tuple[float, int]] = {}

    def of(self, rollout_id: str) -> list[Annotation]:
        """Of one rollout, in the order in which they were added. Raises `ConfigError` if the file cannot be read."""
        with self._lock:
            with self._explained():
                self._lines.look()
            places = list(_latest(self._places.get(rollout_id, array("Q"))))
        found: list[Annotation | None] = []
        with self._explained():
            fd = open_regular(self._path)
            try:
                found += [_read(os.pread(fd, size, begin)) for begin, size in places]
            finally:
                os.close(fd)
        # It may be another file by now.
        return [each for each in found if each is not None and each.rollout == rollout_id]

    def news(self) -> Mapping[str, float]:
        """Looks; the mean size of what is called `difference`, of rollouts that have such values. Raises as `of`."""
        with self._lock:
            with self._explained():
                self._lines.look()
            return {rollout: total / count for rollout, (total, count) in self._differences.items() if count}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            return  # nothing is said, or not any more
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}") from None

    def _forget(self) -> None:
        self._places.clear()
        self._differences.clear()

    def _note(self, begin: int, line: bytes) -> None:
        """Only the rollout is looked for; what else is wrong in the line shows when it is read."""
        rollout, name = _named(line)
        if rollout is None:
            return
        self._places.setdefault(rollout, array("Q")).extend((begin, len(line)))
        found = _read(line) if name == DIFFERENCE else None
        if found is not None:
            values = [abs(value) for value in (found.values or [found.value]) if value is not None]
            total, count = self._differences.get(found.rollout, (0.0, 0))
            self._differences[found.rollout] = (total + sum(values), count + len(values))


def _latest(places: array[int]) -> Iterator[tuple[int, int]]:
    """The last places, as many as are read, in order."""
    begins, sizes = places[::_PLACE], places[1::_PLACE]
    first = len(begins)
    left = _MOST_BYTES
    while first > max(len(begins) - _MOST_LINES, 0) and (left >= sizes[first - 1] or first == len(begins)):
        first -= 1
        left -= sizes[first]
    return zip(begins[first:], sizes[first:], strict=True)


DIFFERENCE: Final = "difference"
"""The name for a trainer's log probability less the recorded one."""
ENTROPY: Final = "entropy"
CLIPPED: Final = "clipped"
"""1 where the ratio was outside of its limits."""


def _named(line: bytes) -> tuple[str | None, object]:
    """The rollout and the name in a line; None: it is no annotation."""
    try:
        found = orjson.loads(line)
    except ValueError:
        return None, None
    rollout = found.get("rollout") if isinstance(found, dict) else None
    return (rollout, found.get("name")) if isinstance(rollout, str) else (None, None)


def _read(line: bytes) -> Annotation | None:
    try:
        found = orjson.loads(line)
        return Annotation(**{name: value for name, value in found.items() if name in Annotation.__slots__})
    except (ValueError, TypeError, AttributeError, GymCaptureError):
        return None
