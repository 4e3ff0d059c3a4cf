"""A configuration that cannot work says which key is at fault, before anything is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gym_capture.cluster.env import CLUSTER_ENV
from gym_capture.errors import ConfigError
from gym_capture.serving.app import build_app, model_folder
from gym_capture.serving.config import LONGEST_DRAIN_S, GraphArgs, Limits


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "model"),
        ({"model": "tiny", "prefix_suply": True}, "prefix_suply"),
        ({"model": "tiny", "state": {"shard": 2}}, "shard"),
        ({"model": "tiny", "state": {"shards": 0}}, "shards"),
        ({"model": "tiny", "stream_interval_s": -1}, "stream_interval_s"),
        ({"model": "tiny", "sampling_pin": "temperature=1"}, "sampling_pin"),
        ({"model": "tiny", "sampling_pin": {"temprature": 1.0}}, "did you mean 'temperature'"),
        ({"model": "tiny", "sampling_pin": {"temperature": "hot"}}, "temperature must be a number"),
    ],
)
def test_a_wrong_key_or_value_is_named(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GraphArgs.model_validate(args)


def test_objects_may_be_json_on_a_command_line() -> None:
    args = GraphArgs.model_validate({"model": "tiny", "engine_args": '{"dtype": "float32"}', "session_cache": "2"})
    assert (args.engine_args, args.session_cache) == ({"dtype": "float32"}, 2)


def test_a_model_that_is_not_there_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*no-such-model"):
        build_app(GraphArgs(model=str(tmp_path / "no-such-model")))
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ({"num_replicas": 2}, "num_replicas: ..."),
        ({"autoscaling_config": {"max_replicas": 2}}, "num_replicas: auto, autoscaling_config: {...}"),
        ({"max_ongoing_requests": 8}, "user_config: {running_calls: ...}"),
        ({"max_queued_requests": 8}, "user_config: {waiting_calls: ...}"),
        ({"graceful_shutdown_timeout_s": 8}, "user_config: {drain_s: ...}"),
        ({"drain_s": 8}, "user_config: {drain_s: ...}"),
    ],
)
def test_what_changes_without_new_engines_is_no_argument(argument: dict[str, Any], option: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(f"`deployments: [{{name: Policy, {option}}}]`")):
        GraphArgs.model_validate({"model": "tiny", **argument})


@pytest.mark.parametrize(
    "user_config", [{"runing_calls": 2}, {"running_calls": 0}, {"waiting_calls": -1}, {"drain_s": 3601}]
)
def test_a_wrong_limit_is_named(user_config: dict[str, Any]) -> None:
    (name,) = user_config
    with pytest.raises(ValidationError, match=name):
        Limits.model_validate(user_config)


def test_serves_own_limits_stand_above_those_of_a_replica(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    deployment = build_app(GraphArgs(model=str(tmp_path)))._bound_deployment
    assert deployment.user_config == Limits().model_dump()
    config = deployment._deployment_config
    assert config.max_ongoing_requests > Limits().running_calls + Limits().waiting_calls
    longest = LONGEST_DRAIN_S
    assert Limits(drain_s=longest).drain_s < config.graceful_shutdown_timeout_s
    assert int(CLUSTER_ENV["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= longest


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"state": {"replicas": 2, "store": "tests.serving.test_config:store_without_a_mirror"}}, "state.replicas"),
        ({"secret_file": "nowhere"}, "nowhere"),
    ],
)
def test_what_a_replica_would_fail_at_stops_the_build(tmp_path: Path, args: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=named):
        build_app(GraphArgs.model_validate({"model": str(tmp_path), **args}))


async def store_without_a_mirror(*, directory: Path) -> None:
    """A store that keeps no second copy."""
