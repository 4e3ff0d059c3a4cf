"""Rollouts as OpenEnv's `TrainingTrace`: a turn for each call that is trained, with the whole prompt that it had.

Invariant: a call is one turn, named by its id, whichever chains it is in; the turn's prompt and completion are what the
engine had and said; its mask is over both, and true on ids to train.

Flow: a group -> `Delivery.samples` -> the calls of each -> `project`, a line for each rollout with its `trace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter
from trainer_bridge.samples import Delivery, Sample
from trainer_bridge.stream import TrainRollout

__all__ = ["EXPORTER", "FILE", "project"]

FILE: Final = "training_traces.jsonl"


def project(rollouts: Sequence[TrainRollout], delivery: Delivery) -> Iterator[JsonObject]:
    """A rollout a line: `trace`, the fields of a `TrainingTrace`, and the reward that stands outside of it.

    The main chain's calls come last, in order. A call that trains nothing is part of the prompts after it, as it is in
    the trajectories.
    """
    for _, samples in groupby(delivery.samples(rollouts), key=lambda sample: sample.rollout.rollout_id):
        found = list(samples)
        rollout = found[0].rollout
        yield {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "trace": {"schema_version": 1, "turns": [turn for sample in found for turn in _turns(sample)]},
        }


def _turns(sample: Sample) -> Iterator[JsonObject]:
    for call_id, spans in groupby(sample.sequence.spans, key=lambda span: span.call_id):
        parts = list(spans)
        start, end = parts[0].start, parts[-1].end
        yield {
            "node_id": call_id,
            "prompt_token_ids": sample.token_ids[:start].tolist(),
            "completion_token_ids": sample.token_ids[start:end].tolist(),
            "per_token_logps": sample.log_probs[start:end].tolist(),
            "loss_mask": [0] * start + sample.mask[start:end].astype(int).tolist(),
            "request": {},
            "response": {},
            "metadata": {"weight_versions": [part.weight_version for part in parts], "chain": sample.chain},
        }


EXPORTER: Final = LinesExporter("openenv", FILE, project)
