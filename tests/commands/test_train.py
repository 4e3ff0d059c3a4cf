"""`gym-capture train`: a run over built trajectories, gone on with when it is started again."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from gym_capture.build.builder import build
from gym_capture.commands.train import command
from gym_capture.data.schema import rows, to_table
from gym_capture.errors import ConfigError
from gym_capture.models import tiny_dir
from tests.data.made_rollouts import snapshot
from trainer_bridge.grpo import GrpoTrainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for group in range(3):
        made = [
            *rows(build(snapshot(f"{group}-a")), group_id=f"g{group}", reward=1.0, advantage=1.0),
            *rows(build(snapshot(f"{group}-b")), group_id=f"g{group}", reward=0.0, advantage=-1.0),
        ]
        pq.write_table(to_table(made), directory / f"part-{group:05d}.parquet")
    return directory


def train(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, ["--model", str(tiny_dir()), *map(str, arguments)])


def test_a_run_started_again_goes_on_and_ends(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    options = ["--data", data, "--out", out, "--rollouts-per-step", 2, "--epochs", 2, "--layout", "tree"]
    first = train(*options, "--steps", 2)
    assert first.exit_code == 0, first.output
    assert "step 2, reward 0.5, loss" in first.stdout
    again = train(*options)
    assert again.exit_code == 0, again.output
    assert "step 3" in again.stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["groups_trained"]) for line in lines] == [(n, n) for n in range(1, 7)]
    assert (out / "metrics.png").exists()
    newest = out / "checkpoints" / "step-00000006"
    assert (newest / "tokenizer.json").exists()
    assert "nothing to do" in train(*options).stdout
    shutil.copytree(data, tmp_path / "other")
    other = train("--data", tmp_path / "other", "--out", out)
    assert isinstance(other.exception, ConfigError)
    assert f"was begun with --data {data}" in str(other.exception)


def test_a_folder_is_followed_until_its_job_has_ended_and_a_run_goes_on_with_what_it_was_begun_with(
    tmp_path: Path, data: Path
) -> None:
    parts = sorted(data.iterdir())
    out, later = tmp_path / "run", tmp_path / "later"
    later.mkdir()
    for part in parts[1:]:
        part.rename(later / part.name)
    options = ["--data", data, "--out", out, "--follow", "--rollouts-per-step", 2]
    first = train(*options, "--steps", 1)
    assert first.exit_code == 0, first.output
    for part in parts[1:]:
        (later / part.name).rename(part)
    (data / "_report.json").write_text("{}")
    again = train(*options)
    assert again.exit_code == 0, again.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["groups_trained"]) for line in lines] == [(n, n) for n in range(1, 4)]
    other = train("--data", data, "--out", out)
    assert isinstance(other.exception, ConfigError)
    assert f"was begun with --follow --data {data}, not --data {data}" in str(other.exception)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_up_the_step_under_way_and_leaves_a_checkpoint(
    tmp_path: Path, data: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = GrpoTrainer._backward
    passes: list[int] = []

    def signalled(self: GrpoTrainer, *arguments: Any) -> Any:
        passes.append(1)
        if len(passes) == 2:
            signal.raise_signal(number)
        return backward(self, *arguments)

    monkeypatch.setattr(GrpoTrainer, "_backward", signalled)
    out = tmp_path / "run"
    handler = signal.getsignal(number)
    stopped = train("--data", data, "--out", out, "--rollouts-per-step", 2)
    assert stopped.exit_code == 128 + number
    assert f"stopped by {number.name}: a checkpoint of step 1 is in {out}" in stopped.stdout
    assert signal.getsignal(number) is handler
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
    again = train("--data", data, "--out", out, "--rollouts-per-step", 2)
    assert again.exit_code == 0, again.output
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0"], "must be positive"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--aggregation", "dr_grpo"], "set tokens_per_rollout"),
        (["--reference", "."], "not a model folder"),
        (["--device", "abacus"], "torch cannot use it"),
        (["--play", "job.yaml"], "--data a folder of trajectories, or --play a job file"),
        (["--ahead", "3"], "--ahead is for groups that come while the run trains"),
        (["--follow", "--epochs", "2"], "are trained once"),
        (["--follow", "--max-lag", "1"], "--max-lag counts versions"),
        (["--set", "samples=2"], "--set is for the job of --play"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(
    tmp_path: Path, data: Path, arguments: list[str], message: str
) -> None:
    failed = train("--data", data, "--out", tmp_path / "run", *arguments)
    assert isinstance(failed.exception, ConfigError)
    assert message in str(failed.exception)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, data: Path) -> None:
    failed = train("--data", data, "--out", data)
    assert isinstance(failed.exception, ConfigError)
    assert "holds something else" in str(failed.exception)
