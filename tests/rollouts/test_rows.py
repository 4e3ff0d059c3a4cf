"""Rows of rollouts: what was asked, what came, and what of the agent's own response is replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_capture.errors import ConfigError
from gym_capture.rollouts.attempt import Outcome, Scored
from gym_capture.rollouts.environment import Environment, Observation
from gym_capture.rollouts.exchanges import EXCHANGES_FILE, Exchanges
from gym_capture.rollouts.harness import Completed, Failed
from gym_capture.rollouts.harness import Outcome as Ended
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.rows import Exchange, exchange_of, row
from tests.rollouts.scripted_job import Scripted, make

MERGED = [{"type": "message", "generation_token_ids": [3]}]
RECORD: Mapping[str, Any] = {
    "agent_ref": {"type": "responses_api_agents", "name": "coder"},
    "responses_create_params": {"input": []},
    "response": {"id": "resp_r", "output": MERGED},
    "reward": 1.0,
    "mask_sample": True,
    "instance_config": {"mask_sample": True},
    "_ng_token_capture": {"n_calls": 1, "mask_reasons": ["no_calls"]},
}
OWN = {"id": "resp_own", "metadata": {"k": "v"}, "output": [{"type": "message", "generation_token_ids": [9]}]}


def outcome(**said: Any) -> RolloutRow:
    values: dict[str, Any] = {"status": "finished", "reward": 1.0, "n_calls": 1, "attempt": 2}
    values |= {"started_at": 0.0, "wall_s": 1.0} | said
    return RolloutRow(rollout_id="r", task_id="t", group_id="t", sample=1, **values)


def test_an_agents_response_keeps_all_but_its_output() -> None:
    made = row(outcome(), Exchange(input=[], tools=[], response=OWN), RECORD, task_index=3, native_problem=None)
    assert made["response"] == {"created_at": 1, **OWN, "output": MERGED}
    assert (made["mask_sample"], made["instance_config"]["mask_sample"]) == (True, True)
    assert (made["task_id"], made["sample"], made["attempt"]) == ("t", 1, 2)
    assert (made["_ng_task_index"], made["_ng_rollout_index"]) == (3, 1)


def test_an_agent_that_gives_no_response_gets_that_of_the_records() -> None:
    assert row(outcome(), Exchange(input=[], tools=[]), RECORD, task_index=3, native_problem=None)[
        "response"
    ] == RECORD["response"] | {"created_at": 1}


def test_a_native_output_is_left_alone_and_masked_for_its_own_reasons_only() -> None:
    native = Exchange(input=[], tools=[], response=OWN, output="native")
    made = row(outcome(), native, RECORD, task_index=3, native_problem=None)
    assert made["response"] == OWN
    assert (made["mask_sample"], made["instance_config"]) == (False, {"mask_sample": False})
    assert made["_ng_token_capture"]["mask_reasons"] == []
    made = row(outcome(), native, RECORD, task_index=3, native_problem="no_trainable_tokens")
    assert (made["mask_sample"], made["instance_config"]) == (True, {"mask_sample": True})
    assert made["_ng_token_capture"]["mask_reasons"] == ["no_trainable_tokens"]
    assert RECORD["_ng_token_capture"]["mask_reasons"] == ["no_calls"]


def test_a_native_output_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match="has to give its response"):
        Completed("", n_calls=1, output="native")


def test_what_the_agent_was_given_is_that_of_a_responses_request() -> None:
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    ]
    observation = Observation(
        messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": parts}),
        tools=({"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}},),
    )
    completed = Completed("", n_calls=1)
    scored = Scored(answer="", n_calls=1, reward=1.0, components={}, completed=completed)
    exchange = exchange_of(Outcome(scored, None, observation))
    assert exchange.input == [
        {"type": "message", "role": "system", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "look"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
            ],
        },
    ]
    assert exchange.tools == [{"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": False}]
    assert exchange_of(Outcome(Failed("environment_start", ""), None, None)) == Exchange(input=[], tools=[])


def test_exchanges_are_found_again_and_a_cut_one_is_cut_off(tmp_path: Path) -> None:
    first, second = (Exchange(input=[{"role": "user", "content": text}], tools=[]) for text in ("one", "two"))
    with Exchanges(tmp_path) as exchanges:
        exchanges.add("a", first)
        exchanges.add("b", Exchange(input=[], tools=[], response=OWN, output="native"))
    with (tmp_path / EXCHANGES_FILE).open("ab") as file:
        file.write(b'{"rollout_id": "c", "inp')
    with Exchanges(tmp_path) as exchanges:
        assert exchanges.get("a") == first
        exchanges.add("a", second)  # another attempt, whose row the job died before
        assert exchanges.get("a") == second
        assert exchanges.get("b").response == OWN
        assert exchanges.get("c") == Exchange(input=[], tools=[])
    assert (tmp_path / EXCHANGES_FILE).read_bytes().count(b"\n") == 3


async def test_RA_04_rewards_of_calls_stand_beside_the_reward(tmp_path: Path) -> None:
    async def rewards_calls(rollout_id: str, environment: Environment) -> Ended:
        return Completed("0", n_calls=2, call_rewards={"chatcmpl-1": 0.5, "chatcmpl-2": -1.0})

    kept: list[str] = []
    job = make(tmp_path / "job", Scripted(rewards_calls), samples=1)
    told: list[RolloutRow] = []
    await job.run(on_row=told.append)
    assert [each.call_rewards for each in told] == [{"chatcmpl-1": 0.5, "chatcmpl-2": -1.0}] * 3
    assert all(each.reward == sum(each.reward_components.values()) for each in told)
    await job.run(on_kept=lambda each: kept.append(each.rollout_id))
    assert kept == [each.rollout_id for each in told]


async def test_a_call_reward_that_is_no_number_fails_the_attempt(tmp_path: Path) -> None:
    async def rewards_calls(rollout_id: str, environment: Environment) -> Ended:
        return Completed("0", n_calls=1, call_rewards={"chatcmpl-1": math.nan})

    summary = await make(tmp_path / "job", Scripted(rewards_calls), samples=1, max_attempts=1).run()
    assert {each.error for each in summary.rows} == {"bad_reward"}
    assert "chatcmpl-1" in (summary.rows[0].detail or "")


def test_a_native_output_of_a_failed_rollout_is_masked() -> None:
    native = Exchange(input=[], tools=[], response=OWN, output="native")
    failed = outcome(status="failed", reward=None, error="call_timeout")
    assert row(failed, native, RECORD, task_index=3, native_problem=None)["_ng_token_capture"]["mask_reasons"] == [
        "incomplete:call_timeout"
    ]
