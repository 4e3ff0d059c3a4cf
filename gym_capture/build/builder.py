"""From a frozen rollout to the trajectories that a trainer reads.

Invariant: each generated id of the snapshot is trained in exactly one trajectory, or counted under a named reason why
not; `token_ids` of a trajectory is exactly what the policy was conditioned on and sampled; whatever could not be
proven masks the rollout, with a reason. The result depends on the records alone, not on their order, and no data
makes `build` raise.

Flow: fold repeated records -> set aside what carries no loss (empty, aborted, side calls) -> place every call under
its proven parent (`merge`) -> settle retries -> take the chains from root to leaf -> flatten those to deliver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from gym_capture.build.merge import NO_PARENT, Forest, UniqueCalls, link, unique_calls
from gym_capture.build.side_calls import SideCallRules, side_calls
from gym_capture.build.trajectories import Segment, Span, Trajectory, flatten, flatten_call, ride_along_problems
from gym_capture.capture.records import CUT_OFF, CallRecord, LostCall, Snapshot, Unresolved, not_a_turn
from gym_capture.reasons import (
    CaptureMark,
    ExcludedReason,
    MaskReason,
    ProblemReason,
    Reason,
    RequestRule,
    UnresolvedReason,
    join_reason,
)

__all__ = [
    "BuildCounts",
    "BuildOptions",
    "BuiltRollout",
    "ExcludedCall",
    "Span",
    "Trajectory",
    "build",
]

_OF_UNKNOWN_ORIGIN: Final = frozenset(
    {UnresolvedReason.NO_MATCH, UnresolvedReason.REWRITTEN_TURN, UnresolvedReason.UNKNOWN_ROLLOUT}
)
# Reasons that say nothing against the record: its place is known, its loss is just not wanted.
_WELL_PLACED: Final = frozenset(ExcludedReason) - {ExcludedReason.UNPLACED_PARENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a build."""

    strategy: Literal["prefix_merging", "per_request"] = "prefix_merging"
    """`prefix_merging`: one sequence for each chain of calls. `per_request`: one for each call with loss."""
    delivery: Literal["main_chain", "all_chains"] = "main_chain"
    """`main_chain`: only the calls of the chain that generated most; the others are counted. `all_chains`: all."""
    side_calls: SideCallRules = field(default_factory=SideCallRules)
    vocab_size: int | None = None
    """Ids from here on mask the rollout; None: not checked."""


