"""Common to `build` and `build-job`: the list of rollouts, the progress bar, the account, the exit code.

Invariant: of any build, with Ray or without, a person reads the same account under the same names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture.build.builder import BuildOptions
from gym_capture.build.side_calls import SideCallRules
from gym_capture.commands.explain import HINT
from gym_capture.printable import visible
from gym_capture.reasons import ProblemReason

if TYPE_CHECKING:
    import pyarrow as pa

    from gym_capture.data.report import BuildReport

Delivery = Annotated[
    Literal["main_chain", "all_chains"],
    typer.Option(help="The chain of calls that generated most, or every chain."),
]
Strategy = Annotated[
    Literal["prefix_merging", "per_request"],
    typer.Option(help="One sequence for each chain of calls, or one for each call."),
]
Scale = Annotated[
    Literal["none", "population_std", "sample_std", "leave_one_out"],
    typer.Option(help="What a group's centered rewards are divided by."),
]
SideModel = Annotated[
    list[str] | None, typer.Option(help="Shell pattern of requested models that are side calls; may be repeated.")
]
Calibrate = Annotated[
    bool, typer.Option(help="Whether requested models other than the one that generated most are side calls.")
]
VocabSize = Annotated[int | None, typer.Option(min=1, help="Mask rollouts with ids from here on.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace trajectories that are there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

DETAILS: Final = 10
"""Rollouts of which it is printed what is wrong with their records."""
_DETAILS_EACH: Final = 1


def options(
    *,
    strategy: Literal["prefix_merging", "per_request"],
    delivery: Literal["main_chain", "all_chains"],
    side_model: list[str] | None,
    calibrate: bool,
    vocab_size: int | None,
) -> BuildOptions:
    """What the options of a command say of a build."""
    return BuildOptions(
        delivery=delivery,
        strategy=strategy,
        side_calls=SideCallRules(model_patterns=tuple(side_model or ()), self_calibrate=calibrate),
        vocab_size=vocab_size,
    )


def listed_rollouts(path: Path, console: Console) -> pa.Table:
    """The rollouts of a file, as `requests.read_requests` reads them."""
    from gym_capture.data.requests import read_requests

    read = read_requests(path)
    if read.cut_lines:
        _warn(console, f"the last line of {path} was cut off in writing and is left out")
    return read.table


@contextmanager
def progress_bar(console: Console, doing: str = "building") -> Iterator[Callable[[int, int], None]]:
    """A bar that shows how much is done, and of how much."""
    spinner = SpinnerColumn(finished_text="[green]✓")
    columns = (spinner, TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("rollouts", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def warn_of_left(console: Console, out: str | Path) -> Callable[[tuple[str, ...]], None]:
    """Names hidden directories in `out` that nobody can tell to be of a build that still runs."""

    def warn(names: tuple[str, ...]) -> None:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        _warn(console, f"{out} holds {shown}, of builds that were killed or still run: remove them once none runs")

    return warn


def show(
    built: BuildReport, out: str | Path, *, as_json: bool, console: Console, look: str | Path | None = None
) -> None:
    """Prints the account of a build, and what is wrong with records. Exits with 1 if nothing at all could be built.

    `look`: where a rollout can be looked into; None: what was built.
    """
    look = out if look is None else look
    if as_json:
        typer.echo(json.dumps(asdict(built), indent=2))
    else:
        Console(soft_wrap=True, highlight=False).print(account(built, out))
        if built.mask_reasons:
            console.print(escape(visible(f"{look_into(built, look)}; {HINT}")), soft_wrap=True)
    for rollout_id, details in itertools.islice(built.details.items(), DETAILS):
        _warn(console, f"{rollout_id}: {'; '.join(_distinct(details))}")
    if len(built.details) > DETAILS:
        _warn(console, f"... and {len(built.details) - DETAILS} more: `details` in _report.json")
    failed = built.mask_reasons.get(ProblemReason.BUILD_FAILED, 0)
    if failed and failed == built.requested - len(built.missing):
        console.print(
            f"[bold red]error:[/] not one of {failed} rollouts could be built: `details` in "
            f"{escape(str(out))}/_report.json say what went wrong",
            soft_wrap=True,
        )
        raise typer.Exit(1)


def look_into(built: BuildReport, look: str | Path) -> str:
    """The command that says of one of the masked rollouts why it is masked. `look`: where it can be looked into."""
    example = next(iter(built.mask_examples.values()))[0]
    return f"`gym-capture inspect {example} {look}` says why that one is masked"


def _distinct(details: Sequence[str]) -> list[str]:
    """A file that is damaged is wrong in every line of it."""
    shown = list(dict.fromkeys(details))
    return (
        shown if len(shown) <= _DETAILS_EACH else [*shown[:_DETAILS_EACH], f"... and {len(shown) - _DETAILS_EACH} more"]
    )


def account(built: BuildReport, out: str | Path) -> Table:
    """The account of a build, for a person."""
    table = Table(title=f"trajectories in {escape(str(out))}", title_justify="left", show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim", no_wrap=True)
    table.add_row("rollouts", f"{built.requested:,}")
    table.add_row("  to train on", f"{built.complete:,}")
    table.add_row("  masked", f"{len(built.incomplete):,}")
    table.add_row("  missing", f"{len(built.missing):,}")
    for reason, count in built.mask_reasons.items():
        examples = built.mask_examples[reason]
        named = ", ".join(examples) + ", ..." * (count > len(examples))
        table.add_row(f"    masked: {escape(visible(reason))}", f"{count:,}", escape(visible(named)))
    if built.truncated:
        table.add_row("  outgrew the context", f"{built.truncated:,}")
    table.add_row("groups", f"{built.groups:,}")
    table.add_row("trajectories", f"{built.trajectories:,}")
    table.add_row("token ids", f"{built.token_ids:,}")
    captured, delivered = built.generated_tokens_captured, built.generated_tokens_delivered
    share = f" ({delivered / captured:.1%})" if captured else ""
    table.add_row("generated ids captured", f"{captured:,}")
    table.add_row("generated ids delivered", f"{delivered:,}{share}")
    for reason, count in built.excluded_tokens.items():
        table.add_row(f"  {reason}", f"{count:,}")
    if built.mixed_prompt_groups:
        table.add_row("[yellow]groups of several first prompts", f"[yellow]{len(built.mixed_prompt_groups):,}")
    return table


def _warn(console: Console, message: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(visible(message))}", soft_wrap=True, highlight=False)
