"""A build's account of the rollouts that were asked for.

Invariant: `requested == complete + len(incomplete) + len(missing)`; a rollout without a summary is missing, whatever
the reason. Nothing that did not come back is left out of the account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gym_capture.data.groups import RolloutSummary
from gym_capture.reasons import reason_name

__all__ = ["BuildReport"]

EXAMPLES: Final = 3
"""Of each reason, to look into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """Counts of rollouts and tokens, and the ids of the rollouts that somebody should look at."""

    requested: int
    complete: int
    """Rollouts that can be trained on."""
    incomplete: tuple[str, ...]
    """Rollouts that are masked: not everything of them was captured, proven or usable. Sorted."""
    missing: tuple[str, ...]
    """Rollouts that left nothing at all. Sorted."""
    mask_reasons: Mapping[str, int]
    """Rollouts by the name of a reason to mask them, the most frequent first; one may count under several."""
    mask_examples: Mapping[str, tuple[str, ...]]
    """By the name of a reason: the first few rollouts that it masks, by id."""
    trajectories: int
    token_ids: int
    """Ids of all trajectories, prompts included."""
    generated_tokens_captured: int
    generated_tokens_delivered: int
    excluded_tokens: Mapping[str, int]
    """Generated ids that were captured and not delivered, by reason, the most frequent first."""
    groups: int
    mixed_prompt_groups: tuple[str, ...]
    """Groups whose rollouts start from different prompts (a date, a session id): trainers that find groups by equal
    prompts, such as NeMo-RL, would give each its own and an advantage of 0. Sorted."""
    snapshots: Mapping[str, tuple[str, int]]
    """By rollout id: `snapshot_id` and `version` that were consumed, for `drop`. Without rollouts of which none could
    be had: missing ones, and those that could not be read or built."""
    truncated: int = 0
    """Rollouts whose conversation outgrew the model's context. That masks none."""
    details: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By rollout id: what is wrong with its records, in words. Only of rollouts of which something is."""


def report(requested: Iterable[str], summaries: Iterable[RolloutSummary]) -> BuildReport:
    """The account of the rollouts `requested`. Of several summaries of one rollout the last counts."""
    asked = set(requested)
    by_id = {summary.rollout_id: summary for summary in summaries}
    known = [by_id[rollout_id] for rollout_id in sorted(asked & by_id.keys())]
    captured = [summary for summary in known if not summary.missing]
    incomplete = tuple(summary.rollout_id for summary in captured if summary.masked)
    missing = tuple(sorted(asked - {summary.rollout_id for summary in captured}))
    prompts: dict[str, set[str]] = {}
    for summary in known:
        prompts.setdefault(summary.group_id, set()).update([summary.first_prompt] if summary.first_prompt else [])
    excluded = Counter[str]()
    for summary in known:
        excluded.update(summary.excluded_tokens)
    masked_for: dict[str, list[str]] = {}
    for summary in known:
        for name in {reason_name(reason) for reason in summary.mask_reasons}:
            masked_for.setdefault(name, []).append(summary.rollout_id)
    reasons = _most_first({name: len(rollouts) for name, rollouts in masked_for.items()})
    return BuildReport(
        requested=len(asked),
        complete=len(captured) - len(incomplete),
        incomplete=incomplete,
        missing=missing,
        mask_reasons=reasons,
        mask_examples={name: tuple(masked_for[name][:EXAMPLES]) for name in reasons},
        trajectories=sum(summary.trajectories for summary in known),
        token_ids=sum(summary.token_ids for summary in known),
        generated_tokens_captured=sum(summary.generated_tokens_captured for summary in known),
        generated_tokens_delivered=sum(summary.generated_tokens_delivered for summary in known),
        excluded_tokens=_most_first(excluded),
        groups=len(prompts),
        mixed_prompt_groups=tuple(sorted(group for group, found in prompts.items() if len(found) > 1)),
        snapshots={
            summary.rollout_id: (summary.snapshot_id, summary.snapshot_version)
            for summary in captured
            if summary.snapshot_id
        },
        truncated=sum(summary.truncated for summary in known),
        details={summary.rollout_id: summary.details for summary in captured if summary.details},
    )


def _most_first(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
