"""What all metrics that Prometheus scrapes from Ray have in common.

Invariant: labels have few values: neither rollouts nor calls are one.

Prometheus sees each name with Ray's prefix, `ray_`, counters with the suffix `_total`. docs/grafana/ has a dashboard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ray.util.metrics import Counter

PREFIX: Final = "gym_capture_"
PUBLISH_EVERY_S: Final = 5.0


def raise_by(counter: Counter, by: float, tags: Mapping[str, str]) -> None:
    """Ray takes no zeros."""
    if by > 0:
        counter.inc(by, dict(tags))
