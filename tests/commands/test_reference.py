"""docs/cli.md is what the commands say, and the commands have one grammar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from gym_capture.cli import COMMANDS, build_app
from gym_capture.commands.reference import _leaves, _subcommands, document

PAGE = Path(__file__).parents[2] / "docs/cli.md"
WITHOUT_JSON = {
    ("rollouts", "logs"),  # what a job has said
}
ON_OR_OFF = ("--json", "--overwrite", "--force", "--dry-run")


def leaves() -> Iterator[tuple[tuple[str, ...], Any]]:
    for command in COMMANDS:
        root = typer.main.get_command(build_app([command.name]))
        for path, leaf in _leaves((command.name,), _subcommands(root)[command.name]):
            yield tuple(path), leaf


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "make cli-table"


def test_options_have_one_grammar() -> None:
    without = set()
    for path, leaf in leaves():
        options = {name: each for each in leaf.params if each.param_type_name == "option" for name in each.opts}
        if "--json" not in options:
            without.add(path)
        for name, option in options.items():
            assert option.is_flag or name not in ON_OR_OFF, f"{path} {name}"
            assert option.help or name.startswith(("--clip", "--max-grad", "--weight-d")), f"{path} {name} has no help"
            assert name == name.lower(), f"{path} {name}"
    assert without == WITHOUT_JSON


def test_what_was_renamed_has_its_new_name_and_no_longer_its_old_one() -> None:
    names: dict[str, set[str]] = {}
    for path, leaf in leaves():
        names.setdefault(path[0], set()).update(option for each in leaf.params for option in each.opts)
    for command in COMMANDS:
        assert set(command.renamed.values()) <= names[command.name]
        assert not set(command.renamed) & names[command.name]
