"""A trainer's way to have its weights served: `push(version, weights)`.

Invariant: a folder under its own name is whole. Whatever ends the trainer, or fills the disk, leaves at most a folder
that begins with a dot, which the next push clears away, and the graph with what it served. What is served now is never
cleared away.

Flow: the tensors are written to a hidden folder, file by file -> sealed with their checksums -> renamed -> the graph is
told (`WeightClient`) -> folders older than the last `keep` go, but for those that are to be pushed yet.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors.torch import save_file

from gym_capture.durable_files import sync_directory
from gym_capture.errors import ConfigError, WeightsFailedError, WeightsRefusedError
from gym_capture.weights import PauseMode, Payload, is_sealed, payload_at, seal
from trainer_bridge.weight_client import Pushed, WeightClient

__all__ = ["WeightSync", "Weights"]

Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""By the names of the model's checkpoint, as `state_dict` and `named_parameters` of a Hugging Face model give them."""

_FILE_BYTES: Final = 4 << 30
"""At which the next file begins: so much is in memory twice."""
_LOOKED_AT: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The types that the graph looks at, too."""
_HIDDEN: Final = "."


class WeightSync:
    """Pushes versions to one graph, by way of a folder that the trainer and all replicas see."""

    def __init__(self, client: WeightClient, directory: Path, *, keep: int = 2) -> None:
        """`keep`: how many versions stay in `directory`. Raises `ConfigError`."""
        if keep < 1:
            raise ConfigError(f"keep: at least 1 version must stay, got {keep}")
        self._client = client
        self._directory = directory.expanduser().absolute()
        self._keep = keep
        self._background = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._queued: list[str] = []
        """Folders that are pushed in the background, or will be."""

    def push(self, version: int, weights: Weights | Path, *, mode: PauseMode = "keep", **options: bool) -> Pushed:
        """Returns once all replicas serve these weights.

        `weights` may be a folder of safetensors that replicas see; it is sealed where it lies. `mode` and `options` are
        those of `WeightClient.push`, whose errors it raises, too; `WeightsFailedError` if they cannot be written.
        """
        payload = self.write(version, weights, allow_non_finite=options.get("allow_non_finite", False))
        pushed = self._client.push(payload, mode=mode, **options)
        self._clear()
        return pushed

    def push_in_background(
        self, version: int, weights: Weights, *, mode: PauseMode = "keep", **options: bool
    ) -> Future[Pushed]:
        """The same while the trainer goes on: the weights are on disk when it returns, so they may change from then on.

        One after another; `result()` raises what `push` would have.
        """
        return self.begin_push(version, weights, mode=mode, **options)[1]

    def begin_push(
        self, version: int, weights: Weights, *, mode: PauseMode = "keep", **options: bool
    ) -> tuple[Payload, Future[Pushed]]:
        """As `push_in_background`, with the folder that the weights are in."""
        payload = self.write(version, weights, allow_non_finite=options.get("allow_non_finite", False))

        def work() -> Pushed:
            try:
                pushed = self._client.push(payload, mode=mode, **options)
            finally:
                self._queued.remove(payload.folder)
            self._clear()
            return pushed

        self._queued.append(payload.folder)
        return payload, self._background.submit(work)

    def close(self) -> None:
        """Waits for what is on its way."""
        self._background.shutdown()

    def write(self, version: int, weights: Weights | Path, *, allow_non_finite: bool = False) -> Payload:
        """A sealed folder of these weights, on disk. Raises `WeightsRefusedError`, or `WeightsFailedError`."""
        try:
            if isinstance(weights, Path):
                return _sealed(weights.expanduser().absolute(), version)
            return self._written(version, weights, allow_non_finite)
        except OSError as error:
            raise WeightsFailedError(f"weights {version} cannot be written to {self._directory}: {error}") from error

    def _written(self, version: int, weights: Weights, allow_non_finite: bool) -> Payload:
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f"{_HIDDEN}weights-*"):
            shutil.rmtree(left, ignore_errors=True)
        hidden = self._directory / f"{_HIDDEN}weights-{version}-{os.getpid()}"
        hidden.mkdir()
        try:
            for number, tensors in enumerate(_files(weights, allow_non_finite)):
                file = hidden / f"model-{number:05d}.safetensors"
                save_file(tensors, file)
                _sync(file)
            digest = seal(hidden, version=version).digest
            # Two lives of a trainer may come to other weights for one version, and the graph may serve the first.
            folder = self._directory / f"weights-{version:08d}-{digest[:8]}"
            if folder.exists():
                shutil.rmtree(hidden)
                os.utime(folder)  # the newest, which nobody clears away
            else:
                hidden.rename(folder)
                sync_directory(self._directory)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return payload_at(str(folder))

    def _clear(self) -> None:
        """Folders of older versions than the last ones; never that which is served, or is to be."""
        folders = sorted(self._directory.glob("weights-*"), key=lambda folder: folder.stat().st_mtime)
        try:
            served = self._client.info()["folder"]
        except WeightsFailedError:
            return  # the push went through, which is what counts; the next one clears
        for folder in folders[: -self._keep]:
            if str(folder) != served and str(folder) not in self._queued:
                _remove(folder)


def _remove(folder: Path) -> None:
    """Half of it, if this is killed, is hidden. Where it cannot be removed, the next push tries again."""
    hidden = folder.with_name(_HIDDEN + folder.name)
    try:
        folder.rename(hidden)
    except OSError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def _sealed(folder: Path, version: int) -> Payload:
    """A folder that the trainer has made itself. One that is sealed stays as it is."""
    if not is_sealed(folder):
        return seal(folder, version=version)
    payload = payload_at(str(folder))
    if payload.version != version:
        raise WeightsRefusedError(f"{folder} is sealed as version {payload.version}, not {version}")
    return payload


def _files(weights: Weights, allow_non_finite: bool) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors, in files of a size that fits into memory beside the model."""
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    pairs: Iterable[tuple[str, Any]] = weights.items() if isinstance(weights, Mapping) else weights
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise WeightsRefusedError(f"{name} is no tensor: {type(tensor).__name__}")
        kept = tensor.detach().to("cpu").contiguous().clone()  # safetensors refuses tensors that share memory
        if not allow_non_finite and not _is_finite(kept):
            raise WeightsRefusedError(
                f"{name} has values that are NaN or infinite; `allow_non_finite` serves them all the same"
            )
        if tensors and size + kept.nbytes > _FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = kept
        size += kept.nbytes
    if not tensors:
        raise WeightsRefusedError("there are no weights to push")
    yield tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    """By the least and the greatest value, which are NaN if any is: much faster than a look at each."""
    if tensor.dtype not in _LOOKED_AT or tensor.numel() == 0:
        return True
    return all(bool(torch.isfinite(each)) for each in torch.aminmax(tensor))


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
