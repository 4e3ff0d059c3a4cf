"""State actors without Ray: real shards in this process, behind the one thing that a client knows of an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from ray.actor import ActorHandle

from gym_capture.serving.state import StateClient, StateShard

LOG = "gym_capture.stores.log:open_log"


class LocalActor:
    """A handle whose calls run on this event loop. `restart` is what Ray does when the process of an actor is gone."""

    def __init__(self, make: Callable[[], StateShard]) -> None:
        self._make = make
        self.shard = make()

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.shard, name))

    async def restart(self) -> None:
        await self.shard.close()
        self.shard = self._make()


class _Method:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._call(*args))


def shard(
    directory: Path,
    *,
    index: int = 0,
    shards: int = 1,
    store: str = LOG,
    store_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> StateShard:
    """A shard whose store is not synced to disk: tests of what survives a crash have their own."""
    if store_kwargs is None:
        store_kwargs = {"fsync": False} if store == LOG else {}
    return StateShard(
        index=index, shards=shards, store=store, store_kwargs=store_kwargs, directory=str(directory), **options
    )


def client_of(*actors: LocalActor) -> StateClient:
    return StateClient([cast(ActorHandle[Any], actor) for actor in actors])


def client(directory: Path, *, shards: int = 1, **options: Any) -> StateClient:
    """A client of shards of its own."""
    makers = (partial(shard, directory, index=index, shards=shards, **options) for index in range(shards))
    return client_of(*map(LocalActor, makers))
