"""A training run: steps over a stream of groups, with a line of metrics for each, checkpoints and plots.

Invariant: whenever the run is killed, its folder holds the last checkpoint whole, and going on from there makes the
steps that it would have made; `metrics.jsonl` has each step once. A run that is told to stop, or whose groups or graph
are gone, leaves a checkpoint of its last whole step.

    RUN/metrics.jsonl    one JSON object a step, as it is made
    RUN/metrics.png      the same, drawn
    RUN/checkpoints/     `checkpoints.py`; the newest is a model folder that can be served

Flow: `Trainer(..., run)` -> `resume()` -> `run(groups)`: groups until there are enough rollouts -> `GrpoTrainer.step`
-> metrics -> the weights go to the graph (`weight_pushes`) -> `on_step` -> now and then a checkpoint and the plots.

    trainer = Trainer(GrpoTrainer.load(folder, GrpoOptions()), Path("runs/first"), LoopOptions(rollouts_per_step=64))
    trainer.resume()
    groups = groups_of(read_rollouts(parquet_batches(data)))
    trainer.run(itertools.islice(groups, trainer.progress.groups_trained, None))

or, on groups as they come: `with GroupStream(source, position=trainer.position) as stream: trainer.run_stream(stream)`.
With `pushes`, call `serve()` before the stream is opened: what is played then is played by the run's own weights.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

from gym_capture.durable_files import replace_file
from gym_capture.errors import ConfigError, GymCaptureError, WeightsError
from trainer_bridge import checkpoints
from trainer_bridge.checkpoints import Progress
from trainer_bridge.groups import GroupStream, Position
from trainer_bridge.grpo import GrpoTrainer, StepGivenUpError, StepMetrics
from trainer_bridge.plots import write_plots
from trainer_bridge.stream import TrainRollout, groups_of
from trainer_bridge.weight_client import Pushed
from trainer_bridge.weight_pushes import WeightPushes

__all__ = ["CHECKPOINTS", "METRICS", "LoopOptions", "Trainer", "groups_of"]

METRICS: Final = "metrics.jsonl"
CHECKPOINTS: Final = "checkpoints"
_PLOTS: Final = "metrics.png"

_G = TypeVar("_G", bound=Sequence[TrainRollout])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How a run goes."""

    rollouts_per_step: int = 64
    """A step takes whole groups until it has at least this many."""
    steps: int | None = None
    """Of the whole run, those before it was resumed included; None: until the stream ends."""
    warmup_steps: int = 0
    """The first steps of the run, over which the learning rate rises in a line to its full value: of the size of a
    gradient AdamW knows nothing at first, and would move each weight by the whole rate."""
    checkpoint_every: int = 10
    """Steps; there is one at the end, too."""
    keep: int = 2
    """Checkpoints."""
    plots: bool = True
    """Draw the metrics beside each checkpoint, if matplotlib is installed."""

    def __post_init__(self) -> None:
        for name, value in (
            ("rollouts_per_step", self.rollouts_per_step),
            ("checkpoint_every", self.checkpoint_every),
            ("keep", self.keep),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1: got {value}")


class Trainer:
    """`GrpoTrainer.step` in a loop, with a folder."""

    def __init__(
        self,
        grpo: GrpoTrainer,
        run: Path,
        options: LoopOptions,
        *,
        tokenizer_from: Path | None = None,
        pushes: WeightPushes | None = None,
    ) -> None:
        """`tokenizer_from`: the model folder whose tokenizer goes with the checkpoints. `pushes`: where the weights of
        each step go."""
        self.grpo = grpo
        self.progress = Progress()
        self.last_line: Mapping[str, Any] = {}
        """That of the step that was made last, as it stands in the metrics."""
        self._folder = run
        self._options = options
        self._tokenizer_from = tokenizer_from
        self._pushes = pushes
        self._stream: GroupStream | None = None
        self._written = 0
        self._stopping = False

    def resume(self) -> bool:
        """Goes on from the newest checkpoint of the run, if there is one: weights, optimizer, random state, steps.

        Lines of metrics behind it, all of them if there is none, are of steps that are to be made again, and go. Raises
        `ConfigError` for a checkpoint of another model, or metrics that are something else.
        """
        lines = self._lines()  # before anything changes
        found = checkpoints.latest(self._folder / CHECKPOINTS)
        if found is not None:
            self.progress = checkpoints.restore(found, self.grpo)
        kept = [text for text in lines if json.loads(text)["step"] <= self.progress.step]
        if (self._folder / METRICS).exists():
            replace_file(self._folder / METRICS, "".join(kept).encode())
        return found is not None

    @property
    def position(self) -> Position | None:
        """Where a stream goes on. Raises `ConfigError` if the checkpoint has one of another version."""
        found = self.progress.position
        return None if found is None else Position.from_json(found)

    def serve(self, *, again: bool = False) -> Pushed | None:
        """Has the graph serve the weights of the run, if it does not. `again`: see `WeightPushes.begin`, which it
        raises the errors of."""
        assert self._pushes is not None, "the trainer was given no `pushes`"
        return self._pushes.begin(self.grpo.model.state_dict(), self.progress.weights, again=again)

    def stop(self) -> None:
        """Ends the run soon, with a checkpoint: a step that has not moved the weights is given up, and nothing is
        waited for. For other threads, and handlers of signals."""
        self._stopping = True
        if self._stream is not None:
            self._stream.end()
        if self._pushes is not None:
            self._pushes.give_up()

    def run(
        self,
        groups: Iterable[Sequence[TrainRollout]],
        *,
        on_step: Callable[[Progress, StepMetrics], None] = lambda progress, metrics: None,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
        on_wait: Callable[[int, int], None] = lambda there, of: None,
    ) -> Progress:
        """Trains on `groups` until they end or the steps are made. `groups`: what comes behind
        `progress.groups_trained`. `on_step` is called behind each step, when its metrics are written; `on_progress`
        gets the passes of a step, `on_wait` how many rollouts are there for the next one, and how many it takes.

        Raises `ConfigError`, before anything is trained, if the folder has a checkpoint of more steps: `resume` first.
        """
        hooks = _Hooks(on_step, on_progress, on_wait)
        return self._run(groups, hooks, settle=lambda some: None, saved=lambda: None, counted=dict)

    def run_stream(
        self,
        stream: GroupStream,
        *,
        on_step: Callable[[Progress, StepMetrics], None] = lambda progress, metrics: None,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
        on_wait: Callable[[int, int], None] = lambda there, of: None,
    ) -> Progress:
        """As `run`, on a stream that was opened at `position`. Each checkpoint has the stream's position, which is
        acknowledged once the checkpoint is written."""

        def saved() -> None:
            if (position := self.position) is not None:
                stream.acknowledge(position)

        def counted() -> dict[str, Any]:
            return {f"stream/{name}": count for name, count in asdict(stream.counts).items()}

        self._stream = stream
        if self._stopping:
            stream.end()
        hooks = _Hooks(on_step, on_progress, on_wait)
        return self._run(
            stream, hooks, settle=lambda some: stream.trained(some).as_json(), saved=saved, counted=counted
        )

    def _run(
        self,
        groups: Iterable[_G],
        hooks: _Hooks,
        *,
        settle: Callable[[list[_G]], Mapping[str, Any] | None],
        saved: Callable[[], None],
        counted: Callable[[], dict[str, Any]],
    ) -> Progress:
        checkpoints.check_none_ahead(self._folder / CHECKPOINTS, self.progress.step)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._written = self.progress.step
        if self._pushes is not None and self._pushes.version is None:
            self.serve()
        try:
            with (self._folder / METRICS).open("a", encoding="utf-8") as file:
                for some in self._some_at_a_time(groups, hooks):
                    self._step(some, hooks, file, settle, counted)
                    if self.progress.step % self._options.checkpoint_every == 0:
                        self._save(saved)
        except StepGivenUpError:
            self._save(saved)
        except GymCaptureError:
            self._save(saved)  # what was trained stays trained, whatever is gone
            if not self._stopping:
                raise
        else:
            self._save(saved)
        self._finish_pushes()
        return self.progress

    def _step(
        self,
        some: list[_G],
        hooks: _Hooks,
        file: TextIO,
        settle: Callable[[list[_G]], Mapping[str, Any] | None],
        counted: Callable[[], dict[str, Any]],
    ) -> None:
        rollouts = list(itertools.chain.from_iterable(some))
        lr = self._set_lr()
        metrics = self.grpo.step(rollouts, on_progress=hooks.on_progress, give_up=lambda: self._stopping)
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            groups_trained=self.progress.groups_trained + len(some),
            position=settle(some),
        )
        more: dict[str, Any] = {"lr": lr, "waited_s": hooks.waited_s} | counted()
        try:
            if self._pushes is not None:
                more |= lags(some, self._pushes.version)
                more |= pushed(self._pushes.finished())
        finally:
            self.last_line = line(self.progress, metrics, more)
            file.write(json.dumps(self.last_line, allow_nan=False) + "\n")
            file.flush()
            self._keep_state_of_pushes()
        if self._pushes is not None:
            try:
                self._pushes.push(self.progress.step, self.grpo.model.state_dict())
            finally:
                self._keep_state_of_pushes()
        hooks.on_step(self.progress, metrics)

    def _set_lr(self) -> float:
        """The learning rate of the next step: it depends on the step alone, so a run that is resumed has the same."""
        warmup = max(self._options.warmup_steps, 1)
        lr = self.grpo.options.lr * min(1.0, (self.progress.step + 1) / warmup)
        for group in self.grpo.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _keep_state_of_pushes(self) -> None:
        if self._pushes is not None:
            self.progress = replace(self.progress, weights=self._pushes.state)

    def _finish_pushes(self) -> None:
        """Waits for the last one. A run that is told to stop pushes it when it goes on."""
        if self._pushes is not None:
            try:
                self._pushes.finished()
            except WeightsError:
                if not self._stopping:
                    raise

    def _some_at_a_time(self, groups: Iterable[_G], hooks: _Hooks) -> Iterator[list[_G]]:
        """Groups for a step each. Takes no group that it does not give, unless it is told to stop."""
        remaining = iter(groups)
        while self._options.steps is None or self.progress.step < self._options.steps:
            some: list[_G] = []
            began = time.perf_counter()
            while (there := sum(map(len, some))) < self._options.rollouts_per_step:
                hooks.on_wait(there, self._options.rollouts_per_step)
                group = next(remaining, None)
                if self._stopping:
                    return
                if group is None:
                    break
                some.append(group)
            if not some:
                return
            hooks.waited_s = time.perf_counter() - began
            yield some

    def _save(self, saved: Callable[[], None]) -> None:
        """A checkpoint, if there is none of these steps yet."""
        if self._written < self.progress.step:
            self._written = self._checkpoint()
            saved()

    def _checkpoint(self) -> int:
        checkpoints.write(
            self._folder / CHECKPOINTS,
            self.grpo,
            self.progress,
            tokenizer_from=self._tokenizer_from,
            keep=self._options.keep,
        )
        if self._options.plots:
            write_plots([json.loads(text) for text in self._lines()], self._folder / _PLOTS)
        return self.progress.step

    def _lines(self) -> list[str]:
        """Whole lines of the metrics; the last one may have been cut off by a crash."""
        path = self._folder / METRICS
        if not path.exists():
            return []
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            return [text for text in lines if text.endswith("\n") and _has_step(text)]
        except ValueError as error:
            raise ConfigError(
                f"{path} has a line that is none of metrics, so it is of something else: {error}"
            ) from None


