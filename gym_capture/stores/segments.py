"""The files of one log directory: the lock, the segment that is appended to, and those that are only read.

Invariant: what `SegmentWriter.append` returned is on disk; what it raised on is not in the log. A segment whose write
or sync failed is cut back to its last durable byte and not appended to again: after a failed sync nobody knows what
the file's cached pages are worth.

Files are private to the owner: records hold what agents said. Only one process may hold a directory.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from gym_capture.durable_files import sync_directory
from gym_capture.errors import CorruptLogError, StoreUnavailableError
from gym_capture.regular_files import open_regular
from gym_capture.stores.frames import (
    SEGMENT_HEADER_BYTES,
    Draft,
    SegmentHeader,
    pack_frame,
    pack_segment_header,
    read_segment_header,
)

_T = TypeVar("_T")

_PREFIX: Final = "segment-"
_SUFFIX: Final = ".log"
_SEGMENT: Final = re.compile(rf"{_PREFIX}([0-9]{{10,18}}){re.escape(_SUFFIX)}")
_LOCK: Final = "lock"
_MAX_OPEN_SEGMENTS: Final = 64


class Location(NamedTuple):
    """Where a record stands."""

    segment: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Disk:
    """The three calls that can fail when a disk is full, slow or broken; a test replaces them."""

    write: Callable[[int, memoryview, int], int] = os.pwrite
    sync: Callable[[int], None] = os.fdatasync
    truncate: Callable[[int, int], None] = os.ftruncate


class Copy(Protocol):
    """Where what is written goes a second time (`gym_capture.stores.mirror`)."""

    def append(self, number: int, offset: int, data: bytes) -> Callable[[], None]:
        """Begins to append to a segment; what it returns waits until that is durable there too."""
        ...

    def cut(self, number: int, size: int) -> None:
        """A segment was cut back to `size` bytes; 0: deleted."""
        ...


# --- the directory -----------------------------------------------------------------------------------------------


def make_directory(directory: str | Path) -> Path:
    path = Path(directory).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def lock_directory(directory: Path) -> int:
    """Takes the directory for this process; returns the descriptor that holds it until it is closed."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise StoreUnavailableError(
            f"the log directory {directory} is in use by process {holder}: of a graph that serves, "
            "`gym-capture build-job` builds; else give each store a directory of its own, or stop that process "
            "(`gym-capture state stop`, if it is a graph's)"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{_PREFIX}{number:010d}{_SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """The segments of a directory, oldest first."""
    # Not `glob`, which takes a directory that may not be read for an empty one.
    return sorted(int(found[1]) for found in map(_SEGMENT.fullmatch, os.listdir(directory)) if found is not None)


def delete_segment(directory: Path, number: int) -> None:
    segment_path(directory, number).unlink()
    sync_directory(directory)


# --- writing -----------------------------------------------------------------------------------------------------


class SegmentWriter:
    """Appends batches of records. Used by one thread at a time."""

    def __init__(
        self, directory: Path, *, segment_bytes: int, fsync: bool, disk: Disk, copy: Copy | None = None
    ) -> None:
        self._directory = directory
        self._copy = copy
        self._next_number = max(segment_numbers(directory), default=0) + 1
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._disk = disk
        self._fd: int | None = None
        self._number = 0
        self._seed = 0
        self._size = 0
        self._is_broken = False

    def append(self, drafts: Sequence[Draft], *, epoch_floor: int) -> list[Location]:
        """Writes a batch and makes it durable. `epoch_floor`: above every epoch in the log so far.

        Raises `OSError` if it could not; then none of the batch is in the log.
        """
        if self._is_broken:
            raise OSError(errno.EIO, "the log could not be cut back after a failed write; open it again")
        if self._fd is None:
            self._start(epoch_floor)
        elif self._size >= self._segment_bytes:
            self.close()
            self._start(epoch_floor)
        assert self._fd is not None
        frames = [pack_frame(draft, seed=self._seed, starts_batch=index == 0) for index, draft in enumerate(drafts)]
        try:
            self._write(b"".join(frames))
        except OSError:
            self._cut_back()
            raise
        locations: list[Location] = []
        for frame in frames:
            locations.append(Location(self._number, self._size, len(frame)))
            self._size += len(frame)
        return locations

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _start(self, epoch_floor: int) -> None:
        number, seed = self._next_number, secrets.randbits(32)
        path = segment_path(self._directory, number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._fd, self._number, self._seed, self._size = fd, number, seed, 0
        try:
            self._write(pack_segment_header(SegmentHeader(seed, epoch_floor)))
            if self._fsync:
                sync_directory(self._directory)
        except OSError:
            self.close()
            path.unlink()
            self._cut_copy(0)
            raise
        self._size = SEGMENT_HEADER_BYTES
        self._next_number += 1

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        copied = None if self._copy is None else self._copy.append(self._number, self._size, data)
        view, offset = memoryview(data), self._size
        while view:
            written = self._disk.write(self._fd, view, offset)
            view, offset = view[written:], offset + written
        if self._fsync:
            self._disk.sync(self._fd)
        if copied is not None:
            copied()

    def _cut_copy(self, size: int) -> None:
        if self._copy is not None:
            self._copy.cut(self._number, size)

    def _cut_back(self) -> None:
        assert self._fd is not None
        try:
            if self._size == SEGMENT_HEADER_BYTES:
                segment_path(self._directory, self._number).unlink()
                self._cut_copy(0)
            else:
                self._disk.truncate(self._fd, self._size)
                if self._fsync:
                    self._disk.sync(self._fd)
                self._cut_copy(self._size)
        except OSError:
            self._is_broken = True
        self.close()


# --- reading -----------------------------------------------------------------------------------------------------


class SegmentReader:
    """Reads records by their location. Used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, tuple[int, int]] = {}
        """Descriptor and checksum seed of each segment that was read from."""

    def read(self, location: Location) -> tuple[bytes, int]:
        """The bytes of a frame, fewer if the segment ends before it, and the seed of its checksums."""
        fd, seed = self._descriptor(location.segment)
        return os.pread(fd, location.size, location.offset), seed

    def forget(self, number: int) -> None:
        """Closes a segment that is about to be deleted."""
        if number in self._open:
            os.close(self._open.pop(number)[0])

    def close(self) -> None:
        for number in list(self._open):
            self.forget(number)

    def _descriptor(self, number: int) -> tuple[int, int]:
        known = self._open.get(number)
        if known is not None:
            return known
        if len(self._open) == _MAX_OPEN_SEGMENTS:
            self.forget(next(iter(self._open)))
        fd = open_regular(segment_path(self._directory, number))
        header = read_segment_header(os.pread(fd, SEGMENT_HEADER_BYTES, 0))
        if header is None:
            os.close(fd)
            raise CorruptLogError(f"segment {number} of {self._directory} lost its header")
        self._open[number] = (fd, header.seed)
        return self._open[number]


class ReadThread:
    """One thread that reads, so that the event loop never waits for the disk. Work is done in the order of `run`."""

    def __init__(self, directory: Path) -> None:
        self._reader = SegmentReader(directory)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gym-capture-log-reader")
        self._is_closed = False

    async def run(self, work: Callable[[SegmentReader], _T]) -> _T:
        """Raises `StoreUnavailableError` if the disk does not answer."""
        if self._is_closed:
            raise StoreUnavailableError("this store is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._reader)
        except OSError as error:
            raise StoreUnavailableError(f"the log cannot be read: {error}") from error

    async def close(self) -> None:
        await self.run(SegmentReader.close)
        self._is_closed = True
        self._thread.shutdown()
