"""`gym-capture records`: what a graph has recorded - listed, verified, exported.

Invariant: nothing is changed and no lock is taken, so all of it is safe while the graph runs. The records of one
rollout are in memory at a time. What the graph consumes or clears meanwhile is left out, and counted.

Flow: the log directories that a path names -> `stores.inspect` or `stores.verify` for each -> a table, lines for
other programs, or the files of `data.record_files`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture.capture.records import Snapshot
from gym_capture.errors import ConfigError, CorruptLogError, StoreUnavailableError
from gym_capture.printable import visible
from gym_capture.reasons import reason_name
from gym_capture.stores import DEFAULT_DIRECTORY
from gym_capture.stores.inspect import LogReport, read_snapshots, scan
from gym_capture.stores.verify import Verification, verify

app = typer.Typer(no_args_is_help=True)

Directory = Annotated[
    Path,
    typer.Argument(
        help="The graph's `state.directory`, or one shard of it.",
        exists=True,
        file_okay=False,
        readable=True,
        default_factory=DEFAULT_DIRECTORY.expanduser,
        show_default=str(DEFAULT_DIRECTORY),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]

_SHARD: Final = re.compile(r"shard-\d+")
_SEGMENT: Final = re.compile(r"segment-\d+\.log")
_ATTEMPTS: Final = 5
_ANY_WIDTH: Final = 100_000


@dataclass(frozen=True, slots=True)
class _Log:
    """A log directory, and what was found in it at first."""

    directory: Path
    report: LogReport


@app.callback()
def group() -> None:
    """List, verify and export the records that a graph keeps, also while it runs."""


@app.command("list")
def list_(directory: Directory, as_json: AsJson = False) -> None:
    """List the live rollouts: id, calls, generated ids, version, what masks them, and when their last call ended.

    On a terminal a table; in a pipe or a file these columns, named in the first line, with tabs between. Totals go to
    stderr.
    """
    logs = scan_logs(directory)
    total = sum(len(log.report.rollouts) for log in logs)
    on_terminal = Console().is_terminal
    table = Table()
    columns = ("rollout", "calls", "generated ids", "version", "incomplete", "problems", "last call")
    if not (as_json or on_terminal):
        typer.echo("\t".join(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in ("calls", "generated ids", "version") else "left")
    flawed: str | None = None
    for snapshot in _with_progress(live_snapshots(logs), total, "reading"):
        row = _row(snapshot)
        flawed = flawed or (snapshot.rollout_id if snapshot.incomplete or snapshot.problems else None)
        numbers = [row[name] for name in ("calls", "generated_ids", "version")]
        reasons = [_counted(snapshot.incomplete), _counted(problem.reason for problem in snapshot.problems)]
        reasons.append(_time(row["last_call_at"]))
        if as_json:
            typer.echo(json.dumps(row))
        elif on_terminal:
            table.add_row(row["rollout_id"], *(f"{number:,}" for number in numbers), *map(escape, reasons))
        else:
            typer.echo("\t".join([row["rollout_id"], *map(str, numbers), *reasons]))
    if as_json:
        return
    if on_terminal:
        _print_whole(table)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    consumed = sum(len(log.report.consumed) for log in logs)
    size = sum(log.report.size_bytes for log in logs)
    kept = f", {consumed:,} consumed and kept" if consumed else ""
    console.print(f"{total:,} rollouts{kept}; {_logs(len(logs))}, {size / 2**20:,.1f} MiB")
    if flawed is not None:
        console.print(escape(f"`gym-capture inspect {flawed} {directory}` says what is amiss with that one"))
    if not all(log.report.is_sound for log in logs):
        console.print(f"[bold red]damaged:[/] `gym-capture records verify {escape(str(directory))}` says where")


@app.command("verify")
def verify_(directory: Directory, as_json: AsJson = False) -> None:
    """Check every byte: checksums, versions, and that each record can be read.

    Exits with 1 if anything is not as this version leaves it. A write that is under way is no finding.
    """
    console = Console(soft_wrap=True, highlight=False)
    logs = log_directories(directory)
    sound = True
    for path in logs:
        found = verify(path)
        sound = sound and found.is_sound
        if as_json:
            typer.echo(json.dumps({"log": str(path), "is_sound": found.is_sound} | asdict(found)))
        else:
            _print_verification(console, path, found)
    if not sound:
        raise typer.Exit(1)


@app.command("export")
def export(
    directory: Directory,
    out: Annotated[Path, typer.Option(help="Directory for the files; made if it is not there.")],
    format_: Annotated[
        Literal["nemo-gym", "parquet", "jsonl"],
        typer.Option(
            "--format",
            help="nemo-gym: token files that NeMo Gym and `gym-capture build` read. parquet, jsonl: a row for each "
            "call and one for each rollout.",
        ),
    ] = "nemo-gym",
    rollouts: Annotated[
        list[str] | None,
        typer.Option("--rollout", help="Ids of rollouts, comma-separated; may be repeated. By default all."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that OUT holds already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write live rollouts as files. Prompts are written without the ids that the call before holds."""
    from gym_capture.data.record_files import open_files

    logs = scan_logs(directory)
    wanted = _wanted(logs, rollouts)
    counts: Counter[str] = Counter()
    with open_files(format_, out, overwrite=overwrite) as files:
        for snapshot in _with_progress(live_snapshots(logs, wanted), len(wanted), "exporting"):
            files.add(snapshot)
            row = _row(snapshot)
            counts.update({name: row[name] for name in ("calls", "generated_ids")})
            counts.update(rollouts=1, masked=bool(snapshot.incomplete or snapshot.problems))
    gone = len(wanted) - counts["rollouts"]
    if as_json:
        counted = {name: counts[name] for name in ("rollouts", "masked", "calls", "generated_ids")}
        typer.echo(json.dumps({"out": str(out), **counted, "gone": gone}))
        return
    console = Console(soft_wrap=True, highlight=False)
    masked = f" ({counts['masked']:,} of them incomplete or with problems)" if counts["masked"] else ""
    console.print(
        f"{counts['rollouts']:,} rollouts{masked}, {counts['calls']:,} calls, {counts['generated_ids']:,} generated "
        f"ids in {escape(str(out))}"
    )
    if gone:
        console.print(f"[yellow]warning:[/] {gone:,} rollouts were consumed or cleared meanwhile and are left out")


