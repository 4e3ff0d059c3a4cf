"""`gym-capture conformance`: does a store of your own keep the contract?

Invariant: the store is used exactly as a state actor uses it - `await factory(directory=..., **kwargs)` - and every
check gets one in a directory of its own, so no check can pass on what another left.

Flow: import the factory -> one check after the other, under a progress bar -> a table, and exit code 1 if one
failed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gym_capture.capture.protocols import LineageStore, RecordStore, TokenSource
from gym_capture.conformance import CHECKS, DURABILITY_CHECKS, Result, run_check
from gym_capture.conformance.lineage import LINEAGE_CHECKS, LINEAGE_DURABILITY_CHECKS, run_lineage_check
from gym_capture.errors import ConfigError, described
from gym_capture.stores.base import StoreFactory


def command(
    factory: Annotated[str, typer.Argument(help="Import path of what opens the store, as `state.store` names it.")],
    kwargs: Annotated[str, typer.Option(help="JSON object of further arguments: `state.store_kwargs`.")] = "{}",
    durability: Annotated[
        bool, typer.Option("--durability", help="Also what must survive a restart: close, and open the same directory.")
    ] = False,
    lineage: Annotated[
        bool, typer.Option("--lineage", help="Also the contract of `resolve`, for a store that is a LineageStore.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option("--check", help="Only this check; may be repeated.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds that one check may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each check.")] = False,
) -> None:
    """Put a store of your own through the checks that gym-capture's stores pass.

    Modules are found as Python finds them, and in the current directory. Exits with 1 if a check failed.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    protocols = (RecordStore, TokenSource, LineageStore) if lineage else (RecordStore, TokenSource)
    opener = _Opener(StoreFactory.at(factory).open, _parse(kwargs), protocols)
    names = _chosen(only, durability=durability, lineage=lineage)
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="gym-capture-conformance-") as root,
        Progress(*columns, console=stderr, transient=True) as progress,
    ):
        bar = progress.add_task("", total=len(names))
        opener.root = Path(root)
        results = asyncio.run(
            _run(opener, names, timeout_s, lambda name: progress.update(bar, description=name, advance=1))
        )
    if as_json:
        for result in results:
            typer.echo(json.dumps(asdict(result) | {"passed": result.passed}))
    else:
        Console(soft_wrap=True, highlight=False).print(results_table(factory, results))
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def results_table(factory: str, results: Sequence[Result]) -> Table:
    """A line for each check and its result; of a check that failed, the contract and what was found instead."""
    failed = sum(not result.passed for result in results)
    outcome = f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks passed"
    table = Table(title=escape(f"{factory}: {outcome}"), title_justify="left")
    # Whole: `--check` wants it as it is.
    table.add_column("check", min_width=max((len(result.name) for result in results), default=0))
    for column in ("", "the contract, and what was found"):
        table.add_column(column)
    for result in results:
        verdict = "[green]pass[/]" if result.passed else "[bold red]fail[/]"
        found = "" if result.failure is None else f"\n[red]{escape(result.failure)}[/]"
        table.add_row(result.name, verdict, escape(result.contract) + found)
    return table


@dataclass(slots=True)
class _Opener:
    """Opens stores as a state actor does."""

    open_store: Callable[..., Any]
    kwargs: dict[str, Any]
    protocols: Sequence[type]
    """The protocol that the store must have."""
    root: Path = field(default_factory=Path)
    """Where stores get directories. Their last parts are new too: elsewhere it may be all that a store goes by."""
    _opened: int = 0

    async def new(self) -> Any:
        self._opened += 1
        return await self._open()

    async def reopen(self, store: Any) -> Any:
        await store.close()
        return await self._open()

    async def _open(self) -> Any:
        opening = self.open_store(directory=self.root / f"{self.root.name}-{self._opened:04}", **self.kwargs)
        if not inspect.isawaitable(opening):
            raise TypeError(
                f"the factory must be a coroutine function, `async def open_store(*, directory, ...)`: "
                f"it returned a {type(opening).__name__}"
            )
        store = await opening
        members = {name for protocol in self.protocols for name in vars(protocol) if not name.startswith("_")}
        if missing := sorted(members.difference(dir(store))):
            raise TypeError(f"what the factory opened, a {type(store).__name__}, has no {', '.join(missing)}")
        return store


async def _run(opener: _Opener, names: Sequence[str], timeout_s: float, on_done: Callable[[str], None]) -> list[Result]:
    # What opens no store fails every check alike: it is said once, as an error. Gathered: it may raise anything.
    opened: Any = (await asyncio.gather(opener.new(), return_exceptions=True))[0]
    if isinstance(opened, BaseException):
        raise ConfigError(f"no store can be opened: {described(opened)}")
    await opened.close()
    results: list[Result] = []
    for name in names:
        is_lineage = name in LINEAGE_CHECKS or name in LINEAGE_DURABILITY_CHECKS
        run = run_lineage_check if is_lineage else run_check
        results.append(await run(name, opener.new, reopen=opener.reopen, timeout_s=timeout_s))
        on_done(name)
    return results


def _chosen(only: list[str] | None, *, durability: bool, lineage: bool) -> list[str]:
    every = [*CHECKS, *DURABILITY_CHECKS, *LINEAGE_CHECKS, *LINEAGE_DURABILITY_CHECKS]
    if only:
        unknown = [name for name in only if name not in every]
        if unknown:
            near = get_close_matches(unknown[0], every, n=3, cutoff=0.0)
            raise ConfigError(f"--check: there is no check {unknown[0]!r}; near it are {', '.join(near)}")
        return only
    names = [*CHECKS]
    names += DURABILITY_CHECKS if durability else ()
    names += LINEAGE_CHECKS if lineage else ()
    names += LINEAGE_DURABILITY_CHECKS if lineage and durability else ()
    return names


def _parse(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--kwargs is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--kwargs must be a JSON object: got {text}")
    return value
