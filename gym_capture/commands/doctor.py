"""`gym-capture doctor`: what on this machine would keep a graph from serving, or make it slow or unsafe?

Invariant: nothing is changed and nothing is started; what is written, to time the disk, is removed. Each finding says
what was found, and of what is not right what to do. A finding is `mend` where something would fail or lose data, and
`note` where it may be meant.

Flow: `doctor_machine` and, for a model folder, `doctor_model` -> findings, one after the other -> a table, or lines of
JSON; exit code 1 if something is to be mended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gym_capture.commands import doctor_machine as machine
from gym_capture.commands.doctor_machine import Finding
from gym_capture.printable import printable
from gym_capture.stores import DEFAULT_DIRECTORY

_COLORS: Final = {"ok": "green", "note": "yellow", "mend": "bold red"}


def command(
    records: Annotated[
        Path,
        typer.Option(
            help="Where the graph is to keep its records: its `state.directory`.",
            default_factory=DEFAULT_DIRECTORY.expanduser,
            show_default=str(DEFAULT_DIRECTORY),
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="A model folder, or smollm2 or tiny: its files, template and parsers, too.")
    ] = None,
    tool_parser: Annotated[str | None, typer.Option(help="The tool parser that the graph is to have.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="Its reasoning parser.")] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="The graph's secret file.", envvar="GYM_CAPTURE_SECRET_FILE")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the graph is to listen.")] = 8000,
    ray_address: Annotated[
        str | None, typer.Option(help="Also whether the Ray cluster there answers.", envvar="RAY_ADDRESS")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Check this machine for a graph: versions, GPU, ports, disk, secrets, limits, Ray's environment; and a model.

    Exits with 1 if something is to be mended.
    """
    checks: tuple[Iterable[Finding], ...] = (
        machine.versions(),
        machine.accelerator(),
        machine.processes(),
        machine.ray_environment(),
        machine.proxy(),
        machine.cluster(ray_address),
        machine.listening(port),
        machine.disk(records),
        machine.secret(secret_file),
        () if model is None else _of_model(model, tool_parser, reasoning_parser),
    )
    findings = (finding for check in checks for finding in check)
    worst = set()
    table = Table(title="gym-capture doctor", title_justify="left")
    for column in ("", "what", "found, and what to do"):
        table.add_column(column)
    for finding in findings:
        worst.add(finding.state)
        if as_json:
            typer.echo(json.dumps(finding._asdict()))
        else:
            todo = f"\n[{_COLORS[finding.state]}]{escape(printable(finding.todo))}[/]" if finding.todo else ""
            table.add_row(
                f"[{_COLORS[finding.state]}]{finding.state}[/]", finding.what, escape(printable(finding.found)) + todo
            )
    if not as_json:
        Console(soft_wrap=not Console().is_terminal, highlight=False).print(table)
    if "mend" in worst:
        raise typer.Exit(1)


def _of_model(model: str, tool_parser: str | None, reasoning_parser: str | None) -> Iterator[Finding]:
    from gym_capture.commands.doctor_model import check_model  # loads tokenizers

    yield from check_model(model, tool_parser, reasoning_parser)
