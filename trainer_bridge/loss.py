"""The clipped policy gradient of GRPO over trained tokens, and how far trainer and generation are apart.

Invariant: the loss is a weighted sum over the tokens that the policy sampled, and the weights of a whole step - not
of a micro-batch - add up to 1; so how tokens are put into rows and rows into micro-batches changes nothing.

For N tokens, with log probabilities `current` of the weights being trained, `prev` of the weights before the step and
`generation` as they were sampled:

    ratio      = exp(current - prev)
    importance = exp(prev - generation), at most `importance_cap`; corrects for the engine computing something else
                 than the trainer, or with older weights
    loss       = - sum of weight * importance * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

Formulas and names are those that NeMo-RL documents for GRPO (clipped policy gradient loss with importance sampling
correction; metrics `gen_kl_error` and `token_mult_prob_error`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of the loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float | None = 2.0
    """The most that a token's importance may be; None: not capped."""
    weigh_by: Literal["rollout", "token"] = "rollout"
    """`rollout`: each rollout weighs the same, its tokens share it. `token`: each token of the step weighs the same."""


def clipped_loss(
    current_N: torch.Tensor,
    *,
    prev_N: torch.Tensor,
    generation_N: torch.Tensor,
    advantage_N: torch.Tensor,
    weight_N: torch.Tensor,
    options: LossOptions,
) -> torch.Tensor:
    """The part of the step's loss that these N tokens carry: a scalar. Only `current_N` has a gradient."""
    ratio_N = torch.exp(current_N - prev_N)
    clipped_N = ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    gain_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    return -(weight_N * importance(prev_N, generation_N, options) * gain_N).sum()


def importance(prev_N: torch.Tensor, generation_N: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """[N]: how much more likely the trainer finds each token than what generated it."""
    importance_N = torch.exp(prev_N - generation_N)
    return importance_N if options.importance_cap is None else importance_N.clamp(max=options.importance_cap)


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
