"""Which rollouts a step trains on: what is left out is whole, and counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trainer_bridge.batching import Selection, compared, step_batch
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
from trainer_bridge.stream import TrainRollout

from .made import model, rollout, sampled_by, sequence


def left_out(*rollouts: TrainRollout, **selection: Any) -> dict[str, int]:
    return dict(step_batch(rollouts, Selection(**selection)).left_out)


def test_groups_without_spread_are_counted_and_can_be_left_out() -> None:
    flat = [rollout(sequence(seed=n), group_id="flat", advantage=0.0) for n in range(3)]
    alone = rollout(sequence(seed=4), group_id="alone", advantage=0.0)
    spread = [rollout(sequence(seed=n), group_id="spread", advantage=a) for n, a in ((5, 1.0), (6, 0.0), (7, -1.0))]
    kept = step_batch([*flat, alone, *spread], Selection())
    assert (kept.groups, kept.groups_without_spread, len(kept.used)) == (3, 2, 7)
    filtered = step_batch([*flat, alone, *spread], Selection(spread_filtering=True))
    assert (filtered.left_out, len(filtered.used), filtered.groups_without_spread) == ({"no_spread": 4}, 3, 2)
    assert filtered.tokens.weight_N.sum() == pytest.approx(1.0)


def test_TR_14_a_row_that_is_too_long_takes_its_rollout_out_uncut() -> None:
    long = rollout(sequence(prompt=100, generated=100), sequence(seed=1))
    assert left_out(long, rollout(sequence()), max_sequence_tokens=128) == {"too_long": 1}
    trainer = GrpoTrainer(model(), GrpoOptions(tokens_per_micro_batch=64))  # the model has 128 positions
    metrics = trainer.step([long, rollout(sequence(prompt=70, generated=30))])
    assert (metrics.left_out, metrics.trained_tokens, metrics.computed_tokens) == ({"too_long": 1}, 30, 100)


def test_TR_12_a_rollout_far_from_the_trainer_is_left_out_before_the_loss() -> None:
    policy = model()
    near = [rollout(sampled_by(policy, sequence(seed=n)), rollout_id=f"near-{n}") for n in range(2)]
    stale = sampled_by(policy, sequence(seed=9))
    far = rollout(
        sampled_by(policy, sequence(seed=8)),
        replace(stale, log_probs=stale.log_probs - np.where(stale.loss_mask, np.float32(6.0), np.float32(0.0))),
        rollout_id="far",
    )
    options = GrpoOptions(mismatch_threshold=2.0, lr=1e-3)
    metrics = GrpoTrainer(model(), options).step([near[0], far, near[1]])
    assert (metrics.left_out, metrics.rollouts) == ({"logprob_mismatch": 1}, 2)
    assert metrics.mismatch is not None
    assert metrics.mismatch.max_abs_log_prob_diff < 1e-4
    without = GrpoTrainer(model(), options)
    expected = without.step(near)
    assert (metrics.loss, metrics.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), abs=1e-5)
    nothing = GrpoTrainer(model(), options).step([far])
    assert (nothing.updates, nothing.left_out, nothing.mismatch) == (0, {"logprob_mismatch": 1}, None)


def test_a_log_probability_that_the_trainer_finds_impossible_is_a_mismatch() -> None:
    """NaN compares with nothing: it must not count as near."""
    policy = model()
    made = rollout(sequence())
    trainer = GrpoTrainer(policy, GrpoOptions(mismatch_threshold=2.0))
    batch = trainer.select([made])
    with_nan = torch.full((batch.trained_tokens,), math.nan)
    assert trainer._without_mismatched([made], batch, with_nan)[0].left_out == {"logprob_mismatch": 1}


def test_rewards_can_be_compared_again_in_another_way() -> None:
    group = [rollout(sequence(seed=n), reward=reward, advantage=None) for n, reward in enumerate((1.0, 0.0, 0.0))]
    masked = rollout(sequence(seed=5), reward=9.0, masked=True)
    found = compared([*group, masked], "leave_one_out")
    assert [each.advantage for each in found] == pytest.approx([1.0, -0.5, -0.5, 0.0])
    batch = step_batch([*group, masked], Selection(advantage="none"))
    assert sorted(set(batch.tokens.advantage_N.round(4).tolist())) == pytest.approx([-0.3333, 0.6667])
    assert batch.left_out == {"masked": 1}
    unknown = rollout(sequence(seed=6), reward=None, group_id="h")
    assert left_out(unknown, advantage="none") == {"no_advantage": 1}


def test_groups_that_start_from_several_prompts_are_counted() -> None:
    same = [rollout(sequence(seed=1), group_id="same"), rollout(sequence(seed=1), group_id="same")]
    dated = [rollout(sequence(seed=n), group_id="dated") for n in (1, 2)]
    assert step_batch([*same, *dated], Selection()).groups_of_several_prompts == 1


def test_the_first_id_of_a_row_is_predicted_by_nothing() -> None:
    made = sequence(prompt=0, generated=4)
    batch = step_batch([rollout(made)], Selection())
    assert (batch.trained_tokens, batch.tokens_without_log_prob) == (3, 1)


def test_a_rollout_in_pieces_teaches_what_it_teaches_whole() -> None:
    """In every aggregation, the weight of a rollout is that of its tokens, however they are spread over rows."""
    whole = sequence(prompt=4, generated=8, seed=3)
    halves = [replace(whole, loss_mask=whole.loss_mask & part) for part in (np.arange(12) < 8, np.arange(12) >= 8)]
    other = rollout(sequence(seed=4, generated=3), advantage=-1.0)

    def learnt(*sequences: Any, aggregation: Any) -> list[float]:
        options = GrpoOptions(selection=Selection(aggregation=aggregation, tokens_per_rollout=10), max_grad_norm=1e9)
        trainer = GrpoTrainer(model(), options)
        metrics = trainer.step([rollout(*sequences), other])
        return [metrics.loss, metrics.grad_norm]

    for aggregation in ("grpo", "dapo", "dr_grpo"):
        assert learnt(*halves, aggregation=aggregation) == pytest.approx(
            learnt(whole, aggregation=aggregation), rel=1e-4
        )
