"""A group with all that a trainer could get wrong, and what must come of it.

`split` has two chains, the shorter of which begins as the main chain does; one of its sampled ids has no log
probability. `masked` has the highest reward, which must move no baseline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gym_capture.build.sampling import Sampling
from gym_capture.build.trajectories import Span
from gym_capture.data.advantages import group_advantages
from trainer_bridge.stream import TrainRollout, TrainSequence

UNKNOWN: Final = float("nan")


def sequence(name: str, ids: list[int], *spans: Span, is_main: bool = True, **changes: Any) -> TrainSequence:
    """Log probabilities are different on all ids, and 0 where nothing is trained."""
    mask: npt.NDArray[np.bool_] = np.zeros(len(ids), dtype=np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    log_probs = np.where(mask, -0.125 * np.arange(1, len(ids) + 1), 0.0).astype(np.float32)
    return TrainSequence(
        trajectory_id=name,
        is_main=is_main,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        log_probs=log_probs,
        spans=spans,
        **{"finish_reason": "stop"} | changes,
    )


def span(start: int, end: int, call_id: str, version: str = "3", *, temperature: float = 0.5) -> Span:
    return Span(start, end, call_id, version, Sampling(temperature=temperature))


def rollout(name: str, *sequences: TrainSequence, reward: float, **changes: Any) -> TrainRollout:
    said: dict[str, Any] = {"masked": False, "mask_reasons": (), "advantage": None, **changes}
    return TrainRollout(rollout_id=name, group_id="task_7", sequences=sequences, reward=reward, **said)


MAIN: Final = sequence("split/b", [1, 2, 3, 4, 5, 6, 7], span(2, 4, "a"), span(5, 6, "b", "3"), span(6, 7, "b", "4"))
SIDE: Final = sequence("split/c", [1, 2, 3, 4, 8, 9], span(5, 6, "c", "4"), is_main=False)
WITH_A_HOLE: Final = sequence("short/a", [1, 2, 10, 11], span(2, 4, "a2"), finish_reason="length")
WITH_A_HOLE.log_probs[3] = UNKNOWN


def made() -> list[TrainRollout]:
    rollouts = [
        rollout("split", MAIN, SIDE, reward=1.0),
        rollout("short", WITH_A_HOLE, reward=0.0),
        rollout("masked", sequence("masked/a", [1, 2, 12], span(2, 3, "a3")), reward=100.0, masked=True),
        rollout("plain", sequence("plain/a", [1, 2, 13], span(2, 3, "a4")), reward=0.25),
    ]
    advantages = group_advantages(
        [each.reward or 0.0 for each in rollouts],
        groups=[each.group_id for each in rollouts],
        masked=[each.masked for each in rollouts],
        scale="sample_std",
    )

    return [replace(each, advantage=float(value)) for each, value in zip(rollouts, advantages, strict=True)]


GROUP: Final = made()
ADVANTAGE: Final = {each.rollout_id: each.advantage for each in GROUP}
TRAINED: Final = {"split/b": [3, 4, 6, 7], "split/c": [9], "short/a": [10], "plain/a": [13]}
"""The ids that a trainer must train of each row: no others, and each of them once."""
