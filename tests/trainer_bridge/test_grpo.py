"""The reference trainer on a tiny random model: what moves, what does not, and what a step says of itself."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gym_capture.errors import ConfigError
from gym_capture.models import tiny_dir
from trainer_bridge.batching import Selection, StepBatch, step_batch
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer, StepMetrics
from trainer_bridge.layouts import MicroBatch, lay_out
from trainer_bridge.loss import LossOptions, clipped_loss, mismatch
from trainer_bridge.stream import TrainRollout

from .made import model, rollout, sampled_by, sequence


def batch_of(*rollouts: TrainRollout, **changes: Any) -> StepBatch:
    return step_batch(rollouts, Selection(**changes))


def laid_out(*rollouts: TrainRollout, budget: int = 1000, **changes: Any) -> tuple[MicroBatch, ...]:
    return lay_out(batch_of(*rollouts, **changes).rows, "padded", tokens=budget, pad_id=0)


def log_probs(trainer: GrpoTrainer, *rollouts: TrainRollout, budget: int = 1000) -> list[float]:
    batch = trainer.select(rollouts)
    return trainer.log_probs(batch, lay_out(batch.rows, "padded", tokens=budget, pad_id=0)).tolist()


def gradient(options: GrpoOptions, *rollouts: TrainRollout) -> torch.Tensor:
    """What one step would move the weights by, up to the optimizer: from AdamW's first moment."""
    trainer = GrpoTrainer(model(), replace(options, max_grad_norm=math.inf))
    trainer.step(rollouts)
    moments = [state["exp_avg"].flatten() for state in trainer.optimizer.state.values()]
    return torch.cat(moments) if moments else torch.zeros(1)


def assert_same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


# --- log probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_plain_forward_pass(temperature: float) -> None:
    policy = model()
    made = sampled_by(policy, sequence(), temperature=temperature)
    trainer = GrpoTrainer(policy, GrpoOptions(selection=Selection(temperature=temperature)))
    assert log_probs(trainer, rollout(made)) == pytest.approx(made.log_probs[made.loss_mask].tolist(), abs=1e-5)


def test_a_padded_batch_equals_single_rows() -> None:
    trainer = GrpoTrainer(model(), GrpoOptions())
    rows = [rollout(sequence(generated=length, prompt=2 + length, seed=length)) for length in (9, 6, 4, 1)]
    together, alone = log_probs(trainer, *rows), log_probs(trainer, *rows, budget=1)
    assert len(laid_out(*rows)) == 1
    assert len(laid_out(*rows, budget=1)) == 4
    assert together == pytest.approx(alone, abs=1e-5)


# --- what a step learns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("advantage", "direction"), [(1.0, 1), (-1.0, -1)])
def test_sampled_ids_become_likelier_with_a_positive_advantage_and_less_likely_with_a_negative(
    advantage: float, direction: int
) -> None:
    trainer = GrpoTrainer(model(), GrpoOptions(lr=1e-3))
    made = rollout(sampled_by(trainer.model, sequence()), advantage=advantage)
    before = sum(log_probs(trainer, made))
    metrics = trainer.step([made])
    after = sum(log_probs(trainer, made))
    assert (after - before) * direction > 0.01
    assert metrics.updates == 1
    assert metrics.loss == pytest.approx(-advantage, abs=1e-5)  # ratio and importance are 1


@pytest.mark.parametrize("aggregation", ["grpo", "dapo", "dr_grpo"])
def test_micro_batches_change_nothing(aggregation: Any) -> None:
    rollouts = [
        rollout(sequence(seed=1), sequence(seed=2, generated=9), advantage=1.0),
        rollout(sequence(seed=3, generated=2), advantage=-0.5),
    ]
    options = GrpoOptions(selection=Selection(aggregation=aggregation, tokens_per_rollout=16))
    one = gradient(replace(options, tokens_per_micro_batch=10_000), *rollouts)
    many = gradient(replace(options, tokens_per_micro_batch=1), *rollouts)
    assert one.abs().max() > 0
    assert_same(one, many)


def test_masked_rollouts_contribute_nothing() -> None:
    kept = rollout(sequence(seed=1))
    masked = rollout(sequence(seed=2), advantage=5.0, masked=True, mask_reasons=("no_calls",))
    assert_same(gradient(GrpoOptions(), kept), gradient(GrpoOptions(), kept, masked))
    metrics = GrpoTrainer(model(), GrpoOptions()).step([kept, masked])
    assert (metrics.rollouts, metrics.left_out) == (1, {"masked": 1})


