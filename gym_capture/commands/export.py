"""`gym-capture export`: built trajectories into the files that a trainer reads.

Invariant: it reads what a build wrote and nothing else: neither records nor a graph need be there any more.

Flow: the exporter that `--to` names -> `trainer_bridge.exporter.export_files` under a progress bar -> one line of what
was exported.
"""

from __future__ import annotations

import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.building import progress_bar
from gym_capture.errors import ConfigError
from trainer_bridge.exporter import EXPORTERS, Exporter, export_files

_NAMES = ", ".join(exporter.name for exporter in EXPORTERS)


def command(
    data: Annotated[str, typer.Argument(help="Directory, or URI of one, that build or build-job wrote.")],
    to: Annotated[str, typer.Option(help=f"The trainer: {_NAMES}.")],
    out: Annotated[str, typer.Option(help="Directory, or URI of one, for the trainer's files.")],
    agent: Annotated[
        str | None, typer.Option(help="Name of the agent that played the rollouts which do not say who did.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Export built trajectories to a trainer: whole groups, masked rollouts among them and marked as such."""
    exporter = _named(to)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with warnings.catch_warnings(record=True) as caught, progress_bar(console, "exporting") as on_progress:
        warnings.simplefilter("always")
        report = export_files(exporter, data, out=out, agent_name=agent, overwrite=overwrite, on_progress=on_progress)
    for warning in caught[:1]:
        more = f" (and so {len(caught) - 1} more)" if len(caught) > 1 else ""
        console.print(f"[yellow]warning:[/] {escape(str(warning.message))}{more}")
    if report.without_input:
        console.print(
            f"[yellow]warning:[/] of {report.without_input:,} rollouts nobody said what the agent was given (`input` "
            "in the list of rollouts): what is exported has the ids of their prompts, not the text"
        )
    typer.echo(
        f"{report.rollouts:,} rollouts in {report.groups:,} groups for {exporter.name}, {report.masked:,} of them "
        f"masked: {out}"
    )


def _named(name: str) -> Exporter:
    for exporter in EXPORTERS:
        if exporter.name == name:
            return exporter
    raise ConfigError(f"--to {name}: there is no such exporter; there are: {_NAMES}")
