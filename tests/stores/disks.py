"""Disks that are slow, full or broken, behind the seam that `LogStore.open` takes."""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Iterator


class GatedSync:
    """A sync that can be held: it returns when it is let go, never earlier."""

    def __init__(self) -> None:
        self.calls = 0
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()

    def __call__(self, fd: int) -> None:
        self.calls += 1
        self._reached.set()
        assert self._open.wait(timeout=60)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it, syncs do not return."""
        self._reached.clear()
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def reached(self) -> None:
        """Until a sync is waiting."""
        assert await asyncio.to_thread(self._reached.wait, 60)


class FullDisk:
    """Writes that fit until `room_bytes` are used up; the last one is cut short, as a real one is."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        if self.room_bytes <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.pwrite(fd, data[: self.room_bytes], offset)
        self.room_bytes -= written
        return written


class FailingSync:
    """A sync that fails as often as it is told to."""

    def __init__(self) -> None:
        self.failures = 0

    def __call__(self, fd: int) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EIO, "Input/output error")
