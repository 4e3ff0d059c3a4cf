"""A training run: steps over a stream of groups, with a line of metrics for each, checkpoints and plots.

Invariant: whenever the run is killed, its folder holds the last checkpoint whole, and going on from there makes the
steps that it would have made; `metrics.jsonl` has each step once.

    RUN/metrics.jsonl    one JSON object a step, as it is made
    RUN/metrics.png      the same, drawn
    RUN/checkpoints/     `checkpoints.py`; the newest is a model folder that can be served

Flow: `Trainer(..., run)` -> `resume()` -> `run(groups)`: groups until there are enough rollouts -> `GrpoTrainer.step`
-> metrics -> `on_step`, for whoever pushes weights or acknowledges groups -> now and then a checkpoint and the plots.

    trainer = Trainer(GrpoTrainer.load(folder, GrpoOptions()), Path("runs/first"), LoopOptions(rollouts_per_step=64))
    trainer.resume()
    groups = groups_of(read_rollouts(parquet_batches(data)))
    trainer.run(itertools.islice(groups, trainer.progress.groups_trained, None))

or, on groups as they come: `with GroupStream(source, position=trainer.position) as stream: trainer.run_stream(stream)`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gym_capture.durable_files import replace_file
from gym_capture.errors import ConfigError
from trainer_bridge import checkpoints
from trainer_bridge.checkpoints import Progress
from trainer_bridge.groups import GroupStream, Position
from trainer_bridge.grpo import GrpoTrainer, StepMetrics
from trainer_bridge.plots import write_plots
from trainer_bridge.stream import TrainRollout

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
    checkpoint_every: int = 10
    """Steps; there is one at the end, too."""
    keep: int = 2
    """Checkpoints."""
    plots: bool = True
    """Draw the metrics beside each checkpoint, if matplotlib is installed."""


class Trainer:
    """`GrpoTrainer.step` in a loop, with a folder."""

    def __init__(
        self, grpo: GrpoTrainer, run: Path, options: LoopOptions, *, tokenizer_from: Path | None = None
    ) -> None:
        """`tokenizer_from`: the model folder whose tokenizer goes with the checkpoints."""
        self.grpo = grpo
        self.progress = Progress()
        self._folder = run
        self._options = options
        self._tokenizer_from = tokenizer_from

    def resume(self) -> bool:
        """Goes on from the newest checkpoint of the run, if there is one: weights, optimizer, random state, steps.

        Lines of metrics behind it are of steps that are to be made again, and go. Raises `ConfigError` for a checkpoint
        of another model, or a run that has metrics of steps and no checkpoint.
        """
        found = checkpoints.latest(self._folder / CHECKPOINTS)
        if found is not None:
            self.progress = checkpoints.restore(found, self.grpo)
        kept = [text for text in self._lines() if json.loads(text)["step"] <= self.progress.step]
        if (self._folder / METRICS).exists():
            replace_file(self._folder / METRICS, "".join(kept).encode())
        return found is not None

    @property
    def position(self) -> Position | None:
        """Where a stream goes on. Raises `ConfigError` if the checkpoint has one of another version."""
        found = self.progress.position
        return None if found is None else Position.from_json(found)

    def run(
        self,
        groups: Iterable[Sequence[TrainRollout]],
        *,
        on_step: Callable[[Progress, StepMetrics], None] = lambda progress, metrics: None,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> Progress:
        """Trains on `groups` until they end or the steps are made. `groups`: what comes behind
        `progress.groups_trained`. `on_step` is called behind each step, when its metrics are written; `on_progress`
        gets the passes of a step."""
        return self._run(groups, on_step, on_progress, settle=lambda some: None, saved=lambda: None)

    def run_stream(
        self,
        stream: GroupStream,
        *,
        on_step: Callable[[Progress, StepMetrics], None] = lambda progress, metrics: None,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> Progress:
        """As `run`, on a stream that was opened at `position`. Each checkpoint has the stream's position, which is
        acknowledged once the checkpoint is written."""

        def saved() -> None:
            if (position := self.position) is not None:
                stream.acknowledge(position)

        return self._run(stream, on_step, on_progress, settle=lambda some: stream.trained(some).as_json(), saved=saved)

    def _run(
        self,
        groups: Iterable[_G],
        on_step: Callable[[Progress, StepMetrics], None],
        on_progress: Callable[[int, int], None],
        *,
        settle: Callable[[list[_G]], Mapping[str, Any] | None],
        saved: Callable[[], None],
    ) -> Progress:
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self.progress.step
        with (self._folder / METRICS).open("a", encoding="utf-8") as file:
            for some in self._some_at_a_time(groups):
                metrics = self.grpo.step(list(itertools.chain.from_iterable(some)), on_progress=on_progress)
                self.progress = Progress(
                    step=self.progress.step + 1,
                    groups_trained=self.progress.groups_trained + len(some),
                    position=settle(some),
                )
                file.write(json.dumps(line(self.progress, metrics), allow_nan=False) + "\n")
                file.flush()
                on_step(self.progress, metrics)
                if self.progress.step % self._options.checkpoint_every == 0:
                    written = self._checkpoint()
                    saved()
        if written < self.progress.step:
            self._checkpoint()
            saved()
        return self.progress

    def _some_at_a_time(self, groups: Iterable[_G]) -> Iterator[list[_G]]:
        """Groups for a step each. Takes no group that it does not give."""
        remaining = iter(groups)
        while self._options.steps is None or self.progress.step < self._options.steps:
            some: list[_G] = []
            while sum(map(len, some)) < self._options.rollouts_per_step:
                group = next(remaining, None)
                if group is None:
                    break
                some.append(group)
            if not some:
                return
            yield some

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
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            return [text for text in lines if text.endswith("\n") and "step" in json.loads(text)]
        except ValueError as error:
            raise ConfigError(f"{path} has a line that is no JSON, so it is of something else: {error}") from None


def line(progress: Progress, metrics: StepMetrics) -> dict[str, Any]:
    """A step as an object of plain names and numbers; inner names behind a slash. What is not finite is null."""
    found: dict[str, Any] = {name: value for name, value in asdict(progress).items() if name != "position"}
    for name, value in asdict(metrics).items():
        if name == "mismatch":
            found |= value or {}
        elif isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in value.items()}
        else:
            found[name] = value
    return {name: None if _endless(value) else value for name, value in found.items()}


def _endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def groups_of(rollouts: Iterable[TrainRollout]) -> Iterator[tuple[TrainRollout, ...]]:
    """Whole groups, of rollouts whose groups stand together, as a build writes them."""
    for _, group in itertools.groupby(rollouts, key=lambda rollout: rollout.group_id):
        yield tuple(group)
