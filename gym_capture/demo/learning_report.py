"""What training runs came to: figures, a table, a picture, and the checks that decide whether the policy got better.

Invariant: every figure is read from what a run wrote: the trainer's line for each update, the job's line for each
rollout.

Flow: a run's folder -> `Run` -> `table`, `checks`, `draw`, `to_json`.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from gym_capture.demo.report import Check
from gym_capture.durable_files import replace_file
from gym_capture.rollouts.ledger import ROWS_FILE

ENDS: Final = 5
"""Updates at the beginning and at the end of a run that are compared."""
LEAST_RISE: Final = 0.1
"""Of the mean reward, over a run; rewards are between 0 and 1."""
LARGEST_PROB_ERROR: Final = 1.02
"""Mean factor that a token's probability is off by, trainer against engine, older weights included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    supplied: bool
    seed: int
    steps: tuple[Mapping[str, Any], ...]
    """The trainer's lines, an update each."""
    rollouts: tuple[Mapping[str, Any], ...]
    """The job's lines."""
    seconds: float

    @property
    def rewards(self) -> list[float]:
        """Mean reward of the rollouts of each update."""
        return [float(step["mean_reward"] or 0.0) for step in self.steps]

    @property
    def first(self) -> float:
        """Mean reward of the first updates."""
        return _mean(self.rewards[:ENDS])

    @property
    def last(self) -> float:
        """Mean reward of the last updates."""
        return _mean(self.rewards[-ENDS:])

    def mean(self, name: str) -> float:
        """A metric, as the mean over the updates that have it."""
        return _mean([step[name] for step in self.steps if step.get(name) is not None])

    def largest(self, name: str) -> float:
        return max((step[name] for step in self.steps if step.get(name) is not None), default=0.0)

    def total(self, name: str) -> int:
        return sum(step[name] for step in self.steps)

    def recorded(self, name: str) -> int:
        """A count of what the graph recorded, over all rollouts."""
        return sum(int(row["recorded"][name]) for row in self.rollouts if row.get("recorded"))

    @property
    def generated_per_rollout(self) -> float:
        known = sum(bool(row.get("recorded")) for row in self.rollouts)
        return self.recorded("generated_tokens") / max(1, known)

    @property
    def trained_per_rollout(self) -> float:
        return self.total("trained_tokens") / max(1, self.total("rollouts"))


def read_run(folder: Path, *, supplied: bool, seed: int, seconds: float) -> Run:
    """The run in `folder`, which has the trainer's `run` and the `job` that it played."""
    return Run(
        supplied=supplied,
        seed=seed,
        steps=_lines(folder / "run" / "metrics.jsonl"),
        rollouts=_lines(folder / "job" / ROWS_FILE),
        seconds=seconds,
    )


def _lines(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(text) for text in path.read_text(encoding="utf-8").splitlines())


def checks(runs: Sequence[Run], *, leftovers: Sequence[str]) -> list[Check]:
    """Every promise, and whether it held. Without prefix supply nothing is promised but that the runs end."""
    found = []
    for run in runs:
        if run.supplied:
            found += _promised(run)
    found.append(Check("nothing is left running", not leftovers, ", ".join(leftovers) or "0 processes"))
    return found


def _promised(run: Run) -> list[Check]:
    links, contiguous = run.recorded("eligible_links"), run.recorded("contiguous_links")
    off_by = run.mean("token_mult_prob_error")
    versions = [step["version"] for step in run.steps]
    served = {version for step in run.steps for version in step["weight_versions"]}
    name = f"seed {run.seed}"
    return [
        Check(
            f"{name}: the reward rises",
            run.last - run.first >= LEAST_RISE,
            f"{run.first:.3f} to {run.last:.3f}, the first and last {ENDS} of {len(run.steps)} updates",
        ),
        Check(
            f"{name}: trainer and engine agree",
            0.0 < off_by <= LARGEST_PROB_ERROR,
            f"token_mult_prob_error {off_by:.4f}, limit {LARGEST_PROB_ERROR:g}",
        ),
        Check(
            f"{name}: each update's weights are served",
            versions == list(range(versions[0], versions[0] + len(versions))),
            f"versions {versions[0]} to {versions[-1]}, rollouts were sampled with {len(served)} of them",
        ),
        Check(f"{name}: every link is contiguous", contiguous == links > 0, f"{contiguous} of {links}"),
    ]