def log_directories(directory: Path) -> list[Path]:
    """The logs in a state directory, or the one that the directory itself is. Raises `ConfigError` if there is none."""
    found = [path for path in (directory, *sorted(directory.glob("*/"))) if _is_log(path)]
    if not found:
        raise ConfigError(
            f"{directory} is not a log: it holds neither segments (segment-*.log) nor shards (shard-*); name the "
            "graph's `state.directory`"
        )
    return found


def _is_log(path: Path) -> bool:
    if _SHARD.fullmatch(path.name):
        return True  # also one to which nothing was recorded yet
    try:
        return any(_SEGMENT.fullmatch(each.name) for each in path.iterdir())
    except PermissionError:
        return False


def scan_logs(directory: Path) -> list[_Log]:
    logs = []
    for path in log_directories(directory):
        try:
            logs.append(_Log(path, scan(path)))
        except CorruptLogError as error:
            raise ConfigError(f"{path}: {error.message}") from None
    return logs


def live_snapshots(logs: Sequence[_Log], wanted: Iterable[str] | None = None) -> Iterator[Snapshot]:
    """The live rollouts, or those of them that are wanted. Those that go away meanwhile are left out."""
    chosen = None if wanted is None else set(wanted)
    for log in logs:
        left = {rollout.rollout_id for rollout in log.report.rollouts}
        left = left if chosen is None else left & chosen
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                for snapshot in read_snapshots(log.directory, rollout_ids=left):
                    left = left - {snapshot.rollout_id}
                    yield snapshot
                break
            except StoreUnavailableError:
                # Compaction deleted a segment: what is left stands elsewhere now.
                if attempt == _ATTEMPTS:
                    raise


