"""A rollout as it is shown, from its rows in a table of trajectories alone.

Invariant: ids, masks and log probabilities are those of the rows. What only records know - calls that no trajectory
has, which prompt was sent, when - is not known here, and left out. Of a call without loss within a chain rows have the
id, and not where it generated: the ids that may be its are of the kind that says so, never `PROMPT`.

Flow: each row's spans say where its calls generated -> those of earlier rows say it for shared beginnings, too -> what
is between them is prompt, unless a call is between them -> arrays for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from gym_capture.capture.records import IdArray
from gym_capture.inspector.seen import (
    NO_CALL,
    NOTHING,
    Link,
    LinkKind,
    Role,
    SeenCall,
    SeenRollout,
    SeenTrajectory,
    TokenKind,
)
from gym_capture.inspector.splits import common_length
from gym_capture.reasons import ExcludedReason, TokenReason, reason_name

Row = Mapping[str, Any]
"""Of `data.schema.SCHEMA`; `token_ids`, `loss_mask` and `log_probs` as arrays."""

_WITHIN_CHAINS: Final = frozenset(
    {ExcludedReason.ABORTED, ExcludedReason.FAILED, ExcludedReason.EMPTY_GENERATION, ExcludedReason.SIDE_CALL}
)
"""Of calls that a call with loss may go on from. Those with another reason end their chains, or have no place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Untrained:
    """What the rows of a rollout say of its calls without loss."""

    reason: str
    """Of each that is within a chain."""
    generated: int | None
    """How many ids each of them generated; None: not known."""
    is_unnamed: bool
    """Whether rows do not name the calls that generated what is in their prompts."""

    @property
    def hides(self) -> bool:
        """Whether ids that one of them generated may be among those without loss."""
        return self.generated != 0


def see_rows(rows: Sequence[Row]) -> SeenRollout:
    """Of one rollout, its main trajectory first."""
    first = rows[0]
    masks = tuple(first["mask_reasons"])
    with_ids = [row for row in rows if len(row["token_ids"])]
    excluded = {pair["key"]: pair["value"] for pair in first["excluded_tokens"]}
    untrained = _untrained(with_ids, excluded)
    trajectories = tuple(_trajectory(row, with_ids[:n], masks, untrained) for n, row in enumerate(with_ids))
    calls = _calls(with_ids, trajectories, untrained)
    return SeenRollout(
        rollout_id=first["rollout_id"],
        calls=calls,
        trajectories=trajectories,
        mask_reasons=masks,
        chains=first["chains"],
        eligible_links=first["eligible_links"],
        exact_links=first["contiguous_links"],
        unresolved_calls=first["unresolved_parent_calls"],
        generated_tokens=first["generated_tokens_delivered"] + sum(excluded.values()),
        trained_tokens=0 if first["masked"] else first["generated_tokens_delivered"],
        first_prompt=_first_prompt(trajectories),
        paths=_paths(trajectories),
        new_prompts=_new_prompts(trajectories),
        input_json=first.get("input"),
    )


def _untrained(rows: Sequence[Row], excluded: Mapping[str, int]) -> _Untrained:
    possible = [name for name in excluded if name in _WITHIN_CHAINS]
    generated = sum(excluded[name] for name in possible)
    is_unnamed = _has_a_row_for_each_call(rows)
    return _Untrained(
        reason=possible[0] if len(possible) == 1 else str(TokenReason.REASON_NOT_TOLD),
        generated=0 if generated == 0 and (possible or is_unnamed) else None,
        is_unnamed=is_unnamed,
    )


def _has_a_row_for_each_call(rows: Sequence[Row]) -> bool:
    """Whether the build was `per_request`. One of chains that have a single call each, and share none, looks the same
    either way, and may be taken for a merged one."""
    if any(len(row["call_ids"]) > 1 for row in rows):
        return False
    return sum(row["is_main"] for row in rows) > 1 or any(row["chains"] < len(rows) for row in rows)


