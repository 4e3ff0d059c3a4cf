"""A job file is tried as a user tries it, on random weights: it holds what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "serve_configs" / "jobs" / "register.yaml"


def try_job(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    command = [sys.executable, "-m", "gym_capture.cli", "try-job", str(JOB), "--model", "tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.engine
def test_every_check_holds_also_at_a_temperature(tmp_path: Path) -> None:
    settings = ["--set", "tasks.count=1", "--set", "samples=2", "--temperature", "0.5"]
    code, printed, output = try_job(*settings, "--json", "--out", str(tmp_path / "kept"))
    assert code == 0, output
    tried = json.loads(printed)
    assert tried["held"], output
    assert (tried["built"]["calls"], tried["built"]["contiguous_links"]) == (6, 4)
    assert tried["training"]["compared_tokens"] > 0
    assert "the first prompts of a group are equal" in output
    assert list((tmp_path / "kept" / "trajectories").glob("part-*.parquet"))


def test_a_job_that_cannot_be_is_refused_before_a_graph_starts(tmp_path: Path) -> None:
    code, _, output = try_job("--set", "sample=2", "--out", str(tmp_path))
    assert code == 2
    assert "sample" in output
    assert not (tmp_path / "serve.yaml").exists()