def _wanted(logs: Sequence[_Log], rollouts: list[str] | None) -> list[str]:
    logs_of: dict[str, list[Path]] = {}
    for log in logs:
        for rollout in log.report.rollouts:
            logs_of.setdefault(rollout.rollout_id, []).append(log.directory)
    there = list(logs_of)
    wanted = there if rollouts is None else _named(logs, rollouts, there)
    for rollout_id in wanted:
        if len(logs_of[rollout_id]) > 1:
            first, second, *_ = logs_of[rollout_id]
            raise ConfigError(
                f"{rollout_id!r} is in two logs, {first} and {second}, and would be written twice (was the number of "
                "shards changed?): export one log at a time"
            )
    return wanted


def _named(logs: Sequence[_Log], rollouts: list[str], there: list[str]) -> list[str]:
    wanted = list(dict.fromkeys(name.strip() for names in rollouts for name in names.split(",") if name.strip()))
    missing = sorted(set(wanted) - set(there))
    if missing:
        near = get_close_matches(missing[0], there, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if any(missing[0] in log.report.consumed for log in logs):
            hint = "it was consumed. "
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ConfigError(f"no such rollout: {missing[0]!r}{more}; {hint}`gym-capture records list` names all")
    return wanted


def _with_progress(snapshots: Iterator[Snapshot], total: int, what: str) -> Iterator[Snapshot]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        for snapshot in snapshots:
            yield snapshot
            progress.advance(bar)


def _row(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "rollout_id": snapshot.rollout_id,
        "calls": len(snapshot.records),
        "generated_ids": sum(int(entry.generation_token_ids.size) for entry in snapshot.records),
        "version": snapshot.version,
        "incomplete": snapshot.incomplete,
        "problems": [asdict(problem) for problem in snapshot.problems],
        "last_call_at": max((entry.created_at for entry in snapshot.records), default=0.0) or None,
    }


def _print_whole(table: Table) -> None:
    """As wide as its contents: in a narrow terminal lines wrap, where a table made to fit would cut ids short."""
    console = Console()
    widest = console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum
    Console(width=max(widest, console.width), soft_wrap=True, highlight=False).print(table)


def _counted(reasons: Iterable[str]) -> str:
    """Names of reasons, without what they are about."""
    counts = Counter(map(reason_name, reasons))
    return visible(", ".join(name if count == 1 else f"{name} {count}x" for name, count in counts.items()))


def _time(unix_s: float | None) -> str:
    return "" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat(sep=" ", timespec="seconds")


def _logs(count: int) -> str:
    return "1 log" if count == 1 else f"{count} logs"


def _print_verification(console: Console, path: Path, found: Verification) -> None:
    mark = "[green]sound[/]  " if found.is_sound else "[bold red]damaged[/]"
    console.print(
        f"{mark} {escape(str(path))}: {found.segments:,} segments, {found.records:,} records, "
        f"{found.size_bytes / 2**20:,.1f} MiB"
    )
    for finding in found.findings:
        whose = [f"rollout {finding.rollout_id}"] if finding.rollout_id else []
        whose += [f"call {finding.call_id}"] if finding.call_id else []
        of = f" ({', '.join(whose)})" if whose else ""
        where = f"segment {finding.segment}, bytes {finding.start:,} to {finding.end:,}"
        console.print(escape(visible(f"    {finding.kind}: {where}: {finding.detail}{of}")))
    if found.masked_rollouts:
        shown = ", ".join(found.masked_rollouts[:10])
        more = f" and {len(found.masked_rollouts) - 10:,} more" if len(found.masked_rollouts) > 10 else ""
        console.print(f"    masks {len(found.masked_rollouts):,} rollouts: {escape(shown)}{more}")
