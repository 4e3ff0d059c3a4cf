"""The demo as a user starts it, on random weights: it holds what it promises, and nothing is left of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def started(*arguments: str, json_to: Path | None = None) -> subprocess.Popen[str]:
    """`json_to`: where stdout goes, apart from what is said on stderr."""
    command = [sys.executable, "-m", "gym_capture.cli", *arguments]
    if json_to is None:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with json_to.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True)


def test_every_check_holds_and_the_table_is_there_for_machines_too(tmp_path: Path) -> None:
    size = ("--model", "tiny", "--tasks", "1", "--samples", "2")
    process = started("demo", *size, "--out", str(tmp_path / "kept"), "--json", json_to=tmp_path / "demo.json")
    _, output = process.communicate(timeout=540)
    assert process.returncode == 0, output
    found = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert found["held"], output
    supplied, rendered = found["modes"]
    assert supplied["contiguous_links"] == supplied["eligible_links"] == 4
    assert rendered["contiguous_links"] < rendered["eligible_links"]
    assert supplied["delivered_fraction"] == 1.0
    assert "contiguous / eligible links" in output
    for job in ("supplied", "rendered"):
        assert f"gym-capture ui {tmp_path}/kept/{job} --records {tmp_path}/kept/records --model" in output
    assert "gym-capture inspect demo-rendered.register-0-0." in output
    assert "prefix supply: serve: Ray Serve starts, vLLM loads the model" in output
    assert list((tmp_path / "kept" / "supplied" / "trajectories").glob("part-*.parquet"))


@pytest.mark.parametrize(
    ("arguments", "log", "number", "code"),
    [
        (("demo",), "supplied/serve.log", signal.SIGINT, 130),
        (("try-job", "serve_configs/jobs/register.yaml"), "serve.log", signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_demo_leaves_nothing_running(
    tmp_path: Path, arguments: tuple[str, ...], log: str, number: signal.Signals, code: int
) -> None:
    process = started(*arguments, "--model", "tiny", "--out", str(tmp_path / "kept"))
    serve_log = tmp_path / "kept" / log
    while not (serve_log.exists() and "Deploying new app" in serve_log.read_text(encoding="utf-8", errors="replace")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    assert {"raylet", "gcs_server"} <= {child.name() for child in below}
    process.send_signal(number)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == code, output
    assert [child for child in below if child.is_running()] == []
