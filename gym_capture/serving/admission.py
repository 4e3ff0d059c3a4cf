"""How many calls a replica works on, how many wait, and who is refused.

Invariant: a call runs only while it holds a place that was granted, places are granted in the order in which they were
asked for, and a call is refused, before the engine or the state has anything to do with it, only while as many wait as
may.

Serve has such limits, too, but answers for itself: plain text, without the shape that a client's library reads. So
Serve's limits stand far above these (`serving.app`), and these refuse.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Final

from gym_capture.errors import EngineOverloadedError

_WEIGHT: Final = 0.1
"""Of the newest call, in the mean of how long calls take."""
_LONGEST_WAIT_S: Final = 60
"""Client libraries ignore a Retry-After beyond."""


class Place:
    """A call's place: among those that run, or in the queue. Release it when the call is over, however it ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since = 0.0
        """When it was granted."""

    async def wait(self) -> None:
        """Returns once the call may run."""
        await asyncio.shield(self.granted)

    def release(self) -> None:
        self._admission.release(self)


class Admission:
    """The places of one replica."""

    def __init__(self, *, running: int, waiting: int) -> None:
        self._limits = (running, waiting)
        self._running: set[Place] = set()
        self._waiting: deque[Place] = deque()
        self._mean_s = 1.0

    def limit(self, *, running: int, waiting: int) -> None:
        """From now on. Who runs or waits already stays."""
        self._limits = (running, waiting)
        self._grant()

    def ask(self) -> Place:
        """A place, at once. Raises `EngineOverloadedError` if it would be one too many."""
        running, waiting = self._limits
        if len(self._running) >= running and len(self._waiting) >= waiting:
            raise EngineOverloadedError(
                f"{len(self._running)} calls run here and {len(self._waiting)} wait; no more are taken now",
                retry_after_s=self._retry_after_s(),
            )
        place = Place(self)
        self._waiting.append(place)
        self._grant()
        return place

    def release(self, place: Place) -> None:
        """Gives a place back; a second time it is nothing."""
        if place in self._running:
            self._running.remove(place)
            self._mean_s += _WEIGHT * (time.monotonic() - place.since - self._mean_s)
        elif place in self._waiting:
            self._waiting.remove(place)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and len(self._running) < self._limits[0]:
            place = self._waiting.popleft()
            place.since = time.monotonic()
            self._running.add(place)
            place.granted.set_result(None)

    def _retry_after_s(self) -> float:
        """About when those that wait now will run: sooner, a client would only be refused again."""
        waves = (len(self._waiting) + 1) / self._limits[0]
        return min(max(1, math.ceil(waves * self._mean_s)), _LONGEST_WAIT_S)