@dataclass(slots=True)
class _Hooks:
    """What a caller is told of."""

    on_step: Callable[[Progress, StepMetrics], None]
    on_progress: Callable[[int, int], None]
    on_wait: Callable[[int, int], None]
    waited_s: float = 0.0
    """For the groups of the step."""


def lags(groups: Iterable[Sequence[TrainRollout]], version: int | None) -> dict[str, Any]:
    """How many versions the oldest weights that sampled a group are behind `version`, those that were trained."""
    found: list[int] = []
    unknown = 0
    for group in groups:
        sampled = {
            each.weight_version
            for rollout in group
            if not rollout.masked
            for sequence in rollout.sequences
            for each in sequence.spans
        }
        known = [int(each) for each in sampled if each is not None and each.isdecimal()]
        unknown += len(known) < len(sampled)
        if known and version is not None:
            found.append(version - min(known))
    return {
        "version": version,
        "lag_mean": sum(found) / len(found) if found else None,
        "lag_max": max(found, default=None),
        "groups_of_unknown_age": unknown,
    }


def pushed(push: Pushed | None) -> dict[str, Any]:
    """Of the push that was finished before this step's weights go."""
    if push is None:
        return {"pushed_version": None, "push_s": None, "paused_s": None}
    return {"pushed_version": push.version, "push_s": push.seconds, "paused_s": push.paused_s}


def line(progress: Progress, metrics: StepMetrics, more: Mapping[str, Any]) -> dict[str, Any]:
    """A step as an object of plain names and numbers; inner names behind a slash. What is not finite is null."""
    found: dict[str, Any] = {"step": progress.step, "groups_trained": progress.groups_trained}
    for name, value in asdict(metrics).items():
        if name == "mismatch":
            found |= value or {}
        elif isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in value.items()}
        else:
            found[name] = value
    found |= more
    return {name: None if _endless(value) else value for name, value in found.items()}


def _has_step(text: str) -> bool:
    """Raises `ValueError` for what is no line of metrics."""
    match json.loads(text):
        case {"step": int()}:
            return True
        case {"step": step}:
            raise ValueError(f"step is {step!r}, no number")
        case {}:
            return False
    raise ValueError("it is no JSON object")


def _endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
