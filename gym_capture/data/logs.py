"""The logs of a graph that does not run, as a source in one process.

Invariant: a log has one owner. This process holds the lock of each log directory, and repairs what a crash left as the
graph itself would. For many workers at once, one process each must own the logs: `log_source`, on Ray.

Flow: `Logs.open` finds the logs (`log_directories`) and opens a store on each -> a rollout is asked of the store whose
log knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from gym_capture.capture.operations import Clear, Drop, Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.capture.rollout_state import retired_error
from gym_capture.data.log_directories import log_directories
from gym_capture.stores.base import ListedStore
from gym_capture.stores.log import LogStore


class Logs(ListedStore):
    """A `RecordStore` over several logs. Lives on one event loop."""

    def __init__(self, opened: AsyncExitStack, store_of: dict[str, LogStore]) -> None:
        self._opened = opened
        self._store_of = store_of

    @classmethod
    async def open(cls, *, directory: str) -> Logs:
        """Raises what `log_directories` and `LogStore.open` raise."""
        store_of: dict[str, LogStore] = {}
        async with AsyncExitStack() as stack:
            for path in log_directories(Path(directory)):
                store = await LogStore.open(path)
                stack.push_async_callback(store.close)
                store_of |= dict.fromkeys(await store.rollout_ids(), store)
            return cls(stack.pop_all(), store_of)

    async def freeze(self, rollout_id: str) -> Snapshot:
        if rollout_id not in self._store_of:
            return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=())
        return await self._store_of[rollout_id].freeze(rollout_id)

    async def write(self, operation: Operation) -> int:
        """Of a rollout that no log knows there is nothing to drop or clear, and nothing else can be said of it."""
        store = self._store_of.get(operation.rollout_id)
        if store is not None:
            return await store.write(operation)
        if isinstance(operation, Drop | Clear):
            return 0
        raise retired_error(operation.rollout_id, operation.call_id)

    async def rollout_ids(self) -> Sequence[str]:
        return sorted(self._store_of)

    async def standings(self) -> Sequence[Standing]:
        stores = dict.fromkeys(self._store_of.values())
        found = [
            each for store in stores for each in await store.standings() if self._store_of[each.rollout_id] is store
        ]
        return sorted(found, key=lambda each: each.rollout_id)

    async def close(self) -> None:
        await self._opened.aclose()
