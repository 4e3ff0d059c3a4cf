"""The logs of a graph that does not run, as a source for many workers at once.

Invariant: a log has one owner. One actor opens each log directory, repairs what a crash left as the graph itself would,
and reads records for everybody; the actors end with `opened_logs`.

Flow: `opened_logs(directory)` finds the log directories and starts their actors -> the `SourceSpec` it gives opens a
`LogClient` in each worker -> a rollout is asked of the actor whose log knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_capture.capture.operations import Clear, Drop, Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.capture.rollout_state import retired_error
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.cluster.replies import answer, cause_of
from gym_capture.data.log_directories import log_directories
from gym_capture.data.sources import SourceSpec
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.base import ListedStore
from gym_capture.stores.log import LogStore


@contextmanager
def opened_logs(directory: Path) -> Iterator[SourceSpec]:
    """The source of the log in `directory`, or of all logs in directories below it, one level down.

    Raises `ConfigError` if there is none or one may not be read, `StoreUnavailableError` if one of them is in use, e.g.
    by a running graph.
    """
    found = log_directories(directory)
    # On this node: the directories are paths of this machine.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(_LogOwner).options(num_cpus=0, scheduling_strategy=here)
    owners = [actor_class.remote(str(path)) for path in found]
    try:
        for owner in owners:
            answer(owner.rollout_ids.remote())
        yield SourceSpec(import_path="gym_capture.data.log_source:LogClient.open", kwargs={"owners": owners})
    finally:
        for owner in owners:
            ray.kill(owner)


class LogClient(ListedStore):
    """A `RecordStore` over logs that other processes own."""

    def __init__(self, owner_of: dict[str, Any]) -> None:
        self._owner_of = owner_of

    @classmethod
    async def open(cls, *, owners: Sequence[Any]) -> LogClient:
        """`owners`: the actors of `opened_logs`."""
        return cls({name: owner for owner in owners for name in await _awaited(owner.rollout_ids.remote())})

    async def freeze(self, rollout_id: str) -> Snapshot:
        if rollout_id not in self._owner_of:
            return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=())
        return decode_snapshot(await _awaited(self._owner_of[rollout_id].freeze.remote(rollout_id)))

    async def write(self, operation: Operation) -> int:
        """Of a rollout that no log knows there is nothing to drop or clear, and nothing else can be said of it."""
        owner = self._owner_of.get(operation.rollout_id)
        if owner is not None:
            return int(await _awaited(owner.write.remote(operation)))
        if isinstance(operation, Drop | Clear):
            return 0
        raise retired_error(operation.rollout_id, operation.call_id)

    async def rollout_ids(self) -> Sequence[str]:
        return sorted(self._owner_of)

    async def standings(self) -> Sequence[Standing]:
        owners = dict.fromkeys(self._owner_of.values())
        answers = [(owner, await _awaited(owner.standings.remote())) for owner in owners]
        found = [each for owner, answer in answers for each in answer if self._owner_of.get(each.rollout_id) == owner]
        return sorted(found, key=lambda each: each.rollout_id)

    async def close(self) -> None:
        """The actors stay: they belong to `opened_logs`."""


class _LogOwner:
    """The actor that has a log open."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._store: LogStore | None = None

    async def rollout_ids(self) -> Sequence[str]:
        return await (await self._opened()).rollout_ids()

    async def standings(self) -> Sequence[Standing]:
        return await (await self._opened()).standings()

    async def freeze(self, rollout_id: str) -> bytes:
        return await (await self._opened()).freeze_encoded(rollout_id)

    async def write(self, operation: Operation) -> int:
        return await (await self._opened()).write(operation)

    async def _opened(self) -> LogStore:
        # `opened_logs` asks each owner once, and waits for the answer, before anybody else can ask.
        if self._store is None:
            self._store = await LogStore.open(self._directory)
        return self._store


async def _awaited(reply: Any) -> Any:
    try:
        return await reply
    except RayTaskError as error:
        raise cause_of(error) from None
    except RayActorError as error:
        raise StoreUnavailableError("the actor that owns the log is gone") from error
