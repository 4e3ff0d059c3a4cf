"""Opening files that others put into a directory.

Invariant: opening never waits and never reads without end. What is not a regular file - a FIFO that nobody writes to,
a device, a directory, a link to one of them - is an `OSError` that says what it is, like a file that may not be read,
and one that is larger than the memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


_LEAST: Final = 4096


def open_regular(path: str | Path) -> int:
    """A descriptor to read a regular file with. Raises `OSError`, `FileNotFoundError` if there is none."""
    # Before it is opened: to open a device can be an act in itself.
    _check(os.stat(path), path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | Path) -> bytes:
    """All of a regular file. Raises as `open_regular`."""
    fd = open_regular(path)
    try:
        pieces: list[bytes] = []
        left = os.fstat(fd).st_size
        # A read makes room for all that it asks for: to find the end with a second one as large doubled what it takes.
        while piece := os.read(fd, max(left, _LEAST)):
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except MemoryError:
        raise OSError(errno.ENOMEM, "does not fit into memory", str(path)) from None
    finally:
        os.close(fd)


def _check(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))
