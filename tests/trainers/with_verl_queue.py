"""Groups through a real TransferQueue into verl's replay buffer, by the function of docs/trainers/verl.md.

`make test-trainers`.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from gym_capture.demo.graph import private_ray
from tests.docs.pages import ROOT, blocks_of
from tests.trainers.conftest import PACKAGES
from tests.trainers.group import ADVANTAGE, GROUP, TRAINED
from trainer_bridge.samples import Delivery
from trainer_bridge.verl import group_uid

STEP = 4


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`put` of the page, on a queue of its own."""
    (text,) = [each.text for each in blocks_of(ROOT / "docs/trainers/verl.md") if each.file == "queue_groups.py"]
    path = tmp_path_factory.mktemp("verl") / "queue_groups.py"
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{ROOT}:{PACKAGES}")  # of the queue's actors
        with private_ray(cpus=4, namespace="verl"):
            tq.init()
            try:
                yield runpy.run_path(str(path))["put"]
            finally:
                tq.close()


def buffer(kind: type[ReplayBuffer]) -> ReplayBuffer:
    return kind(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=2,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.05,
        refill_fn=lambda count: None,
    )


def test_the_replay_buffer_gives_the_trainer_the_rows_of_a_group(queue: Any) -> None:
    delivery = Delivery()
    queue(GROUP, delivery, STEP)
    batch, _ = buffer(ReplayBuffer).sample(STEP, "train", 1)
    uid = group_uid("task_7")
    assert sorted(batch.keys) == [f"{uid}_0_0", f"{uid}_0_1", f"{uid}_1_0", f"{uid}_3_0"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
    names = [said["trajectory_id"] for said in data["extra_fields"]]
    masks = list(data["response_mask"].unbind())
    for name, ids, mask, input_ids in zip(
        names, data["responses"].unbind(), masks, data["input_ids"].unbind(), strict=True
    ):
        assert ids[mask.bool()].tolist() == TRAINED[name]
        (source,) = [s for each in GROUP for s in each.sequences if s.trajectory_id == name]
        assert input_ids.tolist() == source.token_ids.tolist()
    pad = torch.nn.utils.rnn.pad_sequence
    tensors = {
        "response_mask": pad(masks, batch_first=True),
        "token_level_rewards": pad(list(data["rm_scores"].unbind()), batch_first=True),
    }
    got = compute_advantage_for_multi_trajectories(
        DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([uid] * len(names))}),
        batch_keys=batch.keys,
        adv_estimator=AdvantageEstimator.GRPO,
        norm_adv_by_std_in_grpo=True,
    ).batch["advantages"]
    for name, values, mask in zip(names, got, tensors["response_mask"], strict=True):
        expected = ADVANTAGE[name.split("/")[0]]
        assert values[mask.bool()].tolist() == pytest.approx([expected] * int(mask.sum()), rel=1e-4)
    tq.kv_clear(partition_id="train", keys=batch.keys)


def test_an_asynchronous_trainer_leaves_out_groups_that_are_too_old_or_masked(queue: Any) -> None:
    for name, step in (("old", STEP - 2), ("new", STEP)):
        queue([replace(each, group_id=name) for each in GROUP], Delivery(), step)
    queue([each for each in GROUP if each.masked], Delivery(), STEP)
    kept = buffer(ReplayBufferAsync)
    batch, metrics = kept.sample(STEP, "train", 1)
    assert {key.split("_")[0] for key in batch.keys} == {group_uid("new")}
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert set(tq.kv_list("train")["train"]) == set(batch.keys)
