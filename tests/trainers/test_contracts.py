"""What each exporter promises its trainer, by the trainer's rules in our words: these run everywhere.

The trainers' own code over the same group is in the `with_*.py` beside: `make test-trainers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions
from gym_capture.build.sampling import Sampling
from gym_capture.errors import RecordError
from gym_capture.reasons import LeftOutReason
from tests.rollout_strategies import damaged_rollouts, snapshot_of
from tests.trainer_bridge.test_nemo_rl import finished
from tests.trainers.group import ADVANTAGE, GROUP, TRAINED, rollout
from trainer_bridge import openenv, prime_rl, skyrl, tinker, trl_rollouts, verl
from trainer_bridge.exporter import EXPORTERS
from trainer_bridge.finished import JsonObject
from trainer_bridge.lines import LinesExporter, Project
from trainer_bridge.samples import Delivery

Rows = list[tuple[list[int], list[int], list[float]]]
"""Ids, mask and log probabilities of each row, whole."""


def whole(prompt: list[int], response: list[int], mask: list[int], log_probs: list[float]) -> Any:
    return prompt + response, [0] * len(prompt) + mask, [0.0] * len(prompt) + log_probs


def of_verl(row: JsonObject) -> Rows:
    said = row["output"]
    return [whole(*(said[name] for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs")))]


def of_skyrl(row: JsonObject) -> Rows:
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    return [whole(*parts) for parts in zip(*(row[name] for name in names), strict=True)]


def of_trl(row: JsonObject) -> Rows:
    return [(row["input_ids"], row["completion_mask"], row["old_log_probs"])]


def of_prime_rl(row: JsonObject) -> Rows:
    return [(row["token_ids"], row["mask"], row["logprobs"])]


def of_tinker(row: JsonObject) -> Rows:
    ids, inputs = row["model_input"]["chunks"][0]["tokens"], row["loss_fn_inputs"]
    assert ids[1:] == inputs["target_tokens"]["data"][:-1]
    return [
        (
            [*ids, inputs["target_tokens"]["data"][-1]],
            [0, *map(int, inputs["mask"]["data"])],
            [0.0, *inputs["logprobs"]["data"]],
        )
    ]


READERS: dict[str, tuple[Project, Callable[[JsonObject], Rows]]] = {
    "verl": (verl.project, of_verl),
    "skyrl": (skyrl.project, of_skyrl),
    "trl": (trl_rollouts.project, of_trl),
    "prime-rl": (prime_rl.project, of_prime_rl),
    "tinker": (tinker.project, of_tinker),
}


def test_every_exporter_of_lines_is_read_here() -> None:
    assert {each.name for each in EXPORTERS if isinstance(each, LinesExporter)} == {*READERS, "openenv"}


@pytest.mark.parametrize("name", READERS)
@given(entries=damaged_rollouts(), reward=st.sampled_from((0.0, 1.5, None)))
def test_a_trainer_gets_the_ids_the_mask_and_the_log_probabilities_of_every_chain(
    name: str, entries: Any, reward: float | None
) -> None:
    project, read = READERS[name]
    built = finished(snapshot_of(entries), BuildOptions(delivery="all_chains"), reward=reward).for_training()
    built = replace(built, advantage=0.5)
    delivery = Delivery()
    rows = [row for made in project([built], delivery) for row in read(made)]
    if built.masked or not any(each.loss_mask.any() for each in built.sequences):
        assert rows == []
        assert sum(delivery.left_out.values()) == 1
        return
    expected = [
        (each.token_ids.tolist(), each.loss_mask.tolist(), each.log_probs.tolist())
        for each in reversed(built.sequences)
        if each.loss_mask.any()
    ]
    assert rows == expected
    assert (delivery.rows, delivery.trained_tokens) == (len(rows), sum(sum(mask) for _, mask, _ in rows))
    assert delivery.unknown_log_probs == 0


@pytest.mark.parametrize("name", READERS)
def test_TR_06_an_id_without_a_log_probability_is_context(name: str) -> None:
    project, read = READERS[name]
    delivery = Delivery()
    rows = [row for made in project(GROUP, delivery) for row in read(made)]
    trained = [[token for token, kept in zip(ids, mask, strict=True) if kept] for ids, mask, _ in rows]
    assert trained == [TRAINED[name] for name in ("split/c", "split/b", "short/a", "plain/a")]
    assert all(np.isfinite(log_probs).all() for _, _, log_probs in rows)
    assert (delivery.unknown_log_probs, delivery.split_rollouts) == (1, 1)
    assert delivery.left_out == {LeftOutReason.MASKED: 1}
    assert delivery.temperatures == {0.5}


def test_TR_02_rows_of_a_rollout_are_one_session_of_verl_and_its_main_chain_the_last() -> None:
    rows = list(verl.project(GROUP, Delivery()))
    assert {row["uid"] for row in rows} == {verl.group_uid("task_7")}
    assert [row["key"].removeprefix(row["uid"]) for row in rows] == ["_0_0", "_0_1", "_1_0", "_3_0"]
    assert rows[1]["output"]["extra_fields"]["trajectory_id"] == "split/b"
    assert [row["tag"]["min_global_steps"] for row in rows] == [4, 3, 3, 3]
    assert [row["tag"]["max_global_steps"] for row in rows] == [4, 4, 3, 3]
    assert verl.prompt_tag(GROUP, 4) == {"is_prompt": True, "status": "finished", "global_steps": 4}
    assert verl.prompt_tag([each for each in GROUP if each.masked], 4)["status"] == "failure"


def test_TR_02_rows_of_a_rollout_stand_together_in_skyrl_and_its_main_chain_is_the_last_step() -> None:
    (output,) = skyrl.project(GROUP, Delivery())
    assert output["is_last_step"] == [False, True, True, True]
    assert [each["repetition_id"] for each in output["trajectory_ids"]] == [0, 0, 1, 3]
    assert {len(column) for column in output.values() if column is not None} == {4}
    assert list(skyrl.project([each for each in GROUP if each.masked], Delivery())) == []


def test_samples_that_say_which_they_are_keep_their_numbers() -> None:
    (output,) = skyrl.project([replace(each, sample=9 - n) for n, each in enumerate(GROUP)], Delivery())
    assert [each["repetition_id"] for each in output["trajectory_ids"]] == [9, 9, 8, 6]


def test_trl_gets_the_lowest_version_and_our_advantage() -> None:
    rows = list(trl_rollouts.project(GROUP, Delivery()))
    assert [row["model_version"] for row in rows] == [4, 3, 3, 3]
    assert [row["advantage"] for row in rows] == [ADVANTAGE[name] for name in ("split", "split", "short", "plain")]
    assert {row["group_id"] for row in rows} == {trl_rollouts.group_number("task_7")}


def test_one_row_a_prompt_loses_other_chains_and_says_so() -> None:
    delivery = Delivery()
    columns = trl_rollouts.rollout_columns(GROUP, delivery)
    assert [sum(mask) for mask in columns["env_mask"]] == [4, 1, 0, 1]
    assert (delivery.other_chains, delivery.tokens_of_other_chains) == (1, 1)
    # They come out of `scale_rewards="none"` as they went in, the masked one among them.
    assert np.mean(columns["reward"]) == pytest.approx(0.0, abs=1e-9)
    assert columns["reward"][2] == 0.0
    with pytest.raises(RecordError, match="nothing was built"):
        trl_rollouts.rollout_columns([rollout("empty", reward=0.0, masked=True)], Delivery())


@pytest.mark.parametrize("name", ["trl", "prime-rl", "tinker"])
def test_a_trainer_of_advantages_leaves_out_rollouts_without(name: str) -> None:
    delivery = Delivery()
    assert list(READERS[name][0]([replace(GROUP[0], advantage=None)], delivery)) == []
    assert delivery.left_out == {LeftOutReason.NO_ADVANTAGE: 1}


@pytest.mark.parametrize("name", ["verl", "skyrl"])
@pytest.mark.parametrize("reward", [None, float("nan")])
def test_a_trainer_of_rewards_leaves_out_rollouts_without(name: str, reward: float | None) -> None:
    delivery = Delivery()
    assert list(READERS[name][0]([replace(GROUP[0], reward=reward)], delivery)) == []
    assert delivery.left_out == {LeftOutReason.NO_REWARD: 1}


def test_routed_experts_go_along() -> None:
    main = GROUP[0].sequences[0]
    experts = np.arange(1, 13, dtype=np.int16).reshape(6, 2, 1)  # the last id of seven has not been run
    one = replace(GROUP[0], sequences=(replace(main, routed_experts=experts),))
    (row,) = verl.project([one], Delivery())
    assert row["output"]["routed_experts"] == experts.tolist()
    (output,) = skyrl.project([one], Delivery())
    assert output["rollout_expert_indices"] == [experts.tolist()]
    (sample,) = prime_rl.project([one], Delivery())
    sent = msgspec.msgpack.encode(prime_rl.positional(sample))
    data, shape, dtype = msgspec.msgpack.decode(sent, type=SAMPLE, strict=True).routed_experts
    assert np.frombuffer(data, dtype).reshape(shape).tolist() == [*experts.tolist(), [[0], [0]]]


def test_sampling_masks_go_along() -> None:
    main = GROUP[0].sequences[0]  # its ids with loss are those at 2, 3, 5 and 6
    recorded = np.array([[7, 8], [9, -1], [6, 10], [7, 11]], dtype=np.int32)
    top_3 = tuple(replace(each, sampling=Sampling(temperature=0.5, top_k=3)) for each in main.spans)
    log_probs = main.log_probs.copy()
    log_probs[3] = np.nan
    masked = replace(main, sampling_mask=recorded, spans=top_3, log_probs=log_probs)
    one = replace(GROUP[0], sequences=(masked,))
    (output,) = skyrl.project([one], Delivery())
    none = [-1, -1, -1]
    assert output["rollout_sample_support"] == [[[7, 8, -1], none, none, [6, 10, -1], [7, 11, -1]]]
    (sample,) = prime_rl.project([one], Delivery())
    sent = msgspec.msgpack.encode(prime_rl.positional(sample))
    ids, counts = msgspec.msgpack.decode(sent, type=SAMPLE, strict=True).sampling_mask
    assert np.frombuffer(ids, np.int32).tolist() == [7, 8, 6, 10, 7, 11]
    assert np.frombuffer(counts, np.int32).tolist() == [0, 0, 2, 0, 0, 2, 2]


def test_sampling_masks_that_some_rows_lack_or_have_in_another_form_stay_out() -> None:
    main, side = GROUP[0].sequences
    recorded = np.array([[7], [9], [6], [7]], dtype=np.int32)
    for sequences in ((replace(main, sampling_mask=recorded), side), (replace(main, sampling_mask=recorded > 6),)):
        one = replace(GROUP[0], sequences=sequences)
        (output,) = skyrl.project([one], Delivery())
        assert output["rollout_sample_support"] is None
    assert "sampling_mask" not in list(prime_rl.project([one], Delivery()))[-1]


# --- prime-rl's struct, which is in no package --------------------------------------------------------------------

SAMPLE = msgspec.defstruct(
    "TrainingSample",
    [
        *[("token_ids", list[int]), ("mask", list[bool]), ("logprobs", list[float]), ("temperatures", list[float])],
        *[("env_name", str), ("ref_logprobs", list[float] | None, None), ("mm_refs", Any, None)],
        *[("routed_experts", Any, None), ("mm_token_type_ids", list[int] | None, None)],
        *[(name, list[float] | None, None) for name in ("rl_weights", "ce_weights", "ref_kl_weights", "advantages")],
        *[("sampling_mask", Any, None), ("trace_id", str | None, None), ("branch_index", int | None, None)],
    ],
    array_like=True,
    omit_defaults=True,
)
"""The order of the wire, as of November 2026."""


def test_prime_rl_decodes_what_goes_over_its_wire() -> None:
    assert SAMPLE.__struct_fields__ == prime_rl.FIELDS
    lines = list(prime_rl.project(GROUP, Delivery()))
    for line in lines:
        sent = msgspec.msgpack.encode(prime_rl.positional(line))
        got = msgspec.msgpack.decode(sent, type=SAMPLE, strict=True)
        assert msgspec.structs.asdict(got) == dict.fromkeys(prime_rl.FIELDS) | line
        per_token = (got.mask, got.logprobs, got.temperatures, got.advantages)
        assert {len(each) for each in per_token} == {len(got.token_ids)}
        trained = {advantage for advantage, kept in zip(got.advantages, got.mask, strict=True) if kept}
        assert trained == {np.float32(ADVANTAGE[got.trace_id])}
        assert not any(value for value, kept in zip(got.advantages, got.mask, strict=True) if not kept)
        assert {t for t, kept in zip(got.temperatures, got.mask, strict=True) if kept} == {0.5}
    assert [(line["trace_id"], line["branch_index"]) for line in lines] == [
        ("split", 1),
        ("split", 0),
        ("short", 0),
        ("plain", 0),
    ]


# --- OpenEnv -------------------------------------------------------------------------------------------------------


def test_a_turn_of_openenv_is_a_call() -> None:
    split, *_ = openenv.project(GROUP, Delivery())
    turns = {turn["node_id"]: turn for turn in split["trace"]["turns"]}
    assert (turns["b"]["prompt_token_ids"], turns["b"]["completion_token_ids"]) == ([1, 2, 3, 4, 5], [6, 7])
    assert turns["b"]["loss_mask"] == [0, 0, 0, 0, 0, 1, 1]
    assert turns["b"]["per_token_logps"] == [-0.75, -0.875]
    assert turns["b"]["metadata"]["weight_versions"] == ["3", "4"]
