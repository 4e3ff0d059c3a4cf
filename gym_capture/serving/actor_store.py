"""State actors as a store of their own: what the conformance suite checks, and what a program without a graph uses.

Invariant: each store has its own actors in a Ray namespace of its own; they end with it, and only then may its
directory be opened again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray

from gym_capture.cluster.reach import check_reachable
from gym_capture.serving.state import connect, start_shards, stop_shards
from gym_capture.serving.state_client import StateClient


class ActorStore(StateClient):
    """A `StateClient` that owns its actors. A `RecordStore` and a `LineageStore`."""

    def __init__(self, client: StateClient, *, namespace: str) -> None:
        super().__init__(client.shards)
        self._namespace = namespace
        self._is_open = True

    @classmethod
    async def open(
        cls,
        *,
        directory: Path,
        shards: int = 2,
        store: str = "gym_capture.stores.log:open_log",
        store_kwargs: Mapping[str, Any] | None = None,
    ) -> ActorStore:
        """Starts actors that keep their records below `directory`, and answers once they have read them back.

        Joins the cluster that `RAY_ADDRESS` names; without one, starts one on this machine that ends with this process.
        Raises what opening the store raises in an actor, and `ConfigError` for arguments that cannot be.
        """
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "local")
            await asyncio.to_thread(check_reachable, address)
            await asyncio.to_thread(
                ray.init, address, include_dashboard=False, log_to_driver=False, logging_level="error"
            )
        namespace = f"actor-store-{uuid4().hex}"

        def start() -> StateClient:
            start_shards(
                namespace=namespace,
                shards=shards,
                store=store,
                store_kwargs=dict(store_kwargs or {}),
                directory=str(directory),
            )
            return connect(namespace=namespace)

        starting = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            client = await asyncio.shield(starting)
        except BaseException:
            await asyncio.wait([starting])  # a thread goes on when its caller is cancelled: it may start more of them
            await asyncio.to_thread(stop_shards, namespace=namespace)
            raise
        return cls(client, namespace=namespace)

    async def close(self) -> None:
        """Ends the actors, each after it has let go of its files. Closing twice is allowed."""
        if self._is_open:
            self._is_open = False
            try:
                await asyncio.gather(*(shard.close.remote() for shard in self.shards), return_exceptions=True)
            finally:
                await asyncio.to_thread(stop_shards, namespace=self._namespace)
