"""The weights of a vLLM engine.

Invariant: as the seam's (`engines.weights`). A failed load leaves layers that are in no memory at all, and an engine
that is resumed with those dies; so whoever's `apply` fails must apply something else before `resume`.

Calls under way are kept: vLLM puts them back into its queue and computes what they have so far again, with the new
weights. `clear_cache` is what makes it so; without it, they and the prefix cache keep blocks of the old weights,
whatever vLLM's documentation of `keep` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from gym_capture.engines.weights import TransferStep
from gym_capture.errors import EngineDeadError, WeightsFailedError, WeightsRefusedError
from gym_capture.weights import ModelSpec, PauseMode, Payload, TensorSpec, compare, model_files, model_spec, verify

WORKER_EXTENSION: Final = "gym_capture.engines.vllm_worker.FolderWorker"
_DTYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}
_LONGEST: Final = 500
"""Characters of an error of vLLM's."""


class VllmWeights:
    """The weights of one `AsyncLLM`."""

    def __init__(self, llm: AsyncLLM, *, model: str) -> None:
        self._llm = llm
        self._model = Path(model)

    @property
    def world_size(self) -> int:
        return int(self._llm.vllm_config.parallel_config.world_size_across_dp)

    @property
    def dtype(self) -> str:
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @cached_property
    def _spec(self) -> ModelSpec:
        return model_spec(self._model)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        await self._done(self._llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._done(self._llm.resume_generation())

    async def check(self, payload: Payload, *, allow_non_finite: bool) -> None:
        await asyncio.to_thread(lambda: verify(payload, self._spec, allow_non_finite=allow_non_finite))

    async def apply(self, payload: Payload | None, *, version: str) -> None:
        await self.pause("keep", clear_cache=True)
        files = [str(file) for file in model_files(self._model)] if payload is None else payload.paths
        await self._done(self._llm.collective_rpc("gym_capture_load", args=(files,)))
        await self.label(version)

    async def label(self, version: str) -> None:
        await self._done(self._llm.update_weight_version(version))

    async def checksums(self) -> Mapping[str, str]:
        found = await self._done(self._llm.compute_weight_checksums())
        return {name: digest for worker in found for name, digest in worker.items()}

    async def transfer(self, step: TransferStep, info: Mapping[str, Any] | list[Any]) -> None:
        if self._llm.vllm_config.weight_transfer_config is None:
            raise WeightsRefusedError(
                "this engine has no weight transfer backend: set engine_args.weight_transfer_config, e.g. "
                '`{backend: nccl}`, or push a folder (`update_info: {"folder": ...}`)'
            )
        given: Any = info if isinstance(info, list) else dict(info)
        match step:
            case "check":
                self._check_names(given)
            case "init":
                await self._done(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=given)))
            case "start":
                await self._done(self._llm.start_weight_update())
            case "update":
                await self._done(self._llm.update_weights(WeightTransferUpdateRequest(update_info=given)))
            case "finish":
                await self._done(self._llm.finish_weight_update())
            case "shutdown":
                await self._done(self._llm.shutdown_weight_transfer_engine())

    def _check_names(self, info: Any) -> None:
        """What an update says that it will send. Backends that send a part of the weights say nothing here."""
        if not isinstance(info, dict) or not {"names", "shapes", "dtype_names"} <= info.keys():
            return
        tensors = {
            name: TensorSpec(_DTYPES.get(str(dtype).removeprefix("torch."), str(dtype)), tuple(shape))
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        }
        compare(tensors, self._spec)

    async def _done(self, work: Any) -> Any:
        """The result of vLLM's work: whatever it raises is typed here, since it has no types of its own for this."""
        try:
            return await work
        except VllmEngineDeadError as error:
            raise EngineDeadError("the engine process died") from error
        except Exception as error:  # the boundary that classifies
            raise WeightsFailedError(f"{type(error).__name__}: {error}"[:_LONGEST]) from error
