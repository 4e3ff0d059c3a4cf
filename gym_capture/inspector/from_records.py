"""A rollout as it is shown, from its frozen records.

Invariant: what is trained here is what `build` delivers of the same records, id for id; every other generated id has
the reason that the build gives for its call, or the first reason that masks its rollout.

Flow: `placed` and `build_placed`, the pure functions that make trajectories -> roles of calls -> for each chain to a
leaf the tokens, those that are delivered first, then those that no delivered one has -> where unresolved prompts part
from the call that they look like going on from (`splits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from gym_capture.build.builder import BuiltRollout, build_placed, placed
from gym_capture.build.merge import NO_PARENT, Forest
from gym_capture.capture.records import (
    CallRecord,
    Continues,
    EntrySuffix,
    IdArray,
    Snapshot,
    TokenEntry,
    Unresolved,
)
from gym_capture.capture.suffixes import StoredRecord
from gym_capture.inspector.seen import (
    NO_CALL,
    NOTHING,
    Link,
    LinkKind,
    Role,
    SeenCall,
    SeenRollout,
    SeenTrajectory,
    Split,
    TokenKind,
)
from gym_capture.inspector.splits import split_of
from gym_capture.reasons import (
    CaptureMark,
    ExcludedReason,
    MaskReason,
    TokenReason,
    join_reason,
    reason_name,
    split_reason,
)

_CUT: Final = frozenset({ExcludedReason.ABORTED, ExcludedReason.FAILED})
_RETRIED: Final = frozenset({ExcludedReason.RETRY_ORPHAN, MaskReason.UNRESOLVED_RETRIES})
_DIALECTS: Final = {"chatcmpl-": "chat", "resp_": "responses", "msg_": "messages", "cmpl-": "completions"}
_SAID_ITSELF: Final = frozenset({"stop", "tool_calls"})


def see_records(
    snapshot: Snapshot,
    *,
    begun: Mapping[str, float] = MappingProxyType({}),
    extra_mask_reasons: Sequence[str] = (),
    special: frozenset[int] = frozenset(),
    advantage: float | None = None,
    input_json: str | None = None,
) -> SeenRollout:
    """Pure, as `build` is: never raises on data.

    `begun`: when calls began, in Unix seconds, as far as that is known. `extra_mask_reasons`: those that the records
    cannot show. `special`: ids that only the template writes, if the vocabulary is at hand.
    """
    calls_placed = placed(snapshot)
    built = build_placed(snapshot, calls_placed)
    calls, _, forest = calls_placed
    masks = (*built.mask_reasons, *extra_mask_reasons)
    excluded = {each.call_id: reason_name(each.reason) for each in built.excluded}
    tree = _Tree(forest, built, excluded)
    numbers = _numbered(calls.entries)
    links, splits = _links(forest, numbers)
    chains = _Chains(tree, numbers, masks, special, advantage)
    seen_calls = [
        _call(forest, position, number, tree.roles[position], links[position], excluded, begun)
        for number, position in enumerate(numbers, start=1)
    ]
    seen_calls += _calls_apart(built, seen_calls)
    seen_calls += _open_calls(snapshot, begun, first_number=len(seen_calls) + 1)
    first = next((entry for entry in map(calls.entries.__getitem__, numbers) if isinstance(entry, TokenEntry)), None)
    names = [entry.model_call_id for entry in forest.entries]
    return SeenRollout(
        rollout_id=snapshot.rollout_id,
        calls=tuple(seen_calls),
        trajectories=chains.trajectories(),
        splits=splits,
        mask_reasons=masks,
        mask_details=_details(snapshot),
        chains=built.counts.chains,
        eligible_links=built.counts.eligible_links,
        exact_links=built.counts.contiguous_links,
        unresolved_calls=built.counts.unresolved_parent_calls,
        generated_tokens=built.counts.generated_tokens_captured,
        trained_tokens=0 if masks else built.counts.generated_tokens_delivered,
        first_prompt=None if first is None else first.prompt_token_ids,
        paths={names[position]: tuple(names[each] for each in forest.path(position)) for position in forest.order},
        new_prompts={
            names[position]: forest.placed(position).prompt_token_ids[forest.starts[position] :]
            for position in forest.order
        },
        input_json=input_json,
    )


def _details(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """What is wrong with records, by the reason that it masks for."""
    found: dict[str, tuple[str, ...]] = {}
    for each in snapshot.problems:
        reason = join_reason(each.reason, each.call_id, each.field)
        found[reason] = (*found.get(reason, ()), each.detail)
    return found


# --- calls -----------------------------------------------------------------------------------------------------------


def _numbered(entries: Sequence[StoredRecord]) -> list[int]:
    """Positions in the order in which they were recorded; a parent before those that continue it."""
    return sorted(range(len(entries)), key=lambda n: (entries[n].created_at, entries[n].cum_len, n))


def _links(forest: Forest, numbers: Sequence[int]) -> tuple[dict[int, Link], tuple[Split, ...]]:
    links: dict[int, Link] = {}
    splits: list[Split] = []
    earlier: list[TokenEntry] = []
    for position in numbers:
        entry = forest.entries[position]
        links[position], split = _link(forest, position, entry, earlier)
        if split is not None:
            splits.append(split)
        if isinstance(entry, TokenEntry):
            earlier.append(entry)
    return links, tuple(splits)


def _link(
    forest: Forest, position: int, entry: StoredRecord, earlier: Sequence[TokenEntry]
) -> tuple[Link, Split | None]:
    if forest.parents[position] != NO_PARENT and position not in forest.unplaced:
        return Link(kind=LinkKind.EXACT if entry.prefix.supplied else LinkKind.RENDERED), None
    reason = _why_not_linked(forest, position, entry)
    if reason is None or not isinstance(entry, TokenEntry):
        return Link(kind=LinkKind.NONE, reason=reason), None
    split = split_of(entry, earlier, reason)
    return Link(kind=LinkKind.NONE if split is None else LinkKind.SPLIT, reason=reason), split


def _why_not_linked(forest: Forest, position: int, entry: StoredRecord) -> str | None:
    if isinstance(entry.parent, Unresolved):
        return reason_name(entry.parent.reason)
    if position in forest.unplaced:
        return str(forest.unplaced[position])
    if isinstance(entry.parent, Continues):  # refused: the mask reason names the call
        for reason in forest.reasons:
            name, about = split_reason(reason)
            if about.startswith(f"{entry.model_call_id}:"):
                return name
    return None


def _call(
    forest: Forest,
    position: int,
    number: int,
    role: Role,
    link: Link,
    excluded: Mapping[str, str],
    begun: Mapping[str, float],
) -> SeenCall:
    entry = forest.entries[position]
    parent = forest.parents[position]
    began = begun.get(entry.model_call_id)
    return SeenCall(
        call_id=entry.model_call_id,
        number=number,
        parent=_claimed(forest, position, parent),
        role=role,
        link=link,
        created_at=entry.created_at or None,
        seconds=None if began is None or not entry.created_at else max(entry.created_at - began, 0.0),
        prompt_tokens=entry.prompt_len,
        supplied_tokens=forest.starts[position] if entry.prefix.supplied else 0,
        generated_tokens=int(entry.generation_token_ids.size),
        finish=entry.reply.finish_reason,
        weight_versions=tuple(span.version for span in entry.policy.weight_versions),
        excluded=excluded.get(entry.model_call_id),
        dialect=next((name for prefix, name in _DIALECTS.items() if entry.model_call_id.startswith(prefix)), None),
        output_items=entry.reply.output_items,
        sampling={**entry.request.sampling, **_limit(entry)},
        requested_model=entry.request.requested_model,
        model=entry.policy.model,
        notes=entry.request.normalized,
    )


def _limit(entry: CallRecord) -> dict[str, int]:
    return {} if entry.request.max_tokens is None else {"max_tokens": entry.request.max_tokens}


def _claimed(forest: Forest, position: int, parent: int) -> str | None:
    """The proven parent; of a call without a place the one that its record names."""
    if parent != NO_PARENT:
        return forest.entries[parent].model_call_id
    entry = forest.entries[position]
    return entry.parent.call_id if isinstance(entry, EntrySuffix) else None


def _calls_apart(built: BuiltRollout, seen: Sequence[SeenCall]) -> list[SeenCall]:
    """Calls whose records contradict each other, or are another rollout's: of these only the size is believed."""
    known = {call.call_id for call in seen}
    apart = [each for each in built.excluded if each.call_id not in known and each.reason != ExcludedReason.LOST_TRY]
    return [
        _bare(each.call_id, number, Role.UNRESOLVED, reason_name(each.reason), generated=each.generated_tokens)
        for number, each in enumerate(apart, start=len(seen) + 1)
    ]


