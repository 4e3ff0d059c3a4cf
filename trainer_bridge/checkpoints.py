"""Checkpoints of a training run: model, optimizer, random state, and how far it is.

Invariant: a folder that has a checkpoint's name is whole and durable - it is written beside it, synced and renamed -
and is a model folder that can be served. What is read back goes on where it stopped; one of another model changes
nothing.

    step-00000012/   config.json, model.safetensors, tokenizer...    the weights after step 12
                     optimizer.pt                                    AdamW's moments; states of random generators
                     state.json                                      how far; names and shapes of parameters

Flow: `write` after a step -> older ones go, but for the newest few -> `latest` -> `restore`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from safetensors import SafetensorError

from gym_capture.durable_files import sync_directory, sync_folder
from gym_capture.errors import ConfigError
from trainer_bridge.grpo import GrpoTrainer, copy_tokenizer

__all__ = ["Progress", "check_none_ahead", "latest", "restore", "write"]

_NAME: Final = re.compile(r"step-(\d{8,})")
_PARTIAL: Final = ".partial-"
_FORMAT: Final = 1
_UNREADABLE: Final = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError),
    *(UnpicklingError, SafetensorError),
)
"""What reading a file raises that is damaged, or of something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Steps made."""
    groups_trained: int = 0
    """Groups of the stream that went into them, left-out ones included: where to go on."""
    position: Mapping[str, Any] | None = None
    """`Position.as_json` of a `GroupStream`; None: the groups were of none."""
    weights: Mapping[str, Any] | None = None
    """`WeightPushes.state`; None: the run has pushed none."""


def write(
    directory: Path, trainer: GrpoTrainer, progress: Progress, *, tokenizer_from: Path | None = None, keep: int = 2
) -> Path:
    """Writes a checkpoint into `directory`, and removes all but the newest `keep`. Raises `ConfigError` if it cannot be
    written, or is not the newest; those that were there are still there then."""
    if keep < 1:
        raise ConfigError(f"keep must be at least 1: got {keep}")
    check_none_ahead(directory, progress.step)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=directory))
        try:
            _fill(partial, trainer, progress, tokenizer_from)
            folder = directory / f"step-{progress.step:08d}"
            if folder.exists():
                _remove(folder)
            partial.rename(folder)
            sync_directory(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except (OSError, RuntimeError) as error:  # torch raises the latter for a full disk
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the checkpoint of step {progress.step} cannot be written to {directory}: {reason}"
        ) from error
    for old in _all(directory)[:-keep]:
        _remove(old)
    return folder


def _remove(folder: Path) -> None:
    """Half of it, if this is killed, has no checkpoint's name; what cannot be removed, the next write tries again."""
    shutil.rmtree(folder.rename(folder.with_name(f"{_PARTIAL}{folder.name}")), ignore_errors=True)


def latest(directory: Path) -> Path | None:
    """The checkpoint of the most steps; None: there is none."""
    return next(reversed(_all(directory)), None)


def check_none_ahead(directory: Path, step: int) -> None:
    """Raises `ConfigError` if there is a checkpoint of more steps: a run that does not go on from it would have its own
    removed as older, and would later be gone on with from there."""
    newest = latest(directory)
    if newest is not None and _step(newest) > step:
        raise ConfigError(
            f"{newest} is ahead of this run, which is at step {step}: resume from it first, or take another folder"
        )


def restore(folder: Path, trainer: GrpoTrainer) -> Progress:
    """Makes `trainer` what it was. Raises `ConfigError`, with nothing changed, if the checkpoint is of another model or
    cannot be read."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        saved: dict[str, Any] = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        if state["format"] != _FORMAT:
            raise ConfigError(f"{folder} is of another version of checkpoints: {state['format']}")
        _check_same_model(folder, {name: tuple(shape) for name, shape in state["parameters"].items()}, trainer)
        optimizer, rng = saved["optimizer"], saved["rng"]
        cuda_rng = saved["cuda_rng"][: torch.cuda.device_count()]  # there may have been more devices
        _check_optimizer(folder, optimizer, trainer)
        torch.Generator().set_state(rng)  # one that is none is refused here, before it is that of all
        loaded = (
            type(trainer.model)
            .from_pretrained(str(folder), dtype=trainer.model.dtype, local_files_only=True)
            .state_dict()
        )
        progress = Progress(**state["progress"])
    except _UNREADABLE as error:
        raise ConfigError(f"{folder} is no checkpoint that can be read: {' '.join(str(error).split())}") from error
    own = trainer.model.state_dict()
    with torch.no_grad():
        for name, tensor in loaded.items():
            own[name].copy_(tensor)
    options = [(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
    trainer.optimizer.load_state_dict(optimizer)
    for group, (lr, weight_decay) in zip(trainer.optimizer.param_groups, options, strict=True):
        group.update(lr=lr, weight_decay=weight_decay)  # those of today, not of then
    torch.set_rng_state(rng)
    if cuda_rng:
        torch.cuda.set_rng_state_all(cuda_rng)
    return progress


def _fill(folder: Path, trainer: GrpoTrainer, progress: Progress, tokenizer_from: Path | None) -> None:
    trainer.model.save_pretrained(folder)
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, folder)
    state = {"format": _FORMAT, "progress": asdict(progress), "parameters": _parameters(trainer)}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    torch.save(
        {"optimizer": trainer.optimizer.state_dict(), "rng": torch.get_rng_state(), "cuda_rng": cuda_rng},
        folder / "optimizer.pt",
    )
    folder.chmod(0o755)
    sync_folder(folder)


def _parameters(trainer: GrpoTrainer) -> dict[str, tuple[int, ...]]:
    """Those that the optimizer moves, in its order: its state is by their place in it."""
    named = trainer.model.named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in named if parameter.requires_grad}


def _check_same_model(folder: Path, saved: dict[str, tuple[int, ...]], trainer: GrpoTrainer) -> None:
    own = _parameters(trainer)
    for name in [*own, *(name for name in saved if name not in own)]:
        if saved.get(name) != own.get(name):
            raise ConfigError(
                f"{folder} is of another model: its optimizer state has parameter {name} as "
                f"{list(saved.get(name, ())) or 'none'}, this model as {list(own.get(name, ())) or 'none'}"
            )
    if list(saved) != list(own):
        raise ConfigError(f"{folder} is of another model: its parameters stand in another order")


def _check_optimizer(folder: Path, saved: Mapping[str, Any], trainer: GrpoTrainer) -> None:
    """Its state is by place alone: that of another model could be loaded, and would fail at the next step."""
    own = list(_parameters(trainer).items())
    (group,) = saved["param_groups"]
    if list(group["params"]) != list(range(len(own))):
        raise ConfigError(
            f"{folder} is of another model: its optimizer.pt is of {len(group['params'])} parameters, this model has "
            f"{len(own)}"
        )
    for place, moments in saved["state"].items():  # none, for parameters that have never had a gradient
        name, shape = own[place]
        for moment in (moments["exp_avg"], moments["exp_avg_sq"]):
            if tuple(moment.shape) != shape:
                raise ConfigError(
                    f"{folder} is of another model: its optimizer.pt has parameter {name} as {list(moment.shape)}, "
                    f"this model as {list(shape)}"
                )


def _all(directory: Path) -> list[Path]:
    """Ascending."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