_ROWS: Final[tuple[tuple[str, Callable[[Run], str]], ...]] = (
    ("updates", lambda run: str(len(run.steps))),
    (f"mean reward, first {ENDS} updates", lambda run: f"{run.first:.3f}"),
    (f"mean reward, last {ENDS} updates", lambda run: f"{run.last:.3f}"),
    (
        "contiguous / eligible links",
        lambda run: f"{run.recorded('contiguous_links')}/{run.recorded('eligible_links')}",
    ),
    ("tokens generated, a rollout", lambda run: f"{run.generated_per_rollout:.1f}"),
    ("tokens trained, a rollout", lambda run: f"{run.trained_per_rollout:.1f}"),
    ("tokens trained", lambda run: str(run.total("trained_tokens"))),
    ("gen_kl_error, mean", lambda run: f"{run.mean('gen_kl_error'):.2g}"),
    ("token_mult_prob_error, mean", lambda run: f"{run.mean('token_mult_prob_error'):.4f}"),
    ("token_mult_prob_error, largest", lambda run: f"{run.largest('token_mult_prob_error'):.4f}"),
    ("versions behind, mean", lambda run: f"{run.mean('lag_mean'):.2f}"),
    ("graph paused for an update, s", lambda run: f"{run.mean('paused_s'):.3f}"),
    ("seconds", lambda run: f"{run.seconds:.0f}"),
)


def table(runs: Sequence[Run]) -> Table:
    """The arms side by side, with the figures of their seeds in a row."""
    shown = Table(title="GRPO on a served graph", title_style="bold")
    head, *rows = _side_by_side(runs)
    for name in head:
        shown.add_column(name, justify="right" if name else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def to_markdown(runs: Sequence[Run]) -> str:
    """The same table for documents."""
    head, *rows = _side_by_side(runs)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _side_by_side(runs: Sequence[Run]) -> list[list[str]]:
    arms = [[run for run in runs if run.supplied == supplied] for supplied in (True, False)]
    arms = [some for some in arms if some]
    head = [f"{_arm(some[0].supplied)}: seeds {', '.join(str(run.seed) for run in some)}" for some in arms]
    return [["", *head], *([label, *(", ".join(map(cell, some)) for some in arms)] for label, cell in _ROWS)]


def to_json(runs: Sequence[Run], found: Sequence[Check]) -> str:
    """For a machine: the trainer's lines of all runs, the table's figures, the checks."""
    return json.dumps(
        {
            "runs": [
                {
                    "prefix_supply": run.supplied,
                    "seed": run.seed,
                    "seconds": run.seconds,
                    "figures": {label: cell(run) for label, cell in _ROWS},
                    "steps": run.steps,
                }
                for run in runs
            ],
            "checks": [check._asdict() for check in found],
            "held": all(check.held for check in found),
        },
        indent=1,
    )


_PANELS: Final[tuple[tuple[str, Callable[[Run], Sequence[float | None]]], ...]] = (
    ("mean reward of an update's rollouts", lambda run: run.rewards),
    ("tokens trained in an update", lambda run: [step["trained_tokens"] for step in run.steps]),
    ("token_mult_prob_error", lambda run: [step.get("token_mult_prob_error") for step in run.steps]),
)


def draw(runs: Sequence[Run], path: Path) -> None:
    """A PNG: for each arm the mean over its seeds, and from the least to the largest of them."""
    # Not pyplot, which is the state of a process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(_PANELS), 3.2), dpi=80)
    for number, (title, values) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), number)
        for supplied, colour in ((True, "tab:blue"), (False, "tab:orange")):
            lines = [values(run) for run in runs if run.supplied == supplied]
            points = [tuple(each for each in some if each is not None) for some in zip(*lines, strict=False)]
            steps = [step for step, some in enumerate(points, start=1) if some]
            known = [some for some in points if some]
            if known:
                axes.plot(steps, list(map(statistics.fmean, known)), color=colour, label=_arm(supplied))
                axes.fill_between(steps, list(map(min, known)), list(map(max, known)), color=colour, alpha=0.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("update", fontsize=8)
        axes.grid(alpha=0.3)
        if number == 1:
            axes.legend(fontsize=8)
    figure.tight_layout()
    FigureCanvasAgg(figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    replace_file(path, drawn.getvalue())


def _arm(supplied: bool) -> str:
    return "prefix supply" if supplied else "rendered again"


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
