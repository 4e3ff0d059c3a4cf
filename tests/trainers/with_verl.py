"""verl's own code takes the rows: its agent loop's output, its store, its advantage. `make test-trainers`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.trainers.group import ADVANTAGE, GROUP, TRAINED
from trainer_bridge.samples import Delivery
from trainer_bridge.verl import group_uid, project

ROWS = list(project(GROUP, Delivery()))


def test_an_agent_loop_output_has_what_was_sampled() -> None:
    for row in ROWS:
        made = AgentLoopOutput(**row["output"]).as_dict()
        name = made["extra_fields"]["trajectory_id"]
        assert made["responses"][made["response_mask"].bool()].tolist() == TRAINED[name]
        ids = torch.cat([made["prompts"], made["responses"]])
        (source,) = [s for each in GROUP for s in each.sequences if s.trajectory_id == name]
        assert ids.tolist() == source.token_ids.tolist()
        kept = made["response_mask"].bool().numpy()
        expected = source.log_probs[len(made["prompts"]) :][kept]
        assert made["rollout_log_probs"].numpy()[kept].tolist() == expected.tolist()
        assert made["rm_scores"].sum() == row["output"]["reward_score"]
        assert row["tag"]["seq_len"] == len(ids)


def test_rows_go_into_a_tensordict_as_the_agent_loop_puts_them() -> None:
    stored = list_of_dict_to_tensordict([AgentLoopOutput(**row["output"]).as_dict() for row in ROWS])
    assert [len(ids) for ids in stored["prompts"].unbind()] == [row["tag"]["prompt_len"] for row in ROWS]


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_compares_rollouts_and_not_rows(by_std: bool) -> None:
    outputs = [AgentLoopOutput(**row["output"]).as_dict() for row in ROWS]
    pad = torch.nn.utils.rnn.pad_sequence
    tensors = {
        "response_mask": pad([each["response_mask"] for each in outputs], batch_first=True),
        "token_level_rewards": pad([each["rm_scores"] for each in outputs], batch_first=True),
    }
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([row["uid"] for row in ROWS])})
    keys = [row["key"] for row in ROWS]
    got = compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator=AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=by_std
    ).batch["advantages"]
    for row, values, mask in zip(ROWS, got, tensors["response_mask"], strict=True):
        said = row["output"]["extra_fields"]
        mean = (1.0 + 0.0 + 0.25) / 3
        expected = ADVANTAGE[said["rollout_id"]] if by_std else row["output"]["reward_score"] - mean
        assert values[mask.bool()].tolist() == pytest.approx([expected] * int(mask.sum()), rel=1e-4)
        assert not values[~mask.bool()].any()


def test_keys_come_apart_at_underscores_as_verl_takes_them_apart() -> None:
    assert "_" not in group_uid("task_7")
    assert [row["key"].rsplit("_", 2)[1:] for row in ROWS] == [["0", "0"], ["0", "1"], ["1", "0"], ["3", "0"]]
