"""Kills state actors, replicas, HAProxy and whole clusters under a load of agents, some of whom leave in the middle;
then asks whether anything was lost.

python -m tests.faults --kills 200 --seed 7        (or: make test-faults ARGS="--kills 200")

The last line on standard output: kills=200 acknowledged=14210 lost=0 duplicated=0 hung=0. The exit status is 1 if
anything was lost, duplicated or hung, or is otherwise not as it must be; the records are kept then.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gym_capture.demo.processes import ChildProcesses
from tests.faults.agents import Ledger
from tests.faults.cluster import Cluster, make_home, scripted
from tests.faults.killer import Victim, plan
from tests.faults.storm import Report, storm

_SHOWN: Final = 50
_TOKEN_S: Final = 0.004


def main(argv: list[str] | None = None) -> int:
    """Runs a storm. The exit status says whether all went well."""
    options = _options(argv)
    err = Console(stderr=True, highlight=False)
    home = make_home()
    err.print(f"seed {options.seed}\nbelow {home}")
    try:
        report = _run(home, options, err)
    except KeyboardInterrupt:
        shutil.rmtree(home)
        err.print("interrupted; nothing is left running")
        return 130
    _explain(report, err)
    if report.is_clean:
        shutil.rmtree(home)
    else:
        err.print(f"the records and logs are in {home}")
    print(report.line())
    return 0 if report.is_clean else 1


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how many processes (or clusters) to kill")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop killing after this long")
    parser.add_argument("--clients", type=int, default=8, help="how many agents play at the same time")
    parser.add_argument("--deadline", type=float, default=240.0, help="a request has hung after so many seconds")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="decides the order of kills")
    return parser.parse_args(argv)


def _run(home: Path, options: argparse.Namespace, err: Console) -> Report:
    victims = plan(options.kills, options.seed)
    with ChildProcesses() as children, _Watch(err, len(victims)) as watch:
        running_dir = home / "running"
        running_dir.mkdir()
        cluster = Cluster(children, home, args=scripted(token_s=_TOKEN_S, running_dir=str(running_dir)))

        async def run() -> Report:
            await cluster.start()
            return await storm(
                cluster,
                victims,
                running_dir=running_dir,
                seed=options.seed,
                clients=options.clients,
                seconds=options.seconds,
                deadline_s=options.deadline,
                on_kill=watch.killed,
            )

        try:
            report = asyncio.run(run())
            cluster.stop()
        finally:
            cluster.kill()  # whatever a stop, or an error, has left
    if children.leftovers:
        report.wrong.append(f"outlived the run: {', '.join(children.leftovers)}")
    return report


class _Watch:
    """A bar for whoever watches; a line for each kill for whoever reads it later."""

    def __init__(self, err: Console, kills: int) -> None:
        self._err = err
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._bar = self._progress.add_task("kills", total=kills, note="starting the first cluster")

    def killed(self, victim: Victim, kills: int, ledger: Ledger) -> None:
        note = f"{victim}; {ledger.acknowledged} acknowledged, {ledger.hung} hung"
        self._progress.update(self._bar, completed=kills, note=note)
        if not self._err.is_terminal:
            self._err.print(f"kill {kills}: {note}")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()


def _explain(report: Report, err: Console) -> None:
    found = report.findings
    kinds = ", ".join(f"{count} x {victim}" for victim, count in report.kills.most_common())
    err.print(f"killed: {kinds}")
    err.print(f"attempts that failed, or were left: {_counts(report.ledger.failures)}")
    err.print(f"{report.ledger.refusals} of them with a status after which client libraries do not ask again")
    err.print(f"{found.calls} calls of {found.rollouts} rollouts in the logs; masked: {_counts(found.masked)}")
    err.print(f"{found.lost_tries} calls were lost that a retry stood in for")
    err.print(f"{report.probed} rollouts continue the same call before and after a restart")
    wrong = [*found.all(), *report.wrong]
    for line in wrong[:_SHOWN]:
        err.print(line)
    if len(wrong) > _SHOWN:
        err.print(f"... and {len(wrong) - _SHOWN} more")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counter.most_common()) or "none"


if __name__ == "__main__":
    sys.exit(main())
