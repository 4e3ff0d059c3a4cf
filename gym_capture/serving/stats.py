"""Counts of the state actors: for `/stats`, for health, and as metrics.

Invariant: a count never goes down while its actor lives; what does is a level and says so. A restart of an actor begins
its counts at zero, as Prometheus expects of counters, and leaves levels as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.records import CallRecord, Root, Unresolved
from gym_capture.reasons import UNRESOLVED, join_reason, reason_name
from gym_capture.rollout_counts import RolloutCounts

CountName: TypeAlias = Literal[
    "begins",
    "begins_refused",
    "puts",
    "put_failures",
    "put_bytes",
    "prefix_requested",
    "prefix_supplied",
    "replayed_calls",
    "delivered_marks",
    "undelivered_marks",
    "freezes",
    "drops",
    "idle_retired",
    "registrations",
    "completions",
    "generated_tokens",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """One shard, or several of them together (`total`)."""

    shards: int = 1
    # counts
    begins: int = 0
    """Calls that were begun."""
    begins_refused: int = 0
    """Calls that were turned away because too many records waited for the disk."""
    puts: int = 0
    """Records that became durable, repeated ones included."""
    put_failures: int = 0
    """Records that were refused or could not be made durable."""
    put_bytes: int = 0
    """Size of those that became durable."""
    put_seconds: float = 0.0
    """Time that they took, summed: from their arrival in the actor until they were durable."""
    prefix_requested: int = 0
    """Recorded calls whose parent was proven when they began: the ones eligible for prefix supply."""
    prefix_supplied: int = 0
    """Those whose prompt, as the engine reports it, starts with their parent's ids."""
    generated_tokens: int = 0
    """Of recorded calls."""
    replayed_calls: int = 0
    """Recorded calls that were answered from the record of an earlier attempt: no engine generated."""
    delivered_marks: int = 0
    undelivered_marks: int = 0
    registrations: int = 0
    """Rollouts that somebody registered, as with the next one, repeated requests included."""
    completions: int = 0
    """Rollouts of which somebody said how they ended."""
    freezes: int = 0
    drops: int = 0
    idle_retired: int = 0
    """Rollouts that were given up because nobody used them for `max_idle_s`."""
    resolutions: Mapping[str, int] = field(default_factory=dict)
    """Of begun calls, by outcome: `root`, `resolved`, `unresolved:<reason>`."""
    incomplete: Mapping[str, int] = field(default_factory=dict)
    """Marks that a rollout's capture is incomplete, by the name of their reason."""
    rules: Mapping[str, int] = field(default_factory=dict)
    """Recorded calls whose request was not taken to the letter, by the name of the rule (`CallRequest.normalized`)."""
    lineage_reads: int = 0
    """Rollouts that were read from the store into lineage."""
    lineage_evictions: int = 0
    commit_batches: int = 0
    """Syncs of the log."""
    commit_failures: int = 0
    """Syncs that failed, with everything that they would have made durable."""
    commit_records: int = 0
    """Records of any kind in them: by `commit_batches`, the mean size of a group commit."""
    # levels
    live_rollouts: int = 0
    longest_idle_s: float = 0.0
    """How long nothing was written to or read from the live rollout that was left alone for the longest, as far as this
    actor has seen. Of several shards the longest."""
    lineage_rollouts: int = 0
    """Rollouts whose lineage is in memory."""
    lineage_bytes: int = 0
    log_bytes: int = 0
    """Size of the log on disk."""
    log_live_bytes: int = 0
    """The part of it that is still needed; the rest goes when its segments are compacted."""
    log_segments: int = 0
    lost_mirrors: int = 0
    """Shards whose log should have a second copy, and has none now."""
    waiting_puts: int = 0
    """Records in the actor that are not durable yet."""
    waiting_bytes: int = 0
    queued_writes: int = 0
    """Writes of any kind that wait for the sync that is under way to end."""


def total(stats: Iterable[ShardStats]) -> ShardStats:
    """All shards as one."""
    sums: dict[str, Any] = {"shards": 0}
    for one in stats:
        for name, value in asdict(one).items():
            if isinstance(value, Mapping):
                sums[name] = dict(Counter(sums.get(name, {})) + Counter(value))
            elif name == "longest_idle_s":
                sums[name] = max(sums.get(name, 0.0), value)
            else:
                sums[name] = sums.get(name, 0) + value
    return ShardStats(**sums)


class Tally:
    """The counts of one shard while it counts. Counting a call takes about two microseconds."""

    def __init__(self) -> None:
        self.counts: Counter[CountName] = Counter()
        self.put_seconds = 0.0
        self._puts: dict[str, tuple[int, float]] = {}
        """By live rollout: records that this actor has seen become durable, and what they took."""
        self.resolutions: Counter[str] = Counter()
        self.incomplete: Counter[str] = Counter()
        self.rules: Counter[str] = Counter()
        self.waiting_puts = 0
        self.waiting_bytes = 0

    def begun(self, resolution: Resolution) -> None:
        self.counts["begins"] += 1
        self.resolutions[outcome(resolution)] += 1

    def put(self, entry: CallRecord, *, size_bytes: int, took_s: float) -> None:
        self.counts["puts"] += 1
        self.counts["put_bytes"] += size_bytes
        self.counts["prefix_requested"] += entry.prefix.requested
        self.counts["prefix_supplied"] += entry.prefix.supplied
        self.counts["generated_tokens"] += entry.generation_token_ids.size
        self.counts["replayed_calls"] += entry.policy.replayed_from is not None
        self.put_seconds += took_s
        puts, put_s = self._puts.get(entry.rollout_id, (0, 0.0))
        self._puts[entry.rollout_id] = puts + 1, put_s + took_s
        for rule in set(entry.request.normalized):
            self.rules[rule] += 1

    def timed(self, rollout_id: str, counts: RolloutCounts) -> RolloutCounts:
        """With what its records took. No record can have it, which is written before that is known."""
        puts, put_s = self._puts.get(rollout_id, (0, 0.0))
        return counts._replace(timed_puts=puts, put_s=put_s)

    def forget(self, rollout_id: str) -> None:
        """Nothing is recorded of it any more."""
        self._puts.pop(rollout_id, None)

    def marked_incomplete(self, reason: str) -> None:
        """Reasons are counted by name: what they name, a call, is of no end."""
        self.incomplete[reason_name(reason)] += 1


def outcome(resolution: Resolution) -> str:
    """The name under which a resolution is counted."""
    match resolution:
        case Root():
            return "root"
        case Resolved():
            return "resolved"
        case Unresolved(reason):
            return join_reason(UNRESOLVED, reason)
