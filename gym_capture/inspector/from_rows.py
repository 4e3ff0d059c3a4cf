"""A rollout as it is shown, from its rows in a table of trajectories alone.

Invariant: ids, masks and log probabilities are those of the rows. What only records know - calls that no trajectory
has, which prompt was sent, when - is not known here, and left out.

Flow: each row's spans say where its calls generated -> those of rows with the same first ids say it for shared
beginnings, too -> arrays for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from gym_capture.reasons import TokenReason, reason_name

Row = Mapping[str, Any]
"""Of `data.schema.SCHEMA`; `token_ids`, `loss_mask` and `log_probs` as arrays."""


def see_rows(rows: Sequence[Row]) -> SeenRollout:
    """Of one rollout, its main trajectory first."""
    first = rows[0]
    masks = tuple(first["mask_reasons"])
    with_ids = [row for row in rows if len(row["token_ids"])]
    trajectories = tuple(_trajectory(row, with_ids[:n], masks) for n, row in enumerate(with_ids))
    calls = _calls(with_ids, trajectories)
    excluded = {pair["key"]: pair["value"] for pair in first["excluded_tokens"]}
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


def _trajectory(row: Row, earlier: Sequence[Row], masks: Sequence[str]) -> SeenTrajectory:
    token_ids, loss_mask = row["token_ids"], row["loss_mask"]
    size = token_ids.size
    call_ids = tuple(row["call_ids"])
    index_of = {call_id: n for n, call_id in enumerate(call_ids)}
    log_probs = np.where(loss_mask, row["log_probs"], np.float32(np.nan)).astype(np.float32)
    versions = np.full(size, NOTHING, dtype=np.int32)
    version_names: dict[str, int] = {}
    generated: dict[str, tuple[int, int]] = {}
    shared: list[Mapping[str, Any]] = []
    for other in earlier:
        common = common_length(other["token_ids"], token_ids)
        shared += [span for span in other["spans"] if span["end"] <= common]
    for span in (*row["spans"], *shared):
        begin, end, call_id = span["start"], span["end"], span["call_id"]
        known = generated.get(call_id, (begin, end))
        generated[call_id] = (min(known[0], begin), max(known[1], end))
        if span["weight_version"] is not None:
            versions[begin:end] = version_names.setdefault(span["weight_version"], len(version_names))
    kinds = np.where(loss_mask, TokenKind.TRAINED, TokenKind.PROMPT).astype(np.uint8)
    whys = np.full(size, NOTHING, dtype=np.int32)
    why_names: list[str] = []
    if masks:
        kinds[loss_mask] = TokenKind.NOT_TRAINED
        whys[loss_mask] = 0
        why_names.append(reason_name(masks[0]))
    for span in shared:
        kinds[span["start"] : span["end"]] = TokenKind.NOT_TRAINED
        whys[span["start"] : span["end"]] = len(why_names)
    if shared:
        why_names.append(str(TokenReason.TRAINED_ELSEWHERE))
    return SeenTrajectory(
        trajectory_id=row["trajectory_id"],
        call_ids=call_ids,
        token_ids=token_ids,
        kinds=kinds,
        calls=_call_of_each(size, generated, index_of),
        log_probs=log_probs,
        versions=versions,
        version_names=tuple(version_names),
        whys=whys,
        why_names=tuple(why_names),
        generated=generated,
        is_delivered=True,
        advantage=row["advantage"],
    )


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


def _calls(rows: Sequence[Row], trajectories: Sequence[SeenTrajectory]) -> tuple[SeenCall, ...]:
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
                    **_sizes(trajectory, call_id, parent),
                    finish=row["finish_reason"] if is_last else None,
                    weight_versions=_versions(trajectory, call_id),
                    excluded=None,
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


def _sizes(trajectory: SeenTrajectory, call_id: str, parent: str | None) -> dict[str, Any]:
    known = trajectory.generated.get(call_id)
    before = trajectory.generated.get(parent or "")
    return {
        "prompt_tokens": None if known is None else known[0],
        "supplied_tokens": 0 if before is None else before[1],
        "generated_tokens": None if known is None else known[1] - known[0],
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
            return each.token_ids[: min(begins)]
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
            found.setdefault(call_id, each.token_ids[behind : known[0]])
            behind = known[1]
    return found
