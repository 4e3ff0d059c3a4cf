"""The demo's measurements as a table, as checks, and as JSON.

Invariant: every figure comes from what the run wrote - the job's rows, the trajectories' Parquet, the trainer's
report - and every promise of the demo is a check with the figure that decides it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
from rich.table import Table

LARGEST_DIFFERENCE = 0.05
"""Mean |log prob difference|, sampled against trained: both compute in float32, with other kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Of one GRPO step."""

    loss: float
    grad_norm: float
    trained_tokens: int
    compared_tokens: int
    """Tokens of the first rollouts that were not sampled under a grammar, as forced tool calls are."""
    mean_abs_log_prob_difference: float | None
    """Mean over the compared tokens of |trainer's log probability - the recorded one|; None: there are none."""
    mean_importance: float
    """Mean over all trained tokens of the weight that corrects for sampling from another distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One run of the main job, with prefix supply on or off."""

    prefix_supply: bool
    rollouts: int
    failed_rollouts: int
    calls: int
    """Model calls that were recorded."""
    expected_links: int
    """Calls of finished rollouts that continue an earlier call: all but each rollout's first."""
    eligible_links: int
    """Calls whose parent lineage found and verified when they arrived."""
    contiguous_links: int
    """Of these, calls whose prompt starts with their parent's exact ids."""
    masked_rollouts: int
    incomplete_rollouts: int
    """Rollouts of which records are missing or cannot be read."""
    generated_tokens_captured: int
    generated_tokens_delivered: int
    mean_reward: float
    reward_std: float
    training: Training
    seconds: Mapping[str, float]
    """By phase."""

    @property
    def delivered_fraction(self) -> float:
        captured = self.generated_tokens_captured
        return self.generated_tokens_delivered / captured if captured else 0.0


class Built(NamedTuple):
    """Counts over the trajectories of a build; each rollout counted once, however many trajectories it has."""

    rollouts: int
    calls: int
    eligible_links: int
    contiguous_links: int
    masked_rollouts: int
    captured: int
    delivered: int


def read_built(directory: Path) -> Built:
    """Adds up the counts that the Parquet files in `directory` carry."""
    columns = [
        "rollout_id",
        "masked",
        "n_calls",
        "eligible_links",
        "contiguous_links",
        "generated_tokens_captured",
        "generated_tokens_delivered",
    ]
    rows = pq.read_table(directory, columns=columns).to_pylist()
    by_rollout = {row["rollout_id"]: row for row in rows}.values()

    def total(column: str) -> int:
        return sum(int(row[column]) for row in by_rollout)

    return Built(
        rollouts=len(by_rollout),
        calls=total("n_calls"),
        eligible_links=total("eligible_links"),
        contiguous_links=total("contiguous_links"),
        masked_rollouts=total("masked"),
        captured=total("generated_tokens_captured"),
        delivered=total("generated_tokens_delivered"),
    )


class Check(NamedTuple):
    """Something that the demo promises."""

    promise: str
    held: bool
    figure: str


def checks(supplied: Mode, rendered: Mode, *, leftovers: Sequence[str]) -> list[Check]:
    """All promises. `supplied`: with prefix supply, `rendered`: without."""
    found = [
        Check(
            "with prefix supply every link is contiguous",
            supplied.contiguous_links == supplied.eligible_links > 0,
            f"{supplied.contiguous_links} of {supplied.eligible_links}",
        ),
        Check(
            "lineage proves the parent of every call but the first",
            supplied.eligible_links == supplied.expected_links,
            f"{supplied.eligible_links} of {supplied.expected_links}",
        ),
        Check(
            "every generated token is delivered",
            supplied.generated_tokens_delivered == supplied.generated_tokens_captured > 0,
            f"{supplied.generated_tokens_delivered} of {supplied.generated_tokens_captured}",
        ),
        Check("no rollout is masked", supplied.masked_rollouts == 0, str(supplied.masked_rollouts)),
        Check(
            "rendering again keeps fewer links",
            rendered.contiguous_links < rendered.eligible_links,
            f"{rendered.contiguous_links} of {rendered.eligible_links}",
        ),
    ]
    for mode in (supplied, rendered):
        name = _name(mode)
        found += [
            Check(f"{name}: every rollout finished", mode.failed_rollouts == 0, f"{mode.failed_rollouts} failed"),
            Check(
                f"{name}: no rollout is incomplete",
                mode.incomplete_rollouts == 0,
                f"{mode.incomplete_rollouts} of {mode.rollouts}",
            ),
            _agreement(mode),
            Check(
                f"{name}: the step moved the weights",
                0.0 < mode.training.grad_norm < math.inf or mode.reward_std == 0.0,
                f"gradient norm {mode.training.grad_norm:.2g}"
                + ("" if mode.reward_std else "; all rewards are equal, so there is nothing to learn"),
            ),
        ]
    found.append(Check("nothing is left running", not leftovers, ", ".join(leftovers) or "0 processes"))
    return found


