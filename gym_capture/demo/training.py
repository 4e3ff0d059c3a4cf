"""The demo's training: one step of the reference trainer, streamed from the Parquet that the job wrote.

Invariant: the log probabilities are compared before the weights move, and where both sides speak of the same
distribution. A token that was sampled under a grammar (a forced tool call) has the probability that the grammar left
it, which is what it was sampled with; a trainer without that grammar finds it less likely. Its importance weight makes
up for that; a comparison must not mix the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq
import torch
from transformers.utils import logging

from gym_capture.demo.report import Training
from trainer_bridge.batching import Selection
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
from trainer_bridge.loss import mismatch
from trainer_bridge.stream import TrainRollout, TrainSequence, parquet_batches, read_rollouts

_COMPARED_ROLLOUTS: Final = 4
"""One forward pass more for each; on a small machine that counts."""
_MICRO_BATCH: Final = 2048
"""Tokens of a pass: each takes a row of logits, several times over."""


def train(
    trajectories: Path,
    *,
    model: Path,
    grammar_calls: Collection[str],
    on_note: Callable[[str], None],
    temperature: float = 1.0,
) -> Training:
    """One GRPO step of `model` on `trajectories`, sampled at `temperature`. `grammar_calls`: ids of the calls that were
    sampled under one."""
    logging.disable_progress_bar()
    on_note("loading the model")
    options = GrpoOptions(selection=Selection(temperature=temperature), tokens_per_micro_batch=_MICRO_BATCH)
    trainer = GrpoTrainer.load(model, options)
    rollouts = tuple(read_rollouts(parquet_batches(trajectories)))
    on_note("comparing log probabilities")
    compared = free_of(rollouts[:_COMPARED_ROLLOUTS], _spans_of(trajectories, grammar_calls))
    compared_tokens, difference = _compare(trainer, compared)
    metrics = trainer.step(rollouts, on_progress=lambda done, of: on_note(f"pass {done} of {of}"))
    return Training(
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        trained_tokens=metrics.trained_tokens,
        compared_tokens=compared_tokens,
        mean_abs_log_prob_difference=difference,
        mean_importance=metrics.mean_importance,
    )


def free_of(rollouts: Iterable[TrainRollout], spans: Mapping[str, list[tuple[int, int]]]) -> Iterator[TrainRollout]:
    """The rollouts with the tokens of `spans`, [start, end) by trajectory id, left out of the loss mask."""

    def freed(sequence: TrainSequence) -> TrainSequence:
        mask = sequence.loss_mask.copy()
        for start, end in spans.get(sequence.trajectory_id, ()):
            mask[start:end] = False
        return replace(sequence, loss_mask=mask)

    for rollout in rollouts:
        yield replace(rollout, sequences=tuple(map(freed, rollout.sequences)))


def _compare(trainer: GrpoTrainer, rollouts: Iterable[TrainRollout]) -> tuple[int, float | None]:
    """How many tokens they train, and the mean |trainer's log probability - the recorded one| over them."""
    batch = trainer.select(rollouts)
    if not batch.rows:
        return 0, None
    trained = trainer.log_probs(batch, trainer.lay_out(batch))
    recorded = torch.from_numpy(batch.tokens.generation_N)
    return batch.trained_tokens, mismatch(trained, recorded).mean_abs_log_prob_diff


def _spans_of(trajectories: Path, calls: Collection[str]) -> dict[str, list[tuple[int, int]]]:
    rows = pq.read_table(trajectories, columns=["trajectory_id", "spans"]).to_pylist()
    return {
        row["trajectory_id"]: [(span["start"], span["end"]) for span in row["spans"] if span["call_id"] in calls]
        for row in rows
    }
