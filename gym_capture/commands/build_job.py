"""`gym-capture build-job`: finished rollouts into Parquet, in parallel on Ray.

Invariant: records are dropped only after every trajectory is written, and only those that were consumed.

Flow: the rollouts of a job -> the records of the running graph, or of the directory that a stopped one left -> the
Ray Data job under a progress bar -> a table of what became of the rollouts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture.commands.explain import HINT
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.data.job import SourceSpec
    from gym_capture.data.report import BuildReport


_DETAILS = 10
"""Rollouts of which it is printed what is wrong with their records."""


class Strategy(StrEnum):
    """How calls become sequences."""

    PREFIX_MERGING = "prefix_merging"
    PER_REQUEST = "per_request"


class Delivery(StrEnum):
    """Which chains of calls are delivered."""

    MAIN_CHAIN = "main_chain"
    ALL_CHAINS = "all_chains"


class AdvantageScale(StrEnum):
    """What a group's centered rewards are divided by."""

    NONE = "none"
    POPULATION_STD = "population_std"
    SAMPLE_STD = "sample_std"


def command(
    rollouts: Annotated[Path, typer.Argument(help="Rollouts, one JSON object a line, as a rollout job writes them.")],
    out: Annotated[str, typer.Option(help="Directory, or URI of one, for the Parquet files; all nodes write to it.")],
    records: Annotated[
        Path | None,
        typer.Option(help="Records that a stopped graph left. By default: of the running one.", file_okay=False),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Ray namespace of the running graph's state.")] = "gym-capture",
    strategy: Annotated[Strategy, typer.Option()] = Strategy.PREFIX_MERGING,
    delivery: Annotated[Delivery, typer.Option()] = Delivery.MAIN_CHAIN,
    scale: Annotated[AdvantageScale, typer.Option()] = AdvantageScale.POPULATION_STD,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; by default what has room.")] = None,
    worker_cpus: Annotated[float, typer.Option(min=0.0, help="Logical CPUs that a worker takes up.")] = 1.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove trajectories that OUT holds already.")] = False,
    drop_consumed: Annotated[bool, typer.Option("--retire", help="Drop the records that were consumed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Build trajectories of finished rollouts, with rewards and group advantages, as Parquet.

    Exits with 1 if there are rollouts and not a single one can be trained on.
    """
    import ray

    from gym_capture.builder import BuildOptions
    from gym_capture.data import job
    from gym_capture.data.requests import read_requests

    console = Console(stderr=True)
    requests = read_requests(rollouts)
    if requests.cut_lines:
        console.print(f"[yellow]the last line of {rollouts} was cut off in writing and is left out[/]")
    ray.init(log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    options = job.JobOptions(
        build=BuildOptions(strategy=strategy.value, delivery=delivery.value),
        scale=scale.value,
        workers=workers,
        worker_cpus=worker_cpus,
    )
    with _source(records, namespace) as source, _progress(console) as progress:
        bar = progress.add_task("rollouts", total=requests.table.num_rows)
        report = job.write_trajectories(
            requests.table,
            source=source,
            out=out,
            options=options,
            overwrite=overwrite,
            on_progress=lambda done: progress.update(bar, completed=done),
        )
        changed = asyncio.run(job.retire(source, report)) if drop_consumed else ()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        Console().print(report_table(report))
        if report.mask_reasons or report.excluded_tokens:
            console.print(HINT, soft_wrap=True)
    for rollout_id in changed:
        console.print(f"[yellow]{rollout_id} has changed since it was built and is kept[/]")
    for rollout_id, details in itertools.islice(report.details.items(), _DETAILS):
        console.print(f"[yellow]{rollout_id}: {escape('; '.join(details))}[/]", soft_wrap=True)
    if len(report.details) > _DETAILS:
        console.print(f"[yellow]... and {len(report.details) - _DETAILS} more: `details` in {job.REPORT_FILE}[/]")
    if report.requested and not report.complete:
        raise typer.Exit(1)


@contextmanager
def _source(records: Path | None, namespace: str) -> Iterator[SourceSpec]:
    from gym_capture.data.job import SourceSpec
    from gym_capture.data.log_source import opened_logs
    from gym_capture.serving.state import connect

    if records is None:
        connect(namespace=namespace)  # if there is none, that is known before anything is started or written
        yield SourceSpec(import_path="gym_capture.serving.state:connect", kwargs={"namespace": namespace})
        return
    if not records.is_dir():
        raise ConfigError(f"{records} is not a directory")
    with opened_logs(records) as source:
        yield source


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def report_table(report: BuildReport) -> Table:
    """What a person wants to know of a build."""
    table = Table(show_header=False, box=None)
    table.add_row("rollouts", f"{report.requested}")
    table.add_row("  complete", f"{report.complete}")
    table.add_row("  incomplete (masked)", f"{len(report.incomplete)}")
    table.add_row("  missing", f"{len(report.missing)}")
    for reason, count in report.mask_reasons.items():
        table.add_row(f"    {reason}", f"{count}")
    table.add_row("groups", f"{report.groups}")
    table.add_row("trajectories", f"{report.trajectories}")
    table.add_row("ids", f"{report.token_ids}")
    share = report.generated_tokens_delivered / max(report.generated_tokens_captured, 1)
    table.add_row(
        "generated ids delivered",
        f"{report.generated_tokens_delivered} of {report.generated_tokens_captured} ({share:.1%})",
    )
    for reason, count in report.excluded_tokens.items():
        table.add_row(f"  {reason}", f"{count}")
    if report.mixed_prompt_groups:
        table.add_row("[yellow]groups with several first prompts", f"[yellow]{len(report.mixed_prompt_groups)}")
    return table
