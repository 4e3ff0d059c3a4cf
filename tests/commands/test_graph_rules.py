"""Names and values that Ray and vLLM do not know are problems; what only this machine lacks is a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_capture import cli
from gym_capture.commands.graph_rules import check
from gym_capture.models import tiny_dir

AT = ("args",)
SOUND: dict[str, Any] = {
    "model": "tiny",
    "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
    "engine_args": {"max_model_len": 4096, "dtype": "float32"},
    "ray_actor_options": {"num_cpus": 2, "label_selector": {"a": "b"}, "runtime_env": {"env_vars": {"A": "b"}}},
}


def test_sound_arguments_have_neither_problems_nor_warnings(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    assert check(SOUND, AT) == ([], [])
    assert check(SOUND | {"model": str(tiny_dir()), "secret_file": str(secret)}, AT) == ([], [])


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"ray_actor_options": {"num_cpu": 1}}, "ray_actor_options.num_cpu: unknown key, did you mean `num_cpus`?"),
        (
            {"ray_actor_options": {"runtime_env": {"env_var": {}}}},
            "ray_actor_options.runtime_env.env_var: unknown key, did you mean `env_vars`?",
        ),
        ({"engine_args": {"max_model_length": 1}}, "engine_args.max_model_length: unknown key, did you mean"),
        (
            {"engine_args": {"max_model_len": -5}},
            "engine_args.max_model_len: Input should be greater",
        ),
        ({"engine_args": {"dtype": "float33"}}, "engine_args.dtype: Input should be 'auto', 'half', "),
        ({"engine_args": {"gpu_memory_utilization": 90}}, "engine_args.gpu_memory_utilization: Input should be less"),
        ({"engine_args": {"tensor_parallel_size": 0}}, "engine_args.tensor_parallel_size: Input should be greater"),
        ({"engine_args": {"max_num_seqs": "many"}}, "engine_args.max_num_seqs: Input should be a valid integer"),
        ({"tool_parser": "hermess"}, "tool_parser: vLLM has no 'hermess', did you mean `hermes`?"),
        ({"reasoning_parser": "qwen33"}, "reasoning_parser: vLLM has no 'qwen33', did you mean `qwen3`?"),
    ],
)
def test_a_name_that_nobody_knows_is_a_problem(args: dict[str, Any], problem: str, *, as_json: bool) -> None:
    if as_json:
        args = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in args.items()}
    ((found,), warnings) = check(SOUND | args, AT)
    assert found.startswith(f"args.{problem}")
    assert warnings == []


def test_values_that_vllm_finds_out_by_itself_need_not_be_said() -> None:
    left = {"max_model_len": None, "quantization": None, "max_num_seqs": None, "hf_overrides": {"a": 1}, "seed": 0}
    assert check(SOUND | {"engine_args": left}, AT) == ([], [])


@pytest.mark.parametrize(
    ("engine_args", "gpus", "named"),
    [
        ({"tensor_parallel_size": 4}, 1, "tensor_parallel_size 4 needs 4 GPUs of its node, and asks Ray for 1"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            2,
            "tensor_parallel_size 2 x pipeline_parallel_size 2 needs 4 GPUs",
        ),
        ({"tensor_parallel_size": 4}, 4, None),
        ({"tensor_parallel_size": 1}, 0.5, None),
        ({"tensor_parallel_size": 4, "distributed_executor_backend": "ray"}, 1, None),
        ({"tensor_parallel_size": 2}, 0, None),
        ({"tensor_parallel_size": "2"}, 1, None),
    ],
)
def test_an_engine_asks_ray_for_the_gpus_that_it_needs(
    engine_args: dict[str, Any], gpus: float, named: str | None
) -> None:
    args = SOUND | {"engine_args": engine_args, "ray_actor_options": {"num_gpus": gpus}}
    problems, _ = check(args, AT)
    assert (len(problems), named or "") == (0 if named is None else 1, named or "")
    assert all(
        problem.startswith("args.ray_actor_options.num_gpus: ") and str(named) in problem for problem in problems
    )


def test_arguments_of_another_engine_are_left_to_it() -> None:
    args = {"engine": "mine:start", "engine_args": {"anything": 1}, "tool_parser": "mine"}
    assert check(SOUND | args, AT) == ([], [])


@pytest.mark.parametrize("wrong", [None, 1, "{", "text", [1]])
def test_what_is_no_object_is_left_to_the_schema(wrong: object) -> None:
    args = dict.fromkeys(("engine_args", "ray_actor_options", "tool_parser", "model", "secret_file"), wrong)
    assert check(args if not isinstance(wrong, str) else {"engine_args": wrong}, AT) == ([], [])


def test_what_only_this_machine_lacks_is_a_warning() -> None:
    problems, warnings = check(SOUND | {"model": "/not/here", "secret_file": "/nor/here"}, AT)
    assert problems == []
    assert warnings == [
        "args.model: '/not/here' is no folder of this machine, nor one of smollm2, tiny",
        "args.secret_file: cannot read the secret /nor/here: No such file or directory",
    ]


@pytest.mark.parametrize(("change", "code", "verdict"), [({}, 0, "ok"), ({"tool_parser": "x"}, 1, "wrong")])
def test_a_warning_does_not_make_a_file_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], code: int, verdict: str
) -> None:
    args = SOUND | {"model": "/not/here"} | change
    application = {"name": "a", "import_path": "gym_capture.serving.app:build_app", "args": args}
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump({"applications": [application]}))
    with pytest.raises(SystemExit) as stop:
        cli.main(["check-configs", str(file)])
    assert stop.value.code == code
    shown = capsys.readouterr().out
    assert shown.startswith(verdict)
    assert "warning: applications[0].args.model: '/not/here' is no folder" in shown
    assert ("applications[0].args.tool_parser: vLLM has no 'x'" in shown) == bool(change)
