"""The demo's training: one step of the reference trainer, streamed from the Parquet that the job wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging

from gym_capture.demo.report import Training
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
from trainer_bridge.stream import parquet_batches, read_rollouts


def train(trajectories: Path, *, model: Path, on_note: Callable[[str], None]) -> Training:
    """One GRPO step of `model` on `trajectories`."""
    logging.disable_progress_bar()
    on_note("loading the model")
    trainer = GrpoTrainer.load(model, GrpoOptions())
    rollouts = tuple(read_rollouts(parquet_batches(trajectories)))
    metrics = trainer.step(rollouts, on_progress=lambda done, of: on_note(f"pass {done} of {of}"))
    return Training(
        loss=metrics.loss,
        mean_abs_log_prob_difference=metrics.mismatch.mean_abs_log_prob_diff if metrics.mismatch else float("inf"),
        trained_tokens=metrics.trained_tokens,
    )
