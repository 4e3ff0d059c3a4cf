"""Groups as SkyRL's generators give them: a `GeneratorOutput`, step-wise.

Invariant: the rows of a rollout stand together, and its main chain, the last of them, is marked `is_last_step`. SkyRL
compares rollouts by that row and gives its advantage to the others, so a rollout in several rows counts once in the
baseline; masked ones have no row.

Flow: a group -> `Delivery.samples` -> `generator_output`, columns with an element for each row -> a line.

For `generator.step_wise_trajectories=true`. Of `GeneratorOutput` three columns are not plain: each of `trajectory_ids`
is what a `TrajectoryID` is made of; each of `rollout_expert_indices` (int16) and `rollout_sample_support` (int32), an
array. SkyRL's outcome advantages ignore the rewards of rows that are not last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from gym_capture.capture.sampling_masks import NO_ID
from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter
from trainer_bridge.samples import Delivery, session_numbers
from trainer_bridge.stream import TrainRollout

__all__ = ["EXPORTER", "FILE", "generator_output", "project"]

FILE: Final = "generator_outputs.jsonl"


def generator_output(rollouts: Sequence[TrainRollout], delivery: Delivery) -> JsonObject | None:
    """The `GeneratorOutput` of one group; None if nothing in it can be trained."""
    samples = delivery.samples(rollouts)
    if not samples:
        return None
    numbers = {id(each): number for each, number in zip(rollouts, session_numbers(rollouts), strict=True)}
    output: JsonObject = {
        "prompt_token_ids": [each.prompt_ids for each in samples],
        "response_ids": [each.response_ids for each in samples],
        "rewards": [each.rollout.reward for each in samples],
        "loss_masks": [each.response_mask for each in samples],
        "stop_reasons": [each.sequence.finish_reason or "stop" for each in samples],
        "rollout_metrics": None,
        "rollout_logprobs": [each.response_log_probs for each in samples],
        "trajectory_ids": [
            {"instance_id": each.rollout.group_id, "repetition_id": numbers[id(each.rollout)]} for each in samples
        ],
        "is_last_step": [*(a.rollout is not b.rollout for a, b in pairwise(samples)), True],
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
    }
    experts = [each.sequence.routed_experts for each in samples]
    if all(rows is not None for rows in experts):
        output["rollout_expert_indices"] = [rows.tolist() for rows in experts if rows is not None]
    supports = [each.sampling_rows() for each in samples]
    known = [rows for rows in supports if rows is not None]
    if len(known) == len(samples):
        width = max(rows.shape[1] for rows in known)
        output["rollout_sample_support"] = [
            np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=NO_ID)[each.prompt_length :].tolist()
            for each, rows in zip(samples, known, strict=True)
        ]
    return output


def project(rollouts: Sequence[TrainRollout], delivery: Delivery) -> Iterator[JsonObject]:
    output = generator_output(rollouts, delivery)
    if output is not None:
        yield output


EXPORTER: Final = LinesExporter("skyrl", FILE, project)
