"""The logs of a graph that does not run, as a source in one process.

Invariant: a log has one owner. This process holds the lock of each log directory. For many workers at once, one process
each must own the logs: `log_source`, on Ray.

Flow: `Logs.open` finds the logs (`log_directories`) and opens each (`one_log`) -> a rollout is asked of the log that
knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from gym_capture.capture.operations import Clear, Drop, Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.capture.rollout_state import retired_error
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.data.log_directories import log_directories
from gym_capture.data.one_log import OneLog
from gym_capture.stores.base import ListedStore


class Logs(ListedStore):
    """A `RecordStore` over several logs. Lives on one event loop."""

    def __init__(self, opened: AsyncExitStack, log_of: dict[str, OneLog]) -> None:
        self._opened = opened
        self._log_of = log_of

    @classmethod
    async def open(cls, *, directory: str) -> Logs:
        """Raises what `log_directories` and `OneLog` raise."""
        log_of: dict[str, OneLog] = {}
        async with AsyncExitStack() as stack:
            for path in log_directories(Path(directory)):
                log = OneLog(path)
                stack.push_async_callback(log.close)
                log_of |= dict.fromkeys(await log.rollout_ids(), log)
            return cls(stack.pop_all(), log_of)

    async def freeze(self, rollout_id: str) -> Snapshot:
        if rollout_id not in self._log_of:
            return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=())
        return decode_snapshot(await self._log_of[rollout_id].freeze_encoded(rollout_id))

    async def write(self, operation: Operation) -> int:
        """Of a rollout that no log knows there is nothing to drop or clear, and nothing else can be said of it."""
        log = self._log_of.get(operation.rollout_id)
        if log is not None:
            return await log.write(operation)
        if isinstance(operation, Drop | Clear):
            return 0
        raise retired_error(operation.rollout_id, operation.call_id)

    async def rollout_ids(self) -> Sequence[str]:
        return sorted(self._log_of)

    async def standings(self) -> Sequence[Standing]:
        logs = dict.fromkeys(self._log_of.values())
        found = [each for log in logs for each in await log.standings() if self._log_of.get(each.rollout_id) is log]
        return sorted(found, key=lambda each: each.rollout_id)

    async def close(self) -> None:
        await self._opened.aclose()
