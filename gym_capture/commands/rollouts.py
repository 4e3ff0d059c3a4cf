"""`gym-capture rollouts run`: plays a rollout job against a served graph, from a process on its Ray cluster.

Invariant: what can be known to be wrong is said before anything is played. The job needs the cluster: an attempt that
another one supersedes is closed there, so that its records are forgotten, and its agent is refused if it still runs.

Flow: a job file, options over it, or options alone -> `JobFile` -> tasks, environment and harness are made -> the
server is asked whether it is a graph -> `RolloutJob`, watched -> one line for each rollout in `OUT/rollouts.jsonl`.
Started again with the same job it plays only what has no line yet.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.commands import playing
from gym_capture.commands.building import look_into
from gym_capture.commands.loading import one_line
from gym_capture.commands.playing import On
from gym_capture.commands.submitted import logs, status, stop, submit
from gym_capture.printable import printable, visible
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.ledger import check_writable, look, read_job

if TYPE_CHECKING:
    from gym_capture.commands.rollout_view import View
    from gym_capture.data.group_files import StreamReport
    from gym_capture.rollouts.environment import Task
    from gym_capture.rollouts.job import JobSummary
    from gym_capture.rollouts.jobfile import JobFile
    from gym_capture.rollouts.ledger import RolloutRow
    from gym_capture.rollouts.progress import JobProgress

app = typer.Typer(no_args_is_help=True)
for command in (submit, status, logs, stop):
    app.command()(command)

_SHOWN_IDS: Final = 3
_RANDOM_PART: Final = "XXXXXXXX"
_INTERRUPTED: Final = 130


@app.callback()
def group() -> None:
    """Run rollout jobs against a served policy."""


@app.command("run")
def run(
    job_file: Annotated[
        Path | None,
        typer.Argument(help="A job file (docs/jobs.md); the options below win over it.", metavar="JOB.YAML"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The job's directory. A job that was interrupted is resumed in it.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key of a job file: samples=8, harness.max_tokens=64.", metavar="KEY=VALUE"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Progress and result as lines of JSON on stdout.")] = False,
    on: Annotated[
        On, typer.Option(help="Play rollouts in this process, or in workers on the nodes of the Ray cluster.")
    ] = On.HERE,
    build_out: Annotated[
        str | None,
        typer.Option(
            "--build",
            help="Build while it plays: a file of trajectories for each group, once it is complete, in this directory.",
            metavar="OUT",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Where the graph is served: by default http://127.0.0.1:8000.")
    ] = None,
    tasks_file: Annotated[
        Path | None, typer.Option("--tasks", help='Tasks, one a line: {"task_id": ..., "data": {...}}.')
    ] = None,
    generate: Annotated[
        int | None, typer.Option(help="Without --tasks: how many tasks the environment makes up: 4.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the tasks that are made up: 0.")] = None,
    environment: Annotated[str | None, typer.Option(help="Name or import path of the environment: register.")] = None,
    harness: Annotated[str | None, typer.Option(help="Name or import path of the agent: tool-loop.")] = None,
    job_id: Annotated[
        str | None, typer.Option(help="First part of rollout ids; by default the name of OUT and a random part.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model that the agent asks for.")] = None,
    samples: Annotated[int | None, typer.Option(help="Rollouts of each task: 4.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Rollouts at a time: 8.")] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="Attempts at a rollout before it counts as failed: 3.")
    ] = None,
    max_calls: Annotated[int | None, typer.Option(help="Tool loop: model calls of a rollout at most.")] = None,
    forced_calls: Annotated[
        int | None, typer.Option(help="Tool loop: the first calls that must be tool calls.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tool loop: generated tokens of a call at most.")] = None,
    call_timeout_s: Annotated[float | None, typer.Option(help="Tool loop: seconds that a model call may take.")] = None,
    rollout_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds that a rollout may take, once started: 600.")
    ] = None,
    close_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds that the tear-down of a rollout may take: 10.")
    ] = None,
    resume_turns: Annotated[
        bool | None,
        typer.Option(
            "--resume-turns/--no-resume-turns",
            help="Continue rollouts that were cut from their records, call by call, instead of playing them anew.",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="The graph's secret file, if it has one: each rollout gets its own token.")
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help="The Ray cluster that the graph runs on: auto.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Ray namespace of the graph's state actors: gym-capture.")
    ] = None,
) -> None:
    """Play tasks x samples with an agent over HTTP: a job file, or options alone.

    Writes one line for each rollout to OUT/rollouts.jsonl and one for each failed attempt to OUT/failures.jsonl.
    Exits with 1 if rollouts failed for good.
    """
    from gym_capture.commands.job_files import job_of_options
    from gym_capture.rollouts import patience
    from gym_capture.rollouts.progress import JobProgress

    given = {
        "--out": ("out", out),
        "--job-id": ("job_id", job_id),
        "--samples": ("samples", samples),
        "--url": ("endpoint.url", url),
        "--secret-file": ("endpoint.secret_file", secret_file),
        "--ray-address": ("endpoint.ray_address", ray_address),
        "--namespace": ("endpoint.namespace", namespace),
        "--environment": ("environment.name", environment),
        "--generate": ("tasks.count", generate),
        "--seed": ("tasks.seed", seed),
        "--tasks": ("tasks.file", tasks_file),
        "--harness": ("harness.name", harness),
        "--model-name": ("harness.model", model_name),
        "--max-calls": ("harness.max_calls", max_calls),
        "--forced-calls": ("harness.forced_calls", forced_calls),
        "--max-tokens": ("harness.max_tokens", max_tokens),
        "--call-timeout-s": ("harness.call_timeout_s", call_timeout_s),
        "--concurrency": ("limits.concurrency", concurrency),
        "--max-attempts": ("limits.max_attempts", max_attempts),
        "--rollout-timeout-s": ("limits.rollout_timeout_s", rollout_timeout_s),
        "--close-timeout-s": ("limits.close_timeout_s", close_timeout_s),
        "--resume-turns": ("resume_turns", resume_turns),
    }
    job = job_of_options(job_file, given, set_ or ())
    if dry_run:
        planned = patience.run(_planned(job, on, build_out))
        if as_json:
            typer.echo(json.dumps(planned))
        else:
            for name, text in planned.items():
                typer.echo(f"{name:<13}{text}")
        return
    console = Console(stderr=True)
    progress = JobProgress()
    try:
        summary, built = patience.run(_play(job, on, progress, _view(console, as_json=as_json), console, build_out))
    except KeyboardInterrupt:
        console.print(escape(interrupted(progress, job.out)), highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    console.print(escape(summarized(summary, job.endpoint.url)), highlight=False, soft_wrap=True)
    if build_out is not None and built is not None:
        console.print(escape(built_line(built, build_out, job.out)), highlight=False, soft_wrap=True)
    if summary.failed:
        raise typer.Exit(1)


async def _play(
    job: JobFile, on: On, progress: JobProgress, view: View, console: Console, build_out: str | None
) -> tuple[JobSummary, StreamReport | None]:
    """Plays, and builds into `build_out` meanwhile, if that is asked for."""
    from gym_capture.commands.job_rows import build_while_playing
    from gym_capture.commands.rollout_view import watching

    def note(text: str) -> None:
        console.print(f"[yellow]note:[/] {escape(printable(text))}", highlight=False, soft_wrap=True)

    async with playing.playable(job, on, progress=progress, note=note) as ready, watching(progress, view):
        if build_out is None:
            return await ready.play(lambda row: None), None
        summaries: list[JobSummary] = []

        async def play(on_over: Callable[[RolloutRow], None]) -> None:
            summaries.append(await ready.play(on_over))

        built = await build_while_playing(
            play,
            job=job,
            options=ready.options,
            tasks=ready.tasks,
            source=playing.records_of(job.endpoint.namespace),
            exchanges=ready.exchanges,
            out=build_out,
            console=console,
            progress=progress,
        )
    return summaries[0], built


async def _planned(job: JobFile, on: On, build_out: str | None) -> dict[str, str]:
    """The plan of a job. Raises `ConfigError` for what could not be played."""
    from gym_capture.rollouts.job import identity, rollouts_of
    from gym_capture.rollouts.jobfile import prepare

    check_writable(job.out)
    if build_out is not None and "://" not in build_out:
        check_writable(Path(build_out), "--build: trajectories cannot be written to")
    prepared = await prepare(job)
    await prepared.harness.close()
    found = read_job(job.out)
    job_id = job.job_id or (f"{job.out.resolve().name}-{_RANDOM_PART}" if found is None else str(found["job_id"]))
    options = job.options(job_id)
    rollouts = list(rollouts_of(prepared.tasks, options))
    there = look(job.out, identity(prepared.tasks, options, job.settings))
    if there.differences:
        out = f"{job.out}: REFUSED, it holds another job: {'; '.join(there.differences)}"
    elif found is not None:
        out = f"{job.out}: goes on, {there.over} of {len(rollouts)} rollouts are over"
    else:
        out = f"{job.out}: a new job"
    ids = [rollout.attempt_id(1) for rollout in itertools.islice(rollouts, _SHOWN_IDS)]
    more = ", ..." if len(rollouts) > len(ids) else ""
    random = f" ({_RANDOM_PART}: a random part)" if found is None and job.job_id is None else ""
    token = "no token" if job.endpoint.secret_file is None else "a token for each rollout"
    return {
        "out": out,
        "rollouts": f"{len(rollouts)}: {_source(job, prepared.tasks)} x {options.samples} samples",
        "ids": f"{', '.join(ids)}{more}{random}",
        "endpoint": f"{job.endpoint.url}, {token}, Ray at {job.endpoint.ray_address}",
        "environment": _named(job.settings["environment"]),
        "harness": _named(job.settings["harness"]),
        "limits": ", ".join(f"{key} {value:g}" for key, value in job.limits.model_dump().items()),
        **({"cut": "continued from their records"} if job.resume_turns else {}),
        **({} if on is On.HERE else {"workers": _workers(job)}),
    }


def _workers(job: JobFile) -> str:
    asks = [f"{job.ray.num_cpus:g} CPUs", *(f"{amount:g} {name}" for name, amount in job.ray.resources.items())]
    return f"{job.ray.rollouts_per_worker} rollouts each at a time, {', '.join(asks)}, spread over the cluster"


def _source(job: JobFile, tasks: Sequence[Task]) -> str:
    if job.tasks.file is not None:
        return f"{len(tasks)} tasks of {job.tasks.file}"
    return f"{len(tasks)} tasks made up with seed {job.tasks.seed or 0}"


def _named(settings: dict[str, Any]) -> str:
    options = [f"{key}={json.dumps(value)}" for key, value in settings.items() if key != "name"]
    return " ".join([settings["name"], *options])


def _view(console: Console, *, as_json: bool) -> View:
    from gym_capture.commands.rollout_view import JsonView, LineView, LiveView

    if as_json:
        return JsonView()
    return LiveView(console) if console.is_terminal else LineView(console)


def interrupted(progress: JobProgress, out: Path) -> str:
    """One line on a job that was stopped."""
    now = progress.now()
    if not now.total:
        return "interrupted before anything was played"
    return (
        f"interrupted: {now.done} of {now.total} rollouts are over and kept in {out}; the same command goes on with "
        "the others"
    )


def summarized(summary: JobSummary, url: str) -> str:
    """One line on how a job ended that played against `url`."""
    parts = [f"{summary.finished} of {len(summary.rows)} rollouts finished"]
    if summary.failed:
        parts.append(f"{summary.failed} failed for good")
    if summary.truncated:
        parts.append(f"{summary.truncated} outgrew the context (truncated)")
    if summary.resumed:
        parts.append(f"{summary.resumed} were over before this run")
    if summary.replayed_calls:
        parts.append(f"{summary.replayed_calls} calls were answered from the records of attempts that were cut")
    if summary.failures:
        reasons = ", ".join(f"{visible(reason)} {count}x" for reason, count in summary.failures.most_common())
        parts.append(f"failed attempts: {reasons}")
    first = next((row for row in summary.rows if row.status == "failed"), None)
    if first is not None:
        parts.append(f"the first to fail, {first.rollout_id}: {one_line(first.detail or first.error or '')}")
    if summary.failed and summary.failures[AttemptFailure.CONNECTION]:
        parts.append(f"calls could not connect to {url}: is `serve run` still up?")
    if summary.left_running:
        parts.append(f"{summary.left_running} agents or environments did not end when they were cancelled")
    if summary.failed and summary.resumed == len(summary.rows):
        parts.append("nothing was left to play: name another --out to start anew")
    return "; ".join(parts)


def built_line(report: StreamReport, out: str, job_out: Path) -> str:
    """One line on what was built into `out` while a job ran whose directory is `job_out`."""
    built = report.built
    parts = [
        f"built into {out}: {built.groups} groups, {built.trajectories} trajectories; {built.complete} of "
        f"{built.requested} rollouts to train on"
    ]
    if built.mask_reasons:
        reasons = ", ".join(f"{reason} {count}x" for reason, count in built.mask_reasons.items())
        # The job's directory says more of a failure, and shows what was built below it.
        is_below = Path(out).absolute().is_relative_to(job_out.absolute())
        parts.append(f"masked: {reasons}; {look_into(built, job_out if is_below else out)}")
    if report.kept:
        parts.append(f"{report.kept} groups were built before this run")
    if report.changed:
        parts.append(
            f"{len(report.changed)} groups were played again after they had been built, and keep what they were built "
            f"of: {', '.join(report.changed[:_SHOWN_IDS])}"
        )
    return "; ".join(parts)