def _open_calls(snapshot: Snapshot, begun: Mapping[str, float], *, first_number: int) -> list[SeenCall]:
    """Calls that have begun and left no record."""
    found = map(split_reason, snapshot.incomplete)
    names = [call_id for name, call_id in found if name == CaptureMark.DANGLING_INTENT and call_id]
    names.sort(key=lambda call_id: begun.get(call_id, 0.0))
    return [
        _bare(call_id, number, Role.OPEN, str(CaptureMark.DANGLING_INTENT), began=begun.get(call_id))
        for number, call_id in enumerate(names, start=first_number)
    ]


def _bare(
    call_id: str, number: int, role: Role, reason: str, *, generated: int | None = None, began: float | None = None
) -> SeenCall:
    """A call without a record that is believed."""
    return SeenCall(
        call_id=call_id,
        number=number,
        parent=None,
        role=role,
        link=Link(kind=LinkKind.NONE, reason=reason),
        created_at=began,
        seconds=None,
        prompt_tokens=None,
        supplied_tokens=0,
        generated_tokens=generated,
        finish=None,
        weight_versions=(),
        excluded=reason,
        dialect=None,
    )


# --- the tree --------------------------------------------------------------------------------------------------------


class _Tree:
    """The calls that have a place, and what each is in the rollout."""

    def __init__(self, forest: Forest, built: BuiltRollout, excluded: Mapping[str, str]) -> None:
        self.forest = forest
        self.built = built
        self.excluded = excluded
        inner = {forest.parents[position] for position in forest.order}
        self.leaves = [position for position in forest.order if position not in inner]
        main = next((frozenset(each.call_ids) for each in built.trajectories if each.is_main), frozenset())
        self.roles = [Role.UNRESOLVED] * len(forest.entries)
        if len(forest.entries) == 1 and forest.order and not excluded:
            self.roles[0] = Role.ONLY
            return
        for position in (*forest.order, *forest.unplaced):
            self.roles[position] = self._role(position, main)

    def _role(self, position: int, main: frozenset[str]) -> Role:
        entry = self.forest.entries[position]
        if entry.model_call_id in main:
            return Role.MAIN
        reason = self.excluded.get(entry.model_call_id)
        if reason == ExcludedReason.SIDE_CALL:
            return Role.SIDE
        if reason in _CUT:
            return Role.ABORTED
        if reason in _RETRIED:
            return Role.RETRY
        parent = self.forest.parents[position]
        if parent == NO_PARENT:
            unresolved = isinstance(entry.parent, Unresolved) or position in self.forest.unplaced
            return Role.UNRESOLVED if unresolved else Role.SUB_AGENT
        return Role.BRANCH if self.roles[parent] in (Role.MAIN, Role.ONLY) else self.roles[parent]


