"""Runs every benchmark, or those named, one after another: what `make bench` does.

Invariant: each runs in processes of its own, which are all gone before the next begins, so none measures what another
left behind; and each comes to an end - its own, or that of its time. One that fails does not keep the others from
running.

Flow: a benchmark's JSON lines go to stdout as they come -> a table of all of them, with the targets, goes to stderr ->
exit code 1 if a target is missed or a benchmark failed, 130 if it was interrupted.

    python -m benchmarks [--quick] [core files jobs data_job bridge store state mirrored trainer inspector scale ...]

`--quick` is a look at whether all of it runs, with loads too small for the figures to mean much.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gym_capture.demo.processes import Child, ChildProcesses

_POLL_S: Final = 0.5
_STATUS_EVERY_S: Final = 60.0
_WIDTH: Final = 160
"""Of the table in a file."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark, and how long it may take."""

    name: str
    timeout_s: float
    """Some times what it takes on two quiet cores: what takes longer has hung."""
    arguments: Sequence[str] = ()
    quick: Sequence[str] = ()
    """The arguments of a quick run."""

    def command(self, *, quick: bool) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.{self.name}", *(self.quick if quick else self.arguments)]


BENCHMARKS: Final = (
    Benchmark("core", 600),
    Benchmark("files", 900),
    Benchmark("jobs", 600, quick=("--rollouts", "40", "--many", "1200", "--groups", "20")),
    Benchmark("data_job", 3600, quick=("--rollouts", "2000", "--long", "64")),
    Benchmark("bridge", 600, quick=("--groups", "32", "--turns", "1")),
    Benchmark("store", 600),
    Benchmark("state", 1200),
    Benchmark("mirrored", 600),
    Benchmark("trainer", 600, quick=("--rounds", "1")),
    Benchmark("inspector", 900, quick=("--rollouts", "200", "--tokens", "8000")),
    Benchmark("scale", 1200, quick=("--few", "10", "--many", "100", "--calls", "4")),
    Benchmark(
        "serving",
        3600,
        ("--rounds", "2", "--requests", "32"),
        quick=("--model", "tiny", "--rounds", "1", "--requests", "16"),
    ),
    Benchmark(
        "multi_turn",
        3600,
        ("--rounds", "2", "--rollouts", "4"),
        quick=("--model", "tiny", "--rounds", "1", "--rollouts", "2", "--turns", "4"),
    ),
    Benchmark("weights", 1800, quick=("--model", "tiny", "--rounds", "1")),
)


@dataclass(slots=True)
class Outcome:
    """What became of a benchmark."""

    name: str
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    failure: str | None = None
    """Why it is no good although no row says so: it crashed, or ran out of time."""
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.failure is None and all(row.get("ok", True) for row in self.rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small loads: does all of it run?")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(each.name for each in BENCHMARKS)}; default: all")
    options = parser.parse_args(arguments)
    by_name = {each.name: each for each in BENCHMARKS}
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(by_name)}")
    chosen = [by_name[name] for name in options.names] or list(BENCHMARKS)
    # Also where a shell has it ignored, as it does in the background; and a termination unwinds like Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    outcomes: list[Outcome] = []
    try:
        for number, benchmark in enumerate(chosen, start=1):
            outcome = Outcome(benchmark.name)
            outcomes.append(outcome)
            run(
                benchmark.command(quick=options.quick),
                outcome,
                timeout_s=benchmark.timeout_s,
                console=console,
                place=f"{number}/{len(chosen)}",
            )
    except KeyboardInterrupt:
        outcomes[-1].failure = "interrupted"
        _print_table(console, outcomes)
        return 130
    _print_table(console, outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def run(command: Sequence[str], outcome: Outcome, *, timeout_s: float, console: Console, place: str) -> None:
    """Runs one benchmark to its end. However it ends, no process of it is left."""
    began = time.monotonic()
    console.print(f"[bold]{outcome.name}[/] ({place}), at most {timeout_s / 60:.0f} minutes")
    with tempfile.TemporaryDirectory(prefix="gym-capture-bench-log-") as folder:
        log = Path(folder) / "log"
        try:
            with ChildProcesses() as children:
                child = children.start(command, log=log)
                _follow(child, outcome, until=began + timeout_s, console=console, place=place)
        finally:
            outcome.took_s = time.monotonic() - began
        if outcome.failure is not None:
            console.print(f"[red]{outcome.name}: {outcome.failure}[/]; it said last:\n{escape(child.log_tail())}")


def _follow(child: Child, outcome: Outcome, *, until: float, console: Console, place: str) -> None:
    lines = _lines(child.log)
    began = said = time.monotonic()
    with console.status("") as status:
        while True:
            code = child.ended()  # before its last lines are read
            while (line := next(lines)) is not None:
                row = _row(line)
                if row is not None:
                    outcome.rows.append(row)
                    print(line, flush=True)
            now = time.monotonic()
            if code is not None:
                # Below a target it exits with 1, and a row says so.
                if code != 0 and outcome.ok:
                    outcome.failure = f"failed with exit code {code}"
                return
            if now > until:
                outcome.failure = f"not done after {now - began:.0f} s"
                return
            progress = f"{outcome.name} ({place}) {now - began:.0f} s, {len(outcome.rows)} figures"
            if console.is_terminal:
                status.update(progress)
            elif now - said > _STATUS_EVERY_S:
                said = now
                console.print(progress)
            time.sleep(_POLL_S)


def _lines(path: Path) -> Iterator[str | None]:
    """The whole lines of a file that is being written; None where there is no other yet."""
    with path.open("rb") as file:
        waiting = b""
        while True:
            waiting += file.readline()
            if waiting.endswith(b"\n"):
                yield waiting.decode(errors="replace").rstrip("\n")
                waiting = b""
            else:
                yield None


def _row(line: str) -> Mapping[str, Any] | None:
    """A line of figures; None for whatever else a benchmark, or a library of it, prints."""
    if not line.startswith("{"):
        return None
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row if "benchmark" in row else None


def _print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table("", "benchmark", "figures", box=None)
    for outcome in outcomes:
        for row in outcome.rows:
            figures = "  ".join(f"{name} {value}" for name, value in row.items() if _is_figure(name, value))
            table.add_row("[green]✓" if row.get("ok", True) else "[red]✗", str(row["benchmark"]), escape(figures))
        end = f"[red]{outcome.failure}" if outcome.failure else ""
        table.add_row("[green]✓" if outcome.ok else "[red]✗", f"[bold]{outcome.name}", f"{outcome.took_s:.0f} s {end}")
    console.print(table)


def _is_figure(name: str, value: object) -> bool:
    """What the table has room for; the JSON lines have all of it."""
    return name not in ("benchmark", "ok") and value is not None and not isinstance(value, dict | list)


def _interrupt(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
