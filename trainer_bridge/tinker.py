"""Trajectories as tinker's training service takes them: a `Datum` each, inputs against the ids that follow them.

Invariant: element i of every loss input is about id i + 1; mask, log probability and advantage are 0 where nothing is
trained.

Flow: a group -> `Delivery.samples` -> `project`, the JSON of a `Datum` -> a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import TrainRollout

__all__ = ["EXPORTER", "FILE", "project"]

FILE: Final = "data.jsonl"


def project(rollouts: Sequence[TrainRollout], delivery: Delivery) -> Iterator[JsonObject]:
    """A `Datum` for each trajectory, for `importance_sampling` and the losses beside it."""
    for sample in delivery.samples(rollouts, advantages=True):
        yield {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": sample.token_ids[:-1].tolist()}]},
            "loss_fn_inputs": {
                "target_tokens": _tensor(sample.token_ids[1:], "int64"),
                "logprobs": _tensor(sample.log_probs[1:], "float32"),
                "advantages": _tensor(sample.advantages[1:], "float32"),
                "mask": _tensor(sample.mask[1:].astype(np.float32), "float32"),
            },
        }


def _tensor(values: npt.NDArray[Any], dtype: str) -> JsonObject:
    return {"data": values.tolist(), "dtype": dtype, "shape": [int(values.size)]}


EXPORTER: Final = LinesExporter("tinker", FILE, project)