def test_prompt_ids_and_reply_ids_of_others_contribute_nothing() -> None:
    trainer = GrpoTrainer(model(), GrpoOptions())
    made = sequence(prompt=2, generated=6)
    middle_is_a_tool_result = made.loss_mask & ~np.isin(np.arange(8), [4, 5])
    assert trainer.step([rollout(replace(made, loss_mask=middle_is_a_tool_result))]).trained_tokens == 4


def test_TR_01_each_row_of_a_rollout_gets_its_advantage_on_its_own_tokens() -> None:
    masks = [np.array([0, 0, 1, 1, 0], dtype=np.bool_), np.array([0, 1, 0, 0, 0], dtype=np.bool_)]
    rows = [sequence(prompt=2, generated=3, seed=i, loss_mask=mask) for i, mask in enumerate(masks)]
    batch = batch_of(rollout(*rows, advantage=0.5))
    (micro_batch,) = lay_out(batch.rows, "padded", tokens=1000, pad_id=0)
    found = list(zip(micro_batch.row_N.tolist(), micro_batch.predictor_N.tolist(), strict=True))
    assert found == [(0, 1), (0, 2), (1, 0)]
    assert batch.tokens.advantage_N.tolist() == [0.5] * 3


def test_TR_02_a_rollout_weighs_the_same_however_many_rows_it_was_built_into() -> None:
    three_rows = rollout(*(sequence(seed=seed) for seed in (1, 2, 3)))
    one_row = rollout(sequence(seed=4))
    batch = batch_of(three_rows, one_row)
    weights = np.bincount(batch.tokens.sequence_N, weights=batch.tokens.weight_N)
    assert weights.sum() == pytest.approx(1.0)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_dapo_weighs_every_token_the_same() -> None:
    batch = batch_of(rollout(sequence(generated=9)), rollout(sequence(generated=1)), aggregation="dapo")
    assert batch.tokens.weight_N.tolist() == pytest.approx([0.1] * 10)


def test_dr_grpo_divides_by_a_constant_whatever_the_length() -> None:
    rollouts = (rollout(sequence(generated=9), sequence(generated=2)), rollout(sequence(generated=1)))
    batch = batch_of(*rollouts, aggregation="dr_grpo", tokens_per_rollout=20)
    assert batch.tokens.weight_N.tolist() == pytest.approx([1 / 40] * 12)
    with pytest.raises(ConfigError, match="set tokens_per_rollout"):
        Selection(aggregation="dr_grpo")


def test_TR_06_a_token_without_a_log_probability_is_left_out_and_counted() -> None:
    made = sequence(generated=5)
    gap = made.log_probs.copy()
    gap[4] = np.nan
    shorter_mask = made.loss_mask & (np.arange(8) != 4)
    with_gap = rollout(replace(made, log_probs=gap))
    assert_same(
        gradient(GrpoOptions(), with_gap), gradient(GrpoOptions(), rollout(replace(made, loss_mask=shorter_mask)))
    )
    metrics = GrpoTrainer(model(), GrpoOptions()).step([with_gap])
    assert (metrics.trained_tokens, metrics.tokens_without_log_prob) == (4, 1)
    assert metrics.mismatch is not None
    assert math.isfinite(metrics.mismatch.gen_kl_error)


def test_TR_08_overlong_filtering_leaves_out_what_ended_at_a_limit() -> None:
    cut = rollout(sequence(seed=1, finish_reason="length"))
    ended = rollout(sequence(seed=2))
    options = GrpoOptions(selection=Selection(overlong_filtering=True))
    assert_same(gradient(options, ended), gradient(options, cut, ended))
    assert GrpoTrainer(model(), options).step([cut, ended]).left_out == {"truncated": 1}
    assert GrpoTrainer(model(), GrpoOptions()).step([cut, ended]).left_out == {}


def test_rollouts_without_an_advantage_or_a_token_are_counted() -> None:
    nothing = sequence(loss_mask=np.zeros(8, dtype=np.bool_))
    metrics = GrpoTrainer(model(), GrpoOptions()).step(
        [rollout(sequence(), advantage=None), rollout(nothing), rollout(), rollout(sequence())]
    )
    assert metrics.left_out == {"no_advantage": 1, "no_trained_tokens": 2}