@dataclass(frozen=True, slots=True)
class ExcludedCall:
    """A call whose generated ids are trained nowhere, and why. A lost one has none that anybody knows of."""

    call_id: str
    reason: str
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCounts:
    """Counts of kept and excluded calls and tokens. Tokens are generated ids."""

    n_calls: int
    """Distinct calls with a record in the snapshot, whatever became of them."""
    chains: int
    """Root-to-leaf paths that carry loss, delivered or not."""
    roots: int
    """Calls that such paths start from."""
    quarantined_calls: int
    """Calls kept out because their place could not be proven."""
    lost_tries: int
    """Calls that began and left no record, and that a record could only have shown as retries that were not used."""
    side_calls_excluded: int
    unresolved_parent_calls: int
    """Calls whose request echoed assistant turns of which no parent could be proven when it was served."""
    eligible_links: int
    """Calls for which a prefix was requested."""
    contiguous_links: int
    """Those of them whose prompt provably starts with the parent's cumulative ids."""
    generated_tokens_captured: int
    generated_tokens_delivered: int
    """Sum of all loss masks; captured is this plus everything in `excluded_tokens`."""
    delivered_fraction: float
    """Delivered by captured; 0 where nothing was captured."""
    excluded_tokens: Mapping[str, int]
    """By reason, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltRollout:
    """A rollout, built. A masked one keeps what could be built; consumers must honour `masked`."""

    rollout_id: str
    trajectories: tuple[Trajectory, ...]
    """The main chain first, then by generated ids, most first."""
    masked: bool
    mask_reasons: tuple[str, ...]
    """Sorted, as `reasons.join_reason` writes them: a name, then where it applies `:<call id>` and `:<field>`."""
    counts: BuildCounts
    excluded: tuple[ExcludedCall, ...]
    """Sorted by call id."""


class Placed(NamedTuple):
    """The calls of a rollout, those without loss, and the place of each."""

    calls: UniqueCalls
    without_loss: Mapping[int, Reason]
    forest: Forest


def placed(snapshot: Snapshot, options: BuildOptions = BuildOptions()) -> Placed:
    """What `build` begins with, also for whoever shows calls that are not trained: each under its proven parent."""
    calls = unique_calls(snapshot.rollout_id, snapshot.records)
    without_loss = _without_loss(calls.entries, options.side_calls)
    forest = link(
        calls.entries,
        no_candidates=frozenset(without_loss),
        elsewhere=_not_parents(calls),
        vocab_size=options.vocab_size,
    )
    return Placed(calls, without_loss, forest)


def build(snapshot: Snapshot, options: BuildOptions = BuildOptions()) -> BuiltRollout:
    """The trajectories of one rollout. Pure: equal snapshots give equal results; never raises on data."""
    return build_placed(snapshot, placed(snapshot, options), options)


def build_placed(snapshot: Snapshot, calls_placed: Placed, options: BuildOptions = BuildOptions()) -> BuiltRollout:
    """As `build`, of what `placed` gave for the same snapshot and options."""
    calls, without_loss, forest = calls_placed
    unused, retries_unresolved = _settle_retries(forest, without_loss)
    excluded = {**without_loss, **unused, **forest.unplaced}
    paths = _Paths(forest, excluded)
    selected = paths.leaves[:1] if options.delivery == "main_chain" else paths.leaves
    if options.strategy == "per_request":
        trajectories, reasons = _per_request(paths, selected)
    else:
        trajectories, reasons = _merged(paths, selected)

    lost_tries = _lost_tries(snapshot.lost_calls, calls.entries)
    not_missed = {join_reason(CaptureMark.DANGLING_INTENT, call_id) for call_id in lost_tries}
    reasons += [reason for reason in snapshot.incomplete if reason not in not_missed]
    reasons += [join_reason(problem.reason, problem.call_id, problem.field) for problem in snapshot.problems]
    reasons += [join_reason(ProblemReason.CONFLICTING_CALL_ID, call_id) for call_id in calls.conflicting]
    reasons += [join_reason(MaskReason.FOREIGN_RECORD, entry.model_call_id, "rollout_id") for entry in calls.foreign]
    reasons += forest.reasons
    if retries_unresolved:
        reasons.append(MaskReason.UNRESOLVED_RETRIES)
    if not trajectories:
        reasons.append(_why_nothing(calls, without_loss))

    excluded |= dict.fromkeys(paths.unreached(selected), ExcludedReason.NOT_MAIN_CHAIN)
    listed = _excluded_calls(calls, excluded, lost_tries)
    mask_reasons = tuple(sorted(set(reasons)))
    return BuiltRollout(
        rollout_id=snapshot.rollout_id,
        trajectories=tuple(trajectories),
        masked=bool(mask_reasons),
        mask_reasons=mask_reasons,
        counts=_count(calls, forest, paths, listed, sum(t.generated_tokens for t in trajectories)),
        excluded=listed,
    )


# --- what carries no loss ------------------------------------------------------------------------------------------


def _without_loss(entries: Sequence[CallRecord], rules: SideCallRules) -> dict[int, Reason]:
    """Calls that are no part of the task, or whose generation is no decision of the policy -> why."""
    aside: dict[int, Reason] = dict.fromkeys(sorted(side_calls(entries, rules)), ExcludedReason.SIDE_CALL)
    for position, entry in enumerate(entries):
        reason = not_a_turn(entry)
        if reason is not None and position not in aside:
            aside[position] = reason
    return aside


def _not_parents(calls: UniqueCalls) -> dict[str, MaskReason]:
    reasons = {entry.model_call_id: MaskReason.FOREIGN_PARENT for entry in calls.foreign}
    return reasons | dict.fromkeys(calls.conflicting, MaskReason.CONFLICTING_PARENT)


def _settle_retries(forest: Forest, without_loss: Mapping[int, Reason]) -> tuple[dict[int, Reason], bool]:
    """Calls whose reply a retry replaced -> why they are out; and whether some retry could not be settled.

    Calls of the task with the same parent and the same prompt are tries of one request. A later call that continues a
    try proves that its reply was used - of several tries, if several were continued. If none was, `_ended_with` says.
    """
    continued = {forest.parents[position] for position in forest.order}
    same_length: dict[tuple[int, int], list[int]] = {}
    for position in forest.order:
        if without_loss.get(position) != ExcludedReason.SIDE_CALL or position in continued:
            key = (forest.parents[position], forest.entries[position].prompt_len)
            same_length.setdefault(key, []).append(position)
    unused: dict[int, Reason] = {}
    unresolved = False
    for siblings in same_length.values():
        if len(siblings) == 1:
            continue
        for tries in _same_prompt(forest, siblings):
            with_loss = [position for position in tries if position not in without_loss]
            used: Sequence[int] | None = [position for position in tries if position in continued]
            if not used and with_loss:
                used = _ended_with(forest.entries, tries)
            if used is None:
                unresolved = True
                unused |= dict.fromkeys(with_loss, MaskReason.UNRESOLVED_RETRIES)
            elif used:
                unused |= {position: ExcludedReason.RETRY_ORPHAN for position in with_loss if position not in used}
    return unused, unresolved


def _ended_with(entries: Sequence[CallRecord], tries: Sequence[int]) -> list[int] | None:
    """Of the tries of a final call, the one whose reply the agent ended with; None: that is not known.

    Whether a reply has anything to train does not matter: an empty one that was delivered is the one. A generation that
    was cut off never made a whole reply, so unless it is known to have arrived all the same, it is no candidate. A sole
    candidate stands as a call does that was never retried; of several, the one that is known to have been delivered.
    """
    candidates = [
        position
        for position in tries
        if entries[position].delivered or entries[position].reply.finish_reason not in CUT_OFF
    ]
    if len(candidates) == 1:
        return candidates
    delivered = [position for position in candidates if entries[position].delivered]
    return delivered if len(delivered) == 1 else None


def _same_prompt(forest: Forest, siblings: Sequence[int]) -> list[list[int]]:
    """Splits calls with one parent and equal prompt lengths by the ids of their prompts."""
    by_ids: dict[bytes, list[int]] = {}
    for position in siblings:
        own = forest.placed(position).prompt_token_ids[forest.starts[position] :]
        by_ids.setdefault(own.tobytes(), []).append(position)
    return list(by_ids.values())


def _lost_tries(lost_calls: Sequence[LostCall], entries: Sequence[CallRecord]) -> list[str]:
    """Lost calls whose records, had there been any, would have been those of tries that were not used.

    That is so if a later request echoes the answer of another try of the same request, or if the reply to the same
    body, sent again, is known to have been delivered; and if no request echoes, as an answer to it, a turn that no
    record has: that could be what the lost call said. Of the turns that a request echoes an intent tells the latest
    only, so nothing is proven either where a record shows turns of unknown origin.
    """
    if not lost_calls or echoes_unknown_turns(entries):
        return []
    known_turns = {entry.keys.turn_key for entry in entries if not_a_turn(entry) is None}
    delivered = {entry.model_call_id for entry in entries if entry.delivered}
    return [
        lost.model_call_id
        for lost in lost_calls
        if known_turns.issuperset(lost.answers) and (lost.answers or not delivered.isdisjoint(lost.retries))
    ]


def echoes_unknown_turns(entries: Sequence[CallRecord]) -> bool:
    """Whether some request echoes assistant turns that no record of the rollout generated."""
    return any(
        RequestRule.TURNS_ADDED in entry.request.normalized
        or (isinstance(entry.parent, Unresolved) and entry.parent.reason in _OF_UNKNOWN_ORIGIN)
        for entry in entries
    )


# --- chains --------------------------------------------------------------------------------------------------------


class _Paths:
    """The chains that carry loss: from a root to a call that no other such chain goes on from."""

    def __init__(self, forest: Forest, excluded: Mapping[int, Reason]) -> None:
        self.forest = forest
        self.with_loss = [position for position in forest.order if position not in excluded]
        tokens = dict.fromkeys(forest.order, 0)
        tokens |= {position: int(forest.entries[position].generation_token_ids.size) for position in self.with_loss}
        live = set(self.with_loss)
        inner: set[int] = set()
        for position in reversed(forest.order):
            parent = forest.parents[position]
            if position in live and parent != NO_PARENT:
                live.add(parent)
                inner.add(parent)
        self.roots = sum(1 for position in live if forest.parents[position] == NO_PARENT)
        for position in forest.order:
            parent = forest.parents[position]
            if parent != NO_PARENT:
                tokens[position] += tokens[parent]
        # Entries are sorted by call id, so that equal chains fall back to the id of their last call.
        self.leaves = sorted(live - inner, key=lambda leaf: (-tokens[leaf], leaf))

    def unreached(self, leaves: Sequence[int]) -> list[int]:
        """The calls with loss that no path to one of `leaves` goes through."""
        if len(leaves) == len(self.leaves):
            return []
        reached = {position for leaf in leaves for position in self.forest.path(leaf)}
        return [position for position in self.with_loss if position not in reached]


def _merged(paths: _Paths, leaves: Sequence[int]) -> tuple[list[Trajectory], list[str]]:
    """One trajectory for each leaf. A generation that several share is trained in the first of them."""
    forest = paths.forest
    free = set(paths.with_loss)
    trajectories: list[Trajectory] = []
    reasons: list[str] = []
    for rank, leaf in enumerate(leaves):
        segments: list[Segment] = []
        for position in forest.path(leaf):
            segments.append(Segment(forest.placed(position), forest.starts[position], position in free))
            free.discard(position)
        problems = ride_along_problems(segments)
        reasons += problems
        trajectories.append(flatten(segments, is_main=rank == 0, ride_along=not problems))
    return trajectories, reasons


def _per_request(paths: _Paths, leaves: Sequence[int]) -> tuple[list[Trajectory], list[str]]:
    """One trajectory for each call with loss on the way to `leaves`; only its own generation is trained in it."""
    forest = paths.forest
    free = set(paths.with_loss)
    trajectories: list[Trajectory] = []
    reasons: list[str] = []
    for rank, leaf in enumerate(leaves):
        for position in forest.path(leaf):
            if position not in free:
                continue
            free.discard(position)
            entry = forest.placed(position)
            problems = ride_along_problems([Segment(entry, 0, True)])
            reasons += problems
            trajectories.append(flatten_call(entry, is_main=rank == 0, ride_along=not problems))
    return trajectories, reasons


# --- the account ---------------------------------------------------------------------------------------------------


def _why_nothing(calls: UniqueCalls, without_loss: Mapping[int, Reason]) -> MaskReason:
    if not calls.entries and not calls.conflicting and not calls.foreign:
        return MaskReason.NO_CALLS
    if len(without_loss) == len(calls.entries) and set(without_loss.values()) == {ExcludedReason.SIDE_CALL}:
        return MaskReason.ALL_SIDE_CALLS
    return MaskReason.NO_TRAINABLE_TOKENS


def _excluded_calls(
    calls: UniqueCalls, excluded: Mapping[int, Reason], lost_tries: Sequence[str]
) -> tuple[ExcludedCall, ...]:
    listed = [ExcludedCall(call_id, ExcludedReason.LOST_TRY, 0) for call_id in lost_tries]
    listed += [
        ExcludedCall(entry.model_call_id, excluded[position], int(entry.generation_token_ids.size))
        for position, entry in enumerate(calls.entries)
        if position in excluded
    ]
    listed += [
        ExcludedCall(call_id, ProblemReason.CONFLICTING_CALL_ID, tokens)
        for call_id, tokens in calls.conflicting.items()
    ]
    listed += [
        ExcludedCall(entry.model_call_id, MaskReason.FOREIGN_RECORD, int(entry.generation_token_ids.size))
        for entry in calls.foreign
    ]
    return tuple(sorted(listed, key=lambda call: (call.call_id, call.reason, call.generated_tokens)))


def _count(
    calls: UniqueCalls, forest: Forest, paths: _Paths, excluded: Sequence[ExcludedCall], delivered: int
) -> BuildCounts:
    by_reason: dict[str, int] = {}
    for call in excluded:
        name = str(call.reason)  # plain: some writers of JSON take no other keys
        by_reason[name] = by_reason.get(name, 0) + call.generated_tokens
    captured = sum(calls.conflicting.values())
    captured += sum(int(entry.generation_token_ids.size) for entry in (*calls.entries, *calls.foreign))
    eligible = [position for position, entry in enumerate(calls.entries) if entry.prefix.requested]
    return BuildCounts(
        n_calls=len(calls.entries) + len(calls.conflicting) + len(calls.foreign),
        chains=len(paths.leaves),
        roots=paths.roots,
        quarantined_calls=sum(1 for call in excluded if call.reason not in _WELL_PLACED),
        lost_tries=sum(1 for call in excluded if call.reason == ExcludedReason.LOST_TRY),
        side_calls_excluded=sum(1 for call in excluded if call.reason == ExcludedReason.SIDE_CALL),
        unresolved_parent_calls=sum(1 for entry in calls.entries if isinstance(entry.parent, Unresolved)),
        eligible_links=len(eligible),
        contiguous_links=sum(1 for position in eligible if forest.parents[position] != NO_PARENT),
        generated_tokens_captured=captured,
        generated_tokens_delivered=delivered,
        delivered_fraction=delivered / captured if captured else 0.0,
        excluded_tokens={reason: by_reason[reason] for reason in sorted(by_reason)},
    )
