"""Trajectories as prime-rl's trainer takes them: the fields of its `TrainingSample`, one for each branch of a rollout.

Invariant: all arrays of a sample have an element for each id; the advantage is the rollout's on the ids that are
trained, and 0 elsewhere; a temperature is the one that the id was sampled at.

Flow: a group -> `Delivery.samples` -> `project`, the fields by name -> a line.

prime-rl sends these structs as arrays: the order of `FIELDS` is the wire's, and later fields that are absent are left
off. `positional` makes that of a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gym_capture.capture.sampling_masks import NO_ID
from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import TrainRollout

__all__ = ["EXPORTER", "FILE", "positional", "project"]

FILE: Final = "training_samples.jsonl"
ENV_NAME: Final = "gym-capture"
"""By which prime-rl groups its metrics."""
FIELDS: Final = (
    *("token_ids", "mask", "logprobs", "temperatures", "env_name", "ref_logprobs", "mm_refs", "routed_experts"),
    *("mm_token_type_ids", "rl_weights", "ce_weights", "ref_kl_weights", "advantages", "sampling_mask"),
    *("trace_id", "branch_index"),
)
"""In the order of the wire. The first five are required."""


def project(rollouts: Sequence[TrainRollout], delivery: Delivery) -> Iterator[JsonObject]:
    """The fields of a `TrainingSample` for each trajectory.

    `routed_experts` has a row for each id: that of the last one, which no model has run, is zeros. `sampling_mask` has
    a count for each id, 0 where it is not trained.
    """
    for sample in delivery.samples(rollouts, advantages=True):
        rollout = sample.rollout
        made: JsonObject = {
            "token_ids": sample.token_ids.tolist(),
            "mask": sample.mask.tolist(),
            "logprobs": sample.log_probs.tolist(),
            "temperatures": sample.temperatures().tolist(),
            "env_name": ENV_NAME,
            "advantages": sample.advantages.tolist(),
            "trace_id": rollout.rollout_id,
            "branch_index": sample.chain,
        }
        experts = sample.sequence.routed_experts
        if experts is not None:
            lacking = [(0, sample.token_ids.size - len(experts)), *((0, 0) for _ in experts.shape[1:])]
            rows = np.pad(experts, lacking)
            made["routed_experts"] = {"data": rows.ravel().tolist(), "shape": rows.shape, "dtype": rows.dtype.name}
        support = sample.sampling_rows()
        if support is not None:
            kept = support != NO_ID
            made["sampling_mask"] = {"ids": support[kept].tolist(), "counts": kept.sum(axis=1).tolist()}
        yield made


def positional(sample: Mapping[str, Any]) -> list[Any]:
    """A sample as the wire has it."""
    values = [sample.get(name) for name in FIELDS]
    experts = sample.get("routed_experts")
    if experts is not None:
        data = np.array(experts["data"], dtype=experts["dtype"]).tobytes()
        values[FIELDS.index("routed_experts")] = [data, list(experts["shape"]), experts["dtype"]]
    support = sample.get("sampling_mask")
    if support is not None:
        arrays = [np.array(support[name], dtype=np.int32).tobytes() for name in ("ids", "counts")]
        values[FIELDS.index("sampling_mask")] = arrays
    while values[-1] is None:
        values.pop()
    return values


EXPORTER: Final = LinesExporter("prime-rl", FILE, project)
