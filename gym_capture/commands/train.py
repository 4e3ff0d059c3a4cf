"""`gym-capture train`: a training run of the reference GRPO trainer, over built trajectories or groups as they come.

Invariant: a run is a folder. Started again with the same folder it goes on from its newest checkpoint; a folder that
was begun with another model or other data is refused, with nothing changed. A run that is told to stop, or whose groups
or graph are gone, leaves a checkpoint of its last step.

Flow: groups (`train_groups`) -> steps under a progress bar, a line of metrics each -> weights to the graph, with
`--push` -> checkpoints, plots.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from gym_capture.commands import training_options as options
from gym_capture.commands.loading import explained
from gym_capture.commands.stopping import stopped_by_signals
from gym_capture.commands.train_groups import AHEAD, Asked, Stale, epochs_of, job_of, opened
from gym_capture.commands.training_options import Aggregation, Layout
from gym_capture.commands.weights import Token
from gym_capture.data.advantages import Scale
from gym_capture.durable_files import replace_file
from gym_capture.errors import ConfigError, StreamLostError, WeightsError
from gym_capture.rollouts.progress import JobProgress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from gym_capture.rollouts.jobfile import JobFile
    from trainer_bridge.checkpoints import Progress
    from trainer_bridge.grpo import StepMetrics
    from trainer_bridge.loop import Trainer
    from trainer_bridge.weight_pushes import WeightPushes


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

_OPTION: Final = {"model": "--model", "data": "--data", "follow": "--follow --data", "play": "--play"}
"""How a run is begun with what `run.json` names."""


def command(
    model: options.Model,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is there is gone on with.", file_okay=False)],
    data: Annotated[str | None, typer.Option(help="Directory, or URI of one, of trajectories as Parquet.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="A job with --build still writes into --data, or has not begun to.")
    ] = False,
    play: Annotated[
        Path | None,
        typer.Option(help="Instead of --data: play this job, and train on its groups.", metavar="JOB.YAML"),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the job file: samples=8.", metavar="KEY=VALUE")
    ] = None,
    ahead: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Groups that are played, or read, before the trainer takes them: {AHEAD}. The job of --play waits.",
        ),
    ] = None,
    max_lag: Annotated[
        int | None,
        typer.Option(min=0, help="How many versions the weights that sampled a group may be behind the trainer's."),
    ] = None,
    stale: Annotated[Stale, typer.Option(help="What becomes of older groups; they are counted.")] = Stale.DROP,
    retire: Annotated[
        bool, typer.Option("--retire", help="Drop the records of what was trained from the graph of --play.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Where a graph is served that gets the weights of each step.", metavar="URL")
    ] = None,
    push_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 1,
    weights_folder: Annotated[
        Path | None,
        typer.Option(help="Where pushed weights are written, for all replicas to see: RUN/weights.", file_okay=False),
    ] = None,
    token: Token = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times that all groups are trained on.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the whole run; by default until the data ends.")] = None,
    rollouts_per_step: Annotated[
        int, typer.Option(min=1, help="A step takes whole groups until it has at least this many.")
    ] = 64,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps; there is a checkpoint at the end, too.")] = 10,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that are kept.")] = 2,
    lr: options.Lr = 1e-6,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="First steps of the run, over which the learning rate rises to --lr.")
    ] = 0,
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
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve the metrics at this port, for Prometheus.")
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address to serve them at; 0.0.0.0: all.")] = "127.0.0.1",
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the metrics of each step as a line of JSON, as in metrics.jsonl.")
    ] = False,
) -> None:
    """Train over built trajectories, or over groups as they are played, step after step, with checkpoints.

    Ctrl-C and SIGTERM end it with a checkpoint. Exits with 1 if not one update was made.
    """
    asked = Asked(
        data=data,
        follow=follow,
        play=play,
        settings=tuple(set_ or ()),
        ahead=ahead,
        max_lag=max_lag,
        stale=stale,
        retire=retire,
        epochs=epochs,
        pushes=push is not None,
    )
    asked.check()
    if weights_folder is not None and push is None:
        raise ConfigError("--weights-folder is for weights that this run pushes: say --push, and where to")
    if reference is not None and not kl:
        raise ConfigError("--reference is for the divergence from it: say --kl, and how much it counts")
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
    from trainer_bridge.weight_client import WeightClient
    from trainer_bridge.weight_pushes import WeightPushes

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
    if data is not None and not follow:
        count_rows(data)  # all of it can be read, before anything is loaded
    job = None if play is None else job_of(play, asked.settings)
    if push is not None:
        options.check_weights(push, token)
    again = _begin(out, {"model": str(model.resolve()), **asked.begun_with(job)})
    console = Console(soft_wrap=True, highlight=False, markup=False, stderr=as_json)
    with (
        _scraped(out, metrics_host, metrics_port),
        options.progress_bar() as bar,
        ExitStack() as opens,
    ):
        task = bar.add_task("loading the model", total=None)
        with explained(f"cannot load the model of {model}"):
            grpo = GrpoTrainer.load(model, grpo_options, device=device, attention=attention, reference=reference)
        loop = LoopOptions(
            rollouts_per_step=rollouts_per_step,
            steps=steps,
            warmup_steps=warmup_steps,
            checkpoint_every=checkpoint_every,
            keep=keep,
        )
        pushes = None
        if push is not None:
            client = opens.enter_context(WeightClient(push, token=token))
            pushes = WeightPushes(client, weights_folder or out / "weights", every=push_every)
            opens.callback(pushes.close)
        trainer = Trainer(grpo, out, loop, tokenizer_from=model, pushes=pushes)
        if annotate is not None:
            grpo.on_tokens = StepAnnotator(
                annotate, lambda: trainer.progress.step + 1, warn=lambda text: bar.console.print(escape(text))
            )
        if trainer.resume():
            bar.console.print(f"going on behind step {trainer.progress.step}")
        if pushes is not None and (steps is None or trainer.progress.step < steps):
            bar.update(task, description="pushing the weights")
            if (pushed := trainer.serve(again=again)) is not None:
                bar.console.print(f"the graph serves the weights of this run, as version {pushed.version}")
        run = _Run(trainer, asked, job, pushes, console, bar, task, as_json=as_json)
        before = trainer.progress.step
        with stopped_by_signals(trainer.stop) as received:
            try:
                progress = run.go()
            except (WeightsError, StreamLostError):
                console.print(_kept(trainer.progress, out))
                raise
    if received:
        console.print(f"stopped by {received[0].name}: {_kept(progress, out)}")
        raise typer.Exit(128 + received[0])
    if progress.step == before:
        console.print(f"nothing to do: {out} has all {progress.step} steps")
    elif not run.made:
        raise typer.Exit(1)
    elif steps is not None and progress.step < steps:
        hint = "" if data is None or follow else " (--epochs: how often all are trained on)"
        console.print(f"there are no more rollouts: {progress.step} of {steps} steps were made{hint}")


@dataclass
class _Run:
    """A run, shown while it goes."""

    trainer: Trainer
    asked: Asked
    job: JobFile | None
    pushes: WeightPushes | None
    console: Console
    bar: Bar
    task: TaskID
    as_json: bool
    made: int = 0
    """Updates."""
    progress: JobProgress = field(default_factory=JobProgress)
    """Of the job that is played."""

    def go(self) -> Progress:
        trainer, data = self.trainer, self.asked.data
        if self.job is None and not self.asked.follow:
            assert data is not None
            groups = itertools.islice(epochs_of(data, self.asked.epochs), trainer.progress.groups_trained, None)
            return trainer.run(groups, on_step=self._step, on_progress=self._passes, on_wait=self._reads)
        if data is not None and "://" not in data and not Path(data).exists():
            self._note(f"{data} is not there yet: waiting for the job that builds into it")
        with opened(
            self.asked,
            self.job,
            position=trainer.position,
            version=self._version,
            progress=self.progress,
            note=self._note,
        ) as stream:
            done = trainer.run_stream(stream, on_step=self._step, on_progress=self._passes, on_wait=self._waits)
        if stream.counts.dropped_as_stale:
            self.console.print(f"{stream.counts.dropped_as_stale} groups were older than --max-lag, and not trained")
        return done

    def _version(self) -> int:
        return 0 if self.pushes is None or self.pushes.version is None else self.pushes.version

    def _note(self, text: str) -> None:
        self.bar.console.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _step(self, progress: Progress, metrics: StepMetrics) -> None:
        self.made += metrics.updates
        if self.as_json:
            typer.echo(json.dumps(self.trainer.last_line, allow_nan=False))
        else:
            self.console.print(_said(progress, metrics))

    def _passes(self, done: int, of: int) -> None:
        self._show(f"step {self.trainer.progress.step + 1}", done, of)

    def _reads(self, there: int, of: int) -> None:
        self._show(f"step {self.trainer.progress.step + 1}: reading rollouts", there, of)

    def _waits(self, there: int, of: int) -> None:
        self._show(f"step {self.trainer.progress.step + 1}: waiting for rollouts", there, of)

    def _show(self, text: str, done: int, of: int) -> None:
        self.bar.update(self.task, description=text, completed=done, total=of)


def _kept(progress: Progress, out: Path) -> str:
    kept = f"a checkpoint of step {progress.step} is in {out}" if progress.step else "no step was made"
    return f"{kept}; the same command goes on"


def _scraped(out: Path, host: str, port: int | None) -> AbstractContextManager[object]:
    from trainer_bridge.loop import METRICS
    from trainer_bridge.run_metrics import served

    return nullcontext() if port is None else served(out, out / METRICS, host=host, port=port)


def _begin(out: Path, begun_with: dict[str, str]) -> bool:
    """Makes the folder say what it is of. True: it did already. Raises `ConfigError` if it is of something else."""
    path = out / "run.json"
    try:
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differs = [name for name, value in begun_with.items() if found.get(name) != value]
            if differs:
                name = differs[0]
                was = next((key for key in (name, "data", "follow", "play") if key in found), name)
                raise ConfigError(
                    f"{out} was begun with {_OPTION[was]} {found.get(was)}, not {_OPTION[name]} {begun_with[name]}: "
                    "choose another --out"
                )
            return True
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"{out} holds something else: choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(begun_with).encode())
        return False
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
