"""One log directory for a build: read, and written to only once what was built is retired.

Invariant: one process owns the log, from the opening to the close. Reading it is cheap (`stores.log_reader`); the store
that can write to it knows every call, so it is opened only for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gym_capture.capture.operations import Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.stores.log import LogStore
from gym_capture.stores.log_reader import LogReader


class OneLog:
    """Lives on one event loop, which waits for the disk when it reads."""

    def __init__(self, directory: Path) -> None:
        """Raises what opening a `LogReader` raises."""
        self._directory = directory
        self._reader: LogReader | None = LogReader(directory)
        self._store: LogStore | None = None

    async def rollout_ids(self) -> Sequence[str]:
        return self._reader.rollout_ids() if self._reader else await (await self._writable()).rollout_ids()

    async def knows(self, rollout_id: str) -> bool:
        """Whether something is recorded of it."""
        return rollout_id in (self._reader or await self.rollout_ids())

    async def standings(self) -> Sequence[Standing]:
        return self._reader.standings() if self._reader else await (await self._writable()).standings()

    async def freeze_encoded(self, rollout_id: str) -> bytes:
        if self._reader:
            return self._reader.freeze_encoded(rollout_id)
        return await (await self._writable()).freeze_encoded(rollout_id)

    async def write(self, operation: Operation) -> int:
        return await (await self._writable()).write(operation)

    async def close(self) -> None:
        """Lets go of the directory."""
        if self._reader:
            self._reader.close()
        if self._store:
            await self._store.close()

    async def _writable(self) -> LogStore:
        if self._store is None:
            if self._reader:
                self._reader.close()
                self._reader = None
            self._store = await LogStore.open(self._directory)
        return self._store
