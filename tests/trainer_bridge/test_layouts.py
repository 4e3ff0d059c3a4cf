"""Padded, packed and as prefix trees: what a step computes differs, what it learns does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.build.sampling import Sampling
from gym_capture.build.trajectories import Span
from gym_capture.errors import ConfigError, RecordError
from trainer_bridge.batching import Row, Selection, step_batch
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
from trainer_bridge.layouts import Layout, lay_out, packing
from trainer_bridge.prefix_tree import forest, in_order, shared_lengths
from trainer_bridge.scoring import Scorer
from trainer_bridge.stream import TrainRollout, TrainSequence

from .made import model, rollout

POLICY = model()
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "tree")


def trained(ids: list[int], mask: list[bool], *, temperature: float | None = None) -> TrainSequence:
    size = len(ids)
    sampling = None if temperature is None else Sampling(temperature=temperature)
    return TrainSequence(
        trajectory_id="t",
        is_main=True,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask),
        log_probs=np.full(size, -4.0, dtype=np.float32),
        finish_reason="stop",
        spans=(Span(0, size, "c", "1", sampling),),
    )


@st.composite
def branching(draw: st.DrawFn) -> list[TrainRollout]:
    """Rollouts whose rows branch off one another at random, down to equal ones."""
    rows: list[list[int]] = []
    made = []
    for number in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from(rows))[: draw(st.integers(0, 12))] if rows else []
        ids = stem + draw(st.lists(st.integers(0, 96), min_size=0 if len(stem) > 1 else 2, max_size=8))
        rows.append(ids)
        mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        mask[-1] = True
        row = trained(ids, mask, temperature=draw(st.sampled_from([None, 1.0, 0.6])))
        made.append(rollout(row, advantage=draw(st.sampled_from([1.0, -0.5, 2.0])), rollout_id=str(number)))
    return made


def outcome(rollouts: list[TrainRollout], layout: Layout, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log probabilities of all trained tokens, and the gradient."""
    trainer = GrpoTrainer(POLICY, GrpoOptions(layout=layout, tokens_per_micro_batch=tokens))
    batch = trainer.select(rollouts)
    micro_batches = trainer.lay_out(batch)
    found = trainer.log_probs(batch, micro_batches)
    POLICY.zero_grad()
    trainer._backward(batch, micro_batches, None, None, lambda: None)
    return found, torch.cat([parameter.grad.flatten() for parameter in POLICY.parameters()])


