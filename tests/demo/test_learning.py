"""Training runs as processes of their own: followed to their end, and what is said of one that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from gym_capture.cli import build_app
from gym_capture.demo.learning import _watch
from gym_capture.demo.processes import ChildProcesses
from gym_capture.demo.progress import Phases
from gym_capture.errors import ConfigError

_TRAINS = """
import sys
from pathlib import Path
Path(sys.argv[1]).write_text('{"step": 1, "mean_reward": 0.25}\\n{"step": 2, "mean_reward": 0.5}\\n{"st')
print("no graph answers")
sys.exit(int(sys.argv[2]))
"""


def followed(folder: Path, *, status: int) -> str:
    metrics = folder / "metrics.jsonl"
    with Phases(Console()) as phases, ChildProcesses() as children, phases.phase("train") as phase:
        child = children.start([sys.executable, "-c", _TRAINS, str(metrics), str(status)], log=folder / "log")
        _watch(child, metrics, phase, 2)
    return phase.text


def test_a_run_is_followed_and_a_line_that_is_not_whole_yet_is_no_step(tmp_path: Path) -> None:
    assert followed(tmp_path, status=0) == "step 2 of 2, mean reward 0.50"


def test_a_run_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ended with 3; the end of .*\nno graph answers"):
        followed(tmp_path, status=3)


def test_a_folder_that_holds_something_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ConfigError, match=r"--out .* is not empty"):
        build_app(["learn"])(["learn", "--out", str(tmp_path)], standalone_mode=False)
