"""docs/cli.md: every command and every option, from the commands themselves.

Invariant: nothing about a command is said here that the command does not say of itself; only what holds for all of
them stands in this file. `python -m gym_capture.commands.reference > docs/cli.md` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

import typer

from gym_capture.cli import COMMANDS, EXIT_CODES, Command, build_app

_INTRODUCTION: Final = """\
# The command line

`gym-capture --help` lists the commands, `--help` behind one says what it takes. This page is made of the
same words: `make cli-table` writes it.

Results go to stdout, everything else - progress, warnings, errors - to stderr, so that a pipe gets results alone. An
error is one line that names what is wrong and what to do. Ctrl-C and SIGTERM end a command in order: what it started
ends with it, and what is written is whole.

## One name for one thing

| | |
|---|---|
| `--out` | where a command writes: a directory, or a URI of one where it says so |
| `--json` | results as JSON on stdout: one object, or one a line where there are many; of a job its progress, too |
| `--model` | a model folder. `--model-name` is the name that agents ask for |
| `--data` | trajectories: what `build` and `build-job` wrote |
| `--records` | a graph's `state.directory`, where a command takes other things, too |
| `--rollout` | the id of a rollout. `--rollouts` is a file with one a line; `--limit` is how many at most |
| `--url` | where a graph is served, without `/v1` |
| `--secret-file`, `--token` | the graph's secret, or a token of it; some take the environment's, too |
| `--ray-address`, `--namespace` | the Ray cluster of a graph, and the namespace of its state actors |
| `--set` | `KEY=VALUE`, for any key of a job file or of a graph's arguments; may be repeated |
| `--overwrite` | replace what `--out` holds already; without it, that is refused |
| `--force` | do what is refused for a reason that the refusal names |

## Exit codes

| | |
|---|---|
"""

_COMPLETION: Final = """
## Completion

```bash
gym-capture --install-completion    # for bash, zsh, fish or PowerShell; --show-completion prints the script
```

Commands, options, the values of options that have a few, and reasons are completed.
"""

_RENAMED: Final = """
## Names of before

They still work, with a warning.

| command | was | is |
|---|---|---|
"""


def document() -> str:
    """The page."""
    lines = [_INTRODUCTION + "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()), _COMPLETION]
    panels = dict.fromkeys(command.panel for command in COMMANDS)
    for panel in panels:
        lines += [f"## {panel}", ""]
        for command in COMMANDS:
            if command.panel == panel:
                lines += _of_command(command)
    renamed = [(command.name, was, now) for command in COMMANDS for was, now in command.renamed.items()]
    renamed += [("demo", "--json FILE", "--json > FILE"), ("try-job", "--json FILE", "--json > FILE")]
    lines += [_RENAMED.strip("\n"), *(f"| `{name}` | `{was}` | `{now}` |" for name, was, now in renamed)]
    return "\n".join(lines) + "\n"


def _of_command(command: Command) -> Iterator[str]:
    root = typer.main.get_command(build_app([command.name]))
    for path, leaf in _leaves((command.name,), _subcommands(root)[command.name]):
        arguments = [_metavar(each) for each in leaf.params if each.param_type_name == "argument" and not each.hidden]
        yield f"### `gym-capture {' '.join([*path, *arguments])}`"
        yield ""
        yield _text(leaf.help or "")
        yield ""
        rows = [_row(each) for each in leaf.params if not each.hidden and each.name != "help"]
        if rows:
            yield from ["| | default | |", "|---|---|---|", *rows, ""]


def _leaves(path: Sequence[str], command: Any) -> Iterator[tuple[Sequence[str], Any]]:
    inner = _subcommands(command)
    if not inner:
        yield path, command
    for name, each in inner.items():
        yield from _leaves((*path, name), each)


def _subcommands(command: Any) -> dict[str, Any]:
    return dict(command.commands) if isinstance(command, typer.core.TyperGroup) else {}


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_metavar(parameter)}`"
    else:
        name = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        name += " (may be repeated)" if parameter.multiple else ""
    help_ = _text(parameter.help or "")
    if parameter.envvar:
        help_ += f" Else the environment's `{parameter.envvar}`."
    return f"| {name} | {_default(parameter)} | {help_} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return f"`{parameter.show_default}`"
    value = parameter.default
    if value is None or value is False or callable(value):
        return ""
    if isinstance(value, Path) and value.is_absolute():
        return f"`{value.parent.name}/{value.name}`"
    shown = value.value if isinstance(value, Enum) else value
    return f"`{str(shown).lower() if shown is True else shown}`"


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper().replace("-", "_")
    name = name.strip("[]") + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _text(text: str) -> str:
    """In one line; a bar would end a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(document(), end="")
