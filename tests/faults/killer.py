"""Kills parts of a cluster, in an order that a seed decides.

Invariant: every kill is a SIGKILL of a process that was serving, or about to; nothing is warned, and nothing is helped
to come back, except that a cluster that is gone as a whole is started again, as whoever runs it would.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Final

import httpx
import psutil

from tests.faults.cluster import REPLICAS, SHARDS, Cluster

_RECOVERS_WITHIN_S: Final = 300.0
_POLL_S: Final = 0.2
_OVERLAP: Final = 0.35
"""Share of kills that do not wait for the victim before to be back."""


class Victim(StrEnum):
    """What is killed."""

    STATE = "state actor"
    REPLICA = "replica"
    PROXY = "HAProxy"
    MANAGER = "HAProxy's manager"
    CLUSTER = "cluster"


_TITLES: Final = {
    Victim.STATE: "ray::StateShard",
    Victim.REPLICA: "ray::ServeReplica:",
    Victim.PROXY: "haproxy",
    Victim.MANAGER: "ray::HAProxyManager",
}
_WHOLE: Final = {Victim.STATE: SHARDS, Victim.REPLICA: REPLICAS, Victim.PROXY: 1, Victim.MANAGER: 1}
_SHARES: Final = {
    Victim.STATE: 0.5,
    Victim.REPLICA: 0.3,
    Victim.PROXY: 0.08,
    Victim.MANAGER: 0.08,
    Victim.CLUSTER: 0.04,
}


def plan(kills: int, seed: int) -> list[Victim]:
    """Victims in random order, each kind by its share, and from ten kills on at least once."""
    victims = [victim for victim, share in _SHARES.items() for _ in range(max(1, int(share * kills)))]
    victims += [Victim.STATE] * (kills - len(victims))
    victims = victims[len(victims) - kills :]
    random.Random(seed).shuffle(victims)
    return victims


class Killer:
    """Kills what a plan says."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, *, seed: int) -> None:
        self.kills: Counter[Victim] = Counter()
        self._cluster = cluster
        self._http = http
        self._rng = random.Random(f"{seed} killer")

    async def run(self, victims: Sequence[Victim], *, seconds: float, on_kill: Callable[[Victim, int], None]) -> None:
        """Kills them one after another, until all have been or the time is up. The graph is whole afterwards."""
        ends = time.monotonic() + seconds
        for victim in victims:
            if time.monotonic() > ends:
                break
            if self._rng.random() > _OVERLAP:
                await self.recovered()
            await asyncio.sleep(self._rng.expovariate(1.0))
            await self.kill(victim)
            on_kill(victim, self.kills.total())
        await self.recovered()

    async def kill(self, victim: Victim) -> None:
        """One of its kind, as soon as there is one."""
        if victim is Victim.CLUSTER:
            await asyncio.to_thread(self._cluster.kill)
            await self._cluster.start()
        else:
            self._rng.choice(await self._found(victim)).kill()
        self.kills[victim] += 1

    async def recovered(self) -> None:
        """Returns when every part is there again and says that it is well. Raises `TimeoutError` if it never is."""
        async with asyncio.timeout(_RECOVERS_WITHIN_S):
            for victim, count in _WHOLE.items():
                await self._found(victim, at_least=count)
            while True:
                if await self._is_well():
                    return
                await asyncio.sleep(_POLL_S)

    async def _found(self, victim: Victim, *, at_least: int = 1) -> list[psutil.Process]:
        """The processes of a kind, once there are so many."""
        async with asyncio.timeout(_RECOVERS_WITHIN_S):
            while True:
                found = await asyncio.to_thread(self._cluster.processes, _TITLES[victim])
                if len(found) >= at_least:
                    return found
                await asyncio.sleep(_POLL_S)

    async def _is_well(self) -> bool:
        with suppress(httpx.TransportError):
            return (await self._http.get(f"{self._cluster.url}/healthz")).status_code == 200
        return False