def _agreement(mode: Mode) -> Check:
    """Rendered again, a rollout may deliver a forced call alone: then there is nothing to compare."""
    promise = f"{_name(mode)}: sampled and trained log probabilities agree"
    difference = mode.training.mean_abs_log_prob_difference
    if difference is None:
        return Check(promise, not mode.prefix_supply, "nothing to compare: all was sampled under a grammar")
    tokens = mode.training.compared_tokens
    figure = f"mean difference {difference:.2g} over {tokens} tokens, limit {LARGEST_DIFFERENCE:g}"
    return Check(promise, difference < LARGEST_DIFFERENCE, figure)


def _difference(mode: Mode) -> str:
    difference = mode.training.mean_abs_log_prob_difference
    return "-" if difference is None else f"{difference:.2g}"


_ROWS: tuple[tuple[str, Callable[[Mode], str]], ...] = (
    ("rollouts", lambda mode: str(mode.rollouts)),
    ("model calls", lambda mode: str(mode.calls)),
    ("contiguous / eligible links", lambda mode: f"{mode.contiguous_links} / {mode.eligible_links}"),
    ("generated tokens captured", lambda mode: str(mode.generated_tokens_captured)),
    ("generated tokens delivered", lambda mode: str(mode.generated_tokens_delivered)),
    ("delivered fraction", lambda mode: f"{mode.delivered_fraction:.3f}"),
    ("masked rollouts", lambda mode: str(mode.masked_rollouts)),
    ("trained tokens", lambda mode: str(mode.training.trained_tokens)),
    ("mean |log prob difference|", _difference),
    ("reward, mean ± std", lambda mode: f"{mode.mean_reward:.3f} ± {mode.reward_std:.3f}"),
    ("GRPO loss", lambda mode: f"{mode.training.loss:.4f}"),
    ("gradient norm", lambda mode: f"{mode.training.grad_norm:.3f}"),
)


def table(modes: Sequence[Mode]) -> Table:
    """The modes side by side, the seconds of their phases below."""
    shown = Table(title="One GRPO step on rollouts of a tool agent", title_style="bold")
    shown.add_column("")
    for mode in modes:
        shown.add_column(_name(mode), justify="right")
    for label, cell in _ROWS:
        shown.add_row(label, *(cell(mode) for mode in modes))
    shown.add_section()
    for phase in dict.fromkeys(phase for mode in modes for phase in mode.seconds):
        shown.add_row(f"{phase}, s", *(f"{mode.seconds.get(phase, 0.0):.1f}" for mode in modes))
    return shown


def to_json(modes: Sequence[Mode], found: Sequence[Check]) -> str:
    """The same figures for a machine."""
    return json.dumps(
        {
            "modes": [asdict(mode) | {"delivered_fraction": mode.delivered_fraction} for mode in modes],
            "checks": [check._asdict() for check in found],
            "held": all(check.held for check in found),
        },
        indent=2,
    )


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Of a population; zeros if there are no values."""
    return (statistics.fmean(values), statistics.pstdev(values)) if values else (0.0, 0.0)


def _name(mode: Mode) -> str:
    return "prefix supply" if mode.prefix_supply else "rendered again"
