"""The names under which Prometheus gets what state actors, the weight plane, jobs and training runs count."""

from __future__ import annotations

from gym_capture.rollouts import metrics as jobs
from gym_capture.serving import weights_metrics as weights
from gym_capture.serving.metrics import COUNTERS, GAUGES, LABELLED, PUT_LATENCY
from trainer_bridge import run_metrics as runs

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


def exported_by_weights() -> frozenset[str]:
    """Every series of the weight plane."""
    counters = {f"{_PREFIX}{name}_total" for name in weights.COUNTERS}
    return frozenset(counters | {f"{_PREFIX}{name}" for name in weights.GAUGES})


def exported_by_runs() -> frozenset[str]:
    """Every series of a training run, which is scraped from the trainer and not from Ray."""
    counters = {f"{runs.PREFIX}{name}_total" for name in (*runs.COUNTERS, *runs.LABELLED)}
    return frozenset(counters | {f"{runs.PREFIX}{name}" for name in runs.GAUGES})


def every_name() -> frozenset[str]:
    return exported_names() | exported_by_jobs() | exported_by_weights() | exported_by_runs()
