"""`gym-capture train`: a training run of the reference GRPO trainer over built trajectories.

Invariant: a run is a folder. Started again with the same folder it goes on from its newest checkpoint; a folder that
was begun with another model or other data is refused, with nothing changed.

Flow: Parquet -> groups, epoch after epoch -> steps under a progress bar, a line of metrics each -> checkpoints, plots.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from gym_capture.commands import training_options as options
from gym_capture.commands.loading import explained
from gym_capture.commands.training_options import Aggregation, Layout
from gym_capture.data.advantages import Scale
from gym_capture.durable_files import replace_file
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from trainer_bridge.checkpoints import Progress
    from trainer_bridge.grpo import StepMetrics
    from trainer_bridge.stream import TrainRollout


class Importance(StrEnum):
    """What becomes of importance weights beyond their limits."""

    TRUNCATE = "truncate"
    MASK = "mask"
    NONE = "none"


class Ratio(StrEnum):
    """Of what the ratio is clipped."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Advantage(StrEnum):
    """How to compare the rewards of a group."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"


_SCALES: Final[Mapping[Advantage, Scale]] = {
    Advantage.GRPO: "population_std",
    Advantage.DR_GRPO: "none",
    Advantage.RLOO: "leave_one_out",
}


def command(
    model: options.Model,
    data: options.Data,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is there is gone on with.", file_okay=False)],
    epochs: Annotated[int, typer.Option(min=1, help="Times that all groups are trained on.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the whole run; by default until the data ends.")] = None,
    rollouts_per_step: Annotated[
        int, typer.Option(min=1, help="A step takes whole groups until it has at least this many.")
    ] = 64,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps; there is a checkpoint at the end, too.")] = 10,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that are kept.")] = 2,
    lr: options.Lr = 1e-6,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.0,
    temperature: options.Temperature = 1.0,
    updates: options.Updates = 1,
    ratio: Annotated[Ratio, typer.Option(help="Of a token, or of its whole trajectory (GSPO).")] = Ratio.TOKEN,
    clip_low: options.Clip = 0.2,
    clip_high: options.Clip = 0.2,
    importance: Annotated[
        Importance,
        typer.Option(help="Importance weights beyond limits: truncated (TIS), masked (MIS), unused."),
    ] = Importance.TRUNCATE,
    importance_cap: options.ImportanceCap = 2.0,
    importance_floor: Annotated[float, typer.Option(min=0.0, help="Of mask: the least that a weight may be.")] = 0.0,
    mismatch_threshold: Annotated[
        float | None,
        typer.Option(min=0.0, help="Leave out rollouts whose mean |log prob difference| to the trainer is above this."),
    ] = None,
    kl: Annotated[float, typer.Option(min=0.0, help="Coefficient of the divergence from the reference weights.")] = 0.0,
    reference: Annotated[
        Path | None, typer.Option(help="Model folder of the reference weights; by default --model.", file_okay=False)
    ] = None,
    advantage: Annotated[
        Advantage | None, typer.Option(help="Compare the rewards again; by default the advantages are those built.")
    ] = None,
    aggregation: options.AggregationOption = Aggregation.GRPO,
    tokens_per_rollout: options.TokensPerRollout = None,
    max_grad_norm: options.MaxGradNorm = 1.0,
    overlong_filtering: options.OverlongFiltering = False,
    spread_filtering: options.SpreadFiltering = False,
    max_sequence_tokens: options.MaxSequenceTokens = None,
    layout: options.LayoutOption = Layout.PADDED,
    tokens_per_micro_batch: options.TokensPerMicroBatch = 4096,
    attention: Annotated[str, typer.Option(help="Of transformers: sdpa, flex_attention, eager.")] = "sdpa",
    device: options.Device = "cpu",
    annotate: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the records or trajectories: add each token's entropy, difference and clipping there, "
            "for `gym-capture ui`.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Train over built trajectories, step after step, with checkpoints.

    Exits with 1 if not one update was made.
    """
    options.check_temperature(temperature)
    for folder in (model, *([] if reference is None else [reference])):
        options.check_model(folder)
    options.check_device(device)

    from transformers.utils import logging

    from trainer_bridge.annotations import StepAnnotator
    from trainer_bridge.batching import Selection
    from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
    from trainer_bridge.loop import LoopOptions, Trainer
    from trainer_bridge.loss import LossOptions
    from trainer_bridge.stream import count_rows

    logging.disable_progress_bar()
    grpo_options = GrpoOptions(
        lr=lr,
        weight_decay=weight_decay,
        loss=LossOptions(
            ratio=ratio.value,
            clip_low=clip_low,
            clip_high=clip_high,
            importance=importance.value,
            importance_cap=importance_cap,
            importance_floor=importance_floor,
            kl_coefficient=kl,
        ),
        selection=Selection(
            aggregation=aggregation.value,
            tokens_per_rollout=tokens_per_rollout,
            overlong_filtering=overlong_filtering,
            spread_filtering=spread_filtering,
            max_sequence_tokens=max_sequence_tokens,
            temperature=temperature,
            advantage=None if advantage is None else _SCALES[advantage],
        ),
        updates_per_step=updates,
        max_grad_norm=max_grad_norm,
        mismatch_threshold=mismatch_threshold,
        layout=layout.value,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
    count_rows(data)  # all of it can be read, before anything is loaded
    _begin(out, {"model": str(model.resolve()), "data": data})
    console = Console(soft_wrap=True, highlight=False)
    made = 0
    with options.progress_bar() as bar:
        task = bar.add_task("loading the model", total=None)
        with explained(f"cannot load the model of {model}"):
            grpo = GrpoTrainer.load(model, grpo_options, device=device, attention=attention, reference=reference)
        loop = LoopOptions(
            rollouts_per_step=rollouts_per_step, steps=steps, checkpoint_every=checkpoint_every, keep=keep
        )
        trainer = Trainer(grpo, out, loop, tokenizer_from=model)
        if annotate is not None:
            grpo.on_tokens = StepAnnotator(annotate, lambda: trainer.progress.step + 1, warn=bar.console.print)
        if trainer.resume():
            bar.console.print(f"going on behind step {trainer.progress.step}")
        bar.update(task, description=f"step {trainer.progress.step + 1}")

        def on_step(progress: Progress, metrics: StepMetrics) -> None:
            nonlocal made
            made += metrics.updates
            console.print(_said(progress, metrics))
            bar.update(task, description=f"step {progress.step + 1}")

        groups = itertools.islice(_groups(data, epochs), trainer.progress.groups_trained, None)
        before = trainer.progress.step
        progress = trainer.run(
            groups, on_step=on_step, on_progress=lambda done, of: bar.update(task, completed=done, total=of)
        )
    if progress.step == before:
        console.print(f"nothing to do: {out} has all {progress.step} steps")
    elif not made:
        raise typer.Exit(1)


def _groups(data: str, epochs: int) -> Iterator[tuple[TrainRollout, ...]]:
    from trainer_bridge.loop import groups_of
    from trainer_bridge.stream import parquet_batches, read_rollouts

    for _ in range(epochs):
        yield from groups_of(read_rollouts(parquet_batches(data)))


def _begin(out: Path, begun_with: dict[str, str]) -> None:
    """Makes the folder say what it is of. Raises `ConfigError` if it is of something else."""
    path = out / "run.json"
    try:
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differs = [name for name, value in begun_with.items() if found.get(name) != value]
            if differs:
                name = differs[0]
                raise ConfigError(
                    f"{out} was begun with --{name} {found.get(name)}, not {begun_with[name]}: choose another --out"
                )
            return
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"{out} holds something else: choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(begun_with).encode())
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--out {out} cannot be used: {' '.join(str(error).split())}") from None


def _said(progress: Progress, metrics: StepMetrics) -> str:
    """A step in a line, for a person."""
    parts = [f"step {progress.step}", f"loss {metrics.loss:.4g}", f"grad norm {metrics.grad_norm:.4g}"]
    if metrics.mean_reward is not None:
        parts.insert(1, f"reward {metrics.mean_reward:.4g}")
    if metrics.mismatch is not None:
        parts.append(f"token_mult_prob_error {metrics.mismatch.token_mult_prob_error:.4g}")
    parts.append(f"{metrics.rollouts} rollouts, {metrics.trained_tokens} tokens")
    if metrics.left_out:
        parts.append("left out: " + ", ".join(f"{name} {count}" for name, count in metrics.left_out.items()))
    return ", ".join([*parts, *options.warnings(metrics)])
