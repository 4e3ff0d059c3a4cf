"""The views of a rollout job while it runs.

Invariant: all views show the numbers of a `Snapshot` and no others, and how things stand in the end is shown in any
case, unless the job was refused before it began. A view only reads: it changes nothing of the job.

    terminal          a live view
    no terminal       a line every ten seconds, and one in the end
    --json            a JSON object on stdout every two seconds, and one in the end

The first failed attempt of each reason is shown at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Final, Protocol

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gym_capture.printable import visible
from gym_capture.rollouts.progress import JobProgress, Snapshot

_SHOWN_SLOW_S: Final = 5.0
"""Rollouts that have been running for less are not called slow."""


class View(Protocol):
    """One way to show it."""

    every_s: float

    def shown(self) -> AbstractContextManager[object]:
        """The context that is open as long as something is shown."""
        ...

    def show(self, now: Snapshot) -> None: ...


@asynccontextmanager
async def watching(progress: JobProgress, view: View) -> AsyncIterator[None]:
    """Shows the progress of what happens inside, and where it stands in the end, however it ends."""

    async def tick() -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(progress.news.wait(), view.every_s)
            progress.news.clear()
            view.show(progress.now())

    with view.shown():
        ticking = asyncio.create_task(tick())
        try:
            yield
        finally:
            ticking.cancel()
            if (last := progress.now()).total:
                view.show(last)


class LiveView:
    """For a terminal."""

    every_s = 0.25

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def shown(self) -> AbstractContextManager[object]:
        return self._live

    def show(self, now: Snapshot) -> None:
        self._live.update(drawn(now), refresh=True)


class LineView:
    """For a log."""

    every_s = 10.0

    def __init__(self, console: Console) -> None:
        self._console = console

    def shown(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, now: Snapshot) -> None:
        self._console.print(Text(f"rollouts {', '.join(_parts(now))}"), soft_wrap=True)


class JsonView:
    """For a program."""

    every_s = 2.0

    def shown(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, now: Snapshot) -> None:
        typer.echo(json.dumps(asdict(now)))


def drawn(now: Snapshot) -> Group:
    """The live view at one moment."""
    line = Table.grid(padding=(0, 1))
    line.add_row(
        _mark(now), "rollouts", ProgressBar(total=max(1, now.total), completed=now.done, width=30), _counts(now)
    )
    further = [Text("  " + ", ".join(_rates(now)), style="dim")]
    slow = [f"{one.rollout_id} {one.seconds:.0f} s" for one in now.slowest if one.seconds >= _SHOWN_SLOW_S]
    if slow:
        further.append(Text(f"  slowest: {', '.join(slow)}", style="dim", no_wrap=True, overflow="ellipsis"))
    if now.failed_attempts:
        further.append(Text(f"  failed attempts: {_by_reason(now)}", style="yellow"))
    return Group(line, *further)


def _counts(now: Snapshot) -> Text:
    text = Text(f"{now.done}/{now.total}")
    if now.running:
        text.append(f", {now.running} running")
    if now.failed:
        text.append(f", {now.failed} failed" + (" (masked)" if now.masked == now.failed else ""), style="red")
    if now.masked > now.failed:
        text.append(f", {now.masked} masked", style="red")
    if now.mean_reward is not None:
        text.append(f", mean reward {now.mean_reward:.3f}")
    return text


def _mark(now: Snapshot) -> Text:
    if now.done < now.total:
        return Text("…", style="cyan")
    if not now.failed:
        return Text("✓", style="green")
    return Text("!", style="yellow") if now.failed < now.done else Text("✗", style="red")


def _parts(now: Snapshot) -> list[str]:
    failed_attempts = [f"failed attempts: {_by_reason(now)}"] if now.failed_attempts else []
    return [_counts(now).plain, *_rates(now), *failed_attempts]


def _rates(now: Snapshot) -> list[str]:
    parts = [f"{now.calls_per_s:.1f} calls/s"]
    if now.generated_tokens:
        parts.append(f"{now.tokens_per_s:.0f} tokens/s")
    if now.eligible_links:
        parts.append(f"{now.contiguous_links}/{now.eligible_links} links contiguous")
    if now.built is not None:
        parts.append(f"{now.built.groups} group{'' if now.built.groups == 1 else 's'} built")
    parts.append(clock(now.elapsed_s))
    if now.eta_s is not None and now.done < now.total:
        parts.append(f"{clock(now.eta_s)} to go")
    return parts


def _by_reason(now: Snapshot) -> str:
    return ", ".join(f"{visible(reason)} {count}x" for reason, count in now.failed_attempts.items())


def clock(seconds: float) -> str:
    """Such as 0:12:34."""
    return str(timedelta(seconds=round(seconds)))
