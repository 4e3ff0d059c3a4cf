"""What an engine can do with weights: the seam of the weight plane, beside `engines.base`.

Invariant: between `pause` and `resume` no token is sampled. `check` changes nothing. After `apply` the engine is
paused, every token that is sampled from then on is sampled from the weights that were applied and says so (its
`GenerationChunk.weight_versions`), and nothing that other weights computed is used any more: cached blocks are gone,
calls under way are computed again. After an `apply` that failed the weights are undefined and the engine is paused:
only another `apply` makes it fit to `resume`.

An engine without any of this has `Engine.weights` None, and its graph takes no updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from gym_capture.weights import PauseMode, Payload

TransferStep: TypeAlias = Literal["check", "init", "start", "update", "finish", "shutdown"]
"""Of an update by a backend of the engine's own (vLLM: NCCL, IPC...). `check` looks at what `update` will be given."""


class WeightControl(Protocol):
    """The weights of one replica. Its methods are called one after another."""

    @property
    def world_size(self) -> int:
        """Processes that hold a part of the model: each has a rank in a transfer group."""
        ...

    @property
    def dtype(self) -> str:
        """Of the weights in the engine, as torch names it: `float32`."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None: ...

    async def resume(self) -> None: ...

    async def check(self, payload: Payload, *, allow_non_finite: bool) -> None:
        """Raises `WeightsRefusedError` for what is not whole, or not of this model."""
        ...

    async def apply(self, payload: Payload | None, *, version: str) -> None:
        """Pauses, and loads. None: the weights of the model folder. Raises `WeightsFailedError`, or `EngineError`."""
        ...

    async def label(self, version: str) -> None:
        """Names the weights that are loaded. Only while nothing is sampled."""
        ...

    async def checksums(self) -> Mapping[str, str]:
        """Of the tensors as the engine holds them; those of two replicas with equal arguments are equal."""
        ...

    async def transfer(self, step: TransferStep, info: Mapping[str, Any] | list[Any]) -> None:
        """A step of the engine's own backend. Raises `WeightsRefusedError` where it has none, `WeightsFailedError`."""
        ...
