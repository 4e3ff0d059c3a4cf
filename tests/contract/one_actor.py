"""Many stores in one state actor's process: a process for each takes a second of processor time to start.

Invariant: what is asked of a store goes as to a state actor of its own - `StateClient`, Ray's serialization, an actor
that takes many calls at a time, `StateShard` - and only the process is shared. Stores know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from gym_capture.capture.outcomes import Standing
from gym_capture.serving.state import StateClient, StateShard
from gym_capture.serving.state_messages import Request


class Host:
    """The actor. A shard is known by its directory."""

    def __init__(self) -> None:
        self._shards: dict[str, StateShard] = {}

    async def open(self, directory: str) -> None:
        store = "gym_capture.stores.log:open_log"
        shard = StateShard(index=0, shards=1, store=store, store_kwargs={}, directory=directory)
        await shard.describe()  # as `start_shards` does: it has read its log back then
        self._shards[directory] = shard

    async def batch(self, directory: str, *parts: Sequence[Request]) -> list[object]:
        return await self._shards[directory].batch(*parts)

    async def freeze(self, directory: str, rollout_id: str) -> bytes:
        return await self._shards[directory].freeze(rollout_id)

    async def rollout_ids(self, directory: str) -> Sequence[str]:
        return await self._shards[directory].rollout_ids()

    async def standings(self, directory: str) -> Sequence[Standing]:
        return await self._shards[directory].standings()

    async def close(self, directory: str) -> None:
        await self._shards.pop(directory).close()


@dataclass(frozen=True)
class _Method:
    method: Any
    directory: str

    def remote(self, *args: object) -> Any:
        return self.method.remote(self.directory, *args)


class _Hosted:
    """What a `StateClient` takes for the handle of a state actor."""

    def __init__(self, host: ActorHandle[Any], directory: str) -> None:
        self.batch = _Method(host.batch, directory)
        self.freeze = _Method(host.freeze, directory)
        self.rollout_ids = _Method(host.rollout_ids, directory)
        self.standings = _Method(host.standings, directory)
        self.close = _Method(host.close, directory)


class HostedStore(StateClient):
    """A `RecordStore` and a `LineageStore` in the actor `host`."""

    def __init__(self, hosted: Any) -> None:
        super().__init__([hosted])
        self._hosted = hosted

    @classmethod
    async def open(cls, host: ActorHandle[Any], directory: Path) -> HostedStore:
        await host.open.remote(str(directory))
        return cls(_Hosted(host, str(directory)))

    async def close(self) -> None:
        await self._hosted.close.remote()


def start_host() -> ActorHandle[Any]:
    """With the options that state actors have."""
    return ray.remote(Host).options(num_cpus=0, max_concurrency=10_000).remote()
