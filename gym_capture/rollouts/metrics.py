"""A job's numbers as metrics that Prometheus scrapes from Ray.

Invariant: what is exported is what a `Snapshot` says, and belongs to one run of a job: counters begin at zero when a
job is started again. Labels: the graph's namespace, the job's id, and of some one more with few values.

Flow: a view like any other (`commands.rollout_view`): it is shown a snapshot every few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from ray.util.metrics import Counter, Gauge

from gym_capture.cluster.metrics import PREFIX, PUBLISH_EVERY_S, raise_by
from gym_capture.rollouts.progress import Snapshot

_TAGS: Final = ("namespace", "rollout_job")
"""Not `job`: Prometheus puts a label of that name on whatever it scrapes."""

COUNTERS: Final[Mapping[str, str]] = {
    "job_calls": "Model calls of a rollout job that were recorded",
    "job_generated_tokens": "Generated tokens of them",
    "job_eligible_links": "Those of them whose parent was proven",
    "job_contiguous_links": "Those of them whose prompt starts with their parent's ids",
}
"""Field of `Snapshot`, behind `job_` -> what it counts."""

GAUGES: Final[Mapping[str, str]] = {
    "job_masked_rollouts": "Rollouts of a job of which it is known that a build masks them",
    "job_mean_reward": "Mean reward of the rollouts that finished",
    "job_groups_built": "Groups of a job of which there are trajectories",
}

ROLLOUTS: Final = "job_rollouts"
"""By `state`: waiting, running, finished, failed."""
FAILED_ATTEMPTS: Final = "job_failed_attempts"
"""By `reason`."""


class JobMetrics:
    """The metrics of one run of a job, in a process that has joined the cluster."""

    every_s = PUBLISH_EVERY_S

    def __init__(self, *, namespace: str, job_id: str) -> None:
        self._tags = {"namespace": namespace, "rollout_job": job_id}
        self._counters = {name: Counter(PREFIX + name, text, _TAGS) for name, text in COUNTERS.items()}
        self._gauges = {name: Gauge(PREFIX + name, text, _TAGS) for name, text in GAUGES.items()}
        self._rollouts = Gauge(PREFIX + ROLLOUTS, "Rollouts of a job, by where they stand", (*_TAGS, "state"))
        self._failed = Counter(PREFIX + FAILED_ATTEMPTS, "Attempts that failed, by reason", (*_TAGS, "reason"))
        self._published: Mapping[str, int] = dict.fromkeys(COUNTERS, 0)
        self._published_failures: Mapping[str, int] = {}

    def shown(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, now: Snapshot) -> None:
        counts = {
            "job_calls": now.calls,
            "job_generated_tokens": now.generated_tokens,
            "job_eligible_links": now.eligible_links,
            "job_contiguous_links": now.contiguous_links,
        }
        for name, counter in self._counters.items():
            raise_by(counter, counts[name] - self._published[name], self._tags)
        for reason, count in now.failed_attempts.items():
            by = count - self._published_failures.get(reason, 0)
            raise_by(self._failed, by, {**self._tags, "reason": reason})
        self._published, self._published_failures = counts, now.failed_attempts
        states = {
            "waiting": now.total - now.done - now.running,
            "running": now.running,
            "finished": now.done - now.failed,
            "failed": now.failed,
        }
        for state, rollouts in states.items():
            self._rollouts.set(rollouts, {**self._tags, "state": state})
        self._gauges["job_masked_rollouts"].set(now.masked, self._tags)
        if now.mean_reward is not None:
            self._gauges["job_mean_reward"].set(now.mean_reward, self._tags)
        if now.built is not None:
            self._gauges["job_groups_built"].set(now.built.groups, self._tags)
