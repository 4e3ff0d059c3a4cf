"""`gym-capture demo`: the main job on a small model, from nothing to one training step, with its figures and checks.

Invariant: it exits with 0 only if every promise held, and leaves no process behind, however it ends.

Flow: prepare the model -> `demo.run` -> table and checks -> exit code.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.serve import read_config
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.demo.report import Check

_PROGRAM: Final = "gym-capture"
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
    out: Annotated[
        Path | None,
        typer.Option(help="An empty or new directory for logs, records, trajectories; else a temporary one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures and checks as JSON; the rest goes to stderr.")
    ] = False,
    json_file: Annotated[Path | None, typer.Argument(hidden=True, help="`--json FILE`, as it was.")] = None,
) -> None:
    """Serve a small model, roll out a tool agent, build trajectories, train one GRPO step; then compare.

    Everything runs on this machine: a Ray cluster of its own, `serve run`, a rollout job over HTTP, a Ray Data job,
    one step of the reference trainer - once with prefix supply and once without. Takes about five minutes on two
    cores. Exits with 1 if one of its checks did not hold.
    """
    check_out(out)
    console = Console(stderr=as_json)
    if json_file is not None:
        as_json = check_json_file(json_file, as_json=as_json)
    directory = (out or Path(tempfile.mkdtemp(prefix="gym-capture-demo-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    console.print(f"Logs, records and trajectories: {escape(str(directory))}", soft_wrap=True, highlight=False)
    held = _run(
        console,
        directory,
        model=model,
        tasks=tasks,
        samples=samples,
        concurrency=concurrency,
        max_tokens=max_tokens,
        config=config,
        as_json=as_json,
        json_file=json_file,
    )
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
    as_json: bool,
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
        with phases.phase("prepare the model", "made once, then found: half a minute the first time"):
            folder = model_folder(model)
        options = DemoOptions(
            model=folder,
            config=read_config(config),
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
    write_json(to_json(modes, found), json_file, as_json=as_json)
    show_way_on(console, [directory / "supplied", directory / "rendered"], directory / "records", folder)
    return all(check.held for check in found)


def check_out(out: Path | None) -> None:
    """Raises `ConfigError` for a directory that holds something already."""
    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty")


def check_json_file(file: Path, *, as_json: bool) -> bool:
    """For `--json FILE`, as it was: what `--json` says then. Raises `ConfigError` for an argument of another kind."""
    if not as_json:
        raise ConfigError(f"{file}: there is nothing to name here; --out names a directory")
    Console(stderr=True, soft_wrap=True).print(f"[yellow]warning:[/] --json {escape(str(file))} is now --json > FILE")
    return False


def show_way_on(console: Console, jobs: Sequence[Path], records: Path, model: Path) -> None:
    """How to look into what was just made; to be typed as it stands, also where only `make` knows the environment."""
    program = shlex.quote(typed_program())
    options = f"--records {shlex.quote(str(records))} --model {shlex.quote(str(model))}"
    lines = [f"{program} ui {shlex.quote(str(job))} {options}" for job in jobs]
    with (jobs[-1] / "rollouts.jsonl").open(encoding="utf-8") as file:
        first = next(file, None)
    if first is not None:
        rollout_id = shlex.quote(json.loads(first)["rollout_id"])
        lines.append(f"{program} inspect {rollout_id} {shlex.quote(str(jobs[-1]))} {options}")
    console.print("Look into it, in a browser or here:")
    for line in lines:
        console.print(f"  {escape(line)}", soft_wrap=True, highlight=False)


def typed_program() -> str:
    """What a shell finds this program by: its name, or its path if it is not on the PATH."""
    return _PROGRAM if shutil.which(_PROGRAM) else str(Path(sys.executable).with_name(_PROGRAM))


def write_json(text: str, file: Path | None, *, as_json: bool) -> None:
    """Figures, where they were asked for."""
    if as_json:
        typer.echo(text)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")


def show_checks(console: Console, found: Sequence[Check]) -> None:
    """A line for each: whether it held, and the figure that decides it."""
    for check in found:
        mark = "[green]✓[/]" if check.held else "[red]✗[/]"
        console.print(
            f"{mark} {escape(check.promise)} [dim]({escape(check.figure)})[/]", highlight=False, soft_wrap=True
        )
