"""The coordinator of the weight plane as a Ray actor, one for each namespace of state actors.

Invariant: it outlives whoever started it, and starts again where it ends; what it must know then is in its record, and
in the replicas, which join again. A call that its death cuts off is not repeated: whoever made it learns that it is not
known what became of it, and asks `info`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_capture.cluster.replies import answer
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.serving.mirror import alive_nodes
from gym_capture.serving.weights_messages import Later, Load, Numbered, Report, Seat, Welcome
from gym_capture.serving.weights_metrics import WeightMetrics
from gym_capture.serving.weights_mirror import copies_of
from gym_capture.serving.weights_plane import WeightPlane
from gym_capture.serving.weights_record import Copies, WeightsRecord
from gym_capture.stores.mirror import MirrorLostError

logger = logging.getLogger(__name__)

ACTOR: Final = "weights"
"""Its name, in the namespace of the state actors."""
_LOOK_EVERY_S: Final = 1.0
_LOOK_FOR_COPY_EVERY_S: Final = 10.0

Operation: TypeAlias = Literal[
    "pause",
    "resume",
    "is_paused",
    "world_size",
    "init",
    "shut_down",
    "start",
    "update",
    "finish",
    "abort",
    "info",
    "checksums",
]
"""What a trainer may ask of `WeightPlane`."""


class WeightCoordinator:
    """The actor. It answers nothing before its record is read."""

    def __init__(self, *, namespace: str, directory: str, is_copied: bool, **timeouts: float) -> None:
        """`namespace`: that of the actor, which Ray does not tell it. `timeouts`: of `WeightPlane`."""
        self._timeouts = timeouts
        self._directory = Path(directory)
        self._namespace = namespace
        self._is_copied = is_copied
        self._plane: WeightPlane | None = None
        self._opening = asyncio.Lock()
        self._metrics = WeightMetrics(namespace=namespace)
        self._looking: list[asyncio.Task[None]] = []

    async def opened(self) -> WeightPlane:
        """The plane, made on first use: a constructor is not in the event loop."""
        async with self._opening:
            if self._plane is None:
                # An actor that was started to have none, was told to have them, and starts anew, finds one that runs.
                self._is_copied = self._is_copied or await asyncio.to_thread(_has_copy, self._all_copies())
                record = WeightsRecord(self._directory, copies=self._copies())
                self._plane = plane = await asyncio.to_thread(
                    WeightPlane, record, on_over=self._metrics.over, **self._timeouts
                )
                self._looking = [
                    asyncio.create_task(_look(plane, self._metrics)),
                    asyncio.create_task(_look_for_copy(plane, self._copies)),
                ]
        return self._plane

    async def configure(self, *, is_copied: bool, trainer_timeout_s: float, step_timeout_s: float) -> None:
        """The arguments of the graph, as they are now."""
        plane = await self.opened()
        plane.configure(trainer_timeout_s=trainer_timeout_s, step_timeout_s=step_timeout_s)
        if is_copied and not self._is_copied:
            self._is_copied = True
            await plane.keep_copied(self._copies())

    def _copies(self) -> Copies | None:
        return self._all_copies() if self._is_copied else None

    def _all_copies(self) -> Copies:
        return copies_of(directory=self._directory, namespace=self._namespace)

    async def join(self, seat: Seat, replica: ActorHandle[Any]) -> Welcome | Load | Later:
        return await (await self.opened()).join(seat, lambda: _gone(replica))

    async def exchange(self, replica: str, report: Report | None) -> Numbered:
        return await (await self.opened()).exchange(replica, report)

    async def leave(self, replica: str) -> None:
        await (await self.opened()).leave(replica)

    async def operate(self, operation: Operation, arguments: Mapping[str, Any]) -> object:
        """What a trainer asks."""
        said = await _operations(await self.opened())[operation](**arguments)
        if operation == "finish":
            self._metrics.was_paused(cast("Mapping[str, float]", said)["paused_s"])
        return said


def _operations(plane: WeightPlane) -> Mapping[Operation, Callable[..., Awaitable[object]]]:
    return {
        "pause": plane.pause,
        "resume": plane.resume,
        "is_paused": plane.is_paused,
        "world_size": plane.world_size,
        "init": plane.init,
        "shut_down": plane.shut_down,
        "start": plane.start,
        "update": plane.update,
        "finish": plane.finish,
        "abort": plane.abort,
        "info": plane.info,
        "checksums": plane.checksums,
    }


async def _look(plane: WeightPlane, metrics: WeightMetrics) -> None:
    while True:
        metrics.publish(await plane.info())
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            await plane.give_up_if_silent()
        except GymCaptureError as error:
            logger.error("could not go on without the trainer: %s", error)


async def _look_for_copy(plane: WeightPlane, copies: Callable[[], Copies | None]) -> None:
    while True:
        await asyncio.sleep(_LOOK_FOR_COPY_EVERY_S)
        await plane.keep_copied(copies())


def _has_copy(copies: Copies) -> bool:
    try:
        return copies.newest() is not None
    except MirrorLostError:  # there is one, and it does not answer
        return True


async def _gone(replica: ActorHandle[Any]) -> None:
    """Returns when the actor has died."""
    while True:
        try:
            await replica.__ray_ready__.remote()
        except ActorDiedError:
            return
        except ActorUnavailableError:  # the network; Ray decides whether it lives
            pass
        await asyncio.sleep(_LOOK_EVERY_S)


class CoordinatorClient:
    """Reaches the coordinator, from a replica or from anywhere in the cluster."""

    def __init__(self, actor: ActorHandle[Any], *, replica: ActorHandle[Any] | None = None) -> None:
        """`replica`: the actor that joins; None for who does not."""
        self._actor = actor
        self._self = replica

    async def join(self, seat: Seat) -> Welcome | Load | Later:
        return cast("Welcome | Load | Later", await _asked(self._actor.join.remote(seat, self._self)))

    async def exchange(self, replica: str, report: Report | None) -> Numbered:
        return cast(Numbered, await _asked(self._actor.exchange.remote(replica, report)))

    async def leave(self, replica: str) -> None:
        await _asked(self._actor.leave.remote(replica))

    async def operate(self, operation: Operation, **arguments: Any) -> Any:
        """Raises what `WeightPlane` does, or `StoreUnavailableError` if it is not known what became of it."""
        return await _asked(self._actor.operate.remote(operation, arguments))


async def _asked(reply: Any) -> object:
    try:
        return await reply
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GymCaptureError):
            raise cause from None
        raise StoreUnavailableError(f"the coordinator of the weights failed: {cause!r}") from error
    except RayActorError as error:
        raise StoreUnavailableError(
            "the coordinator of the weights starts anew; what is served now, /weight_info says"
        ) from error


def start_coordinator(
    *, namespace: str, directory: str, trainer_timeout_s: float, step_timeout_s: float, replicas: int = 1
) -> ActorHandle[Any]:
    """Makes sure that the coordinator of `namespace` runs; one that runs has these timeouts, and copies, from now on.

    `replicas`: 2 keeps a copy of its record on another node. It runs on the node of the first state actor, so that a
    cluster which is started anew finds the record where it was. Raises `StoreError` if that cannot be read.
    """
    beside_state = NodeAffinitySchedulingStrategy(alive_nodes()[0], soft=True)
    timeouts = {"trainer_timeout_s": trainer_timeout_s, "step_timeout_s": step_timeout_s}
    actor: ActorHandle[Any] = (
        ray.remote(WeightCoordinator)
        .options(
            name=ACTOR,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            memory=1,  # byte: Ray heeds the strategy only of actors that need something
            scheduling_strategy=beside_state,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=10_000,
        )
        .remote(namespace=namespace, directory=str(Path(directory).expanduser()), is_copied=replicas > 1, **timeouts)
    )
    answer(actor.configure.remote(is_copied=replicas > 1, **timeouts))
    return actor
