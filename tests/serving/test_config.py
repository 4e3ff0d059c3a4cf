"""A configuration that cannot work says which key is at fault, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gym_capture.errors import ConfigError
from gym_capture.serving.app import build_app, model_folder
from gym_capture.serving.config import GraphArgs


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "model"),
        ({"model": "tiny", "prefix_suply": True}, "prefix_suply"),
        ({"model": "tiny", "state": {"shard": 2}}, "shard"),
        ({"model": "tiny", "state": {"shards": 0}}, "shards"),
        ({"model": "tiny", "num_replicas": "many"}, "num_replicas"),
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
    args = GraphArgs.model_validate({"model": "tiny", "engine_args": '{"dtype": "float32"}', "num_replicas": "2"})
    assert (args.engine_args, args.num_replicas) == ({"dtype": "float32"}, 2)


def test_a_model_that_is_not_there_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .*no-such-model"):
        build_app(GraphArgs(model=str(tmp_path / "no-such-model")))
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("args", "named"),
    [({"num_replicas": "auto"}, "num_replicas"), ({"autoscaling_config": {"max_replicas": 2}}, "autoscaling_config")],
)
def test_autoscaling_needs_both_of_its_keys(tmp_path: Path, args: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=named):
        build_app(GraphArgs(model=str(tmp_path), **args))


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
