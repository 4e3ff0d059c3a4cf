"""Lines of a file that others add to.

Invariant: each line that is whole is told once, in order, with where it begins; one that is still being written waits.
Nothing takes more memory than the longest line that is wanted: a longer one is passed over. Another file under the same
name, or one that was cut or written again, is begun from its beginning.

Flow: `look` -> is it the file of the look before? -> what is behind the last whole line, piece by piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gym_capture.regular_files import open_regular

_READ_BYTES: Final = 1 << 20
_COMPARED: Final = 64
"""Bytes before the end of the last look: those of another file differ, or are not there."""


class AddedLines:
    """For one thread at a time."""

    def __init__(
        self, path: Path, note: Callable[[int, bytes], None], *, longest: int, begin_again: Callable[[], None]
    ) -> None:
        """`note`: is told where a line begins, and the line. `begin_again`: is told that what was noted is of a file
        that is not there any more."""
        self._path = path
        self._note = note
        self._longest = longest
        self._begin_again = begin_again
        self._inode = 0
        self._end = 0
        self._before = b""
        self._is_too_long = False
        """Whether `_end` is inside of a line that is passed over."""

    def look(self) -> None:
        """Notes the lines that were added. Raises as `open_regular`."""
        fd = open_regular(self._path)
        try:
            inode = os.fstat(fd).st_ino
            if inode != self._inode or not self._goes_on(fd):
                self._begin_again()
                self._inode, self._end, self._is_too_long = inode, 0, False
            try:
                self._read_on(fd)
            finally:
                begin = max(self._end - _COMPARED, 0)
                self._before = os.pread(fd, self._end - begin, begin)
        finally:
            os.close(fd)

    def _goes_on(self, fd: int) -> bool:
        size = len(self._before)
        return os.pread(fd, size, self._end - size) == self._before

    def _read_on(self, fd: int) -> None:
        rest = bytearray()
        while data := os.pread(fd, _READ_BYTES, self._end + len(rest)):
            begin = 0
            while (end := data.find(b"\n", begin)) >= 0:
                line = bytes(rest) + data[begin:end] if rest else data[begin:end]
                if not self._is_too_long:
                    self._note(self._end, line)
                self._end += len(line) + 1
                self._is_too_long = False
                rest.clear()
                begin = end + 1
            rest += data[begin:]
            if len(rest) > self._longest:
                self._is_too_long = True
                self._end += len(rest)
                rest.clear()
