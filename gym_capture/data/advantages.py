"""Group-relative advantages, one a rollout; and which rewards can be compared at all.

Invariant: an advantage compares whole rollouts of one group and nothing else. How many rows a rollout was built into,
how large other groups are and in which order rollouts stand changes nothing; masked rollouts are outside of the
baseline and of the deviation and get 0; every result is finite.

For a rollout with reward r in a group of n whose unmasked rewards have mean m and standard deviation s:

    population_std    (r - m) / (s + 1e-6),  s over n           GRPO (DeepSeekMath, arXiv:2402.03300, 4.1.2)
    sample_std        (r - m) / (s + 1e-6),  s over n - 1       GRPO, as torch's `std` computes it
    none              r - m                                     Dr. GRPO (arXiv:2503.20783)
    leave_one_out     r - mean of the others = n / (n - 1) (r - m)   RLOO (arXiv:2402.14740)

A group with one unmasked rollout has nothing to compare it with: its advantage is 0, as are those of a group whose
rewards are all the same. Whatever the rewards, nothing overflows on the way; an advantage without a scale that a
float32 cannot hold is cut to the largest one that it can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from gym_capture.reasons import MaskReason

__all__ = ["Scale", "group_advantages", "reward_problems"]

Scale: TypeAlias = Literal["none", "population_std", "sample_std", "leave_one_out"]

_EPSILON: Final = 1e-6
"""Keeps a group whose rewards differ by rounding only from being blown up to advantages of +-1."""

_LARGEST: Final = float(np.finfo(np.float32).max)
"""Trainers multiply in float32."""


def reward_problems(reward: float | None) -> tuple[str, ...]:
    """Reasons to mask a rollout over its reward, for every table and trainer; none if it can be compared."""
    if reward is None:
        return (MaskReason.MISSING_REWARD,)
    return () if math.isfinite(reward) else (MaskReason.NON_FINITE_REWARD,)


def group_advantages(
    rewards: Sequence[float] | npt.NDArray[np.float64],
    *,
    groups: Sequence[str],
    masked: Sequence[bool] | npt.NDArray[np.bool_],
    scale: Scale = "population_std",
) -> npt.NDArray[np.float64]:
    """float64 [N]: the advantage of each of N rollouts. All arguments have one element a rollout - not a row.

    Rewards of masked rollouts are not looked at. Raises `ValueError` for lengths that differ and for rewards of
    unmasked rollouts that are not finite.
    """
    reward_N = np.asarray(rewards, dtype=np.float64)
    masked_N = np.asarray(masked, dtype=np.bool_)
    if not (reward_N.shape == masked_N.shape == (len(groups),)):
        raise ValueError(
            f"rewards, groups and masked must have one element a rollout: got {reward_N.size}, {len(groups)} "
            f"and {masked_N.size}"
        )
    kept_N = ~masked_N
    wrong_N = kept_N & ~np.isfinite(reward_N)
    if wrong_N.any():
        raise ValueError(f"reward {int(np.argmax(wrong_N))} must be finite: got {reward_N[np.argmax(wrong_N)]}")
    advantage_N = np.zeros(reward_N.shape, dtype=np.float64)
    if not kept_N.any():
        return advantage_N
    reward_K = reward_N[kept_N]
    # Not numpy's own way, whose text is as wide as the widest one and has no NUL at its end.
    numbers: dict[str, int] = {}
    group_N = np.array([numbers.setdefault(group, len(numbers)) for group in groups])
    _, group_K = np.unique(group_N[kept_N], return_inverse=True)
    count_G = np.bincount(group_K)
    # In each group, rewards are brought down to [-1, 1] by a power of two, which loses no digit: squares stay in range.
    largest_G = np.zeros(count_G.shape)
    np.maximum.at(largest_G, group_K, np.abs(reward_K))
    exponent_G = np.maximum(np.frexp(largest_G)[1], 0)
    reward_K = np.ldexp(reward_K, -exponent_G[group_K])
    centered_K = reward_K - (np.bincount(group_K, weights=reward_K) / count_G)[group_K]
    # Large rewards that are all the same differ from their mean by its rounding, and from nothing else.
    some_G = np.zeros(count_G.shape)
    some_G[group_K] = reward_K
    differs_G = np.bincount(group_K, weights=reward_K != some_G[group_K]) > 0
    centered_K[~differs_G[group_K]] = 0.0
    if scale in ("none", "leave_one_out"):
        if scale == "leave_one_out":
            centered_K *= (count_G / np.maximum(count_G - 1, 1))[group_K]
        with np.errstate(over="ignore"):
            centered_K = np.clip(np.ldexp(centered_K, exponent_G[group_K]), -_LARGEST, _LARGEST)
    else:
        freedom_G = count_G if scale == "population_std" else np.maximum(count_G - 1, 1)
        std_G = np.sqrt(np.bincount(group_K, weights=np.square(centered_K)) / freedom_G)
        centered_K /= (std_G + np.ldexp(_EPSILON, -exponent_G))[group_K]
    advantage_N[kept_N] = centered_K
    return advantage_N
