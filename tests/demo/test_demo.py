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


def demo(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gym_capture.cli", "demo", "--model", "tiny", "--tasks", "1", "--samples", "2"]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_every_check_holds_and_the_table_is_there_for_machines_too(tmp_path: Path) -> None:
    process = demo("--json", str(tmp_path / "demo.json"), "--keep", str(tmp_path / "kept"))
    output, _ = process.communicate(timeout=540)
    assert process.returncode == 0, output
    found = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert found["held"], output
    supplied, rendered = found["modes"]
    assert supplied["contiguous_links"] == supplied["eligible_links"] == 4
    assert rendered["contiguous_links"] < rendered["eligible_links"]
    assert supplied["delivered_fraction"] == 1.0
    assert "contiguous / eligible links" in output
    assert list((tmp_path / "kept" / "supplied" / "trajectories").glob("part-*.parquet"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = demo("--keep", str(tmp_path / "kept"))
    log = tmp_path / "kept" / "supplied" / "serve.log"
    while not (log.exists() and "Deploying new app" in log.read_text(encoding="utf-8", errors="replace")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert {"raylet", "gcs_server"} <= {child.name() for child in started}
    process.send_signal(number)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == code, output
    assert [child for child in started if child.is_running()] == []
