"""What the demo says in the end can be typed as it stands."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gym_capture.commands.demo import check_json_file, show_way_on
from gym_capture.demo.progress import Phases
from gym_capture.errors import ConfigError


@pytest.mark.parametrize("path", [str(Path(sys.executable).parent), "/nowhere"])
def test_the_last_lines_are_commands(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind `make demo`, where the environment's programs are not on the PATH."""
    monkeypatch.setenv("PATH", path)
    said, jobs = io.StringIO(), [tmp_path / "supplied", tmp_path / "my job"]
    jobs[1].mkdir()
    (jobs[1] / "rollouts.jsonl").write_text(json.dumps({"rollout_id": "demo-rendered.register-0-0.0-a1"}) + "\n")
    show_way_on(Console(file=said, width=40), jobs, tmp_path / "my records", Path("/models/a"))
    _, *browsers, here = said.getvalue().splitlines()
    program = shutil.which(shlex.split(here)[0])
    assert program is not None
    assert Path(program).name == "gym-capture"
    options = ["--records", str(tmp_path / "my records"), "--model", "/models/a"]
    assert [shlex.split(line)[1:] for line in browsers] == [["ui", str(job), *options] for job in jobs]
    assert shlex.split(here)[1:] == ["inspect", "demo-rendered.register-0-0.0-a1", str(jobs[1]), *options]


def test_without_a_rollout_the_inspector_is_named_all_the_same(tmp_path: Path) -> None:
    said = io.StringIO()
    (tmp_path / "rollouts.jsonl").touch()
    show_way_on(Console(file=said), [tmp_path], tmp_path, tmp_path)
    assert " ui " in said.getvalue().splitlines()[-1]


def test_a_long_phase_says_without_a_terminal_what_happens_before_it_does() -> None:
    said = io.StringIO()
    with Phases(Console(file=said)) as phases, phases.phase("serve", "about a minute"):
        assert said.getvalue() == "  serve: about a minute\n"


def test_a_file_behind_json_is_taken_as_before_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_json_file(Path("demo.json"), as_json=True) is False
    assert "--json demo.json is now --json > FILE" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nothing to name here"):
        check_json_file(Path("demo.json"), as_json=False)
