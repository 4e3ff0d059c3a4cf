"""`gym-capture train-step`: one step of the reference GRPO trainer on built trajectories.

Invariant: the model it reads is never changed; what it writes is a whole model folder of its own. A signal ends it at
once, whatever it computes.

Flow: Parquet -> rollouts -> one step under a progress bar -> metrics, and the trained model if `--out` names a place.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from gym_capture.commands import training_options as options
from gym_capture.commands.loading import explained
from gym_capture.commands.training_options import Aggregation, Layout
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from trainer_bridge.grpo import StepMetrics


def command(
    model: options.Model,
    data: options.Data,
    out: Annotated[Path | None, typer.Option(help="Folder for the trained model; by default it is not kept.")] = None,
    rollouts: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Train on the first groups with about so many rollouts; else on all."),
    ] = None,
    lr: options.Lr = 1e-6,
    temperature: options.Temperature = 1.0,
    updates: options.Updates = 1,
    clip_low: options.Clip = 0.2,
    clip_high: options.Clip = 0.2,
    importance_cap: options.ImportanceCap = 2.0,
    aggregation: options.AggregationOption = Aggregation.GRPO,
    tokens_per_rollout: options.TokensPerRollout = None,
    max_grad_norm: options.MaxGradNorm = 1.0,
    overlong_filtering: options.OverlongFiltering = False,
    spread_filtering: options.SpreadFiltering = False,
    max_sequence_tokens: options.MaxSequenceTokens = None,
    layout: options.LayoutOption = Layout.PADDED,
    tokens_per_micro_batch: options.TokensPerMicroBatch = 4096,
    device: options.Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Train one GRPO step, and report how far the trainer's log probabilities are from those recorded.

    Exits with 1 if no update was made: nothing to train on, or a gradient that is not finite. A gradient of zero is an
    update that moves nothing, and is warned of.
    """
    options.check_temperature(temperature)
    options.check_model(model)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is there already: choose another place for the trained model")

    options.check_device(device)

    from transformers.utils import logging

    from trainer_bridge.batching import Selection
    from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
    from trainer_bridge.loss import LossOptions
    from trainer_bridge.stream import parquet_batches, read_rollouts, steps

    logging.disable_progress_bar()
    read = read_rollouts(parquet_batches(data))
    batch = tuple(read) if rollouts is None else next(steps(read, rollouts_per_step=rollouts), ())
    grpo_options = GrpoOptions(
        lr=lr,
        loss=LossOptions(clip_low=clip_low, clip_high=clip_high, importance_cap=importance_cap),
        selection=Selection(
            aggregation=aggregation.value,
            tokens_per_rollout=tokens_per_rollout,
            overlong_filtering=overlong_filtering,
            spread_filtering=spread_filtering,
            max_sequence_tokens=max_sequence_tokens,
            temperature=temperature,
        ),
        updates_per_step=updates,
        max_grad_norm=max_grad_norm,
        layout=layout.value,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
    with options.progress_bar() as progress:
        bar = progress.add_task("loading the model", total=None)
        with signals_end_it_at_once(progress.console):
            with explained(f"cannot load the model of {model}"):
                trainer = GrpoTrainer.load(model, grpo_options, device=device)
            progress.update(bar, description=f"training on {len(batch)} rollouts")
            metrics = trainer.step(batch, on_progress=lambda done, of: progress.update(bar, completed=done, total=of))
        if out is not None:
            progress.update(bar, description="saving")
            trainer.save(out, tokenizer_from=model)
    if as_json:
        typer.echo(json.dumps(asdict(metrics), indent=2))
    else:
        Console().print(metrics_table(metrics))
    if not metrics.updates:
        raise typer.Exit(1)
    notes = options.warnings(metrics)
    if metrics.grad_norm == 0:
        notes.append("the gradient is zero, so the weights did not move: are the rewards of each group equal?")
    for note in notes:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[yellow]warning:[/] {note}")


@contextmanager
def signals_end_it_at_once(console: Console) -> Iterator[None]:
    """Meanwhile Ctrl-C and SIGTERM end this process where it stands.

    Python would hear of them when torch returns, and one pass may take minutes. Nothing is lost, and nothing is left:
    what has been computed is kept nowhere yet.
    """
    console.show_cursor()  # hidden by a progress bar, which would not be there to show it again
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_GROUPED = {"left_out": "left out", "temperatures": "tokens of temperature"}


def metrics_table(metrics: StepMetrics) -> Table:
    """The account of a step, for a person."""
    table = Table(show_header=False, box=None)
    for name, value in asdict(metrics).items():
        if isinstance(value, dict):
            for inner, number in value.items():
                label = f"{_GROUPED[name]}: {inner}" if name in _GROUPED else inner
                table.add_row(label, f"{number:.6g}")
        elif isinstance(value, float | int):
            table.add_row(name, f"{value:.6g}")
        elif value:
            table.add_row(name, ", ".join(value))
    return table
