"""The clipped policy gradient over trained tokens, and how far trainer and generation are apart.

Invariant: the loss is a weighted sum over the tokens that the policy sampled, and the weights are those of a whole
step, not of a micro-batch; so how tokens are put into rows and rows into micro-batches changes nothing.

For N tokens, with log probabilities `current` of the weights being trained, `prev` of the weights before the step,
`generation` as they were sampled and `reference` of weights to stay close to:

    ratio       = exp(current - prev)                     PPO's and GRPO's (arXiv:1707.06347; arXiv:2402.03300)
                  or, one for a trajectory, exp(mean over its tokens of current - prev)      GSPO (arXiv:2507.18071)
    importance  = exp(prev - generation), which corrects for the engine computing something else than the trainer, or
                  with older weights: `truncate`d to at most `importance_cap` (TIS), or `mask`ed, i.e. 0, outside of
                  [importance_floor, importance_cap] (MIS; IcePop, arXiv:2510.18855), or `none`: 1
    kl          = exp(reference - current) - (reference - current) - 1                       GRPO, eq. 4
    gain        = importance * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss        = sum of weight * (kl_coefficient * kl - gain)

Clipping higher than lower is DAPO's (arXiv:2503.14476, 3.1). TIS is that of "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training" (Yao et al., 2025). A masked token keeps its place in the weights of the others.
`gen_kl_error` and `token_mult_prob_error` are NeMo-RL's metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["LossOptions", "Mismatch", "clipped_loss", "importance", "kl", "log_ratio", "mismatch", "outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of the loss."""

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance: Literal["truncate", "mask", "none"] = "truncate"
    importance_cap: float | None = 2.0
    """The most that a token's importance may be; None: no limit."""
    importance_floor: float = 0.0
    """The least, for `mask`."""
    kl_coefficient: float = 0.0
    """Of the divergence from the reference weights; 0: there are none."""


def clipped_loss(
    current_N: torch.Tensor,
    *,
    prev_N: torch.Tensor,
    generation_N: torch.Tensor,
    advantage_N: torch.Tensor,
    weight_N: torch.Tensor,
    options: LossOptions,
    sequence_N: torch.Tensor | None = None,
    reference_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """The part of the step's loss that these N tokens carry: a scalar. Only `current_N` has a gradient.

    `sequence_N`: the trajectory of each, all of whose trained tokens are here; a ratio of sequences needs it.
    """
    ratio_N = torch.exp(log_ratio(current_N, prev_N, sequence_N, options))
    clipped_N = ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    gain_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    loss = -(weight_N * importance(prev_N, generation_N, options) * gain_N).sum()
    if reference_N is not None and options.kl_coefficient:
        loss = loss + options.kl_coefficient * (weight_N * kl(current_N, reference_N)).sum()
    return loss


def log_ratio(
    current_N: torch.Tensor, prev_N: torch.Tensor, sequence_N: torch.Tensor | None, options: LossOptions
) -> torch.Tensor:
    """[N]: how much likelier each token has become, or its whole trajectory by the token, as a logarithm."""
    difference_N = current_N - prev_N
    if options.ratio == "token" or not difference_N.numel():
        return difference_N
    if sequence_N is None:
        raise ValueError("a ratio of sequences needs sequence_N")
    _, number_N, count_S = torch.unique(sequence_N, return_inverse=True, return_counts=True)
    total_S = torch.zeros(len(count_S), dtype=difference_N.dtype, device=difference_N.device)
    mean_S: torch.Tensor = total_S.index_add(0, number_N, difference_N) / count_S
    return mean_S[number_N]


def kl(current_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N]: KL(current || reference) of each token by the k3 estimator, of tokens that `current` sampled."""
    difference_N = reference_N - current_N
    return torch.expm1(difference_N) - difference_N


def importance(prev_N: torch.Tensor, generation_N: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """[N]: how much more likely the trainer finds each token than what generated it, within the limits."""
    if options.importance == "none":
        return torch.ones_like(prev_N)
    importance_N = torch.exp(prev_N - generation_N)
    if options.importance == "mask":
        return importance_N.masked_fill(outside(importance_N, options), 0.0)
    if options.importance_cap is not None:
        importance_N = importance_N.clamp(max=options.importance_cap)
    return importance_N


def outside(importance_N: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """[N]: whether each importance, before any limit, is outside of the limits."""
    outside_N = torch.zeros_like(importance_N, dtype=torch.bool)
    if options.importance_cap is not None:
        outside_N |= importance_N > options.importance_cap
    if options.importance == "mask":
        outside_N |= importance_N < options.importance_floor
    return outside_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the trainer's log probabilities are from those that were sampled with; means over tokens."""

    gen_kl_error: float
    """KL(generation || trainer) by the k3 estimator: exp(d) - d - 1 with d = prev - generation. 0 if they agree."""
    token_mult_prob_error: float
    """exp(|prev - generation|): the factor that a token's probability is off by. 1 if they agree."""
    mean_abs_log_prob_diff: float
    max_abs_log_prob_diff: float


def mismatch(prev_N: torch.Tensor, generation_N: torch.Tensor) -> Mismatch:
    """Over N > 0 tokens with a known log probability."""
    difference_N = (prev_N - generation_N).double()
    absolute_N = difference_N.abs()
    return Mismatch(
        gen_kl_error=float((torch.expm1(difference_N) - difference_N).mean()),
        token_mult_prob_error=float(absolute_N.exp().mean()),
        mean_abs_log_prob_diff=float(absolute_N.mean()),
        max_abs_log_prob_diff=float(absolute_N.max()),
    )
