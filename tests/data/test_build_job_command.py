"""`gym-capture build-job` on the records that a stopped graph left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow.dataset
import pytest
import typer
from typer.testing import CliRunner, Result

from gym_capture.commands import building
from gym_capture.commands.build_job import command
from gym_capture.data.schema import SCHEMA
from gym_capture.errors import ConfigError, StoreUnavailableError

from .test_log_source import record

pytestmark = pytest.mark.usefixtures("cluster")


def build_job(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    lines = [
        {"rollout_id": "a", "task_id": "t", "group_id": "g", "reward": 1.0, "status": "finished", "error": None},
        {"rollout_id": "b", "task_id": "t", "group_id": "g", "reward": 0.0, "status": "finished", "error": None},
        {"rollout_id": "c", "task_id": "t", "group_id": "g", "reward": 0.0, "status": "failed", "error": "timeout"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rollouts_become_parquet_and_a_report(tmp_path: Path, rollouts: Path) -> None:
    asyncio.run(record(tmp_path / "records", "a", "b", "c"))
    out = tmp_path / "out"
    records = ("--records", tmp_path / "records")
    built = build_job(rollouts, *records, "--out", out, "--json", "--scale", "none", "--retire")
    assert built.exit_code == 0, built.output
    report = json.loads(built.stdout)
    assert (report["requested"], report["complete"], report["incomplete"]) == (3, 2, ["c"])
    table = pyarrow.dataset.dataset(out).to_table()
    assert table.column("advantage").to_pylist() == [0.5, -0.5, 0.0]
    assert table.column("mask_reasons").to_pylist() == [[], [], ["incomplete:timeout"]]

    retired = build_job(rollouts, *records, "--out", tmp_path / "again")
    assert retired.exit_code == 1
    assert "missing                3" in retired.stdout


def test_a_directory_without_records_is_an_error(tmp_path: Path, rollouts: Path) -> None:
    failed = build_job(rollouts, "--records", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert isinstance(failed.exception, ConfigError)
    assert "not a directory" in str(failed.exception)


def test_no_graph_to_read_from_is_an_error(tmp_path: Path, rollouts: Path) -> None:
    failed = build_job(rollouts, "--out", tmp_path / "out", "--namespace", "nobody")
    assert isinstance(failed.exception, StoreUnavailableError)
    assert "is the graph running" in str(failed.exception)


def test_no_rollouts_are_no_rows_and_no_failure(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path / "records", "a"))
    (tmp_path / "none.jsonl").touch()
    built = build_job(tmp_path / "none.jsonl", "--records", tmp_path / "records", "--out", tmp_path / "out")
    assert built.exit_code == 0, built.output
    table = pyarrow.dataset.dataset(tmp_path / "out").to_table()
    assert (table.num_rows, table.schema) == (0, SCHEMA)


def test_rollouts_whose_records_are_wrong_are_named_with_what_is(
    tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "DETAILS", 1)
    asyncio.run(record(tmp_path / "records", "a", "b", "c"))
    (log,) = (tmp_path / "records").glob("*.log")
    log.write_bytes(log.read_bytes().replace(b"policy", b"polizy"))
    built = build_job(rollouts, "--records", tmp_path / "records", "--out", tmp_path / "out")
    assert built.exit_code == 1
    assert "a: " in built.stderr
    assert "... and 2 more: `details` in _report.json" in built.stderr
    assert "`gym-capture explain REASON` says what" in built.stderr
