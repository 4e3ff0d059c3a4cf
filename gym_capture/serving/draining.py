"""The end of a replica that Serve has asked to go.

Invariant: a replica that goes ends its calls itself, in order, before Serve kills it, provided that the state actors
answer in time: what a client gets is a reply or an error of its API, and every call is on record as what it was.

Flow: Serve asks (a scale-down, a new version of the graph) and sends nobody new -> calls run on, and the replica ends
when they have -> those that are not over after `drain_s` are ended with an error that clients try again.

Serve tells a deployment's code that it ends only when its calls are over. That it has been asked stands in the object
that runs the code.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray._private.worker import global_worker

from gym_capture.errors import EngineOverloadedError
from gym_capture.serving.live import LiveCalls

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.5
_TO_END_IN_ORDER_S: Final = 10.0
"""Records become durable, errors leave, the engine stops: before Serve's own limit."""


class ServeReplica:
    """The replica that runs this code in an actor of Serve's."""

    def __init__(self) -> None:
        actor = global_worker.actors[ray.ActorID.from_hex(ray.get_runtime_context().get_actor_id())]
        self._replica: Any = actor._replica_impl
        # A version of Ray that has these elsewhere fails now, not when they are needed.
        assert not self.is_asked_to_end
        assert self.killed_after_s >= 0

    @property
    def is_asked_to_end(self) -> bool:
        return bool(self._replica._shutting_down)

    @property
    def killed_after_s(self) -> float:
        """How long after it was asked Serve kills it."""
        return float(self._replica._deployment_config.graceful_shutdown_timeout_s)


async def end_in_order(replica: ServeReplica, calls: LiveCalls, drain_s: Callable[[], float]) -> None:
    """Watches until the replica has been asked to end; then gives its calls their time, and ends the rest."""
    while True:
        if replica.is_asked_to_end:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    asked = time.monotonic()
    killed_after_s = replica.killed_after_s
    at_most_s = max(killed_after_s - _TO_END_IN_ORDER_S, killed_after_s / 2)
    while True:
        passed_s = time.monotonic() - asked
        if passed_s >= min(drain_s(), at_most_s):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    ended = await calls.end(EngineOverloadedError("this engine is being replaced; ask again, and another one answers"))
    if ended:
        logger.warning("this replica was asked to end %.0f s ago: %d calls that still ran are ended", passed_s, ended)
