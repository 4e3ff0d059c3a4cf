"""Rollouts for TRL: samples of `AsyncGRPOTrainer`, and what a `rollout_func` returns.

Invariant: a sample of the asynchronous trainer is one trajectory with the advantage of its rollout, so every chain is
trained and none moves the baseline. `rollout_func` has one row for each prompt: there a rollout is its main chain, and
what is not delivered is counted.

Flow: a group -> `Delivery.samples` -> `project`, the arguments of a `RolloutSample` each; or `rollout_columns`.

`GRPOTrainer` compares all the rows of a group, and has no word for one to leave out. So the reward that it is given is
our advantage, 0 for a masked rollout: these have a mean of 0, so that `scale_rewards="none"` leaves them as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from gym_capture.errors import RecordError
from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter
from trainer_bridge.samples import Delivery, Sample
from trainer_bridge.stream import TrainRollout

__all__ = ["EXPORTER", "FILE", "project"]

FILE: Final = "rollout_samples.jsonl"


def group_number(group_id: str) -> int:
    """The group's number: TRL's are integers, and it keeps samples with equal ones together."""
    return int.from_bytes(hashlib.sha256(group_id.encode()).digest()[:6], "big")


def project(rollouts: Sequence[TrainRollout], delivery: Delivery) -> Iterator[JsonObject]:
    """The arguments of a `RolloutSample` for each trajectory; arrays are lists.

    `prompt` and `completion`, which TRL only shows, are empty: what the policy had are the ids. `model_version` is the
    lowest that sampled any of it, so that TRL's bound on staleness holds for all of it; 0 if it is not known.
    """
    for sample in delivery.samples(rollouts, advantages=True):
        rollout = sample.rollout
        low, _ = sample.versions or (0, 0)
        metrics = {} if rollout.reward is None else {"reward": rollout.reward}
        yield {
            "prompt": [],
            "completion": [],
            "input_ids": sample.token_ids.tolist(),
            "completion_mask": sample.mask.astype(int).tolist(),
            "old_log_probs": sample.log_probs.tolist(),
            "advantage": rollout.advantage,
            "model_version": low,
            "group_id": group_number(rollout.group_id),
            "metrics": metrics,
        }


def with_arrays(row: Mapping[str, Any]) -> JsonObject:
    """A row of `project`, or a line of the export, with arrays where a `RolloutSample` has them."""
    return {
        **row,
        "input_ids": np.array(row["input_ids"], dtype=np.int64),
        "completion_mask": np.array(row["completion_mask"], dtype=np.int64),
        "old_log_probs": np.array(row["old_log_probs"], dtype=np.float32),
    }


def rollout_columns(rollouts: Sequence[TrainRollout], delivery: Delivery) -> JsonObject:
    """What `rollout_func` returns of whole groups, a row for each rollout in their order; `reward` is the advantage.

    Masked rollouts keep their row, with nothing to train and a reward of 0. Raises `RecordError` for one of which
    nothing was built: there is no row without ids.
    """
    columns: dict[str, list[object]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
    }
    for rollout in rollouts:
        found = delivery.samples([rollout], main_only=True, advantages=True)
        sample = found[0] if found else _untrained(rollout)
        columns["prompt_ids"].append(sample.prompt_ids)
        columns["completion_ids"].append(sample.response_ids)
        columns["logprobs"].append(sample.response_log_probs)
        columns["env_mask"].append(sample.response_mask)
        columns["reward"].append(rollout.advantage if found else 0.0)
    return columns


def reward_of_row(completions: Sequence[object], *, reward: Sequence[float], **_: object) -> list[float]:
    """A reward function for `GRPOTrainer`: the column `reward` of `rollout_columns`."""
    return list(reward)


def _untrained(rollout: TrainRollout) -> Sample:
    if not rollout.sequences:
        raise RecordError(
            "nothing was built of it, so TRL has no row for it", field="token_ids", rollout_id=rollout.rollout_id
        )
    main = rollout.sequences[0]
    blank = replace(main, log_probs=np.zeros_like(main.log_probs))
    return Sample(
        rollout=rollout,
        sequence=blank,
        chain=0,
        prompt_length=int(main.loss_mask.argmax()),
        mask=np.zeros_like(main.loss_mask),
        log_probs=blank.log_probs,
    )


EXPORTER: Final = LinesExporter("trl", FILE, project)
