"""A second copy of a log, kept by a peer on another node.

Invariant: while a peer is there, a write that was acknowledged is durable in both copies, byte for byte. When the node
of the log is lost, the log opened anew elsewhere begins with what the peer has. Losing the peer stops nothing: the log
goes on alone, says so (`is_attached`), and fills a new peer up as soon as there is one.

Flow: `restore` before the log is read: it takes the peer's copy if that is the newer one -> `attach` once it was
repaired: the peer becomes equal to it -> every write is sent while the local disk works, and waited for after it.

Which copy is newer: each opening of the log gives both copies the next *generation*. A log that went on elsewhere has a
higher one than what it left behind, which must not be taken for the log when it is opened there again. A peer listens
only to the highest generation that has claimed it, so what is left of an earlier owner cannot write any more: neither
there, nor, as it waits for that, anything that it would acknowledge.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from gym_capture.durable_files import replace_file, sync_directory
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.stores.frames import SEGMENT_HEADER_BYTES
from gym_capture.stores.segments import (
    delete_segment,
    lock_directory,
    make_directory,
    segment_numbers,
    segment_path,
)

logger = logging.getLogger(__name__)

_GENERATION: Final = "generation"
_CHUNK_BYTES: Final = 4 << 20


class MirrorLostError(GymCaptureError):
    """The peer does not answer, or its copy is not what it should be; never leaves this package."""


class MirrorTakenError(MirrorLostError):
    """The log was opened anew elsewhere, and the peer belongs to that one now."""


class Receiver(Protocol):
    """The peer's end. Every method raises `MirrorLostError` if it cannot be reached."""

    def claim(self, generation: int) -> None:
        """From now on, only what carries this generation is taken. Raises `MirrorTakenError` if a higher one was."""
        ...

    def generation(self) -> int:
        """Of the copy, which is whole."""
        ...

    def set_generation(self, generation: int) -> None: ...
    def inventory(self) -> dict[int, tuple[int, bytes]]:
        """Size and header of each segment."""
        ...

    def append(self, generation: int, number: int, offset: int, data: bytes) -> Callable[[], None]:
        """Begins to append to a segment that ends at `offset`; what it returns waits until that is durable."""
        ...

    def read(self, number: int, offset: int, size: int) -> bytes: ...
    def cut(self, generation: int, number: int, size: int) -> None:
        """Cuts a segment back to its first `size` bytes; 0: deletes it."""
        ...


