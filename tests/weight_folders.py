"""Folders of weights for tests: those of the tiny model, moved by a little noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gym_capture.models import tiny_dir
from gym_capture.weights import Payload, seal

Tensors = Mapping[str, torch.Tensor]


def tiny_tensors() -> dict[str, torch.Tensor]:
    return load_file(tiny_dir() / "model.safetensors")


def moved(seed: int, by: float = 0.05) -> dict[str, torch.Tensor]:
    """Other weights of the tiny model: equal seeds give equal ones."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: tensor + by * torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype)
        for name, tensor in tiny_tensors().items()
    }


def weights_folder(
    root: Path, version: int, tensors: Tensors | None = None, *, spoil: Callable[[dict[str, Any]], None] | None = None
) -> Payload:
    """A sealed folder of version `version`; `spoil` changes the tensors first."""
    folder = root / f"weights-{version}"
    folder.mkdir(parents=True)
    kept = dict(moved(version) if tensors is None else tensors)
    if spoil is not None:
        spoil(kept)
    save_file(kept, folder / "model.safetensors")
    return seal(folder, version=version)
