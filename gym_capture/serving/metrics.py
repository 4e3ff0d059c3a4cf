"""The state actors' counts as metrics that Prometheus scrapes from Ray.

Invariant: what is exported is what `ShardStats` says, at most `PUBLISH_EVERY_S` old; labels have few values, since
neither rollouts nor calls are one.

Flow: a shard counts in plain numbers -> now and then it `publish`es them: the difference to the last time goes into
counters, levels are set. Only the latency of puts is observed one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from ray.util.metrics import Counter, Gauge, Histogram

from gym_capture.cluster.metrics import PREFIX, raise_by
from gym_capture.serving.stats import ShardStats

_TAGS: Final = ("namespace", "shard")
_BOUNDARIES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

COUNTERS: Final[Mapping[str, str]] = {
    "begins": "Calls that were begun",
    "begins_refused": "Calls turned away because too many records waited for the disk",
    "puts": "Records made durable",
    "put_failures": "Records refused or not made durable",
    "put_bytes": "Bytes of records made durable",
    "prefix_requested": "Recorded calls eligible for prefix supply: their parent was proven",
    "prefix_supplied": "Recorded calls whose prompt starts with their parent's ids",
    "generated_tokens": "Generated tokens of recorded calls",
    "replayed_calls": "Recorded calls that were answered from the record of an earlier attempt",
    "delivered_marks": "Replies known to be delivered, of calls that may be a retry",
    "undelivered_marks": "Replies whose end could not be sent",
    "registrations": "Rollouts registered",
    "completions": "Rollouts of which it was said how they ended",
    "freezes": "Snapshots taken",
    "drops": "Rollouts consumed",
    "idle_retired": "Rollouts given up because nobody used them for max_idle_s",
    "lineage_reads": "Rollouts read from the store into lineage",
    "lineage_evictions": "Rollouts evicted from lineage",
    "commit_batches": "Syncs of the log",
    "commit_failures": "Syncs of the log that failed",
    "commit_records": "Records in syncs of the log, of any kind",
}
"""Field of `ShardStats` -> what it counts."""

GAUGES: Final[Mapping[str, str]] = {
    "live_rollouts": "Rollouts with records that were neither dropped nor cleared",
    "longest_idle_seconds": "Since the live rollout that was left alone for the longest was used",
    "lineage_rollouts": "Rollouts whose lineage is in memory",
    "lineage_bytes": "Memory of lineage",
    "log_bytes": "Size of the log on disk",
    "log_live_bytes": "Bytes of the log that are still needed",
    "log_segments": "Segment files of the log",
    "lost_mirrors": "Logs that should have a second copy and have none now",
    "waiting_puts": "Records that are not durable yet",
    "waiting_bytes": "Bytes of records that are not durable yet",
    "queued_writes": "Writes that wait for a sync to end",
}
"""Field of `ShardStats` -> what it is. Prometheus spells units out: `_seconds` is `_s` there."""

LABELLED: Final[Mapping[str, tuple[str, str]]] = {
    "resolutions": ("outcome", "What calls were found to continue: root, resolved, unresolved:<reason>"),
    "rules": ("rule", "Recorded calls whose request was not taken to the letter, by the rule's name"),
    "incomplete": ("reason", "Marks that the capture of a rollout is incomplete"),
}
"""Field of `ShardStats` -> its label, and what it counts."""

PUT_LATENCY: Final = "put_latency_seconds"


class ShardMetrics:
    """The metrics of one shard."""

    def __init__(self, *, namespace: str, index: int) -> None:
        self._tags = {"namespace": namespace, "shard": str(index)}
        self._counters = {name: Counter(PREFIX + name, text, _TAGS) for name, text in COUNTERS.items()}
        self._gauges = {name: Gauge(PREFIX + name, text, _TAGS) for name, text in GAUGES.items()}
        self._labelled = {
            name: Counter(PREFIX + name, text, (*_TAGS, label)) for name, (label, text) in LABELLED.items()
        }
        self._latency = Histogram(
            PREFIX + PUT_LATENCY, "From a record's arrival until it is durable", list(_BOUNDARIES_S), _TAGS
        )
        self._published = asdict(ShardStats())

    def observe_put(self, took_s: float) -> None:
        self._latency.observe(took_s, self._tags)

    def publish(self, stats: ShardStats) -> None:
        now, before = asdict(stats), self._published
        for name, counter in self._counters.items():
            raise_by(counter, now[name] - before[name], self._tags)
        for name, counter in self._labelled.items():
            label = LABELLED[name][0]
            for value, count in now[name].items():
                raise_by(counter, count - before[name].get(value, 0), {**self._tags, label: value})
        for name, gauge in self._gauges.items():
            gauge.set(now[field_of(name)], self._tags)
        self._published = now


def field_of(name: str) -> str:
    """The field of `ShardStats` that a gauge shows."""
    return name.removesuffix("econds") if name.endswith("_seconds") else name