class MirrorDirectory:
    """A `Receiver` on a directory of this machine: what a peer hosts."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = make_directory(directory)
        self._lock = lock_directory(self._directory)
        self._claimed = read_generation(self._directory)

    def claim(self, generation: int) -> None:
        if generation < self._claimed:
            raise MirrorTakenError(f"generation {self._claimed} has claimed this mirror, {generation} has not")
        self._claimed = generation

    def generation(self) -> int:
        return read_generation(self._directory)

    def set_generation(self, generation: int) -> None:
        write_generation(self._directory, generation)

    def inventory(self) -> dict[int, tuple[int, bytes]]:
        return _inventory(self._directory)

    def append(self, generation: int, number: int, offset: int, data: bytes) -> Callable[[], None]:
        self._check(generation)
        path = segment_path(self._directory, number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size != offset:
                raise MirrorLostError(f"segment {number} ends at {size} here, at {offset} in the log")
            _write_all(fd, data, offset)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if offset == 0:
            sync_directory(self._directory)
        return _done

    def read(self, number: int, offset: int, size: int) -> bytes:
        with segment_path(self._directory, number).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def cut(self, generation: int, number: int, size: int) -> None:
        self._check(generation)
        path = segment_path(self._directory, number)
        if not path.exists():
            return
        if size == 0:
            delete_segment(self._directory, number)
        else:
            os.truncate(path, size)

    def close(self) -> None:
        os.close(self._lock)

    def _check(self, generation: int) -> None:
        if generation != self._claimed:
            raise MirrorLostError(f"generation {self._claimed} has claimed this mirror, {generation} has not")


class Mirror:
    """The log's end. Used by the threads of one store.

    find: gives the peer to write to, starting it if need be, or None if there is no node for one. Asked again when the
    peer was lost, at most every `look_again_after_s` while there is none.
    newest: gives the peer that has the newest copy of the log, wherever it is; None if there is none.
    """

    def __init__(
        self,
        find: Callable[[], Receiver | None],
        *,
        newest: Callable[[], Receiver | None],
        look_again_after_s: float = 10.0,
    ) -> None:
        self._find = find
        self._newest = newest
        self._look_again_after_s = look_again_after_s
        self._peer: Receiver | None = None
        self._directory: Path | None = None
        """None: not attached yet."""
        self._generation = 0
        self._is_taken = False
        self._looked_at = 0.0
        self._lock = threading.RLock()

    @property
    def is_attached(self) -> bool:
        """Whether there is a second copy now."""
        return self._peer is not None

    def restore(self, directory: Path) -> None:
        """Takes the peer's copy if it is newer than what stands in `directory`.

        Raises `OSError` if the disk fails, `StoreUnavailableError` if the peer is lost meanwhile: what stands here may
        be old, so it is not opened instead.
        """
        try:
            self._restore(directory)
        except MirrorLostError as error:
            raise StoreUnavailableError(f"the mirror of the log cannot be read: {error.message}") from error

    def _restore(self, directory: Path) -> None:
        peer = self._newest()
        if peer is None:
            return
        generation = peer.generation()
        if generation <= read_generation(directory):
            return
        for number in segment_numbers(directory):
            delete_segment(directory, number)
        for number, (size, _) in sorted(peer.inventory().items()):
            with segment_path(directory, number).open("xb") as file:
                for offset in range(0, size, _CHUNK_BYTES):
                    file.write(peer.read(number, offset, min(_CHUNK_BYTES, size - offset)))
                file.flush()
                os.fsync(file.fileno())
        sync_directory(directory)
        write_generation(directory, generation)  # last: a restart before it restores again
        logger.warning("the log in %s was restored from its mirror", directory)

    def attach(self, directory: Path) -> None:
        """Makes the peer's copy equal to the log in `directory`, as the next generation. Raises `OSError`."""
        with self._lock:
            self._directory = directory
            self._generation = read_generation(directory) + 1
            write_generation(directory, self._generation)
            self._look()

    def append(self, number: int, offset: int, data: bytes) -> Callable[[], None]:
        """Sends what is being written; what it returns waits until it is durable at the peer, if there is one.

        Both raise `OSError` once the log was opened anew elsewhere.
        """
        with self._lock:
            if self._is_taken:
                raise _taken()
            if self._directory is None:
                return _done  # `attach` will send it
            if self._peer is None and time.monotonic() - self._looked_at >= self._look_again_after_s:
                return self._locked_look  # once it stands on this disk, it is sent with everything else
            if self._peer is None:
                return _done
            try:
                wait = self._peer.append(self._generation, number, offset, data)
            except MirrorLostError:
                return self._locked_look

        def waited() -> None:
            try:
                wait()
            except MirrorLostError:
                self._locked_look()

        return waited

    def cut(self, number: int, size: int) -> None:
        """The same cuts and deletions in the copy."""
        with self._lock:
            if self._peer is not None:
                try:
                    self._peer.cut(self._generation, number, size)
                except MirrorLostError:
                    self._lost()

    def _locked_look(self) -> None:
        with self._lock:
            self._look()

    def _look(self) -> None:
        """Finds a peer and fills it up; goes on without one if there is none.

        Raises `OSError` if this log is not the newest any more: then nothing may be acknowledged.
        """
        assert self._directory is not None
        self._looked_at = time.monotonic()
        self._peer = None
        try:
            peer = self._find()
            if peer is not None:
                peer.claim(self._generation)
                _fill(peer, self._directory, self._generation)
                peer.set_generation(self._generation)  # last: what is not whole must not look newest
                self._peer = peer
                return
        except MirrorTakenError as error:
            self._is_taken = True
            raise _taken() from error
        except MirrorLostError as error:
            logger.warning("a mirror of the log in %s was lost while it was filled: %s", self._directory, error)
        self._lost()

    def _lost(self) -> None:
        self._peer = None
        logger.error("the log in %s has no mirror: it is on one node only", self._directory)


def read_generation(directory: Path) -> int:
    """0 for a directory that has never held a log with a mirror."""
    try:
        return int((directory / _GENERATION).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def write_generation(directory: Path, generation: int) -> None:
    replace_file(directory / _GENERATION, str(generation).encode())


def _fill(peer: Receiver, directory: Path, generation: int) -> None:
    """Sends what the peer lacks, and removes what it has too much."""
    there, here = peer.inventory(), _inventory(directory)
    for number in there.keys() - here.keys():
        peer.cut(generation, number, 0)
    for number, (size, header) in sorted(here.items()):
        size_there, header_there = there.get(number, (0, b""))
        if header_there != header or size_there > size:
            # Another segment of that number, or one that was cut back here while the peer could not hear of it.
            size_there = size if header_there == header else 0
            peer.cut(generation, number, size_there)
        try:
            with segment_path(directory, number).open("rb") as file:
                file.seek(size_there)
                for offset in range(size_there, size, _CHUNK_BYTES):
                    peer.append(generation, number, offset, file.read(min(_CHUNK_BYTES, size - offset)))()
        except FileNotFoundError:
            peer.cut(generation, number, 0)  # compacted meanwhile


def _inventory(directory: Path) -> dict[int, tuple[int, bytes]]:
    found: dict[int, tuple[int, bytes]] = {}
    for number in segment_numbers(directory):
        try:
            with segment_path(directory, number).open("rb") as file:
                found[number] = (os.fstat(file.fileno()).st_size, file.read(SEGMENT_HEADER_BYTES))
        except FileNotFoundError:
            continue
    return found


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _taken() -> OSError:
    return OSError(errno.ESTALE, "this log was opened anew on another node, with its mirror")


def _done() -> None:
    pass