@settings(max_examples=25, deadline=None)
@given(rollouts=branching(), tokens=st.sampled_from([1, 24, 10_000]))
def test_every_layout_is_the_plain_result_forward_and_backward(rollouts: list[TrainRollout], tokens: int) -> None:
    log_probs, gradient = outcome(rollouts, "padded", 1)  # each row alone, without a mask
    for layout in LAYOUTS:
        found, moved = outcome(rollouts, layout, tokens)
        torch.testing.assert_close(found, log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(moved, gradient, atol=1e-5, rtol=1e-4)


@given(rollouts=branching())
def test_a_forest_has_each_shared_beginning_once_and_each_row_whole(rollouts: list[TrainRollout]) -> None:
    rows = [each.sequences[0].token_ids for each in rollouts]
    rows = [rows[index] for index in in_order(rows)]
    made = forest(rows, shared_lengths(rows))
    assert made.token_ids_T.size == len({row[: end + 1].tobytes() for row in rows for end in range(row.size)})
    for row, places in zip(rows, made.places, strict=True):
        assert made.token_ids_T[places].tolist() == row.tolist()
        assert made.position_T[places].tolist() == list(range(row.size))
        for length, q in enumerate(places, start=1):
            seen = [k for k in range(made.token_ids_T.size) if k <= q < made.subtree_end_T[k]]
            assert seen == places[:length].tolist()


def test_four_branches_of_a_long_prefix_compute_it_once() -> None:
    prefix = list(range(60))
    rows = [rollout(trained([*prefix, 61 + n] * 1, [False] * 60 + [True]), rollout_id=str(n)) for n in range(4)]
    metrics = GrpoTrainer(model(), GrpoOptions(layout="tree", lr=0.0)).step(rows)
    assert (metrics.row_tokens, metrics.computed_tokens, metrics.micro_batches) == (244, 64, 1)


def row_of(size: int) -> Row:
    return Row(np.zeros(size, dtype=np.int32), np.array([size - 1]), 0, 0)


def test_packing_fills_its_rows() -> None:
    """Lengths as agents' rollouts have them: mostly short, a few long."""
    lengths = np.random.default_rng(0).lognormal(mean=5.5, sigma=0.8, size=300).clip(16, 4096).astype(int)
    rows = [row_of(length) for length in lengths]
    packed = lay_out(rows, "packed", tokens=4096, pad_id=0)
    assert packing(packed, 4096) >= 0.95
    assert (
        sum(each.row_tokens for each in packed) == sum(each.input_ids_B_T.numel() for each in packed) == lengths.sum()
    )
    assert all(each.input_ids_B_T.numel() <= 4096 for each in packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_beyond_the_budget_is_alone_and_whole(layout: Layout) -> None:
    made = lay_out([row_of(9), row_of(50), row_of(8)], layout, tokens=20, pad_id=0)
    assert sorted(each.input_ids_B_T.shape[1] for each in made)[-1] == 50
    assert next(each for each in made if each.input_ids_B_T.shape[1] == 50).input_ids_B_T.shape[0] == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attentions_agree_on_a_tree(attention: str) -> None:
    rows = [rollout(trained([1, 2, 3, *end], [False] * 3 + [True] * 3)) for end in ([4, 5, 6], [4, 7, 8], [9, 9, 9])]
    trainer = GrpoTrainer(POLICY, GrpoOptions())
    batch = trainer.select(rows)
    plain = trainer.log_probs(batch, lay_out(batch.rows, "padded", tokens=1, pad_id=0))
    POLICY.set_attn_implementation(attention)
    try:
        found = trainer.log_probs(batch, lay_out(batch.rows, "tree", tokens=1000, pad_id=0))
    finally:
        POLICY.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)


def test_blocks_for_flex_attention_are_the_mask_of_the_tree() -> None:
    """Its kernels need minutes to compile without a GPU; what they are asked for needs none."""
    policy = model()
    rows = [row_of(5), Row(np.array([0, 0, 7, 8], dtype=np.int32), np.array([3]), 1, 1), row_of(3)]
    (micro_batch,) = lay_out(rows, "tree", tokens=100, pad_id=0)
    ends = micro_batch.subtree_end_B_T
    assert ends is not None
    dense = Scorer(policy)._mask(ends)[0, 0]
    policy.config._attn_implementation = "flex_attention"
    blocks = Scorer(policy)._mask(ends)
    at = torch.arange(ends.shape[1])
    zero = torch.tensor(0)
    assert torch.equal(blocks.mask_mod(zero, zero, at[:, None], at[None]), dense)
    assert blocks.shape == (1, 1, 7, 7)


def test_a_model_that_would_not_keep_to_the_mask_is_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    windowed = MistralForCausalLM(
        MistralConfig(vocab_size=97, num_key_value_heads=1, sliding_window=4, **config)
    ).eval()
    rows = [rollout(trained([1, 2, 3, 4, 5, end], [False] * 5 + [True])) for end in (6, 7)]
    with pytest.raises(ConfigError, match="window of 4"):
        GrpoTrainer(windowed, GrpoOptions(layout="tree")).step(rows)

    class Recurrent(torch.nn.Module):
        """Sees all ids before it, whatever the mask says."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model()
            self.config, self.device, self.dtype = self.inner.config, self.inner.device, self.inner.dtype

        def forward(self, input_ids: Any, **others: Any) -> Any:
            return self.inner(input_ids=input_ids, use_cache=False)

    with pytest.raises(ConfigError, match="does not keep to a mask"):
        GrpoTrainer(Recurrent(), GrpoOptions(layout="tree")).step(rows)


# --- temperatures ----------------------------------------------------------------------------------------------------


def test_TR_11_the_temperature_on_record_is_the_one_that_is_used() -> None:
    cold, warm, unknown = (trained([1, 2, 3, 4], [False, True, True, True], temperature=t) for t in (0.5, 2.0, None))
    trainer = GrpoTrainer(POLICY, GrpoOptions(selection=Selection(temperature=0.8), lr=0.0))
    for layout in LAYOUTS:
        batch = trainer.select([rollout(cold), rollout(warm), rollout(unknown)])
        found = trainer.log_probs(batch, lay_out(batch.rows, layout, tokens=1000, pad_id=0))
        with torch.no_grad():
            logits = POLICY(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0, :-1]
        for temperature, row in zip((0.5, 2.0, 0.8), found.reshape(3, 3), strict=True):
            expected = torch.log_softmax(logits / temperature, dim=-1)[range(3), [2, 3, 4]]
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)
    metrics = trainer.step([rollout(cold), rollout(warm), rollout(unknown)])
    assert (metrics.temperatures, metrics.tokens_of_assumed_temperature) == ({0.5: 3, 2.0: 3}, 3)


def test_TR_11_what_a_trainer_cannot_repeat_is_counted() -> None:
    plain = trained([1, 2, 3, 4], [False, True, True, True], temperature=1.0)
    spans = (
        Span(1, 2, "a", "1", Sampling(temperature=1.0)),
        Span(2, 4, "b", "1", Sampling(temperature=1.0, top_p=0.9)),
    )
    metrics = GrpoTrainer(POLICY, GrpoOptions(lr=0.0)).step([rollout(replace(plain, spans=spans)), rollout(plain)])
    assert metrics.reshaped_tokens == 2


def test_greedy_rollouts_are_left_out_and_counted() -> None:
    greedy = rollout(trained([1, 2, 3], [False, True, True], temperature=0.0))
    batch = step_batch([greedy], Selection())
    assert (batch.left_out, batch.trained_tokens) == ({"greedy": 1}, 0)


def test_ids_of_another_model_are_named() -> None:
    with pytest.raises(RecordError, match="token id 500 is outside of the model's vocabulary of 97"):
        GrpoTrainer(POLICY, GrpoOptions()).step([rollout(trained([1, 500, 3], [False, True, True]))])


def test_the_probe_is_made_once() -> None:
    scorer = Scorer(POLICY)
    (micro_batch,) = lay_out([row_of(5), row_of(6)], "packed", tokens=100, pad_id=0)
    scorer.score(micro_batch, torch.ones(2))
    assert scorer._checked
