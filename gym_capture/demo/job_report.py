"""The report on a job that was tried: figures, the checks that decide whether its tokens are exact, a table.

Invariant: every figure is read from what a trainer reads, the trajectories' Parquet, or reported by the trainer that
read it; no check holds for want of anything to check.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
from rich.table import Table

from gym_capture.data.schema import read_pairs
from gym_capture.demo.report import LARGEST_DIFFERENCE, Built, Check, Training, mean_and_std, read_built

_COLUMNS: Final = (
    *("rollout_id", "group_id", "is_main", "token_ids", "spans", "reward", "output_items"),
    *("unresolved_parent_calls", "excluded_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One job that was played, built and trained on."""

    built: Built
    tool_calls: int
    """Tool calls of the policy, in the calls that are delivered."""
    unresolved_calls: int
    """Calls that echo turns which no call is proven to have made, as a client does that rewrites what was cut."""
    excluded_tokens: Mapping[str, int]
    """Generated tokens that are not delivered, by reason."""
    first_prompts: Mapping[str, Sequence[tuple[int, ...]]]
    """By group: the ids that each of its rollouts began with. A rollout with nothing to train on has none."""
    mean_reward: float
    reward_std: float
    training: Training | None
    """None: there was nothing to train on."""
    seconds: Mapping[str, float]
    """By phase."""

    @property
    def uneven_groups(self) -> list[str]:
        """The groups whose rollouts did not begin with the same ids."""
        return sorted(group for group, prompts in self.first_prompts.items() if len(set(prompts)) != 1)


def read_tried(trajectories: Path, *, training: Training | None, seconds: Mapping[str, float]) -> Tried:
    """The figures of the trajectories in a directory."""
    rows = [row for row in pq.read_table(trajectories, columns=list(_COLUMNS)).to_pylist() if row["is_main"]]
    first_prompts = defaultdict(list)
    excluded = Counter[str]()
    for row in rows:
        excluded.update(read_pairs(row["excluded_tokens"]))
        if row["spans"]:
            first_prompts[row["group_id"]].append(tuple(row["token_ids"][: row["spans"][0]["start"]]))
    mean_reward, reward_std = mean_and_std([row["reward"] for row in rows if row["reward"] is not None])
    return Tried(
        built=read_built(trajectories),
        tool_calls=sum(map(_tool_calls, rows)),
        unresolved_calls=sum(row["unresolved_parent_calls"] for row in rows),
        excluded_tokens=dict(excluded),
        first_prompts=dict(first_prompts),
        mean_reward=mean_reward,
        reward_std=reward_std,
        training=training,
        seconds=dict(seconds),
    )


def _tool_calls(row: Mapping[str, Any]) -> int:
    turns = [json.loads(items) for items in row["output_items"] or ()]
    return sum(item["type"] == "function_call" for items in turns for item in items)


def checks(tried: Tried, *, leftovers: Sequence[str]) -> list[Check]:
    """Every promise of the job, and whether it held."""
    built, training = tried.built, tried.training
    left_out = sum(tried.excluded_tokens.values())
    with_prompts = sum(map(len, tried.first_prompts.values()))
    difference = None if training is None else training.mean_abs_log_prob_difference
    compared = 0 if training is None else training.compared_tokens
    return [
        Check(
            "every rollout can be trained on",
            0 < built.rollouts == with_prompts and built.masked_rollouts == 0,
            f"{built.masked_rollouts} of {built.rollouts} masked, {with_prompts} with something to train on",
        ),
        Check(
            "every eligible link is contiguous",
            0 < built.contiguous_links == built.eligible_links,
            f"{built.contiguous_links} of {built.eligible_links}",
        ),
        Check(
            "every generated token is delivered, or left out for a reason",
            0 < built.delivered == built.captured - left_out,
            f"{built.captured} generated, {built.delivered} delivered, {left_out} left out",
        ),
        Check(
            "the first prompts of a group are equal, id for id",
            with_prompts > len(tried.first_prompts) > 0 and not tried.uneven_groups,
            f"{with_prompts} prompts in {len(tried.first_prompts)} groups"
            + (f"; they differ in {', '.join(tried.uneven_groups)}" if tried.uneven_groups else ""),
        ),
        Check(
            "sampled and trained log probabilities agree",
            difference is not None and difference < LARGEST_DIFFERENCE,
            "nothing to compare"
            if difference is None
            else f"mean difference {difference:.2g} over {compared} tokens, limit {LARGEST_DIFFERENCE:g}",
        ),
        Check("nothing is left running", not leftovers, ", ".join(leftovers) or "0 processes"),
    ]


def table(tried: Tried, *, title: str) -> Table:
    """The figures, the seconds of the phases below."""
    built, training = tried.built, tried.training
    lengths = sorted({len(prompt) for prompts in tried.first_prompts.values() for prompt in prompts})
    shown = Table(title=title, title_style="bold", show_header=False)
    for label, cell in (
        ("rollouts, groups", f"{built.rollouts}, {len(tried.first_prompts)}"),
        ("model calls", str(built.calls)),
        ("tool calls", str(tried.tool_calls)),
        ("first prompts, tokens", f"{lengths[0]} to {lengths[-1]}" if lengths else "-"),
        ("contiguous / eligible links", f"{built.contiguous_links} / {built.eligible_links}"),
        ("calls whose parent is unresolved", str(tried.unresolved_calls)),
        ("generated tokens captured", str(built.captured)),
        ("generated tokens delivered", str(built.delivered)),
        *((f"left out: {reason}", str(tokens)) for reason, tokens in sorted(tried.excluded_tokens.items())),
        ("masked rollouts", str(built.masked_rollouts)),
        ("trained tokens", "0" if training is None else str(training.trained_tokens)),
        ("reward, mean ± std", f"{tried.mean_reward:.3f} ± {tried.reward_std:.3f}"),
    ):
        shown.add_row(label, cell)
    shown.add_section()
    for phase, seconds in tried.seconds.items():
        shown.add_row(f"{phase}, s", f"{seconds:.1f}")
    return shown


def to_json(tried: Tried, found: Sequence[Check]) -> str:
    """The same for a machine; of the prompts their lengths."""
    figures = asdict(tried)
    figures["built"] = tried.built._asdict()
    figures["first_prompts"] = {group: [len(ids) for ids in prompts] for group, prompts in tried.first_prompts.items()}
    held = all(check.held for check in found)
    return json.dumps({**figures, "checks": [check._asdict() for check in found], "held": held}, indent=2)
