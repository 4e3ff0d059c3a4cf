"""`gym-capture model` prints the folder, and nothing else, on stdout."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from gym_capture.commands.model import command
from gym_capture.models import tiny_dir


def test_the_path_is_all_that_is_printed() -> None:
    app = typer.Typer()
    app.command()(command)
    made = CliRunner().invoke(app, ["tiny"])
    assert made.stdout == f"{tiny_dir()}\n"
    assert json.loads(CliRunner().invoke(app, ["tiny", "--json"]).stdout) == {"model": str(tiny_dir())}
    assert CliRunner().invoke(app, ["huge"]).exit_code == 2
