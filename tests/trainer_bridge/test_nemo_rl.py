"""NeMo-RL gets from a record exactly the trajectory that was built, and cannot miss that it is masked."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions, build
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Continues, Root, Snapshot, TokenEntry, WeightSpan, suffix_of
from gym_capture.data.advantages import reward_problems
from gym_capture.data.schema import rows, to_table
from gym_capture.errors import RecordError
from tests.calls import entry_of
from tests.rollout_strategies import damaged_rollouts, snapshot_of
from trainer_bridge.finished import FinishedRollout, read_finished
from trainer_bridge.nemo_rl import MixedPromptsWarning, contiguity_walk, project, project_group


def text(value: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": value}]}


def annotated(value: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": value, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content}


CALL_A = entry_of(
    rollout_id="r1",
    model_call_id="a",
    model="served",
    requested_model="policy",
    has_tools=True,
    prompt_token_ids=np.array([1, 2], dtype=np.int32),
    generation_token_ids=np.array([3, 9], dtype=np.int32),
    generation_log_probs=np.array([-0.5, -0.25], dtype=np.float32),
    parent=Root(),
    output_items=({"type": "reasoning", "summary": []}, text("hi"), {"type": "function_call", "name": "ls"}),
    token_item_index=1,
)
CALL_B = with_values(
    CALL_A,
    model_call_id="b",
    prompt_token_ids=np.array([1, 2, 3, 9, 4], dtype=np.int32),
    generation_token_ids=np.array([5], dtype=np.int32),
    generation_log_probs=np.array([-0.125], dtype=np.float32),
    parent=Continues("a", 4),
    output_items=(text("done"),),
    token_item_index=None,
)


def finished(
    snapshot: Snapshot,
    options: BuildOptions | None = None,
    *,
    reward: float | None = 1.0,
    reward_components: dict[str, float] | None = None,
) -> FinishedRollout:
    """As an exporter gets it: built, and read again from the table of trajectories."""
    made = rows(
        build(snapshot, options or BuildOptions()),
        snapshot=snapshot,
        group_id="g",
        reward=reward,
        reward_components=reward_components,
        agent_name="coder",
        input_json=json.dumps([{"role": "user", "content": "go"}]),
        extra_mask_reasons=reward_problems(reward),
    )
    (rollout,) = read_finished([to_table(made)])
    return rollout


def token_bearing(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in record["response"]["output"] if "generation_token_ids" in item]


def test_a_record() -> None:
    record = project(
        finished(snapshot_of([suffix_of(CALL_B), CALL_A]), reward_components={"answer": 0.75, "style": 0.25})
    )
    tokens_a = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 9], "generation_log_probs": [-0.5, -0.25]}
    tokens_b = {"prompt_token_ids": [1, 2, 3, 9, 4], "generation_token_ids": [5], "generation_log_probs": [-0.125]}
    assert record["response"]["output"] == [
        {"type": "reasoning", "id": "rs_a_0", "summary": []},
        {"id": "msg_a_1", "status": "completed"} | annotated("hi") | tokens_a,
        {"type": "function_call", "id": "fc_a_2", "status": "completed", "call_id": "fc_a_2", "arguments": ""}
        | {"name": "ls"},
        {"id": "msg_b_0", "status": "completed"} | annotated("done") | tokens_b,
    ]
    counted = record["response"]["usage"]
    assert (counted["input_tokens"], counted["output_tokens"], counted["total_tokens"]) == (2, 3, 5)
    assert record["response"]["model"] == "served"
    assert (record["rollout_id"], record["group_id"], record["agent_ref"]["name"]) == ("r1", "g", "coder")
    assert record["responses_create_params"] == {"input": [{"role": "user", "content": "go"}]}
    assert (record["reward"], record["reward_components"]) == (1.0, {"answer": 0.75, "style": 0.25})
    assert (record["mask_sample"], record["instance_config"]) == (False, {"mask_sample": False})
    health = record["_ng_token_capture"]
    assert (health["n_calls"], health["delivered_fraction"], health["mask_reasons"]) == (2, 1.0, [])
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_the_items_of_the_snapshot_are_left_alone() -> None:
    project(finished(snapshot_of([CALL_A])))
    assert all("prompt_token_ids" not in item for item in CALL_A.reply.output_items)


def test_a_call_without_items_gets_one_that_carries_the_ids() -> None:
    (item,) = project(finished(snapshot_of([with_values(CALL_A, output_items=(), token_item_index=None)])))["response"][
        "output"
    ]
    assert (item["type"], item["role"], item["generation_token_ids"]) == ("message", "assistant", [3, 9])


def test_a_call_without_loss_keeps_its_text_and_becomes_prompt() -> None:
    aborted = with_values(CALL_A, finish_reason="abort")
    output = project(finished(snapshot_of([aborted, CALL_B])))["response"]["output"]
    assert [item.get("generation_token_ids") for item in output] == [None, None, None, [5]]
    assert [message.token_ids for message in contiguity_walk(output)] == [(1, 2, 3, 9, 4), (5,)]


def test_another_chain_does_not_train_what_it_shares() -> None:
    other = replace(
        CALL_B,
        model_call_id="c",
        prompt_token_ids=np.array([1, 2, 3, 9, 7], dtype=np.int32),
    )
    rollout = finished(snapshot_of([CALL_A, CALL_B, other]), BuildOptions(delivery="all_chains"))
    (item,) = token_bearing(project(rollout, rank=1))
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == ([1, 2, 3, 9, 7], [5])


def test_generations_under_several_weights_are_one_item() -> None:
    entry = with_values(CALL_A, weight_versions=(WeightSpan(0, 1, "1"), WeightSpan(1, 2, "2")))
    (item,) = token_bearing(project(finished(snapshot_of([entry]))))
    assert item["generation_token_ids"] == [3, 9]


def test_routed_experts_have_a_row_for_each_id() -> None:
    a = with_values(CALL_A, routed_experts=np.array([[[1]], [[2]], [[3]]], dtype=np.int16))
    b = with_values(CALL_B, routed_experts=np.array([[[1]], [[2]], [[3]], [[4]], [[5]]], dtype=np.int16))
    first, second = token_bearing(project(finished(snapshot_of([a, b]))))
    assert first["routed_experts"] == [[[1]], [[2]], [[3]], [[4]]]
    assert second["routed_experts"] == [[[1]], [[2]], [[3]], [[4]], [[5]], [[0]]]


def test_a_masked_record_says_so_twice_and_still_bears_tokens() -> None:
    record = project(finished(replace(snapshot_of([CALL_A]), incomplete=("dangling_intent:x",))))
    assert (record["mask_sample"], record["instance_config"]) == (True, {"mask_sample": True})
    assert record["_ng_token_capture"]["mask_reasons"] == ["dangling_intent:x"]
    assert len(token_bearing(record)) == 1


@pytest.mark.parametrize(("reward", "reason"), [(None, "missing_reward"), (float("nan"), "non_finite_reward")])
def test_a_reward_that_cannot_be_used_masks(reward: float | None, reason: str) -> None:
    record = project(finished(snapshot_of([CALL_A]), reward=reward))
    assert (record["reward"], record["mask_sample"]) == (0.0, True)
    assert record["_ng_token_capture"]["mask_reasons"] == [reason]


@pytest.mark.parametrize("reward", [2.0, None])
def test_components_that_do_not_add_up_are_left_out(reward: float | None) -> None:
    with pytest.warns(UserWarning, match="reward_components of 'r1' do not add up"):
        record = project(finished(snapshot_of([CALL_A]), reward=reward, reward_components={"answer": 1.0}))
    assert "reward_components" not in record
    assert record["reward"] == (reward or 0.0)


def test_rounding_of_components_is_no_error() -> None:
    project(finished(snapshot_of([CALL_A]), reward=0.3, reward_components={"a": 0.1, "b": 0.2}))


# --- groups --------------------------------------------------------------------------------------------------------


def test_a_group_with_several_first_prompts_warns() -> None:
    dated = replace(CALL_A, prompt_token_ids=np.array([1, 7], dtype=np.int32))
    with pytest.warns(MixedPromptsWarning, match="group g has 2 different first prompts in 3 rollouts"):
        records = project_group([finished(snapshot_of([entry])) for entry in (CALL_A, CALL_A, dated)])
    assert {record["group_id"] for record in records} == {"g"}


def test_a_rollout_with_nothing_to_show_stays_in_its_group() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = project_group([finished(snapshot_of([])), finished(snapshot_of([CALL_A]))])
    assert [token_bearing(record)[0]["prompt_token_ids"] for record in records] == [[1, 2], [1, 2]]
    assert [record["mask_sample"] for record in records] == [True, False]
    assert records[0]["_ng_token_capture"]["mask_reasons"] == ["no_calls"]
    assert [record["_ng_token_capture"]["placeholder"] for record in records] == [True, False]
    assert len(token_bearing(project(finished(snapshot_of([]))))) == 1


# --- NeMo-RL's walk ------------------------------------------------------------------------------------------------

ITEM = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
NEXT = {"prompt_token_ids": [1, 2, 3, 4], "generation_token_ids": [5], "generation_log_probs": [-0.25]}


def test_the_walk_makes_a_message_log() -> None:
    log = contiguity_walk([{"type": "reasoning"}, ITEM, {"type": "message", "generation_token_ids": []}, NEXT])
    assert [(message.role, message.token_ids, message.generation_logprobs) for message in log] == [
        ("user", (1, 2), None),
        ("assistant", (3,), (-0.5,)),
        ("user", (4,), None),
        ("assistant", (5,), (-0.25,)),
    ]


@pytest.mark.parametrize(
    ("output", "field"),
    [
        ([ITEM, NEXT | {"prompt_token_ids": [1, 2, 4, 4]}], "prompt_token_ids"),
        ([ITEM, NEXT | {"prompt_token_ids": [1, 2]}], "prompt_token_ids"),
        ([ITEM | {"generation_log_probs": [float("nan")]}], "generation_log_probs"),
        ([ITEM | {"generation_log_probs": []}], "generation_log_probs"),
        ([ITEM | {"routed_experts": [[[0]], [[0]]]}], "routed_experts"),
        ([{"type": "message"}], "generation_token_ids"),
    ],
)
def test_the_walk_stops_where_nemo_rl_would(output: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(RecordError) as caught:
        contiguity_walk(output)
    assert caught.value.field == field


@given(
    damaged_rollouts(),
    st.sampled_from(("main_chain", "all_chains")),
    st.sampled_from(("prefix_merging", "per_request")),
)
def test_the_walk_gives_back_what_was_built(entries: list[TokenEntry], delivery: Any, strategy: Any) -> None:
    rollout = finished(snapshot_of(entries), BuildOptions(delivery=delivery, strategy=strategy))
    for rank, trajectory in enumerate(rollout.trajectories):
        log = contiguity_walk(project(rollout, rank=rank)["response"]["output"])
        walked = [token_id for message in log for token_id in message.token_ids]
        loss = [message.role == "assistant" for message in log for _ in message.token_ids]
        log_probs = [p for m in log for p in (m.generation_logprobs or [0.0] * len(m.token_ids))]
        last_trained = trajectory.spans[-1].end
        assert walked == trajectory.token_ids.tolist()[:last_trained]
        assert loss == trajectory.loss_mask.tolist()[:last_trained]
        assert log_probs == trajectory.log_probs.tolist()[:last_trained]
    assert project(rollout)["mask_sample"] == rollout.masked


def test_a_failed_rollout_of_a_job_has_no_components_to_add_up() -> None:
    record = project(finished(snapshot_of([CALL_A]), reward=None, reward_components={}))
    assert (record["reward"], record["mask_sample"], "reward_components" in record) == (0.0, True, False)
