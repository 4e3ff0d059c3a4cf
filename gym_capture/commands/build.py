"""`gym-capture build`: from a directory of captured token records to Parquet files of trajectories.

Invariant: the command adds nothing to what `data.directory` does; it only reads options and shows an account.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture.builder import BuildOptions
from gym_capture.commands.explain import HINT
from gym_capture.data.directory import build_directory
from gym_capture.data.report import BuildReport
from gym_capture.data.requests import read_requests
from gym_capture.side_calls import SideCallRules


def command(
    source: Annotated[
        Path, typer.Argument(help="Directory of <rollout>.tokens.jsonl files.", exists=True, file_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Directory for the Parquet files; made if it is not there.")],
    delivery: Annotated[
        Literal["main_chain", "all_chains"],
        typer.Option(help="The chain of calls that generated most, or every chain."),
    ] = "main_chain",
    strategy: Annotated[
        Literal["prefix_merging", "per_request"],
        typer.Option(help="One sequence for each chain of calls, or one for each call."),
    ] = "prefix_merging",
    rollouts: Annotated[
        Path | None,
        typer.Option(
            help="Which rollouts to build, one a line: rollout_id, group_id, reward. Without it, all of them, each its "
            "own group and without a reward.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    side_model: Annotated[
        list[str] | None, typer.Option(help="Shell pattern of requested models that are side calls; may be repeated.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Whether requested models other than the one that generated most are side calls.")
    ] = True,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Mask rollouts with ids from here on.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one for each CPU.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace trajectories that are there.")] = False,
) -> None:
    """Build trajectories from a directory of token captures, as NeMo Gym writes them.

    Writes OUT/part-*.parquet and OUT/_report.json. What could not be proven is masked, with its reasons, not dropped.
    """
    options = BuildOptions(
        strategy=strategy,
        delivery=delivery,
        side_calls=SideCallRules(model_patterns=tuple(side_model or ()), self_calibrate=calibrate),
        vocab_size=vocab_size,
    )
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    requests = None
    if rollouts is not None:
        read = read_requests(rollouts)
        requests = read.table
        if read.cut_lines:
            stderr.print(f"[yellow]warning:[/] the last line of {escape(str(rollouts))} was cut off and is left out")
    columns = (TextColumn("building"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
    with progress:
        bar = progress.add_task("rollouts", total=None)
        built = build_directory(
            source,
            out=out,
            options=options,
            requests=requests,
            workers=workers,
            overwrite=overwrite,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if not built.requested:
        why = "the list of rollouts is empty" if rollouts else "it holds no files named <rollout id>.tokens.jsonl"
        stderr.print(f"[yellow]warning:[/] nothing to build in {escape(str(source))}: {why}; wrote a file without rows")
    Console(soft_wrap=True, highlight=False).print(summary_table(built, out))
    if built.mask_reasons:
        stderr.print(HINT)


def summary_table(built: BuildReport, out: Path) -> Table:
    """The account of a build, for people."""
    table = Table(title=f"trajectories in {out}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("rollouts", f"{built.requested:,}")
    table.add_row("  to train on", f"{built.complete:,}")
    table.add_row("  masked", f"{len(built.incomplete):,}")
    table.add_row("  without any record", f"{len(built.missing):,}")
    table.add_row("trajectories", f"{built.trajectories:,}")
    table.add_row("token ids", f"{built.token_ids:,}")
    captured, delivered = built.generated_tokens_captured, built.generated_tokens_delivered
    share = f" ({delivered / captured:.1%})" if captured else ""
    table.add_row("generated ids captured", f"{captured:,}")
    table.add_row("generated ids delivered", f"{delivered:,}{share}")
    for reason, count in built.mask_reasons.items():
        table.add_row(f"masked: {reason}", f"{count:,}")
    if built.mixed_prompt_groups:
        table.add_row("groups of different first prompts", f"{len(built.mixed_prompt_groups):,}")
    return table
