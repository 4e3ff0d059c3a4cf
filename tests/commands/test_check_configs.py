"""A configuration that passes holds no key that would be ignored."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from gym_capture.commands.check_configs import AppModels, check_config


class Engine(BaseModel):
    model_config = ConfigDict(extra="forbid")
    max_model_len: int = 1


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    engines: list[Engine] = []


class UserConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    running_calls: int = 1


SOUND = """
proxy_location: HeadOnly
http_options:
  port: 8000
applications:
  - name: policy
    import_path: package.module:build_app
    route_prefix: /
    args:
      model: folder
      engines: [{max_model_len: 2048}]
    deployments:
      - name: Gateway
        max_ongoing_requests: 100
        autoscaling_config: {min_replicas: 1, max_replicas: 2}
        ray_actor_options: {num_cpus: 1}
        user_config: {running_calls: 2}
"""


def problems(text: str) -> list[str]:
    return check_config(text, {"package.module:build_app": AppModels(Args, {"Gateway": UserConfig})})


def test_a_sound_file_has_no_problems() -> None:
    assert problems(SOUND) == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("port:", "prot:", "http_options.prot: unknown key, did you mean `port`?"),
        ("http_options:", "http_option:", "http_option: unknown key, did you mean `http_options`?"),
        (
            "max_ongoing_requests",
            "max_ongoing_request",
            "applications[0].deployments[0].max_ongoing_request: unknown key, did you mean `max_ongoing_requests`?",
        ),
        (
            "max_replicas",
            "max_replica",
            "applications[0].deployments[0].autoscaling_config.max_replica: unknown key, did you mean `max_replicas`?",
        ),
        (
            "num_cpus: 1",
            "runtime_env: {env_var: {}}",
            "applications[0].deployments[0].ray_actor_options.runtime_env.env_var: unknown key, did you mean",
        ),
        (
            "route_prefix: /",
            "runtime_env: {pipp: []}",
            "applications[0].runtime_env.pipp: unknown key, did you mean `pip`?",
        ),
        (
            "running_calls",
            "running_call",
            "applications[0].deployments[0].user_config.running_call: unknown key, did you mean `running_calls`?",
        ),
        (
            "running_calls: 2",
            "running_calls: many",
            "applications[0].deployments[0].user_config.running_calls: Input should be a valid integer",
        ),
        (
            "name: Gateway",
            "name: Gatway",
            "applications[0].deployments[0].name: there is no deployment 'Gatway', did you mean `Gateway`?",
        ),
        ("user_config", "zzz", "applications[0].deployments[0].zzz: unknown key"),
        (
            "max_model_len",
            "max_model_length",
            "applications[0].args.engines[0].max_model_length: unknown key, did you mean `max_model_len`?",
        ),
        ("port: 8000", "port: many", "http_options.port: Input should be a valid integer, unable to parse string as"),
        ("model: folder", "", "applications[0].args.model: Field required"),
        ("port: 8000", "port: 8000\n  port: 8001", "http_options.port: given twice, the second time in line 5"),
        ("applications:", "applications: [", "not valid YAML: "),
    ],
)
def test_each_kind_of_mistake_is_named_with_its_key(good: str, bad: str, problem: str) -> None:
    assert good in SOUND
    found = problems(SOUND.replace(good, bad, 1))
    assert any(line.startswith(problem) for line in found), found


@pytest.mark.parametrize("text", ["", "- 1", "just text"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert problems(text) == ["not a mapping: a Serve configuration has `applications` at its top"]


def test_arguments_of_an_application_that_is_not_ours_are_left_to_it() -> None:
    assert check_config(SOUND.replace("model: folder", "whatever: 1"), {}) == []
