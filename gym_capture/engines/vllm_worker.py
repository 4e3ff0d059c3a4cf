"""What vLLM's worker processes learn for the weight plane: loading weights from a folder of safetensors.

vLLM makes the class a base of its worker (`worker_extension_cls`), so that `collective_rpc` reaches its methods in each
process that holds a part of the model. Its names must not be those of the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform


class FolderWorker:
    """Mixed into vLLM's worker, of which it uses these."""

    reload_weights: Callable[..., None]
    model_runner: Any

    def gym_capture_load(self, files: Sequence[str]) -> None:
        """Loads all tensors of `files`, as vLLM loads a checkpoint: names, slices and layouts are its business."""
        self.reload_weights(weights_iterator=_tensors(files), is_checkpoint_format=True)
        if current_platform.is_cpu():
            _pack_output_layers(self.model_runner.get_model())


def _tensors(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """One at a time: the model is in memory once."""
    for file in files:
        opened: Any
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_tensor(name)


def _pack_output_layers(model: torch.nn.Module) -> None:
    """On a CPU, layers multiply by a packed copy of their weights, which vLLM makes when it loads them. An output layer
    that is the embedding is loaded with that one, not by itself: its copy would be that of the old weights.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
