"""`gym-capture train` on the graph as it serves: it plays a job, and its weights play on. `train_follow.py` has the way
over files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from gym_capture.models import tiny_dir
from tests.serving.graph import Graph, environment

pytestmark = pytest.mark.engine


def job_file(graph: Graph, directory: Path, *, tasks: int) -> Path:
    job = {
        "format_version": 1,
        "out": str(directory / "job"),
        "endpoint": {"url": graph.url, "namespace": graph.namespace},
        "environment": {"name": "register"},
        "tasks": {"count": tasks},
        "samples": 2,
        "harness": {"name": "tool-loop", "forced_calls": 1, "max_calls": 2, "max_tokens": 8, "temperature": 1.0},
        "limits": {"concurrency": 2},
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


@contextmanager
def running(*arguments: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gym_capture.cli", *map(str, arguments)],
            env=environment(),
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ends(process: subprocess.Popen[bytes], log: Path) -> int:
    try:
        return process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()) from None


def until_step(process: subprocess.Popen[bytes], run: Path, step: int, log: Path) -> None:
    for _ in range(3000):
        if len(lines(run)) >= step:
            return
        assert process.poll() is None, log.read_text()
        with_timeout = psutil.Process(process.pid)
        try:
            with_timeout.wait(timeout=0.1)
        except psutil.TimeoutExpired:
            continue
    raise AssertionError(log.read_text())


def test_a_job_is_played_and_trained_with_its_own_weights_and_killed_it_goes_on(graph: Graph, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = [
        *("train", "--model", tiny_dir(), "--out", run, "--play", job_file(graph, tmp_path, tasks=4)),
        *("--ahead", "1", "--rollouts-per-step", "2", "--checkpoint-every", "1", "--lr", "1e-4"),
        *("--push", graph.url, "--max-lag", "3", "--stale", "keep"),
    ]
    with running(*arguments, log=log) as process:
        until_step(process, run, 2, log)
        process.kill()
        process.wait()
    with running(*arguments, log=log) as process:
        assert ends(process, log) == 0, log.read_text()
    found = lines(run)
    assert [line["step"] for line in found] == [1, 2, 3, 4], log.read_text()
    assert found[-1]["groups_trained"] == 4  # of 4 tasks: none twice, none lost
    versions = [line["version"] for line in found]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]
    sampled = [max(map(int, line["weight_versions"])) for line in found]
    assert sampled[-1] > sampled[0]  # of the records: what was pushed has sampled
    assert all(0 <= line["lag_mean"] <= 2 for line in found)
    assert any(line["push_s"] for line in found)
    served = httpx.get(f"{graph.url}/weight_info", trust_env=False).json()
    assert int(served["weight_version"]) == versions[-1] + 1
