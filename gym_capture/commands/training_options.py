"""What `train` and `train-step` ask of a person in the same words, and what both check before anything is loaded.

Invariant: what cannot work is one line, before a model is loaded or a folder is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gym_capture.commands.loading import explained
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from trainer_bridge.grpo import StepMetrics


_LINE_EVERY_S: Final = 10.0
_SAME_AGAIN: Final = 6
"""Lines that say nothing new are left out, but for the last of so many."""


class Aggregation(StrEnum):
    """How tokens and rollouts weigh: see docs/training.md."""

    GRPO = "grpo"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"


class Layout(StrEnum):
    """How rows become micro-batches."""

    PADDED = "padded"
    PACKED = "packed"
    TREE = "tree"


Model = Annotated[Path, typer.Option(help="Model folder that the rollouts were sampled from.", file_okay=False)]
Data = Annotated[str, typer.Option(help="Directory, or URI of one, of trajectories as Parquet.")]
Lr = Annotated[float, typer.Option(min=0.0, help="Learning rate.")]
Temperature = Annotated[
    float, typer.Option(help="Of rollouts whose records do not say it; a recorded one is used, whatever this is.")
]
Updates = Annotated[int, typer.Option(min=1, help="Updates of the weights on the same rollouts.")]
Clip = Annotated[float, typer.Option(min=0.0)]
ImportanceCap = Annotated[float, typer.Option(help="The most that a token's importance weight may be.")]
AggregationOption = Annotated[Aggregation, typer.Option(help="How tokens and rollouts weigh.")]
TokensPerRollout = Annotated[
    int | None, typer.Option(min=1, help="Of dr_grpo: what a rollout may generate at most, its constant divisor.")
]
MaxGradNorm = Annotated[float, typer.Option(min=0.0)]
OverlongFiltering = Annotated[
    bool, typer.Option("--overlong-filtering", help="Leave out rollouts that ended at a length limit.")
]
SpreadFiltering = Annotated[
    bool, typer.Option("--spread-filtering", help="Leave out groups whose rollouts all have an advantage of 0.")
]
MaxSequenceTokens = Annotated[int | None, typer.Option(min=2, help="Leave out rollouts with a longer trajectory.")]
LayoutOption = Annotated[Layout, typer.Option(help="How rows become micro-batches; changes speed, not results.")]
TokensPerMicroBatch = Annotated[int, typer.Option(min=1, help="Ids of one forward pass, padding included.")]
Device = Annotated[str, typer.Option(help="Of torch, e.g. cpu or cuda.")]


def check_model(model: Path) -> None:
    """Raises `ConfigError` for what is no model folder."""
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} is not a model folder: it has no config.json")


def check_temperature(temperature: float) -> None:
    """Raises `ConfigError` for one that is no temperature to train at."""
    if not temperature > 0:
        raise ConfigError(f"--temperature must be positive: got {temperature}; greedy sampling has no policy gradient")


def check_device(device: str) -> None:
    """Raises `ConfigError` for one that torch cannot use."""
    import torch

    with explained(f"--device {device}: torch cannot use it here"):
        torch.empty(0, device=device)


def check_weights(url: str, token: str | None) -> None:
    """Raises `ConfigError` or `WeightsError` if there is no graph at `--push` that takes weights with this token."""
    import httpx

    from trainer_bridge.weight_client import WeightClient

    try:
        with WeightClient(url, token=token) as client:
            client.info()
    except httpx.InvalidURL as error:
        raise ConfigError(f"--push {url} is not a URL such as http://127.0.0.1:8000: {error}") from None


@contextmanager
def progress_bar(console: Console | None = None, *, every_s: float = _LINE_EVERY_S) -> Iterator[Progress]:
    """On stderr: a bar on a terminal, else a line now and then."""
    console = console or Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        if console.is_terminal:
            yield progress
            return
        ended = threading.Event()
        lines = threading.Thread(target=_lines, args=(progress, ended, every_s), name="progress", daemon=True)
        lines.start()
        try:
            yield progress
        finally:
            ended.set()
            lines.join()


def _lines(progress: Progress, ended: threading.Event, every_s: float) -> None:
    """Says where things stand, if that has changed since it was said, and now and then although it has not."""
    said, silent = "", 0
    while not ended.wait(every_s):
        now = "; ".join(
            task.description if task.total is None else f"{task.description}: {task.completed:g} of {task.total:g}"
            for task in progress.tasks
        )
        silent += 1
        if now and (now != said or silent >= _SAME_AGAIN):
            progress.console.print(now, highlight=False, markup=False, soft_wrap=True)
            said, silent = now, 0


def warnings(metrics: StepMetrics) -> list[str]:
    """What a person should know of a step."""
    found = []
    if metrics.reshaped_tokens:
        found.append(f"{metrics.reshaped_tokens} tokens were drawn with top-p, top-k, penalties or a grammar")
    if len(metrics.temperatures) > 1:
        found.append("tokens of several temperatures: " + ", ".join(f"{each:g}" for each in metrics.temperatures))
    if metrics.groups_of_several_prompts:
        found.append(f"{metrics.groups_of_several_prompts} groups start from more than one prompt")
    return found
