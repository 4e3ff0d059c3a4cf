"""Batches have the ids, masks and log probabilities of the rows, whole and once; what is not trained is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.errors import RecordError
from trainer_bridge.collate import PackedBatch, PaddedBatch, pack, pad

from .test_stream import row, table


def made(lengths: Sequence[int], **changes: Any) -> pa.Table:
    rng = np.random.default_rng(0)
    rows = [
        row(f"r{n}", n, tokens=1, advantage=float(n))
        | {
            "token_ids": rng.integers(0, 1000, length, dtype=np.int32),
            "loss_mask": rng.integers(0, 2, length).astype(bool),
            "log_probs": -rng.random(length, dtype=np.float32),
        }
        | changes
        for n, length in enumerate(lengths)
    ]
    return pa.concat_tables([table(*rows)])


def rows_of(batch: PackedBatch | PaddedBatch) -> dict[str, tuple[list[int], list[bool], list[float], float]]:
    """By trajectory id: ids, mask, log probabilities, advantage."""
    found = {}
    for n, name in enumerate(batch.trajectory_ids):
        if isinstance(batch, PackedBatch):
            own = slice(int(batch.cu_seqlens[n]), int(batch.cu_seqlens[n + 1]))
            parts = (batch.token_ids_T[own], batch.loss_mask_T[own], batch.log_probs_T[own])
            assert batch.position_ids()[own].tolist() == list(range(parts[0].numel()))
        else:
            real = batch.attention_mask_S_T[n]
            parts = (batch.token_ids_S_T[n][real], batch.loss_mask_S_T[n][real], batch.log_probs_S_T[n][real])
            assert not batch.loss_mask_S_T[n][~real].any()
        found[name] = (*(part.tolist() for part in parts), float(batch.advantage_S[n]))
    return found


def of_table(whole: pa.Table) -> dict[str, Any]:
    names = ("token_ids", "loss_mask", "log_probs", "advantage")
    return {each["trajectory_id"]: tuple(each[name] for name in names) for each in whole.to_pylist()}


@pytest.mark.parametrize("collate", [pack, pad])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), cut=st.integers(0, 12), tokens=st.integers(40, 90)
)
def test_every_row_is_in_one_batch_as_it_is_in_the_table(
    collate: Any, lengths: list[int], cut: int, tokens: int
) -> None:
    whole = made(lengths)
    collated = collate([whole.slice(0, cut), whole.slice(cut)], tokens=tokens)
    found = [rows_of(batch) for batch in collated.batches]
    assert sum(map(len, found)) == len(lengths)
    assert {name: each for some in found for name, each in some.items()} == of_table(whole)
    assert collated.efficiency == pytest.approx(sum(lengths) / (tokens * len(collated.batches)))
    if collate is pack:
        assert all(batch.token_ids_T.numel() <= tokens for batch in collated.batches)
    assert collated.left_out == {}


def test_rows_that_stand_together_are_arrows_own_memory() -> None:
    whole = made([5, 6, 7])
    (batch,) = pack([whole], tokens=100).batches
    values = whole.column("token_ids").chunk(0).values
    assert batch.token_ids_T.data_ptr() == values.buffers()[1].address
    assert batch.log_probs_T.data_ptr() == whole.column("log_probs").chunk(0).values.buffers()[1].address


def test_rollouts_that_are_not_trained_are_left_out_whole_and_counted() -> None:
    rows = [
        row("masked", masked=True),
        row("long"),
        row("long", 1, tokens=50),
        row("alone", advantage=None),
        row("empty", tokens=0),
        row("good"),
    ]
    collated = pack([table(*rows)], tokens=40)
    assert [batch.trajectory_ids for batch in collated.batches] == [("good/0",)]
    assert collated.left_out == {"masked": 1, "too_long": 1, "no_advantage": 1}


def test_TR_06_a_token_without_a_log_probability_is_not_trained_and_is_counted() -> None:
    collated = pack([table(row("a", log_probs=[0.0, -0.5, None]), row("b"))], tokens=40)
    (batch,) = collated.batches
    assert batch.loss_mask_T.tolist() == [False, True, False, False, True, True]
    assert torch.isnan(batch.log_probs_T).tolist() == [False, False, True, False, False, False]
    assert collated.tokens_without_log_prob == 1


@pytest.mark.parametrize("changes", [{"loss_mask": [True]}, {"log_probs": [0.0]}, {"token_ids": [1, None, 3]}])
def test_rows_that_are_not_aligned_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="must align with token_ids"):
        pack([table(row("a", **changes))], tokens=40)


def test_nothing_makes_no_batch() -> None:
    assert pack([table()], tokens=40).batches == ()
    assert pad([], tokens=40).efficiency == 1.0
