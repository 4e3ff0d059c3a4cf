"""A job file that passes has no key that would be ignored; what is wrong with it is said with the key it belongs to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gym_capture.commands.check_configs import check_file
from gym_capture.commands.job_files import check_job, is_job, job_of_options, overridden, parse, read_job_file
from gym_capture.errors import ConfigError
from gym_capture.rollouts.jobfile import JobFile

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "serve_configs" / "jobs").glob("*.yaml"))
SOUND = """
format_version: 1
out: runs/one
endpoint: {url: "http://here:1", namespace: other}
environment: {name: register}
tasks: {count: 3, seed: 1}
samples: 2
harness: {name: tool-loop, model: policy, max_calls: 4}
limits: {concurrency: 2, rollout_timeout_s: 60}
"""


def job_file(folder: Path, text: str = SOUND) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_a_job_is_read_with_its_defaults(tmp_path: Path) -> None:
    job = read_job_file(job_file(tmp_path), [])
    assert (job.out, job.samples, job.tasks.count, job.endpoint.url) == (Path("runs/one"), 2, 3, "http://here:1")
    assert (job.endpoint.ray_address, job.limits.concurrency, job.limits.max_attempts) == ("auto", 2, 3)
    assert job.settings == {
        "environment": {"name": "register"},
        "harness": {"name": "tool-loop", "model": "policy", "max_calls": 4},
    }
    assert check_job(SOUND).problems == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_jobs_without_problems(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parents[2])
    assert is_job(path.read_text())
    assert check_file(path, {}, {}) == ([], [])


def test_the_docs_show_every_key_with_its_default() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "jobs.md").read_text(), flags=re.DOTALL)
    data, problems = parse(text)
    assert problems == []
    least = JobFile.model_validate({"format_version": 1, "out": data["out"]})
    # What the file's defaults say of tasks, and the one option that is shown.
    shown = {**least.model_dump(mode="json"), "tasks": {"count": 4, "seed": 0}}
    shown["harness"]["model"] = "policy"
    assert data == shown


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("samples:", "sampels:", "sampels: unknown key, did you mean `samples`?"),
        ("seed:", "sede:", "tasks.sede: unknown key, did you mean `seed`?"),
        ("concurrency:", "concurency:", "limits.concurency: unknown key, did you mean `concurrency`?"),
        ("namespace:", "name_space:", "endpoint.name_space: unknown key, did you mean `namespace`?"),
        ("max_calls:", "max_cals:", "harness 'tool-loop' has no option 'max_cals' (did you mean 'max_calls'?)"),
        ("max_calls: 4", "max_calls: many", "harness 'tool-loop', option max_calls: Input should be a valid integer"),
        ("{name: register}", "{name: regster}", "there is no environment 'regster' (did you mean 'register'?)"),
        ("{name: register}", "{name: 'nowhere:x'}", "cannot load 'nowhere:x'"),
        ("{name: register}", "{}", "environment.name: Field required"),
        ("samples: 2", "samples: two", "samples: Input should be a valid integer"),
        ("samples: 2", "samples: 0", "samples: Input should be greater than 0"),
        ("samples: 2", "samples: 2\nsamples: 3", "samples: given twice, the second time in line 8"),
        ("count: 3", "count: 3, file: a.jsonl", "tasks: Value error, tasks come from a `file`, or"),
        ("60", ".nan", "limits.rollout_timeout_s: Input should be a finite number"),
        ("out: runs/one", "", "out: Field required"),
        ("samples: 2", "samples: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(good: str, bad: str, problem: str) -> None:
    assert good in SOUND
    (found,) = check_job(SOUND.replace(good, bad)).problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2", "format_version: this version of gym-capture reads 1, not 2: update gym-capture"),
        ("0", "format_version: this version of gym-capture reads 1, not 0: write the file anew, after docs/jobs.md"),
        ("'1'", "format_version: this version of gym-capture reads 1, not '1': write the file anew"),
        ("true", "format_version: this version of gym-capture reads 1, not True"),
        ("null", "format_version: is missing: this version of gym-capture reads 1"),
    ],
)
def test_a_file_of_another_version_is_refused_for_that_alone(tmp_path: Path, version: str, message: str) -> None:
    text = SOUND.replace("format_version: 1", f"format_version: {version}") + "a_key_of_that_version: 1\n"
    with pytest.raises(ConfigError) as refused:
        read_job_file(job_file(tmp_path, text), [])
    assert str(refused.value).startswith(f"{tmp_path / 'job.yaml'}: {message}")
    assert "a_key" not in str(refused.value)


def test_a_serve_configuration_is_no_job() -> None:
    assert not is_job("applications: []")
    assert is_job("format_version: 1")
    assert is_job("harness: {name: x}")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("samples=8", ("samples", 8)),
        ("harness.model=policy", ("harness.model", "policy")),
        ("harness.stop=[a, b]", ("harness.stop", ["a", "b"])),
        ("endpoint.secret_file=null", ("endpoint.secret_file", None)),
        ("harness.text=a=b", ("harness.text", "a=b")),
    ],
)
def test_a_key_is_set_to_a_value_as_yaml_writes_it(option: str, expected: tuple[str, Any]) -> None:
    assert overridden(option) == expected


@pytest.mark.parametrize("option", ["samples", "=3", "harness..x=3", "samples=["])
def test_what_sets_nothing_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        overridden(option)


def test_options_win_over_the_file_and_say_the_same_thing_once(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    job = read_job_file(path, [("samples", 9), ("harness.max_calls", 7), ("tasks.file", "a.jsonl"), ("samples", 10)])
    assert (job.samples, job.harness.options["max_calls"]) == (10, 7)
    assert (job.tasks.file, job.tasks.count, job.tasks.seed) == (Path("a.jsonl"), None, None)
    from_file = job_file(tmp_path, SOUND.replace("{count: 3, seed: 1}", "{file: a.jsonl}"))
    assert read_job_file(from_file, [("tasks.count", 5)]).tasks.file is None


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({}, ["samples=three"], "^--set samples=three: samples: Input should be a valid integer[^;]*$"),
        ({}, ["sampels=3"], r"^--set sampels=3: sampels: unknown key, did you mean `samples`\?$"),
        ({}, ["limits={tries: 3}"], r"^--set limits={tries: 3}: limits.tries: unknown key[^;]*$"),
        ({"--samples": ("samples", 0)}, [], "^--samples 0: samples: Input should be greater than 0$"),
        ({"--seed": ("tasks.seed", None), "--samples": ("samples", 0)}, ["samples=-1"], "^--set samples=-1: samples: "),
        ({}, ["samples=x"], "^--set samples=x: samples: .*; [^;]*job.yaml: limits.bad: unknown key$"),
    ],
)
def test_what_an_option_set_wrongly_is_said_of_the_option(
    tmp_path: Path, given: dict[str, tuple[str, Any]], settings: list[str], message: str
) -> None:
    both = "job.yaml" in message
    path = job_file(tmp_path, SOUND.replace("concurrency: 2", "bad: 2") if both else SOUND)
    with pytest.raises(ConfigError) as refused:
        job_of_options(path, given, settings)
    assert re.search(message, str(refused.value)), refused.value


def test_options_alone_are_a_job() -> None:
    job = read_job_file(None, [("out", "x"), ("harness.max_calls", 7)])
    assert job.harness.settings == {"name": "tool-loop", "max_calls": 7}
    assert job.environment.name == "register"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        read_job_file(tmp_path / "nowhere.yaml", [])
    (tmp_path / "job.yaml").write_bytes(b"out: \xff")
    with pytest.raises(ConfigError, match=r"job\.yaml: not UTF-8 text"):
        read_job_file(tmp_path / "job.yaml", [])
