"""A replica's side of the weight plane: it has the current version before it serves, and obeys the coordinator.

Invariant: `start` returns once the replica serves the version that is current, or is paused for want of it. From then
on the engine changes its weights only by an order, and samples only with weights that are whole. A replica that is
dismissed, or hangs in an order, fails its health check, so that Serve replaces it.

Flow: `start` joins -> loads what it is told to, and joins again -> welcome -> orders are fetched and obeyed, one at a
time, until `stop`. When the coordinator starts anew, the replica says what it has, and is told what to do about it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol

from gym_capture.engines.weights import WeightControl
from gym_capture.errors import (
    EngineDeadError,
    GymCaptureError,
    StoreUnavailableError,
    WeightsFailedError,
    WeightsRefusedError,
    described,
)
from gym_capture.serving.weights_messages import (
    Apply,
    Check,
    Checksums,
    Label,
    Later,
    Leave,
    Load,
    Nothing,
    Numbered,
    Order,
    Pause,
    Rejoin,
    Report,
    Resume,
    Seat,
    Transfer,
    Version,
    Welcome,
)
from gym_capture.weights import look_at, payload_at

logger = logging.getLogger(__name__)

_TRY_AGAIN_S: Final = 0.5


class Coordinator(Protocol):
    """How an agent reaches the coordinator. Each raises `StoreUnavailableError` while it starts anew."""

    async def join(self, seat: Seat) -> Welcome | Load | Later: ...
    async def exchange(self, replica: str, report: Report | None) -> Numbered: ...
    async def leave(self, replica: str) -> None: ...


class WeightAgent:
    """The weights of one replica."""

    def __init__(
        self,
        coordinator: Coordinator,
        weights: WeightControl,
        *,
        replica: str,
        model: str,
        node: str,
        step_timeout_s: float,
    ) -> None:
        """`step_timeout_s`: after which the coordinator gives up a replica that obeys."""
        self._coordinator = coordinator
        self._weights = weights
        self._replica = replica
        self._node = node
        self._step_timeout_s = step_timeout_s
        self._obeying: tuple[Order, float] | None = None
        """What it is doing, since when."""
        self._version = Version(number=0, model=model)
        self._is_sound = True
        self._is_paused = False
        self._cannot_load: str | None = None
        self._serves = asyncio.Event()
        self._has_started = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._dismissed: str | None = None

    async def start(self) -> None:
        """Returns once the replica serves the current version - or, paused, if nobody can have that one: its routes
        must be there for the next. Raises what the engine does."""
        await self._weights.label(str(self._version.number))
        await self._join()
        self._following = asyncio.create_task(self._follow())
        waits = asyncio.ensure_future(self._has_started.wait())
        await asyncio.wait({waits, self._following}, return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        self.check_health()

    def check_health(self) -> None:
        """Raises `EngineDeadError` if the replica must be replaced."""
        following = self._following
        if following is not None and following.done() and not following.cancelled():
            error = following.exception()
            if error is not None:  # whatever it was, the weights would stay as they are from now on
                self._dismissed = f"this replica cannot follow the coordinator of the weights: {described(error)}"
        if self._obeying is not None:
            order, since = self._obeying
            if time.monotonic() - since > self._step_timeout_s:  # it is no member any more, and others have gone on
                self._dismissed = f"this replica hangs: {type(order).__name__} for {self._step_timeout_s:g} s"
        if self._dismissed is not None:
            raise EngineDeadError(self._dismissed)

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        try:
            await self._coordinator.leave(self._replica)
        except StoreUnavailableError as error:  # it notices that this process has ended
            logger.warning("could not leave the weight plane: %s", error)

    async def _join(self) -> None:
        while True:
            try:
                answer = await self._coordinator.join(self._seat())
            except StoreUnavailableError:
                answer = Later()
            match answer:
                case Later():
                    await asyncio.sleep(_TRY_AGAIN_S)
                case Load(version):
                    try:
                        await self._apply(version)
                    except (WeightsRefusedError, WeightsFailedError) as error:
                        logger.error("weights %d cannot be loaded: %s", version.number, error)
                        self._cannot_load = version.digest
                case Welcome(is_paused, is_current, must_answer):
                    if is_paused:
                        await self._weights.pause("keep", clear_cache=False)
                        self._is_paused = True
                    elif self._is_paused:
                        await self._resume()
                    if is_current:
                        self._serves.set()
                    if is_current or must_answer:
                        self._has_started.set()
                    return

    def _seat(self) -> Seat:
        return Seat(
            replica=self._replica,
            version=self._version,
            is_sound=self._is_sound,
            world_size=self._weights.world_size,
            dtype=self._weights.dtype,
            node=self._node,
            cannot_load=self._cannot_load,
        )

    async def _follow(self) -> None:
        report: Report | None = None
        while True:
            try:
                number, order = await self._coordinator.exchange(self._replica, report)
            except StoreUnavailableError:
                await asyncio.sleep(_TRY_AGAIN_S)
                continue
            match order:
                case Nothing():
                    continue
                case Rejoin():
                    report = None
                    try:
                        await self._join()
                    except GymCaptureError as error:
                        self._dismissed = f"the weights of this replica are not known to be current: {error.message}"
                        return
                case Leave(reason, must_end):
                    if must_end:
                        self._dismissed = f"this replica is replaced: {reason}"
                    return
                case _:
                    report = await self._obeyed(number, order)

    async def _obeyed(self, number: int, order: Order) -> Report:
        self._obeying = order, time.monotonic()
        try:
            return Report(number, await self._obey(order))
        except GymCaptureError as error:
            return Report(number, error=error)
        except Exception as error:  # the boundary: whatever fails here, the coordinator is told
            logger.error("%s failed", type(order).__name__, exc_info=error)
            return Report(number, error=WeightsFailedError(described(error)))
        finally:
            self._obeying = None

    async def _obey(self, order: Order) -> object:
        match order:
            case Check(folder, allow_non_finite, was_read):
                payload = await asyncio.to_thread(payload_at, folder)
                if was_read:
                    await asyncio.to_thread(look_at, payload)
                else:
                    await self._weights.check(payload, allow_non_finite=allow_non_finite)
                return payload
            case Apply(version):
                await self._apply(version)
            case Label(version):
                await self._weights.label(str(version.number))
                self._version, self._is_sound = version, True
            case Pause(mode, clear_cache):
                self._is_paused = True
                await self._weights.pause(mode, clear_cache=clear_cache)
            case Resume():
                await self._resume()
            case Checksums():
                return await self._weights.checksums()
            case Transfer(step, info):
                if step in ("start", "update", "finish"):
                    self._is_sound = False
                await self._weights.transfer(step, info)
        return None

    async def _apply(self, version: Version) -> None:
        """Loads it; the engine is paused then. What is in the folder is verified where that was not done before."""
        payload = None
        if version.folder is not None:
            payload = await asyncio.to_thread(payload_at, version.folder)
            if payload.digest != version.digest:
                raise WeightsRefusedError(f"{version.folder} holds other weights than those that are served")
            if not self._serves.is_set():  # they were checked when they were pushed, but not from here
                await self._weights.check(payload, allow_non_finite=True)
        self._is_paused, self._is_sound = True, False
        await self._weights.apply(payload, version=str(version.number))
        self._version, self._is_sound = version, True

    async def _resume(self) -> None:
        if not self._is_sound:
            raise WeightsFailedError("its weights are not whole")
        await self._weights.resume()
        self._is_paused = False
        self._serves.set()
        self._has_started.set()
