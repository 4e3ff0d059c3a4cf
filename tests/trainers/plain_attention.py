"""TRL's asynchronous trainer on a CPU: its attention kernel, which runs on GPUs only, in torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def without_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packing, "_flash_attn", lambda: PlainAttention)
    patch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks for a GPU's name


class PlainAttention:
    """What the trainer's attention kernel computes, which runs on GPUs only: segments against their own paths."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert causal
        assert window_size == (-1, -1)
        parts = []
        heads = query.shape[1] // key.shape[1]
        pairs = (pairwise(ends.tolist()) for ends in (ends_q, ends_k))
        for (q0, q1), (k0, k1) in zip(*pairs, strict=True):
            q = query[q0:q1].transpose(0, 1)
            k, v = (part[k0:k1].transpose(0, 1).repeat_interleave(heads, 0) for part in (key, value))
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
            scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, -torch.inf)
            parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(parts)
