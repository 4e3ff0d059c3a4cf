"""Rollouts as exporters take them: all that a build wrote of them, from its files or from Arrow batches as they come.

Invariant: a rollout that is read is the one that was built: its trajectories id by id, its counts, why it is masked,
and for each call of a trajectory the items that the policy's turn was parsed to.

Flow: `parquet_batches(directory, columns=COLUMNS)` or the batches of a Ray dataset -> `read_finished` -> `groups`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

from gym_capture.build.builder import BuildCounts
from gym_capture.build.trajectories import Trajectory
from gym_capture.data.schema import read_pairs, read_spans, read_tensor
from gym_capture.errors import RecordError
from trainer_bridge.stream import Batch, TrainRollout, TrainSequence, rows_by_rollout

__all__ = ["COLUMNS", "FinishedRollout", "JsonObject", "Turn", "groups", "read_finished"]

JsonObject: TypeAlias = dict[str, Any]

_COUNTS: Final = tuple(field.name for field in fields(BuildCounts))

COLUMNS: Final = (
    *("rollout_id", "group_id", "trajectory_id", "is_main", "call_ids", "token_ids", "loss_mask", "log_probs", "spans"),
    *("finish_reason", "reward", "reward_components", "masked", "mask_reasons", "routed_experts", "sampling_mask"),
    *("output_items", "token_item_indices", "model", "agent_name", "input", "call_rewards", "span_sampling"),
    *("sample", "attempt", "advantage", "truncated"),
    *_COUNTS,
)
"""The columns of a table of trajectories that exporters read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The turn that one call generated, as a client saw it."""

    output_items: tuple[JsonObject, ...]
    """Responses items, without token arrays."""
    token_item_index: int | None
    """Which of them the generated ids belong to; None: not noted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRollout:
    """A rollout that was played, captured and built."""

    rollout_id: str
    group_id: str
    trajectories: tuple[Trajectory, ...]
    """The main chain first. Empty: nothing could be built."""
    turns: Mapping[str, Turn]
    """By call id, of every call of a trajectory."""
    counts: BuildCounts
    masked: bool
    mask_reasons: tuple[str, ...]
    reward: float | None
    """None: not known."""
    reward_components: Mapping[str, float] | None
    """Parts that add up to the reward."""
    model: str | None
    """The policy that generated."""
    agent_name: str | None
    """Who played it. None: nobody said."""
    input: str | list[JsonObject] | None
    """The task as it was given to the agent: `input` of a Responses request. None: nobody said."""
    call_rewards: Mapping[str, float]
    """The agent's own rewards of single calls, by call id: no part of the reward."""
    sample: int | None = None
    attempt: int | None = None
    """Which sample of its task it is, from 0, and which attempt at it, from 1. None: nobody said."""
    advantage: float | None = None
    """Against the unmasked rollouts of its group. None: it has no group, or it has not been computed."""
    outgrown: bool = False
    """Its conversation outgrew the model's context: a further call was refused."""

    def for_training(self) -> TrainRollout:
        """Its ids and numbers, without the texts: what the stream gives of the same rollout."""
        return TrainRollout(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            sequences=tuple(map(_sequence, self.trajectories)),
            reward=self.reward,
            advantage=self.advantage,
            masked=self.masked,
            mask_reasons=self.mask_reasons,
            outgrown=self.outgrown,
            sample=self.sample,
            attempt=self.attempt,
            call_rewards=self.call_rewards,
        )


def read_finished(batches: Iterable[Batch]) -> Iterator[FinishedRollout]:
    """The rollouts of `batches`, in order. Raises `RecordError` if the rows of one do not stand together."""
    return map(_finished, rows_by_rollout(batches, COLUMNS))


def groups(rollouts: Iterable[FinishedRollout]) -> Iterator[tuple[FinishedRollout, ...]]:
    """Whole groups, in order. Raises `RecordError` if the rollouts of one do not stand together."""
    finished: set[str] = set()
    for group_id, group in itertools.groupby(rollouts, key=lambda rollout: rollout.group_id):
        if group_id in finished:
            raise RecordError(f"rollouts of group {group_id} must stand together", field="group_id")
        finished.add(group_id)
        yield tuple(group)


def _finished(rows: Sequence[dict[str, Any]]) -> FinishedRollout:
    first = rows[0]
    components, task = first["reward_components"], first["input"]
    built = [row for row in rows if len(row["token_ids"])]
    return FinishedRollout(
        rollout_id=first["rollout_id"],
        group_id=first["group_id"],
        trajectories=tuple(map(_trajectory, built)),
        turns={call_id: turn for row in built for call_id, turn in _turns(row)},
        counts=BuildCounts(
            **{name: first[name] for name in _COUNTS} | {"excluded_tokens": read_pairs(first["excluded_tokens"])}
        ),
        masked=first["masked"],
        mask_reasons=tuple(first["mask_reasons"]),
        reward=first["reward"],
        reward_components=None if components is None else read_pairs(components),
        model=first["model"],
        agent_name=first["agent_name"],
        input=None if task is None else json.loads(task),
        call_rewards=read_pairs(first.get("call_rewards") or ()),
        sample=first.get("sample"),
        attempt=first.get("attempt"),
        advantage=first["advantage"],
        outgrown=bool(first.get("truncated")),
    )


def _turns(row: Mapping[str, Any]) -> Iterator[tuple[str, Turn]]:
    if row["output_items"] is None or row["token_item_indices"] is None:
        raise RecordError(
            "output_items are not known: the table was built by an earlier version, or without them; build it again",
            field="output_items",
            rollout_id=row["rollout_id"],
        )
    turns = zip(row["call_ids"], row["output_items"], row["token_item_indices"], strict=True)
    for call_id, items, index in turns:
        yield call_id, Turn(output_items=tuple(json.loads(items)), token_item_index=index)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        rollout_id=row["rollout_id"],
        trajectory_id=row["trajectory_id"],
        is_main=row["is_main"],
        call_ids=tuple(row["call_ids"]),
        token_ids=row["token_ids"].to_numpy(),
        loss_mask=row["loss_mask"].to_numpy(zero_copy_only=False),
        log_probs=row["log_probs"].to_numpy(zero_copy_only=False),
        spans=read_spans(row["spans"], row.get("span_sampling")),
        finish_reason=row["finish_reason"],
        routed_experts=read_tensor(row["routed_experts"]),
        sampling_mask=read_tensor(row["sampling_mask"]),
    )


def _sequence(trajectory: Trajectory) -> TrainSequence:
    return TrainSequence(
        trajectory_id=trajectory.trajectory_id,
        is_main=trajectory.is_main,
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        log_probs=trajectory.log_probs,
        finish_reason=trajectory.finish_reason,
        spans=trajectory.spans,
        routed_experts=trajectory.routed_experts,
        sampling_mask=trajectory.sampling_mask,
    )
