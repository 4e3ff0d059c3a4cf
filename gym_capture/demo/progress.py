"""The demo's progress, for a person who watches: one line for each phase, with a bar where there is a count.

Invariant: a phase's seconds are measured whether or not anyone watches; without a terminal a line is printed when a
phase that takes long begins, which says what happens and how long that takes, and one when a phase ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Phase:
    """A phase under way."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress = progress
        self._bar = bar
        self.text = ""
        self.seconds = 0.0
        """How long it took, once it is over."""

    def note(self, text: str) -> None:
        """Says more about what happens."""
        self.text = text
        self._progress.update(self._bar, note=text)

    def count(self, done: int, total: int) -> None:
        self._progress.update(self._bar, completed=done, total=total)

    def done(self, total: float | None) -> None:
        self._progress.update(self._bar, total=total or 1, completed=total or 1)


class Phases:
    """All phases of one run. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    @contextmanager
    def phase(self, name: str, about: str = "") -> Iterator[Phase]:
        """`about`: what happens, and how long it takes, if it takes long."""
        bar = self._progress.add_task(name, total=None, note=about)
        phase = Phase(self._progress, bar)
        if about and not self._console.is_terminal:
            self._console.print(f"  {name}: {about}", highlight=False, soft_wrap=True)
        started = time.monotonic()
        yield phase
        phase.seconds = time.monotonic() - started
        task = next(task for task in self._progress.tasks if task.id == bar)
        phase.done(task.total)
        if not self._console.is_terminal:
            self._console.print(f"✓ {name}: {phase.seconds:.1f} s  {phase.text}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()