def test_nothing_to_train_on_moves_nothing() -> None:
    trainer = GrpoTrainer(model(), GrpoOptions(lr=1.0))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    metrics = trainer.step([rollout(sequence(), masked=True)])
    assert (metrics.updates, metrics.mismatch, metrics.loss) == (0, None, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    trainer = GrpoTrainer(model(), GrpoOptions(lr=1.0))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    metrics = trainer.step([rollout(sequence(), advantage=math.inf)])
    assert metrics.updates == 0
    assert not math.isfinite(metrics.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_the_gradient_is_clipped_to_its_norm() -> None:
    def moment(max_grad_norm: float) -> float:
        trainer = GrpoTrainer(model(), GrpoOptions(max_grad_norm=max_grad_norm))
        trainer.step([rollout(sequence())])
        return math.sqrt(sum(float(s["exp_avg"].square().sum()) for s in trainer.optimizer.state.values()))

    assert moment(1e-3) == pytest.approx(0.1 * 1e-3, rel=1e-3)  # AdamW's first moment is 0.1 of the gradient
    assert moment(math.inf) > 1e-2


# --- several updates, clipping, importance ---------------------------------------------------------------------------


def test_several_updates_train_from_the_weights_before_the_first() -> None:
    trainer = GrpoTrainer(model(), GrpoOptions(lr=1e-2, updates_per_step=4))
    made = rollout(sampled_by(trainer.model, sequence()))
    progress: list[tuple[int, int]] = []
    metrics = trainer.step([made], on_progress=lambda done, of: progress.append((done, of)))
    assert metrics.updates == 4
    assert metrics.clip_fraction > 0.5
    assert metrics.mismatch is not None
    assert metrics.mismatch.max_abs_log_prob_diff < 1e-4  # of the weights before the step
    assert progress == [(n, 5) for n in range(6)]  # one pass for the log probabilities before, four updates


def terms(
    current: float, *, prev: float, generation: float, advantage: float, options: LossOptions
) -> tuple[float, float]:
    """The loss of one token, and its gradient."""
    x = torch.tensor([current], requires_grad=True)
    loss = clipped_loss(
        x,
        prev_N=torch.tensor([prev]),
        generation_N=torch.tensor([generation]),
        advantage_N=torch.tensor([advantage]),
        weight_N=torch.ones(1),
        options=options,
    )
    loss.backward()
    assert x.grad is not None
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # already likelier by more than 1.28: nothing more to gain
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),  # already less likely than 0.8: nothing more to gain
    ],
)
def test_the_ratio_is_clipped_where_it_has_gone_far_enough(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    options = LossOptions(clip_low=0.2, clip_high=0.28)
    found = terms(-1.0 + math.log(ratio), prev=-1.0, generation=-1.0, advantage=advantage, options=options)
    assert found == pytest.approx((loss, slope), abs=1e-5)


@pytest.mark.parametrize(("cap", "importance"), [(None, 3.0), (2.0, 2.0)])
def test_importance_corrects_for_what_generated_and_is_capped(cap: float | None, importance: float) -> None:
    options = LossOptions(importance_cap=cap)
    found = terms(-1.0, prev=-1.0, generation=-1.0 - math.log(3.0), advantage=1.0, options=options)
    assert found == pytest.approx((-importance, -importance), abs=1e-5)


def test_masked_importance_drops_a_token_and_truncated_caps_it() -> None:
    off = -1.0 - math.log(3.0)
    for low, generation in ((0.0, off), (0.9, -0.8)):
        masked = LossOptions(importance="mask", importance_cap=2.0, importance_floor=low)
        found = terms(-1.0, prev=-1.0, generation=generation, advantage=1.0, options=masked)
        assert found == pytest.approx((0.0, 0.0), abs=1e-6)
    kept = LossOptions(importance="mask", importance_cap=2.0, importance_floor=0.5)
    ratio = math.exp(-0.2)
    found = terms(-1.0, prev=-1.0, generation=-0.8, advantage=1.0, options=kept)
    assert found == pytest.approx((-ratio, -ratio), abs=1e-5)
    unused = LossOptions(importance="none")
    found = terms(-1.0, prev=-1.0, generation=off, advantage=1.0, options=unused)
    assert found == pytest.approx((-1.0, -1.0), abs=1e-6)


def test_a_ratio_of_sequences_is_the_mean_over_each_trajectory() -> None:
    """GSPO: the trajectory is clipped as one."""
    options = LossOptions(ratio="sequence", clip_high=0.28)
    current = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    prev = torch.tensor([-1.0 - 0.6, -1.0, -1.0 - 0.1])  # means: 0.3, 0.3, 0.1
    loss = clipped_loss(
        current,
        prev_N=prev,
        generation_N=prev,
        advantage_N=torch.ones(3),
        weight_N=torch.ones(3),
        options=options,
        sequence_N=torch.tensor([7, 7, 9]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 * 2 + math.exp(0.1)), abs=1e-5)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([0.0, 0.0, -math.exp(0.1)], abs=1e-5)


def test_the_divergence_from_the_reference_holds_the_weights_back() -> None:
    options = GrpoOptions(lr=1e-3, updates_per_step=8, loss=LossOptions(clip_high=100.0))

    def moved(coefficient: float) -> StepMetrics:
        loss = replace(options.loss, kl_coefficient=coefficient)
        trainer = GrpoTrainer(model(), replace(options, loss=loss), reference=model())
        return trainer.step([rollout(sampled_by(trainer.model, sequence()))])

    free, held = moved(0.0), moved(20.0)
    assert free.kl is not None
    assert held.kl is not None
    assert 0 < held.kl < free.kl / 2
    with pytest.raises(ConfigError, match="needs a reference"):
        GrpoTrainer(model(), GrpoOptions(loss=LossOptions(kl_coefficient=0.1)))


def test_entropy_is_that_of_the_distributions_at_their_temperature() -> None:
    policy = model()
    made = sequence(prompt=3, generated=4)
    with torch.no_grad():
        logits = policy(input_ids=torch.from_numpy(made.token_ids.astype(np.int64))[None]).logits[0, 2:-1]
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy().mean().item()
    metrics = GrpoTrainer(policy, GrpoOptions(lr=0.0, selection=Selection(temperature=0.5))).step([rollout(made)])
    assert metrics.entropy == pytest.approx(expected, abs=1e-4)


# --- metrics -------------------------------------------------------------------------------------------------------


def test_mismatch_is_nothing_when_trainer_and_generation_agree() -> None:
    same = torch.tensor([-0.1, -2.0, -9.0])
    found = mismatch(same, same)
    assert (found.gen_kl_error, found.token_mult_prob_error) == (0.0, 1.0)
    assert (found.mean_abs_log_prob_diff, found.max_abs_log_prob_diff) == (0.0, 0.0)


def test_mismatch_follows_its_formulas() -> None:
    prev, generation = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.8])
    differences = np.array([0.5, -0.2])
    found = mismatch(prev, generation)
    assert found.gen_kl_error == pytest.approx(np.mean(np.exp(differences) - differences - 1), rel=1e-5)
    assert found.token_mult_prob_error == pytest.approx(np.mean(np.exp(np.abs(differences))), rel=1e-5)
    assert found.mean_abs_log_prob_diff == pytest.approx(0.35, rel=1e-5)
    assert found.max_abs_log_prob_diff == pytest.approx(0.5, rel=1e-5)


