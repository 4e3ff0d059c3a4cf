"""Recorded log probabilities against those of another computation: how far apart, and which calls.

Invariant: memory does not grow with what is compared: distributions are counts in bins of 2 %, sums and the largest
value, and of the calls that are beyond a tolerance the first `limit` are kept and all are counted. What was sampled
under a grammar or a bias has numbers of its own and is never beyond: its distribution cannot be computed again.

A scorer gives bounds, since a top-p or min-p may leave a token at its edge in or out: the difference is how far the
recorded value is from them. It is infinite where the recorded token could not have been sampled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gym_capture.capture.records import IdArray
from trainer_bridge.recorded import RecordedPart

_BINS_PER_DECADE: Final = 116
_LOWEST: Final = -9
_HIGHEST: Final = 4
_EDGES: Final = np.logspace(_LOWEST, _HIGHEST, (_HIGHEST - _LOWEST) * _BINS_PER_DECADE + 1)
_MOST: Final = 700.0
"""The exponential of more is infinite."""

JUDGED: Final = ("constrained", "no")
"""The group whose differences must be noise."""


class Bounds(NamedTuple):
    """float32 [G], [G]: between what a log probability may be."""

    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]


@dataclass(slots=True)
class Distribution:
    """Of the differences of one group of tokens."""

    tokens: int = 0
    impossible: int = 0
    """Tokens that could not have been sampled at all; not in what is below."""
    max_difference: float = 0.0
    _sum: float = 0.0
    _sum_factor: float = 0.0
    _sum_kl: float = 0.0
    _counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, dtype=np.int64))

    def add(self, difference: npt.NDArray[np.float64]) -> None:
        """`difference`: scored again - recorded."""
        possible = difference[np.isfinite(difference)]
        self.tokens += difference.size
        self.impossible += difference.size - possible.size
        if not possible.size:
            return
        absolute = np.abs(possible)
        self.max_difference = max(self.max_difference, float(absolute.max()))
        self._sum += float(absolute.sum())
        self._sum_factor += float(np.exp(np.minimum(absolute, _MOST)).sum())
        self._sum_kl += float((np.expm1(np.minimum(possible, _MOST)) - possible).sum())
        self._counts += np.bincount(np.searchsorted(_EDGES, absolute), minlength=self._counts.size)

    def quantile(self, share: float) -> float:
        """To 2 %, and never above the largest; below 1e-9 it is 0."""
        rank = share * self._compared
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return 0.0 if index == 0 else min(float(_EDGES[min(index, len(_EDGES) - 1)]), self.max_difference)

    @property
    def token_mult_prob_error(self) -> float:
        return self._sum_factor / self._compared if self._compared else 1.0

    @property
    def _compared(self) -> int:
        return self.tokens - self.impossible

    def as_dict(self) -> dict[str, float]:
        """`gen_kl_error` and `token_mult_prob_error` as `trainer_bridge.loss` has them."""
        count = self._compared or 1
        return {
            "tokens": self.tokens,
            "impossible": self.impossible,
            "mean": self._sum / count,
            "median": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "max": self.max_difference,
            "token_mult_prob_error": self.token_mult_prob_error,
            "gen_kl_error": self._sum_kl / count,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A call with tokens beyond noise: the first of them."""

    rollout_id: str
    call_id: str
    position: int
    """In what the call generated."""
    token_id: int
    recorded: float
    rescored: float | None
    """None: it could not have been sampled."""
    tokens_beyond: int
    """Of the call, under this version of the weights."""
    weight_version: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Comparison:
    """Recorded against one scorer."""

    def __init__(self, *, limit: int) -> None:
        self.groups: dict[tuple[str, str], Distribution] = {("all", ""): Distribution()}
        self.findings: list[Finding] = []
        self.calls_beyond = 0
        self._limit = limit
        self._last: tuple[str, str] | None = None

    def add(self, part: RecordedPart, token_ids: IdArray, bounds: Bounds, *, tolerance: float) -> None:
        """`token_ids`: those of the sequence that the part is of."""
        recorded = part.log_probs.astype(np.float64)
        low, high = bounds.low.astype(np.float64), bounds.high.astype(np.float64)
        rescored = np.clip(recorded, low, high)
        difference = rescored - recorded
        for key in (
            ("all", ""),
            ("constrained", "yes" if part.is_constrained else "no"),
            ("finish", part.finish_reason or "not known"),
            ("weights", part.weight_version or "not known"),
        ):
            self.groups.setdefault(key, Distribution()).add(difference)
        beyond = np.flatnonzero(~(np.abs(difference) <= tolerance))
        if beyond.size and not part.is_constrained:
            at = int(beyond[0])
            value = float(rescored[at])
            self._found(
                Finding(
                    rollout_id=part.rollout_id,
                    call_id=part.call_id,
                    position=part.position + at,
                    token_id=int(token_ids[part.start + at]),
                    recorded=float(recorded[at]),
                    rescored=value if np.isfinite(value) else None,
                    tokens_beyond=int(beyond.size),
                    weight_version=part.weight_version,
                )
            )

    def _found(self, finding: Finding) -> None:
        if self._last != (finding.rollout_id, finding.call_id):  # the parts of a call come one behind the other
            self.calls_beyond += 1
        self._last = (finding.rollout_id, finding.call_id)
        if len(self.findings) < self._limit:
            self.findings.append(finding)

    @property
    def judged(self) -> Distribution:
        return self.groups.get(JUDGED, Distribution())
