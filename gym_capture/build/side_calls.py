"""Which calls of a rollout are not part of its task: conversation titles, quota probes, other models' errands.

Invariant: a call is a side call only for a reason that the records show - what was asked for, and how much each model
generated, never what was answered - and the same records give the same answer in any order.

Flow: explicit patterns and probes first; then, over what is left, self-calibration: a harness names the policy in the
calls that do the work, so the requested model that generated most is the policy and the others are side calls. A name
that is not known is not another name: then the model that generated tells, as far as it can.
Whether a call offers tools never makes it a side call: a rollout may be one plain question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gym_capture.capture.records import CallRecord

__all__ = ["SideCallRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCallRules:
    """How side calls are told from the task's own."""

    model_patterns: tuple[str, ...] = ()
    """Requested models that are always side calls: shell patterns such as `*-haiku-*`, case-sensitive.

    Where nobody noted what was asked for, they look at the model that generated.
    """
    self_calibrate: bool = True
    """Whether requested models other than the one that generated most are side calls."""
    probe_max_tokens: int = 1
    """A request that allows at most this many generated ids is a probe; 0: no request is."""

    def asks_for_side_call(self, entry: CallRecord) -> bool:
        """Whether the request alone shows it: by a pattern, or as a probe."""
        limit = entry.request.asked_max_tokens
        if limit is not None and 1 <= limit <= self.probe_max_tokens:
            return True
        if not self.model_patterns:
            return False
        asked = entry.request.requested_model or entry.policy.model
        return any(fnmatchcase(asked, pattern) for pattern in self.model_patterns)


def side_calls(entries: Sequence[CallRecord], rules: SideCallRules) -> frozenset[int]:
    """Positions in `entries` (one entry for each call) of the calls that are not part of the task."""
    found = {position for position, entry in enumerate(entries) if rules.asks_for_side_call(entry)}
    if rules.self_calibrate:
        rest = [position for position in range(len(entries)) if position not in found]
        found.update(_of_other_models(entries, rest))
    return frozenset(found)


def _of_other_models(entries: Sequence[CallRecord], positions: Sequence[int]) -> list[int]:
    """Those that asked for another model than the policy; where nobody noted what was asked for, by what generated."""
    named = [position for position in positions if entries[position].request.requested_model]
    unnamed = [position for position in positions if not entries[position].request.requested_model]
    policy = _heaviest([(entries[position].request.requested_model, entries[position]) for position in named])
    if policy is None:
        model = _heaviest([(entries[position].policy.model, entries[position]) for position in unnamed])
        return [position for position in unnamed if entries[position].policy.model != model]
    others = [position for position in named if entries[position].request.requested_model != policy]
    models = {
        entries[position].policy.model for position in named if entries[position].request.requested_model == policy
    }
    return others + [position for position in unnamed if entries[position].policy.model not in {*models, ""}]


def _heaviest(named: Sequence[tuple[str, CallRecord]]) -> str | None:
    """The name that generated most; among equals the one with more tool-offering calls, more calls, the first name."""
    weights: dict[str, tuple[int, int, int]] = {}
    for name, entry in named:
        tokens, with_tools, calls = weights.get(name, (0, 0, 0))
        weights[name] = (
            tokens + int(entry.generation_token_ids.size),
            with_tools + int(entry.request.has_tools),
            calls + 1,
        )
    if not weights:
        return None
    most = max(weights.values())
    return min(name for name, weight in weights.items() if weight == most)