def test_the_wrong_temperature_shows_as_a_mismatch() -> None:
    policy = model()
    made = rollout(sampled_by(policy, sequence(generated=20), temperature=0.7))

    def error(temperature: float) -> float:
        metrics: StepMetrics = GrpoTrainer(
            policy, GrpoOptions(lr=0.0, selection=Selection(temperature=temperature))
        ).step([made])
        assert metrics.mismatch is not None
        return metrics.mismatch.gen_kl_error

    assert error(0.7) < 1e-8
    assert error(1.0) > 1e-3


def test_metrics_are_plain_data() -> None:
    metrics = GrpoTrainer(model(), GrpoOptions()).step([rollout(sequence())])
    assert json.loads(json.dumps(asdict(metrics)))["weight_versions"] == ["1"]


# --- saving --------------------------------------------------------------------------------------------------------


def test_a_saved_model_is_whole_and_is_not_written_over(tmp_path: Path) -> None:
    trainer = GrpoTrainer(model(), GrpoOptions(lr=1e-2))
    made = rollout(sequence())
    trainer.step([made])
    trainer.save(tmp_path / "trained")
    loaded = GrpoTrainer.load(tmp_path / "trained", GrpoOptions())
    assert log_probs(loaded, made) == pytest.approx(log_probs(trainer, made), abs=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
    with pytest.raises(ConfigError, match="is there already"):
        trainer.save(tmp_path / "trained")


def test_a_saved_model_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, synced, behind = tmp_path / "trained", set[int](), set[int]()
    sync = os.fsync

    def noted(fd: int) -> None:
        (behind if place.exists() else synced).add(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    GrpoTrainer(model(), GrpoOptions()).save(place, tokenizer_from=tiny_dir())
    assert (place / "tokenizer.json").exists()
    assert {path.stat().st_ino for path in [place, *place.rglob("*")]} <= synced
    assert behind == {tmp_path.stat().st_ino}
