"""`gym-capture export`: built trajectories into the files that a trainer reads.

Invariant: it reads what a build wrote and nothing else: neither records nor a graph need be there any more.

Flow: the exporter that `--to` names -> `trainer_bridge.exporter.export_files` under a progress bar -> one line of what
was exported.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.building import progress_bar
from gym_capture.errors import ConfigError
from trainer_bridge.exporter import EXPORTERS, Exporter, ExportReport, export_files
from trainer_bridge.samples import Delivery

_NAMES = ", ".join(exporter.name for exporter in EXPORTERS)


def command(
    data: Annotated[str, typer.Argument(help="Directory, or URI of one, that build or build-job wrote.")],
    to: Annotated[str, typer.Option(help=f"The trainer: {_NAMES}.")],
    out: Annotated[str, typer.Option(help="Directory, or URI of one, for the trainer's files.")],
    agent: Annotated[
        str | None, typer.Option(help="Name of the agent that played the rollouts which do not say who did.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the account as JSON.")] = False,
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
    for text in _said(report.delivery):
        console.print(f"[yellow]warning:[/] {escape(text)}")
    if report.without_input and exporter.name == "nemo-rl":
        console.print(
            f"[yellow]warning:[/] of {report.without_input:,} rollouts nobody said what the agent was given (`input` "
            "in the list of rollouts): what is exported has the ids of their prompts, not the text"
        )
    if as_json:
        typer.echo(json.dumps(_account(exporter.name, out, report)))
        return
    typer.echo(
        f"{report.rollouts:,} rollouts in {report.groups:,} groups for {exporter.name}, {report.masked:,} of them "
        f"masked: {report.delivery.rows:,} rows, {report.delivery.trained_tokens:,} ids to train on: {out}"
    )


def _account(trainer: str, out: str, report: ExportReport) -> dict[str, object]:
    delivery = report.delivery
    return {
        "to": trainer,
        "out": out,
        "rollouts": report.rollouts,
        "groups": report.groups,
        "masked": report.masked,
        "without_input": report.without_input,
        "rows": delivery.rows,
        "trained_tokens": delivery.trained_tokens,
        "split_rollouts": delivery.split_rollouts,
        "other_chains": delivery.other_chains,
        "tokens_of_other_chains": delivery.tokens_of_other_chains,
        "unknown_log_probs": delivery.unknown_log_probs,
        "reshaped": delivery.reshaped,
        "left_out": dict(delivery.left_out),
        "temperatures": sorted(delivery.temperatures),
    }


def _said(delivery: Delivery) -> Iterator[str]:
    """What of the data the trainer does not get as it is."""
    for reason, count in sorted(delivery.left_out.items()):
        yield f"left out {count:,} rollouts: {reason} (gym-capture explain {reason})"
    if delivery.other_chains:
        yield (
            f"this trainer takes one trajectory of a rollout: {delivery.other_chains:,} others, with "
            f"{delivery.tokens_of_other_chains:,} ids to train on, are not in the export"
        )
    if delivery.split_rollouts:
        yield (
            f"{delivery.split_rollouts:,} rollouts have several rows: a loss that averages over rows weighs them more, "
            "one that averages over ids does not"
        )
    if delivery.unknown_log_probs:
        yield f"{delivery.unknown_log_probs:,} sampled ids have no log probability on record, and are not trained"
    if delivery.temperatures - {1.0}:
        found = ", ".join(f"{value:g}" for value in sorted(delivery.temperatures))
        yield f"ids were sampled at temperature {found}: set the trainer's temperature to it"
    if delivery.reshaped:
        yield (
            f"ids of {delivery.reshaped:,} rows were sampled with top-p, top-k, penalties or constraints: the "
            "trainer's probabilities are of another distribution"
        )


def _named(name: str) -> Exporter:
    for exporter in EXPORTERS:
        if exporter.name == name:
            return exporter
    raise ConfigError(f"--to {name}: there is no such exporter; there are: {_NAMES}")