class _Chains:
    """The sequences, token by token."""

    def __init__(
        self,
        tree: _Tree,
        numbers: Sequence[int],
        masks: Sequence[str],
        special: frozenset[int],
        advantage: float | None,
    ) -> None:
        self._tree = tree
        self._numbers = numbers
        self._forest = tree.forest
        self._mask = reason_name(masks[0]) if masks else None
        self._advantage = advantage
        self._positions = {entry.model_call_id: n for n, entry in enumerate(tree.forest.entries)}
        # What ends a turn that the policy ended itself; with a vocabulary at hand, also what only the template says.
        self._closes = special | {
            int(entry.generation_token_ids[-1])
            for entry in tree.forest.entries
            if entry.reply.finish_reason in _SAID_ITSELF and entry.generation_token_ids.size
        }

    def trajectories(self) -> tuple[SeenTrajectory, ...]:
        delivered = self._tree.built.trajectories
        made: list[SeenTrajectory] = []
        shown: set[int] = set()
        for each in delivered:
            path = [self._positions[call_id] for call_id in each.call_ids]
            owned = {span.call_id for span in each.spans}
            made.append(self._trajectory(path, owned, each.trajectory_id, is_delivered=True))
            shown.update(path)
        rollout_id = self._tree.built.rollout_id
        leaves = frozenset(self._tree.leaves)
        for leaf in self._numbers:
            if leaf in leaves and leaf not in shown:
                name = f"{rollout_id}/{self._forest.entries[leaf].model_call_id}"
                path = self._forest.path(leaf)
                made.append(self._trajectory(path, set(), name, is_delivered=False))
        return tuple(made)

    def _trajectory(
        self, path: Sequence[int], owned: set[str], trajectory_id: str, *, is_delivered: bool
    ) -> SeenTrajectory:
        last = self._forest.placed(path[-1])
        size = last.cum_len
        kinds = np.zeros(size, dtype=np.uint8)
        calls = np.full(size, NO_CALL, dtype=np.int32)
        log_probs = np.full(size, np.nan, dtype=np.float32)
        versions, whys = (np.full(size, NOTHING, dtype=np.int32) for _ in range(2))
        version_names: dict[str, int] = {}
        why_names: dict[str, int] = {}
        generated: dict[str, tuple[int, int]] = {}
        before: TokenEntry | None = None
        for index, position in enumerate(path):
            entry = self._forest.placed(position)
            begin, end = entry.prompt_len, entry.cum_len
            calls[self._forest.starts[position] : end] = index
            generated[entry.model_call_id] = (begin, end)
            log_probs[begin:end] = entry.generation_log_probs
            why = self._why(entry, owned)
            kinds[begin:end] = TokenKind.TRAINED if why is None else TokenKind.NOT_TRAINED
            if why is not None:
                whys[begin:end] = why_names.setdefault(why, len(why_names))
            for span in entry.policy.weight_versions:
                index_of = version_names.setdefault(span.version, len(version_names))
                versions[begin + span.start : begin + span.end] = index_of
            if before is not None:
                closed = before.cum_len + self._inserted(before, entry.prompt_token_ids)
                kinds[before.cum_len : closed] = TokenKind.INSERTED_CLOSE
            before = entry
        return SeenTrajectory(
            trajectory_id=trajectory_id,
            call_ids=tuple(self._forest.entries[position].model_call_id for position in path),
            token_ids=last.cumulative_ids(),
            kinds=kinds,
            calls=calls,
            log_probs=log_probs,
            versions=versions,
            version_names=tuple(version_names),
            whys=whys,
            why_names=tuple(why_names),
            generated=generated,
            is_delivered=is_delivered,
            advantage=self._advantage,
        )

    def _why(self, entry: TokenEntry, owned: set[str]) -> str | None:
        """Why a call's ids are not trained in this sequence; None: they are."""
        reason = self._tree.excluded.get(entry.model_call_id)
        if reason is not None:
            return reason
        if self._mask is not None:
            return self._mask
        return None if entry.model_call_id in owned else str(TokenReason.TRAINED_ELSEWHERE)

    def _inserted(self, before: TokenEntry, prompt_ids: IdArray) -> int:
        """How many ids behind a turn end it in the policy's stead: it was cut before it said them itself."""
        generation = before.generation_token_ids
        if generation.size and int(generation[-1]) in self._closes:
            return 0
        behind = prompt_ids[before.cum_len : before.cum_len + 1]
        return int(behind.size and int(behind[0]) in self._closes)
