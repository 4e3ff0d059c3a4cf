"""The weights of a scripted engine: for tests of the weight plane and of its faults.

Invariant: as the seam's (`engines.weights`), without a model. While it is paused a generation hands out nothing, each
id has the version under which it was handed out, and after a load that failed nothing can be resumed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gym_capture.capture.records import WeightSpan
from gym_capture.engines.weights import TransferStep
from gym_capture.errors import WeightsFailedError
from gym_capture.weights import PauseMode, Payload, model_spec, verify

OnStep: TypeAlias = Callable[[str, str], Awaitable[None]]
"""Called with the name of a step that begins, and the version that it is about; what it raises, the step raises."""


async def _nothing(step: str, version: str) -> None:
    pass


class ScriptedWeights:
    """The weights of one scripted engine.

    model: payloads are compared with this model folder; None: any folder that is whole will do.
    """

    world_size = 1
    dtype = "float32"

    def __init__(self, *, model: Path | None = None, on_step: OnStep = _nothing) -> None:
        self.on_step = on_step
        self.version: str | None = None
        """None until it is told: then generations have no spans."""
        self.loaded = ""
        """The digest of what is loaded; empty for the model folder."""
        self.is_sound = True
        self.steps: list[str] = []
        """What was asked of it, in order."""
        self._model = model
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def is_paused(self) -> bool:
        return not self._runs.is_set()

    async def runs(self) -> None:
        """Returns once it is not paused."""
        await self._runs.wait()

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        await self._step("pause", mode)
        self._runs.clear()

    async def resume(self) -> None:
        await self._step("resume", "")
        assert self.is_sound, "an engine whose weights are not whole dies of it"
        self._runs.set()

    async def check(self, payload: Payload, *, allow_non_finite: bool) -> None:
        await self._step("check", str(payload.version))
        if self._model is not None:
            spec = model_spec(self._model)
            await asyncio.to_thread(lambda: verify(payload, spec, allow_non_finite=allow_non_finite))

    async def apply(self, payload: Payload | None, *, version: str) -> None:
        self._runs.clear()
        self.is_sound = False
        await self._step("apply", version)
        if payload is not None and not all(map(os.path.exists, payload.paths)):
            raise WeightsFailedError("files are gone")
        self.loaded = "" if payload is None else payload.digest
        self.is_sound, self.version = True, version

    async def label(self, version: str) -> None:
        await self._step("label", version)
        self.version = version

    async def checksums(self) -> Mapping[str, str]:
        return {"weights": self.loaded}

    async def transfer(self, step: TransferStep, info: Mapping[str, Any] | list[Any]) -> None:
        self.is_sound = step not in ("start", "update")
        await self._step(step, str(info))
        if step == "finish":
            self.loaded = "transfer"

    async def _step(self, step: str, version: str) -> None:
        self.steps.append(f"{step} {version}".rstrip())
        await self.on_step(step, version)


class Spans:
    """The versions of one generation."""

    def __init__(self, weights: ScriptedWeights) -> None:
        self._weights = weights
        self._spans: list[WeightSpan] = []

    def count(self, ids: int) -> None:
        """So many ids were sampled now."""
        version = self._weights.version
        if version is None or ids == 0:
            return
        end = self._spans[-1].end if self._spans else 0
        is_same = bool(self._spans) and self._spans[-1].version == version
        start = self._spans.pop().start if is_same else end
        self._spans.append(WeightSpan(start, end + ids, version))

    def all(self) -> tuple[WeightSpan, ...]:
        return tuple(self._spans)