def _shared(row: Row, earlier: Sequence[Row], untrained: _Untrained) -> list[Mapping[str, Any]]:
    """Where ids were generated that an earlier row trains."""
    if not untrained.is_unnamed:
        own = {span["call_id"] for span in row["spans"]}
        of_chain = set(row["call_ids"]) - own
        return [span for other in earlier for span in other["spans"] if span["call_id"] in of_chain]
    shared: list[Mapping[str, Any]] = []
    begin = min((span["start"] for span in row["spans"]), default=0)
    for other in earlier:
        end = max((span["end"] for span in other["spans"]), default=0)
        if end <= min(begin, common_length(other["token_ids"], row["token_ids"])):
            shared += other["spans"]
    return shared


def _trajectory(row: Row, earlier: Sequence[Row], masks: Sequence[str], untrained: _Untrained) -> SeenTrajectory:
    token_ids, loss_mask = row["token_ids"], row["loss_mask"]
    size = token_ids.size
    call_ids = tuple(row["call_ids"])
    index_of = {call_id: n for n, call_id in enumerate(call_ids)}
    log_probs = np.where(loss_mask, row["log_probs"], np.float32(np.nan)).astype(np.float32)
    versions = np.full(size, NOTHING, dtype=np.int32)
    version_names: dict[str, int] = {}
    generated: dict[str, tuple[int, int]] = {}
    shared = _shared(row, earlier, untrained)
    for span in (*row["spans"], *shared):
        begin, end, call_id = span["start"], span["end"], span["call_id"]
        known = generated.get(call_id, (begin, end))
        generated[call_id] = (min(known[0], begin), max(known[1], end))
        if span["weight_version"] is not None:
            versions[begin:end] = version_names.setdefault(span["weight_version"], len(version_names))
    kinds = np.where(loss_mask, TokenKind.TRAINED, TokenKind.PROMPT).astype(np.uint8)
    whys = np.full(size, NOTHING, dtype=np.int32)
    why_names: dict[str, int] = {}

    def explain(where: slice | np.ndarray[Any, np.dtype[np.bool_]], kind: TokenKind, why: str) -> None:
        kinds[where] = kind
        whys[where] = why_names.setdefault(why, len(why_names))

    calls = _call_of_each(size, generated, index_of)
    for begin, end in _not_told(call_ids, generated, untrained):
        explain(slice(begin, end), TokenKind.NOT_TOLD, str(TokenReason.PLACE_NOT_TOLD))
        calls[begin:end] = NO_CALL
    if masks:
        explain(loss_mask, TokenKind.NOT_TRAINED, reason_name(masks[0]))
    for span in shared:
        why = reason_name(masks[0]) if masks else str(TokenReason.TRAINED_ELSEWHERE)
        explain(slice(span["start"], span["end"]), TokenKind.NOT_TRAINED, why)
    return SeenTrajectory(
        trajectory_id=row["trajectory_id"],
        call_ids=call_ids,
        token_ids=token_ids,
        kinds=kinds,
        calls=calls,
        log_probs=log_probs,
        versions=versions,
        version_names=tuple(version_names),
        whys=whys,
        why_names=tuple(why_names),
        generated=generated,
        is_delivered=True,
        advantage=row["advantage"],
    )


def _not_told(
    call_ids: Sequence[str], generated: Mapping[str, tuple[int, int]], untrained: _Untrained
) -> list[tuple[int, int]]:
    """Where calls without loss generated something, among prompts: before the next call that is known."""
    if not untrained.hides:
        return []
    found: list[tuple[int, int]] = []
    behind, is_between = 0, untrained.is_unnamed
    names = sorted(generated, key=generated.__getitem__) if untrained.is_unnamed else call_ids
    for call_id in names:
        known = generated.get(call_id)
        if known is None:
            is_between = True
            continue
        if is_between and behind < known[0]:
            found.append((behind, known[0]))
        behind, is_between = known[1], untrained.is_unnamed
    return found


