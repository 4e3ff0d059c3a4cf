"""`gym-capture train-step` on built trajectories and the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from gym_capture.build.builder import build
from gym_capture.commands.train_step import command
from gym_capture.data.schema import rows, to_table
from gym_capture.errors import ConfigError
from gym_capture.models import tiny_dir
from tests.data.made_rollouts import snapshot


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for group in range(2):
        made = [
            *rows(build(snapshot(f"{group}-a")), group_id=f"g{group}", reward=1.0, advantage=1.0),
            *rows(build(snapshot(f"{group}-b")), group_id=f"g{group}", reward=0.0, advantage=-1.0),
            *rows(build(snapshot(f"{group}-c", turns=0)), group_id=f"g{group}", reward=0.0, advantage=0.0),
        ]
        pq.write_table(to_table(made), directory / f"part-{group:05d}.parquet")
    return directory


def train_step(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_metrics_of_a_step_and_a_model_folder_that_can_be_served(tmp_path: Path, data: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "trained"
    done = train_step("--model", tiny_dir(), "--data", data, "--out", out, "--lr", "1e-3", "--json")
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)
    assert (metrics["updates"], metrics["rollouts"], metrics["left_out"]) == (1, 4, {"masked": 2})
    assert metrics["weight_versions"] == ["0", "1"]
    assert metrics["mismatch"]["mean_abs_log_prob_diff"] > 1  # made up log probabilities
    before = AutoModelForCausalLM.from_pretrained(tiny_dir()).state_dict()
    after = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert any(not before[name].equal(after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(tiny_dir()).chat_template


def test_a_person_gets_a_table(data: Path) -> None:
    done = train_step("--model", tiny_dir(), "--data", data, "--limit", "1")
    assert done.exit_code == 0, done.output
    lines = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.strip())
    named = {name.strip(): value for name, value in lines.items()}
    assert named["rollouts"] == "2"  # the first group, whole
    assert named["left out: masked"] == "1"
    assert float(named["token_mult_prob_error"]) > 1


def test_nothing_to_train_on_is_no_success(tmp_path: Path) -> None:
    masked = to_table(rows(build(snapshot("r", turns=0)), group_id="g", reward=0.0, advantage=0.0))
    pq.write_table(pa.concat_tables([masked]), tmp_path / "part-00000.parquet")
    assert train_step("--model", tiny_dir(), "--data", tmp_path).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--temperature", "0"], "must be positive"), (["--model", "."], "not a model folder")],
)
def test_what_cannot_work_is_said_at_once(data: Path, arguments: list[str], message: str) -> None:
    failed = train_step("--model", tiny_dir(), "--data", data, *arguments)
    assert isinstance(failed.exception, ConfigError)
    assert message in str(failed.exception)


_DEEP_IN_C = """
import sys
from trainer_bridge.grpo import GrpoTrainer
from gym_capture.cli import main

def step(*_, **__):
    print("computing", flush=True)
    sum(range(10**15))  # no signal handler of Python's runs before it ends

GrpoTrainer.step = step
main(["train-step", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_the_middle_of_a_pass(tmp_path: Path, data: Path, number: signal.Signals) -> None:
    out = tmp_path / "trained"
    words = [sys.executable, "-c", _DEEP_IN_C, "--model", tiny_dir(), "--data", data, "--out", out]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "computing\n"
            os.kill(process.pid, number)
            assert process.wait(60) == -number
        finally:
            process.kill()
    assert not out.exists()
