"""What a rollout job has the graph's state actors do with its attempts.

Invariant: an attempt that another one supersedes is refused from then on, whatever still runs of it; all of this may be
repeated.

Flow: `connected_fence` -> `claim`, for the job -> `rollouts.attempt.make_ready`, before an attempt plays -> `over`,
when one that went on from others is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from gym_capture.capture.operations import Clear, Close, GoOn, HandOn
from gym_capture.capture.protocols import RecordStore
from gym_capture.capture.replay import replays_of
from gym_capture.commands.claims import claim
from gym_capture.commands.cluster import join_cluster
from gym_capture.rollouts.attempt import Replayed

Claims: TypeAlias = Callable[[str, Callable[[str], None]], Awaitable[object]]
"""Claims a job id, and tells what it waits for."""


async def unclaimed(job_id: str, note: Callable[[str], None]) -> None:
    """For records that no other process could have a job on."""


class Fence:
    """Clears and closes attempts, and has them go on from others: a `TurnResume`."""

    def __init__(self, state: RecordStore, claims: Claims = unclaimed) -> None:
        self._state = state
        self._claims = claims
        self._claim: object = None

    async def claim(self, job_id: str, note: Callable[[str], None]) -> None:
        """Keeps every other process from playing a job of that id. Raises `ConfigError` if one does."""
        self._claim = await self._claims(job_id, note)

    async def clear(self, rollout_id: str) -> None:
        """Has the graph forget it, and take its calls."""
        await self._state.write(Clear(rollout_id))

    async def close(self, rollout_id: str) -> None:
        """Has the graph forget it, and refuse its calls."""
        await self._state.write(Close(rollout_id))

    async def hand_on(self, rollout_id: str) -> None:
        await self._state.write(HandOn(rollout_id))

    async def go_on(self, rollout_id: str, source: str) -> None:
        await self._state.write(GoOn(rollout_id, source))

    async def over(self, rollout_id: str, sources: Sequence[str]) -> Replayed:
        snapshot, *earlier = await asyncio.gather(*map(self._state.freeze, (rollout_id, *sources)))
        found = replays_of(snapshot, earlier)
        for source in sources:
            await self.close(source)
        return Replayed(calls=found.calls, diverged_at=found.diverged_at)


def connected_fence(ray_address: str, namespace: str) -> Fence:
    """The fence of the graph in that Ray cluster and namespace."""
    join_cluster(ray_address, namespace=namespace)
    return fence_of(namespace)


def fence_of(namespace: str) -> Fence:
    """The fence of the graph in that namespace, for a process that is on its cluster."""
    from gym_capture.serving.state import connect

    def claims(job_id: str, note: Callable[[str], None]) -> Awaitable[object]:
        return claim(job_id, namespace, note=note)

    return Fence(connect(namespace=namespace), claims)
