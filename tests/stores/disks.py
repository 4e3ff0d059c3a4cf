"""Disks that are slow, full or broken, behind the seam that `LogStore.open` takes."""

import asyncio
import contextlib
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
