"""Waiting for a graph that is away: an attempt that fails meanwhile is not the rollout's fault.

Invariant: no attempt begins while the graph is known to be away, so an outage costs each rollout one attempt at most,
and that one does not count. A graph that stays away for too long ends the job, with nothing lost: the same job, started
again, goes on.

Flow: an attempt has failed -> `is_away` asks the graph, unless it is known -> if it does not answer, one task asks
again and again, for all rollouts -> `over` returns once it answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import httpx

from gym_capture.errors import ConfigError

_ASKED_EVERY_S: Final = 1.0
_ANSWERS_WITHIN_S: Final = 10.0

IsWell = Callable[[], Awaitable[bool]]


async def _always() -> bool:
    return True


class Outage:
    """Whether the graph is away. One for a run of a job."""

    def __init__(
        self,
        is_well: IsWell = _always,
        *,
        limit_s: float = math.inf,
        note: Callable[[str], None] = lambda text: None,
        asked_every_s: float = _ASKED_EVERY_S,
    ) -> None:
        """`is_well` asks the graph; `note` is told when it goes and when it is back."""
        self._is_well = is_well
        self._limit_s = limit_s
        self._note = note
        self._asked_every_s = asked_every_s
        self._waiting: asyncio.Task[None] | None = None

    async def is_away(self) -> bool:
        """Whether the graph does not answer, or not as one that is well."""
        if self._waiting is None and await self._is_well():
            return False
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._until_well())
        return True

    async def over(self) -> None:
        """Returns once the graph answers, at once if it is not known to be away.

        Raises `ConfigError` if it is away for too long.
        """
        if self._waiting is not None:
            await asyncio.shield(self._waiting)

    async def close(self) -> None:
        """Asks no more."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._waiting = None

    async def _until_well(self) -> None:
        began = time.monotonic()
        self._note("the graph does not answer: the job waits for it, and plays on when it does")
        while not await self._is_well():
            if time.monotonic() - began > self._limit_s:
                raise ConfigError(
                    f"the graph has not answered for {self._limit_s:g} s (`limits.outage_timeout_s`); nothing counts "
                    "as failed by this: the same command goes on when the graph is back"
                )
            await asyncio.sleep(self._asked_every_s)
        self._note(f"the graph answers again, after {time.monotonic() - began:.0f} s")
        self._waiting = None


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[IsWell]:
    """Asks the graph at `url` (scheme, host and port) whether it is well."""
    async with httpx.AsyncClient(timeout=_ANSWERS_WITHIN_S, trust_env=False) as client:

        async def is_well() -> bool:
            try:
                return (await client.get(f"{url.rstrip('/')}/healthz")).status_code == 200
            except httpx.HTTPError:
                return False

        yield is_well
