"""The seam to trainers: an `Exporter` turns finished rollouts into the files that one trainer reads.

Invariant: an exporter gets whole groups, masked rollouts among them, from what a build wrote and from nothing else; its
files appear together, or not at all.

Flow: the files of a build -> `read_finished` -> groups -> `Exporter.export` writes its files -> they appear in `out`.

To add one: a module beside `nemo_rl.py` with a class as `Exporter` says, and a line in `EXPORTERS`. Then `gym-capture
export --to NAME` knows it. `FinishedRollout` is all that it gets. Where a line of the file is an object of the trainer,
`lines.LinesExporter` is that class, and what is left to write is one function. A test puts what it writes through the
trainer's own reader, as those in `tests/trainers` do, or through the rules of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeAlias

from gym_capture.data.staged_files import staged_files
from trainer_bridge import openenv, prime_rl, skyrl, tinker, trl_rollouts, verl
from trainer_bridge.finished import COLUMNS, FinishedRollout, groups, read_finished
from trainer_bridge.nemo_rl import NemoRlExporter
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import count_rows, parquet_batches

__all__ = ["EXPORTERS", "Create", "ExportReport", "Exporter", "export_files"]

Create: TypeAlias = Callable[[str], AbstractContextManager[BinaryIO]]
"""A new file of the export, by its name."""


class Exporter(Protocol):
    """Files for one trainer."""

    @property
    def name(self) -> str:
        """The trainer's, as `--to` takes it."""
        ...

    @property
    def files(self) -> tuple[str, ...]:
        """The files it writes, as shell patterns: an earlier export is known by them."""
        ...

    def export(self, rollouts: Iterable[tuple[FinishedRollout, ...]], create: Create) -> Delivery:
        """Writes the groups, one in memory at a time, and says what of them the trainer gets.

        Raises `RecordError` for what the trainer could not read.
        """
        ...


EXPORTERS: Final[tuple[Exporter, ...]] = (
    NemoRlExporter(),
    verl.EXPORTER,
    trl_rollouts.EXPORTER,
    skyrl.EXPORTER,
    prime_rl.EXPORTER,
    openenv.EXPORTER,
    tinker.EXPORTER,
)
"""All that there are."""


@dataclass(slots=True)
class ExportReport:
    """The account of an export."""

    groups: int = 0
    rollouts: int = 0
    masked: int = 0
    without_input: int = 0
    """Rollouts of which nobody said what the agent was given."""
    delivery: Delivery = field(default_factory=Delivery)
    """What the trainer gets of them."""


def export_files(
    exporter: Exporter,
    data: str | Path,
    *,
    out: str | Path,
    agent_name: str | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Exports the trajectories that a build wrote into `data` to the directory `out`; both are paths or URIs.

    `agent_name`: of rollouts that do not say who played them. `on_progress` gets the trajectories done, and of all.
    Raises `ConfigError` for data that is none or an `out` that cannot be written to, and what the exporter raises.
    """
    total = count_rows(data)
    report = ExportReport()
    done = 0

    def counted() -> Iterator[tuple[FinishedRollout, ...]]:
        nonlocal done
        for group in groups(read_finished(parquet_batches(data, columns=COLUMNS))):
            yield tuple(replace(each, agent_name=each.agent_name or agent_name) for each in group)
            report.groups += 1
            report.rollouts += len(group)
            report.masked += sum(each.masked for each in group)
            report.without_input += sum(each.input is None for each in group)
            done += sum(max(len(each.trajectories), 1) for each in group)
            on_progress(done, total)

    with staged_files(out, exporter.files, what="an export", overwrite=overwrite) as staged:

        def create(name: str) -> AbstractContextManager[BinaryIO]:
            staged.add(name, name)
            return staged.staging.create(name)

        report.delivery = exporter.export(counted(), create)
    return report
