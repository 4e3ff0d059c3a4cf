"""`gym-capture try-job`: a job file against a small graph of its own, with figures and checks.

Invariant: it exits with 0 only if every promise held, and leaves no process behind, however it ends.

Flow: prepare the model -> `demo.try_job` -> table and checks -> exit code.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.demo import CONFIG, check_json_file, check_out, show_checks, show_way_on, write_json
from gym_capture.commands.serve import read_config


def command(
    job_file: Annotated[
        Path, typer.Argument(help="A job file (docs/jobs.md).", metavar="JOB.YAML", exists=True, dir_okay=False)
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the job: samples=4.", metavar="KEY=VALUE")
    ] = None,
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny` (random weights), or a model folder.")] = "smollm2",
    config: Annotated[
        Path, typer.Option(help="Serve config of the graph.", exists=True, dir_okay=False, show_default=False)
    ] = CONFIG,
    temperature: Annotated[float, typer.Option(min=0.01, help="That the policy is sampled with.")] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(help="An empty or new directory for logs, records, trajectories; else a temporary one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures and checks as JSON; the rest goes to stderr.")
    ] = False,
    json_file: Annotated[Path | None, typer.Argument(hidden=True, help="`--json FILE`, as it was.")] = None,
) -> None:
    """Serve a small model, play a job against it, build, train one step; check that every token is exact.

    Everything runs on this machine, on a Ray cluster of its own: `serve run`, `rollouts run`, `build-job`, one step of
    the reference trainer. Exits with 1 if one of its checks did not hold.
    """
    check_out(out)
    console = Console(stderr=as_json)
    if json_file is not None:
        as_json = check_json_file(json_file, as_json=as_json)
    directory = (out or Path(tempfile.mkdtemp(prefix="gym-capture-try-job-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    console.print(f"Logs, records and trajectories: {escape(str(directory))}", soft_wrap=True, highlight=False)
    held = _run(
        console,
        directory,
        job_file,
        set_ or [],
        model=model,
        config=config,
        temperature=temperature,
        as_json=as_json,
        json_file=json_file,
    )
    if not held:
        raise typer.Exit(1)


def _run(
    console: Console,
    directory: Path,
    job_file: Path,
    settings: list[str],
    *,
    model: str,
    config: Path,
    temperature: float,
    as_json: bool,
    json_file: Path | None,
) -> bool:
    """Whether every check held."""
    from gym_capture.commands.job_files import job_of_options

    # What is wrong with it is said before anything slow is loaded.
    job = job_of_options(job_file, {}, settings)
    from gym_capture.demo.job_report import checks, table, to_json
    from gym_capture.demo.processes import ChildProcesses
    from gym_capture.demo.progress import Phases
    from gym_capture.demo.try_job import TryOptions, try_job
    from gym_capture.serving.app import model_folder

    children = ChildProcesses()
    with Phases(console) as phases, children:
        with phases.phase("prepare the model", "made once, then found: half a minute the first time"):
            folder = model_folder(model)
        options = TryOptions(
            job=job_file,
            settings=settings,
            model=folder,
            config=read_config(config),
            temperature=temperature,
            directory=directory,
        )
        tried = try_job(options, children=children, phases=phases)
    found = checks(tried, leftovers=children.leftovers)
    console.print(table(tried, title=f"{job.harness.name} in {job.environment.name}"))
    show_checks(console, found)
    write_json(to_json(tried, found), json_file, as_json=as_json)
    show_way_on(console, [directory / "job"], directory / "records", folder)
    return all(check.held for check in found)
