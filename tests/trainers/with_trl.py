"""TRL's own code takes the samples: its packing, its queue, and steps of its trainer. `make test-trainers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.packing import TreeRow

from gym_capture.models import tiny_dir
from tests.trainers.group import ADVANTAGE, GROUP, TRAINED
from tests.trainers.plain_attention import without_a_gpu
from trainer_bridge.samples import Delivery
from trainer_bridge.trl_rollouts import project, reward_of_row, rollout_columns, with_arrays
from trainer_bridge.trl_worker import GroupWorker, StreamOverError

SAMPLES = [RolloutSample(**with_arrays(row)) for row in project(GROUP, Delivery())]
NAMES = ["split/c", "split/b", "short/a", "plain/a"]


def test_a_tree_row_has_the_terms_of_every_chain_and_shares_the_prefix() -> None:
    row = TreeRow()
    for sample in SAMPLES:
        row.add(asdict(sample))
    packed = row.pack()
    # Each trained id is the label of the position that predicts it; where it was forked, of a position of its own.
    labels = packed["shift_labels"][packed["token_index"]].tolist()
    assert labels == [token for name in NAMES for token in TRAINED[name]]
    assert packed["segment_id"].bincount().tolist() == [len(TRAINED[name]) for name in NAMES]
    rollouts = [name.split("/")[0] for name in NAMES for _ in TRAINED[name]]
    assert packed["advantages"].tolist() == pytest.approx([ADVANTAGE[name] for name in rollouts])
    expected = [float(p) for each in SAMPLES for p in each.old_log_probs[each.completion_mask.astype(bool)]]
    assert packed["old_log_probs"].tolist() == expected
    assert packed["input_ids"].numel() < sum(len(each.input_ids) for each in SAMPLES)


def test_grpo_on_the_rows_of_a_rollout_func_gives_our_advantages() -> None:
    """What `GRPOTrainer` does with rewards under `scale_rewards="none"`: they less the mean of the group's rows."""
    columns = rollout_columns(GROUP, Delivery())
    rewards = torch.tensor(reward_of_row(completions=[], **columns))
    for got, rollout, mask in zip(rewards - rewards.mean(), GROUP, columns["env_mask"], strict=True):
        assert float(got) == pytest.approx(0.0 if rollout.masked else ADVANTAGE[rollout.rollout_id], abs=1e-6)
        assert any(mask) is not rollout.masked


# --- steps of the trainer ------------------------------------------------------------------------------------------


class NoTransfer:
    """Counts how often the trainer wanted to send its weights."""

    sent = 0

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[Any]) -> None:
        assert all(isinstance(tensor, torch.Tensor) for _, tensor in iterator)
        self.sent += 1


def test_the_asynchronous_trainer_takes_steps_on_our_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    without_a_gpu(monkeypatch)
    groups = [GROUP] * 4
    worker, transfer = GroupWorker(groups, RolloutSample), NoTransfer()
    trainer = AsyncGRPOTrainer(
        model=str(tiny_dir()),
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=len(SAMPLES),
            gradient_accumulation_steps=1,
            token_budget=-1,
            dtype="float32",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            learning_rate=1e-2,
            save_strategy="no",
            temperature=0.5,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["-"]}),
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    worker.stop()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 3
    assert all(np.isfinite(line["loss"]) for line in logged)
    assert any(not torch.equal(each, before[name]) for name, each in trainer.model.named_parameters())
    assert transfer.sent >= 3
    assert worker.model_version >= 3
    assert worker.delivery.left_out == {"masked": len(groups)}


def test_a_stream_that_ends_or_breaks_is_told() -> None:
    def broken() -> Iterator[Any]:
        yield GROUP
        raise ValueError("no route to host")

    worker = GroupWorker(broken(), RolloutSample)
    worker.start()
    for _ in SAMPLES:
        worker.check_health(1.0)
        assert worker.rollout_buffer.get(timeout=30).enqueued_at > 0
    worker.stop()
    with pytest.raises(StreamOverError, match="the stream of groups broke: no route to host"):
        worker.check_health(1.0)


def test_a_merged_adapter_has_the_names_that_the_graph_knows() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir())
    names = [name for name, _ in model.named_parameters()]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert [name for name, _ in async_grpo_trainer._iter_vllm_named_params(adapted)] == names
