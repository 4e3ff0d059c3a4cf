"""`gym-capture build`: from a directory of captured token records to Parquet files of trajectories.

Invariant: every rollout of the directory gets at least one row, however bad its files are, and the same directory
gives the same files with any number of workers. A worker has one rollout in memory at a time.

Flow: the rollouts of the directory, or those that `--rollouts` names with their groups and rewards -> parts of fixed
size -> each part, in a process of the pool, is read, built and written as one file -> `_report.json` and a table.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture.builder import BuildOptions, build
from gym_capture.data.groups import RolloutSummary, build_group, summarize
from gym_capture.data.nemo_gym import read_rollout, rollout_ids
from gym_capture.data.report import BuildReport, report
from gym_capture.data.requests import Request, check_requests, groups_of, read_requests, split_into_parts
from gym_capture.data.schema import SCHEMA, rows, to_table
from gym_capture.errors import ConfigError, StoreError
from gym_capture.records import RecordProblem, Snapshot
from gym_capture.side_calls import SideCallRules

REPORT_FILE: Final = "_report.json"

_ROLLOUTS_PER_PART: Final = 64
_ROW_GROUP_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one task reads, builds and writes."""

    number: int
    rollout_ids: tuple[str, ...] = ()
    """Rollouts of which nothing but the records is known: each its own group, without a reward."""
    groups: tuple[tuple[Request, ...], ...] = ()
    """Rollouts with groups and rewards."""


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
    progress = Progress(
        TextColumn("building"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=stderr, transient=True
    )
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
    Console(soft_wrap=True, highlight=False).print(summary_table(built, out))


def build_directory(
    source: Path,
    *,
    out: Path,
    options: BuildOptions,
    requests: pa.Table | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> BuildReport:
    """Builds the captures in `source` and writes `part-<number>.parquet` files of `schema.SCHEMA` into `out`.

    `requests`: which rollouts, with their groups and rewards (`requests.REQUEST_SCHEMA`); None: all there are, each
    its own group and without a reward. `on_progress` gets the number of rollouts that are written, and of all. Raises
    `ConfigError` if there is nothing to build or `out` holds trajectories already, `RecordError` for wrong `requests`,
    `StoreError` if `source` cannot be listed or a worker died.
    """
    parts = _parts_of_directory(source) if requests is None else _parts_of_requests(requests)
    total = sum(len(part.rollout_ids) + sum(map(len, part.groups)) for part in parts)
    _make_room(out, overwrite=overwrite)
    summaries: list[RolloutSummary] = []
    write = partial(_write_part, source=source, out=out, options=options)
    for part_summaries in _run(write, parts, workers or os.cpu_count() or 1):
        summaries += part_summaries
        on_progress(len(summaries), total)
    built = report((summary.rollout_id for summary in summaries), summaries)
    (out / REPORT_FILE).write_text(json.dumps(asdict(built), indent=2) + "\n", encoding="utf-8")
    return built


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


# --- parts -----------------------------------------------------------------------------------------------------------


def _parts_of_directory(source: Path) -> list[_Part]:
    found = rollout_ids(source)
    if not found:
        raise ConfigError(f"{source} holds no captures: expected files named <rollout id>.tokens.jsonl")
    return [
        _Part(number=number, rollout_ids=tuple(found[first : first + _ROLLOUTS_PER_PART]))
        for number, first in enumerate(range(0, len(found), _ROLLOUTS_PER_PART))
    ]


def _parts_of_requests(requests: pa.Table) -> list[_Part]:
    tables = split_into_parts(check_requests(requests), rollouts_per_part=_ROLLOUTS_PER_PART)
    if not tables:
        raise ConfigError("there are no rollouts to build: the list of rollouts is empty")
    return [
        _Part(number=number, groups=tuple(tuple(group) for group in groups_of(table)))
        for number, table in enumerate(tables)
    ]


def _run(
    write: Callable[[_Part], list[RolloutSummary]], parts: Sequence[_Part], workers: int
) -> Iterator[list[RolloutSummary]]:
    """The parts in their order. One part is not worth a process."""
    if min(workers, len(parts)) == 1:
        yield from map(write, parts)
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(workers, len(parts)), mp_context=context) as pool:
            yield from pool.map(write, parts)
    except BrokenProcessPool:
        raise StoreError("a worker process died, perhaps for lack of memory: try again with fewer workers") from None


def _write_part(part: _Part, *, source: Path, out: Path, options: BuildOptions) -> list[RolloutSummary]:
    path = out / f"part-{part.number:05d}.parquet"
    unfinished = path.with_name(f".{path.name}.unfinished")
    summaries: list[RolloutSummary] = []
    with pq.ParquetWriter(unfinished, SCHEMA, compression="zstd") as writer:
        waiting: list[pa.Table] = []
        for summary, table in _build_part(part, source, options):
            summaries.append(summary)
            if waiting and sum(each.nbytes for each in (*waiting, table)) > _ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
            waiting.append(table)
        writer.write_table(pa.concat_tables(waiting))
    unfinished.replace(path)
    return summaries


def _build_part(part: _Part, source: Path, options: BuildOptions) -> Iterator[tuple[RolloutSummary, pa.Table]]:
    for rollout_id in part.rollout_ids:
        snapshot = _read(source, rollout_id)
        built = build(snapshot, options)
        request = Request(
            rollout_id=built.rollout_id,
            group_id=built.rollout_id,
            reward=None,
            reward_components=None,
            failure=None,
        )
        table = to_table(rows(built, group_id=request.group_id, reward=None))
        yield summarize(request, snapshot, built, built.mask_reasons), table
    for group in part.groups:
        yield from build_group(group, partial(_read, source), options=options, scale="population_std")


def _read(source: Path, rollout_id: str) -> Snapshot:
    """The snapshot; a rollout whose files cannot be read gets one that says so."""
    try:
        return read_rollout(source, rollout_id)
    except StoreError as error:
        problem = RecordProblem(reason="unreadable", call_id=None, field=None, detail=error.message)
        return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=(), problems=(problem,))


def _make_room(out: Path, *, overwrite: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write trajectories to {out}: {error.strerror}") from None
    present = [*out.glob("part-*.parquet"), *out.glob(REPORT_FILE)]
    if present and not overwrite:
        raise ConfigError(f"{out} already holds trajectories: choose another directory, or pass --overwrite")
    for path in [*present, *out.glob(".part-*.unfinished")]:
        path.unlink()
