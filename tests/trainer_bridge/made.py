"""Small models, and rollouts to train them on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gym_capture.build.trajectories import Span
from trainer_bridge.stream import TrainRollout, TrainSequence

VOCABULARY = 97


def model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def sequence(*, prompt: int = 3, generated: int = 5, seed: int = 0, **changes: Any) -> TrainSequence:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, prompt + generated, dtype=np.int32)
    made = TrainSequence(
        trajectory_id=f"t{seed}",
        is_main=True,
        token_ids=ids,
        loss_mask=np.arange(prompt + generated) >= prompt,
        log_probs=np.where(np.arange(prompt + generated) >= prompt, np.float32(-4.0), np.float32(0.0)),
        finish_reason="stop",
        spans=(Span(prompt, prompt + generated, "c", "1"),),
    )
    return replace(made, **changes)


def rollout(*sequences: TrainSequence, advantage: float | None = 1.0, **changes: Any) -> TrainRollout:
    made = TrainRollout(
        rollout_id="r",
        group_id="g",
        sequences=sequences,
        reward=1.0,
        advantage=advantage,
        masked=False,
        mask_reasons=(),
    )
    return replace(made, **changes)


def sampled_by(policy: Any, made: TrainSequence, *, temperature: float = 1.0) -> TrainSequence:
    """The sequence with the log probabilities that `policy` gives its sampled ids, computed the plain way."""
    ids = torch.from_numpy(made.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        log_probs = torch.log_softmax(policy(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
    chosen = log_probs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return replace(made, log_probs=np.where(made.loss_mask, np.concatenate(([0.0], chosen)), 0.0).astype(np.float32))
