"""`gym-capture rollouts run`: plays a rollout job against a served graph, from a process on its Ray cluster.

Invariant: the job needs the cluster, because what an earlier attempt of a rollout left must be cleared before the
rollout is dispatched again - two attempts under one id would be stitched into one conversation.

Flow: tasks from a file or generated -> `RolloutJob` with a progress bar -> one line for each rollout in
`OUT/rollouts.jsonl`. Started again with the same `--out` it plays only what has no line yet.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from gym_capture.auth import Keyring
from gym_capture.commands.cluster import join_cluster
from gym_capture.commands.loading import one_line
from gym_capture.errors import ConfigError
from gym_capture.imports import load
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.ledger import read_job

if TYPE_CHECKING:
    from gym_capture.rollouts.environment import EnvironmentFactory, Task, TaskMaker
    from gym_capture.rollouts.job import JobSummary
    from gym_capture.rollouts.ledger import RolloutRow

app = typer.Typer(no_args_is_help=True)

_ANSWERS_WITHIN_S: Final = 10.0


@app.callback()
def group() -> None:
    """Run rollout jobs against a served policy."""


@app.command("run")
def run(
    out: Annotated[Path, typer.Option(help="The job's directory. A job that was interrupted is resumed in it.")],
    url: Annotated[str, typer.Option(help="Where the graph is served.")] = "http://127.0.0.1:8000",
    tasks_file: Annotated[
        Path | None,
        typer.Option(
            "--tasks", help='Tasks, one a line: {"task_id": ..., "data": {...}}.', exists=True, dir_okay=False
        ),
    ] = None,
    generate: Annotated[
        int, typer.Option(min=1, help="Without --tasks: how many tasks the environment generates.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Of the generated tasks.")] = 0,
    environment: Annotated[
        str, typer.Option(help="Import path of the environment's factory.")
    ] = "gym_capture.rollouts.environment:Register",
    job_id: Annotated[
        str | None, typer.Option(help="First part of rollout ids; by default the name of OUT and a random part.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model name to ask for.")] = "policy",
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 4,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at a time.")] = 8,
    max_attempts: Annotated[int, typer.Option(min=1, help="Attempts at a rollout before it counts as failed.")] = 3,
    max_calls: Annotated[int, typer.Option(min=1, help="Model calls of a rollout at most.")] = 3,
    forced_calls: Annotated[int, typer.Option(min=0, help="The first calls that must be tool calls.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of a call at most.")] = 48,
    call_timeout_s: Annotated[float, typer.Option(help="Seconds that a model call may take.")] = 120.0,
    rollout_timeout_s: Annotated[float, typer.Option(help="Seconds that a rollout may take, once started.")] = 600.0,
    secret_file: Annotated[
        Path | None, typer.Option(help="The graph's secret file, if it has one: each rollout gets its own token.")
    ] = None,
    ray_address: Annotated[str, typer.Option(help="The Ray cluster that the graph runs on.")] = "auto",
    namespace: Annotated[str, typer.Option(help="Ray namespace of the graph's state actors.")] = "gym-capture",
) -> None:
    """Play tasks x samples with a tool-calling agent over HTTP.

    Writes one line for each rollout to OUT/rollouts.jsonl and one for each failed attempt to OUT/failures.jsonl.
    Exits with 1 if rollouts failed for good.
    """
    from gym_capture.rollouts.harness import ToolLoopOptions
    from gym_capture.rollouts.job import JobOptions
    from gym_capture.rollouts.tool_agent import run_tool_agent

    keyring = None if secret_file is None else Keyring.from_file(secret_file)
    check_server(url)
    make_environment: EnvironmentFactory = load(environment)
    tasks = read_tasks(tasks_file) if tasks_file else made_tasks(environment, generate, seed=seed)
    job = JobOptions(
        job_id=job_id or _job_id(out),
        samples=samples,
        concurrency=concurrency,
        max_attempts=max_attempts,
        rollout_timeout_s=rollout_timeout_s,
    )
    loop = ToolLoopOptions(
        model=model,
        max_calls=max_calls,
        forced_calls=forced_calls,
        max_tokens=max_tokens,
        call_timeout_s=call_timeout_s,
    )
    clear = _clearing(ray_address, namespace)
    console = Console(stderr=True)

    def play(on_row: Callable[[RolloutRow], None]) -> JobSummary:
        return asyncio.run(
            run_tool_agent(
                url=url,
                tasks=tasks,
                make_environment=make_environment,
                job=job,
                loop=loop,
                clear=clear,
                directory=out,
                on_row=on_row,
                keyring=keyring,
            )
        )

    summary = with_progress(play, total=len(tasks) * samples, console=console)
    console.print(escape(summarized(summary, url)), highlight=False)
    if summary.failed:
        raise typer.Exit(1)


def check_server(url: str) -> None:
    """Raises `ConfigError` if nothing answers at `url`; whether what answers is a graph, the calls will tell."""
    try:
        httpx.get(f"{url.rstrip('/')}/v1/models", timeout=_ANSWERS_WITHIN_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url {url} is not a URL such as http://127.0.0.1:8000: {error}") from None
    except httpx.TransportError as error:
        raise ConfigError(
            f"no graph answers at {url} ({error or type(error).__name__}): is `serve run` up? --url names another place"
        ) from None


def _job_id(out: Path) -> str:
    """That of the job in `out`, if there is one, else a new one.

    A name alone would do harm: a job in another folder of the same name would take the first one's rollout ids, and
    clearing them before it plays would put its tokens under the first one's rewards.
    """
    found = read_job(out)
    return f"{out.resolve().name}-{uuid.uuid4().hex[:8]}" if found is None else str(found["job_id"])


def with_progress(
    play: Callable[[Callable[[RolloutRow], None]], JobSummary], *, total: int, console: Console
) -> JobSummary:
    """Runs `play` under a progress bar that shows the mean reward so far and what failed."""
    finished, failed, rewards = 0, 0, 0.0
    spinner = SpinnerColumn(finished_text="[green]✓")
    columns = (
        spinner,
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total)

        def on_row(row: RolloutRow) -> None:
            nonlocal finished, failed, rewards
            if row.status == "finished":
                finished, rewards = finished + 1, rewards + row.reward
            else:
                failed += 1
            shown = [f"mean reward {rewards / finished:.3f}"] if finished else []
            shown += [f"[red]{failed} failed"] if failed else []
            spinner.finished_text = _mark(finished=finished, failed=failed)
            progress.update(bar, advance=1, description=", ".join(shown))

        summary = play(on_row)
        spinner.finished_text = _mark(finished=summary.finished, failed=summary.failed)
        progress.update(bar, completed=len(summary.rows))
        return summary


def _mark(*, finished: int, failed: int) -> Text:
    if not failed:
        return Text("✓", style="green")
    return Text("!", style="yellow") if finished else Text("✗", style="red")


def summarized(summary: JobSummary, url: str) -> str:
    """One line on how a job ended that played against `url`."""
    parts = [f"{summary.finished} of {len(summary.rows)} rollouts finished"]
    if summary.failed:
        parts.append(f"{summary.failed} failed for good")
    if summary.resumed:
        parts.append(f"{summary.resumed} were over before this run")
    if summary.failures:
        reasons = ", ".join(f"{reason} {count}x" for reason, count in summary.failures.most_common())
        parts.append(f"failed attempts: {reasons}")
    first = next((row for row in summary.rows if row.status == "failed"), None)
    if first is not None:
        parts.append(f"the first to fail, {first.rollout_id}: {one_line(first.detail or first.error or '')}")
    if summary.failed and summary.failures[AttemptFailure.CONNECTION]:
        parts.append(f"calls could not connect to {url}: is `serve run` still up?")
    if summary.failed and summary.resumed == len(summary.rows):
        parts.append("nothing was left to play: name another --out to start anew")
    return "; ".join(parts)


def read_tasks(path: Path) -> list[Task]:
    """Tasks from lines of JSON. Raises `ConfigError`, naming the line."""
    from gym_capture.rollouts.environment import Task

    tasks = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            tasks.append(Task(str(found["task_id"]), found.get("data", {})))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not a task: {type(error).__name__}: {error}") from None
    if not tasks:
        raise ConfigError(f"{path}: there are no tasks in it")
    return tasks


def made_tasks(environment: str, count: int, *, seed: int) -> Sequence[Task]:
    """Tasks that an environment makes up itself. Raises `ConfigError` if it makes none."""
    try:
        make: TaskMaker = load(f"{environment}.tasks")
    except ConfigError as error:
        raise ConfigError(
            f"{environment} makes no tasks of its own: give it some with --tasks ({error.message})"
        ) from None
    return make(count, seed=seed)


def _clearing(ray_address: str, namespace: str) -> Callable[[str], Awaitable[None]]:
    """What makes the graph's state actors forget a rollout."""
    from gym_capture.operations import Clear
    from gym_capture.serving.state import connect

    join_cluster(ray_address, namespace=namespace)
    state = connect(namespace=namespace)

    async def clear(rollout_id: str) -> None:
        await state.write(Clear(rollout_id))

    return clear
