"""The metrics of a run as one picture.

Invariant: a picture is whole or not there, and whether one can be drawn - matplotlib is needed for nothing else - never
ends a run.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gym_capture.durable_files import replace_file

DRAWN: Final = (
    *("mean_reward", "loss", "grad_norm", "gen_kl_error", "token_mult_prob_error", "clip_fraction"),
    *("entropy", "kl", "importance_outside", "trained_tokens", "groups_without_spread", "seconds"),
    *("lag_mean", "push_s", "paused_s", "waited_s"),
)
"""Metrics with a panel of their own, where a run has them."""
_COLUMNS: Final = 3


def write_plots(lines: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draws the metrics of a run's steps into a PNG. False: there is no matplotlib, or nothing to draw."""
    series = {name: points for name in DRAWN if (points := _points(lines, name))}
    if not series or importlib.util.find_spec("matplotlib") is None:
        return False
    # Not pyplot, which is the state of a process: this runs inside of whoever trains.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(series) / _COLUMNS)
    figure = Figure(figsize=(4.5 * _COLUMNS, 2.6 * rows))
    for number, (name, points) in enumerate(series.items(), start=1):
        axes = figure.add_subplot(rows, _COLUMNS, number)
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "", linewidth=1.2)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
    drawn = io.BytesIO()
    figure.tight_layout()
    FigureCanvasAgg(figure)
    figure.savefig(drawn, format="png")
    replace_file(path, drawn.getvalue())
    return True


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(each["step"], each[name]) for each in lines if each.get(name) is not None and math.isfinite(each[name])]
