"""`gym-capture demo`: the main job on a small model, from nothing to one training step, with its figures and checks.

Invariant: it exits with 0 only if every promise held, and leaves no process behind, however it ends.

Flow: prepare the model -> `demo.run` -> table and checks -> exit code.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.demo.report import Check

CONFIG = Path(__file__).parents[1] / "demo" / "cpu_demo.yaml"
"""In a clone a link to that of `serve_configs/`; the wheel has a copy."""


def command(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny` (random weights), or a model folder.")] = "smollm2",
    tasks: Annotated[int, typer.Option(min=1, help="Tasks.")] = 3,
    samples: Annotated[int, typer.Option(min=2, help="Rollouts of each task: the size of a GRPO group.")] = 4,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at a time.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of a call at most.")] = 48,
    config: Annotated[
        Path, typer.Option(help="Serve config of the graph.", exists=True, dir_okay=False, show_default=False)
    ] = CONFIG,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures and checks as JSON.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep logs, records and trajectories here; an empty or new directory."),
    ] = None,
) -> None:
    """Serve a small model, roll out a tool agent, build trajectories, train one GRPO step; then compare.

    Everything runs on this machine: a Ray cluster of its own, `serve run`, a rollout job over HTTP, a Ray Data job,
    one step of the reference trainer - once with prefix supply and once without. Takes about five minutes on two
    cores. Exits with 1 if one of its checks did not hold.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"--keep {keep}: is not empty")
    console = Console()
    directory = (keep or Path(tempfile.mkdtemp(prefix="gym-capture-demo-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    held = False
    try:
        held = _run(
            console,
            directory,
            model=model,
            tasks=tasks,
            samples=samples,
            concurrency=concurrency,
            max_tokens=max_tokens,
            config=config,
            json_file=json_file,
        )
    finally:
        if held and keep is None:
            shutil.rmtree(directory)
        else:
            console.print(f"Logs, records and trajectories: {escape(str(directory))}", soft_wrap=True, highlight=False)
    if not held:
        raise typer.Exit(1)


def _run(
    console: Console,
    directory: Path,
    *,
    model: str,
    tasks: int,
    samples: int,
    concurrency: int,
    max_tokens: int,
    config: Path,
    json_file: Path | None,
) -> bool:
    """Whether every check held."""
    from gym_capture.demo.processes import ChildProcesses
    from gym_capture.demo.progress import Phases
    from gym_capture.demo.report import checks, table, to_json
    from gym_capture.demo.run import DemoOptions, run_demo
    from gym_capture.rollouts.harnesses.tool_loop import ToolLoopOptions
    from gym_capture.serving.app import model_folder

    children = ChildProcesses()
    with Phases(console) as phases, children:
        with phases.phase("prepare the model"):
            folder = model_folder(model)
        options = DemoOptions(
            model=folder,
            config=yaml.safe_load(config.read_text(encoding="utf-8")),
            directory=directory,
            tasks=tasks,
            samples=samples,
            concurrency=concurrency,
            loop=ToolLoopOptions(max_tokens=max_tokens),
        )
        modes = run_demo(options, children=children, phases=phases)
    found = checks(*modes, leftovers=children.leftovers)
    console.print(table(modes))
    show_checks(console, found)
    if json_file is not None:
        json_file.write_text(to_json(modes, found) + "\n", encoding="utf-8")
    return all(check.held for check in found)


def show_checks(console: Console, found: Sequence[Check]) -> None:
    """A line for each: whether it held, and the figure that decides it."""
    for check in found:
        mark = "[green]✓[/]" if check.held else "[red]✗[/]"
        console.print(
            f"{mark} {escape(check.promise)} [dim]({escape(check.figure)})[/]", highlight=False, soft_wrap=True
        )
