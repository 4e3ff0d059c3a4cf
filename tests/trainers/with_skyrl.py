"""SkyRL's own check takes the groups, and its trainer's advantage. `make test-trainers`."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from tests.trainers.group import ADVANTAGE, GROUP, TRAINED
from trainer_bridge.samples import Delivery
from trainer_bridge.skyrl import generator_output

NAMES = ["split/c", "split/b", "short/a", "plain/a"]


def made() -> dict[str, Any]:
    output = copy.deepcopy(generator_output(GROUP, Delivery()))
    assert output is not None
    output["trajectory_ids"] = [TrajectoryID(**each) for each in output["trajectory_ids"]]
    return output


def test_it_is_a_generator_output() -> None:
    output = made()
    assert set(output) <= set(GeneratorOutput.__annotations__)
    validate_generator_output(1, GeneratorOutput(**output), step_wise=True)
    trained = [
        [token for token, kept in zip(ids, mask, strict=True) if kept]
        for ids, mask in zip(output["response_ids"], output["loss_masks"], strict=True)
    ]
    assert trained == [TRAINED[name] for name in NAMES]
    assert [each.to_string() for each in output["trajectory_ids"]] == ["task_7_0", "task_7_0", "task_7_1", "task_7_3"]


def test_the_check_would_refuse_rows_that_do_not_stand_together() -> None:
    output = made()
    for name in ("trajectory_ids", "is_last_step"):
        output[name] = [output[name][i] for i in (0, 2, 1, 3)]
    with pytest.raises(AssertionError):
        validate_generator_output(1, GeneratorOutput(**output), step_wise=True)


def test_its_trainer_compares_rollouts_and_not_rows() -> None:
    output = made()
    masks = torch.nn.utils.rnn.pad_sequence([torch.tensor(m) for m in output["loss_masks"]], batch_first=True)
    rewards = torch.zeros(masks.shape)
    rewards[:, -1] = torch.tensor(output["rewards"])
    batch = TrainingInputBatch({"rewards": rewards, "response_mask": masks, "values": None})
    batch.metadata = {
        "uids": [each.instance_id for each in output["trajectory_ids"]],
        "is_last_step": output["is_last_step"],
        "avg_response_length": 1.0,
    }
    algorithm = SimpleNamespace(advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=True)
    config = SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=True), trainer=SimpleNamespace(algorithm=algorithm)
    )
    trainer = SimpleNamespace(cfg=config, all_metrics={})
    got = RayPPOTrainer.compute_advantages_and_returns(trainer, batch)["advantages"]
    for name, values, mask in zip(NAMES, got, masks, strict=True):
        expected = ADVANTAGE[name.split("/")[0]]
        assert values[mask.bool()].tolist() == pytest.approx([expected] * int(mask.sum()), rel=1e-4)