def _call_of_each(
    size: int, generated: Mapping[str, tuple[int, int]], index_of: Mapping[str, int]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The prompt ids before a generation are of the same call, as far as no other one generated them."""
    calls = np.full(size, NO_CALL, dtype=np.int32)
    behind = 0
    for call_id, (_, end) in sorted(generated.items(), key=lambda item: item[1]):
        calls[behind:end] = index_of.get(call_id, NO_CALL)
        behind = end
    return calls


def _calls(rows: Sequence[Row], trajectories: Sequence[SeenTrajectory], untrained: _Untrained) -> tuple[SeenCall, ...]:
    found: dict[str, SeenCall] = {}
    calls_alone = len({call_id for row in rows for call_id in row["call_ids"]}) == 1
    for row, trajectory in zip(rows, trajectories, strict=True):
        items = row.get("output_items") or [None] * len(trajectory.call_ids)
        sampling = _sampling(row)
        parent: str | None = None
        for call_id, text in zip(trajectory.call_ids, items, strict=True):
            if call_id not in found:
                is_last = call_id == trajectory.call_ids[-1]
                found[call_id] = SeenCall(
                    call_id=call_id,
                    number=len(found) + 1,
                    parent=parent,
                    role=_role(row, parent, found, alone=calls_alone),
                    link=Link(kind=LinkKind.NONE if parent is None else LinkKind.EXACT),
                    created_at=None,
                    seconds=None,
                    **_sizes(trajectory, call_id, parent, untrained),
                    finish=row["finish_reason"] if is_last else None,
                    weight_versions=_versions(trajectory, call_id),
                    excluded=None if call_id in trajectory.generated else untrained.reason,
                    dialect=None,
                    output_items=() if text is None else tuple(orjson.loads(text)),
                    sampling=sampling.get(call_id, {}),
                    model=row.get("model") or "",
                )
            parent = call_id
    return tuple(found.values())


def _role(row: Row, parent: str | None, found: Mapping[str, SeenCall], *, alone: bool) -> Role:
    if row["is_main"]:
        return Role.ONLY if alone else Role.MAIN
    if parent is None:
        return Role.SUB_AGENT
    before = found[parent].role
    return Role.BRANCH if before in (Role.MAIN, Role.ONLY) else before


def _sizes(trajectory: SeenTrajectory, call_id: str, parent: str | None, untrained: _Untrained) -> dict[str, Any]:
    known = trajectory.generated.get(call_id)
    before = trajectory.generated.get(parent or "")
    return {
        "prompt_tokens": None if known is None else known[0],
        "supplied_tokens": 0 if parent is None else None if before is None else before[1],
        "generated_tokens": untrained.generated if known is None else known[1] - known[0],
    }


def _versions(trajectory: SeenTrajectory, call_id: str) -> tuple[str, ...]:
    begin, end = trajectory.generated.get(call_id, (0, 0))
    found = dict.fromkeys(trajectory.versions[begin:end].tolist())
    return tuple(trajectory.version_names[index] for index in found if index != NOTHING)


def _sampling(row: Row) -> dict[str, Mapping[str, Any]]:
    hows = row.get("span_sampling") or ()
    return {
        span["call_id"]: {name: value for name, value in how.items() if value is not None}
        for span, how in zip(row["spans"], hows, strict=False)
        if how is not None
    }


def _first_prompt(trajectories: Sequence[SeenTrajectory]) -> IdArray | None:
    for each in trajectories:
        begins = [begin for begin, _ in each.generated.values()]
        if begins:
            first = each.kinds[: min(begins)]
            return None if (first == TokenKind.NOT_TOLD).any() else each.token_ids[: min(begins)]
    return None


def _paths(trajectories: Sequence[SeenTrajectory]) -> dict[str, tuple[str, ...]]:
    return {
        call_id: each.call_ids[: n + 1] for each in reversed(trajectories) for n, call_id in enumerate(each.call_ids)
    }


def _new_prompts(trajectories: Sequence[SeenTrajectory]) -> dict[str, IdArray]:
    found: dict[str, IdArray] = {}
    for each in trajectories:
        behind = 0
        for call_id in each.call_ids:
            known = each.generated.get(call_id)
            if known is None:
                continue
            if not (each.kinds[behind : known[0]] == TokenKind.NOT_TOLD).any():
                found.setdefault(call_id, each.token_ids[behind : known[0]])
            behind = known[1]
    return found
