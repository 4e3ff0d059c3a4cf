"""SkyRL's own check takes the groups, and its trainer's advantage. `make test-trainers`."""

from __future__ import annotations

import copy
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.dataset.preprocess import _collate_rollout_expert_indices, build_sample_support
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import validate_generator_output

from gym_capture.build.sampling import Sampling
from gym_capture.capture.record_rows import row_json
from tests.docs.pages import ROOT, blocks_of
from tests.trainers.group import ADVANTAGE, GROUP, TRAINED
from trainer_bridge.samples import Delivery
from trainer_bridge.skyrl import FILE, generator_output
from trainer_bridge.stream import TrainSequence

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


def with_arrays(sequence: TrainSequence) -> TrainSequence:
    """Every id could have been itself alone, of two; and was routed to two experts by its value."""
    ids = sequence.token_ids
    return replace(
        sequence,
        sampling_mask=ids[sequence.loss_mask][:, None],
        routed_experts=np.stack([ids, ids + 1], axis=-1)[:-1, None].astype(np.int16),
        spans=tuple(replace(span, sampling=Sampling(temperature=0.5, top_k=2)) for span in sequence.spans),
    )


def test_the_page_reads_experts_and_sample_supports_as_its_batches_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [replace(each, sequences=tuple(map(with_arrays, each.sequences))) for each in GROUP]
    file = tmp_path / "runs/register/skyrl" / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(row_json(generator_output(group, Delivery())))
    (text,) = [each.text for each in blocks_of(ROOT / "docs/trainers/skyrl.md") if each.file == "read_skyrl.py"]
    (tmp_path / "read_skyrl.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    output = runpy.run_path("read_skyrl.py")["output"]
    lengths = np.array([len(ids) for ids in output["response_ids"]])
    supports = build_sample_support(output["rollout_sample_support"], lengths).values
    # One id of `short/a` has no log probability, and is not trained.
    assert supports[supports[:, 0] >= 0].tolist() == [[token, -1] for name in NAMES for token in TRAINED[name]]
    totals = lengths + [len(ids) for ids in output["prompt_token_ids"]]
    experts = _collate_rollout_expert_indices(output["rollout_expert_indices"], totals).values
    parts = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    ids = [token for prompt, response in parts for token in prompt + response]
    ends = np.cumsum(totals) - 1  # which have not been run
    kept = np.delete(np.arange(len(ids)), ends)
    assert experts[kept, 0, 0].tolist() == [ids[place] for place in kept]


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
