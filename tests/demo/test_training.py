"""What is compared: tokens that no grammar constrained."""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.demo.training import free_of
from trainer_bridge.stream import TrainRollout, TrainSequence

SEQUENCE = TrainSequence(
    trajectory_id="r/c",
    is_main=True,
    token_ids=np.arange(8, dtype=np.int32),
    loss_mask=np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=np.bool_),
    log_probs=np.zeros(8, dtype=np.float32),
    finish_reason="stop",
)
ROLLOUT = TrainRollout(
    rollout_id="r", group_id="g", sequences=(SEQUENCE,), reward=1.0, advantage=0.5, masked=False, mask_reasons=()
)


@pytest.mark.parametrize(
    ("spans", "mask"),
    [
        ({}, [0, 0, 1, 1, 0, 1, 1, 1]),
        ({"r/c": []}, [0, 0, 1, 1, 0, 1, 1, 1]),
        ({"r/c": [(2, 4)]}, [0, 0, 0, 0, 0, 1, 1, 1]),
        ({"r/c": [(2, 4), (5, 8)]}, [0] * 8),
        ({"another": [(0, 8)]}, [0, 0, 1, 1, 0, 1, 1, 1]),
    ],
)
def test_tokens_of_the_spans_leave_the_mask(spans: dict[str, list[tuple[int, int]]], mask: list[int]) -> None:
    (freed,) = free_of([ROLLOUT], spans)
    assert freed.sequences[0].loss_mask.tolist() == [bool(kept) for kept in mask]
    assert SEQUENCE.loss_mask.tolist() == [False, False, True, True, False, True, True, True]
