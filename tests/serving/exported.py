"""The names under which Prometheus gets what state actors and rollout jobs count."""

from __future__ import annotations

from gym_capture.rollouts import metrics as jobs
from gym_capture.serving.metrics import COUNTERS, GAUGES, LABELLED, PUT_LATENCY

_PREFIX = "ray_gym_capture_"


def exported_names() -> frozenset[str]:
    """Every series of state actors."""
    counters = {f"{_PREFIX}{name}_total" for name in (*COUNTERS, *LABELLED)}
    gauges = {f"{_PREFIX}{name}" for name in GAUGES}
    histogram = {f"{_PREFIX}{PUT_LATENCY}_{part}" for part in ("bucket", "sum", "count")}
    return frozenset(counters | gauges | histogram)


def exported_by_jobs() -> frozenset[str]:
    """Every series of a rollout job."""
    counters = {f"{_PREFIX}{name}_total" for name in (*jobs.COUNTERS, jobs.FAILED_ATTEMPTS)}
    return frozenset(counters | {f"{_PREFIX}{name}" for name in (*jobs.GAUGES, jobs.ROLLOUTS)})
