"""The weight plane as metrics that Prometheus scrapes from Ray: what is served, and what became of updates.

Invariant: levels are what `WeightPlane.info` says; an update counts once, when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ray.util.metrics import Counter, Gauge

from gym_capture.cluster.metrics import PREFIX, raise_by
from gym_capture.serving.weights_update import Outcome

_TAGS: Final = ("namespace",)

GAUGES: Final[Mapping[str, str]] = {
    "weights_version": "Version of the weights that are served",
    "weights_replicas": "Replicas that serve it",
    "weights_waiting_replicas": "Replicas that have other weights, and so take no calls yet",
    "weights_paused": "1 while the graph is paused by a trainer, or for want of weights to go back to; else 0",
}
PAUSED: Final = "weights_paused_seconds"
UPDATES: Final = "weights_updates"
"""By `outcome`: applied, refused, failed, aborted, given_up."""

COUNTERS: Final[Mapping[str, tuple[str | None, str]]] = {
    PAUSED: (None, "Seconds for which replicas were paused by updates that were applied"),
    UPDATES: ("outcome", "Updates of the weights, by what became of them: applied, refused, failed, aborted, given_up"),
}
"""Name -> its label, if it has one, and what it counts."""


class WeightMetrics:
    """The metrics of one coordinator."""

    def __init__(self, *, namespace: str) -> None:
        self._tags = {"namespace": namespace}
        self._gauges = {name: Gauge(PREFIX + name, text, _TAGS) for name, text in GAUGES.items()}
        self._counters = {
            name: Counter(PREFIX + name, text, _TAGS if label is None else (*_TAGS, label))
            for name, (label, text) in COUNTERS.items()
        }

    def publish(self, info: Mapping[str, Any]) -> None:
        """What `WeightPlane.info` says."""
        if info["weight_version"] is not None:
            self._gauges["weights_version"].set(int(info["weight_version"]), self._tags)
        self._gauges["weights_replicas"].set(len(info["replicas"]), self._tags)
        self._gauges["weights_waiting_replicas"].set(len(info["waiting_replicas"]), self._tags)
        self._gauges["weights_paused"].set(int(info["is_paused"]), self._tags)

    def was_paused(self, seconds: float) -> None:
        """By an update that was applied."""
        raise_by(self._counters[PAUSED], seconds, self._tags)

    def over(self, outcome: Outcome) -> None:
        """An update has ended."""
        raise_by(self._counters[UPDATES], 1, {**self._tags, "outcome": str(outcome)})
