"""`gym-capture rollouts submit | status | logs | stop`: jobs that a Ray cluster runs, by Ray's Jobs API.

Invariant: what a submitted job needs of this machine travels with it - the job as its options make it, its tasks, the
packages that are named - and what it leaves is in its directory, on storage of the cluster's. The job's directory
is what a job is: submitted again with the same one it goes on, and two at a time are refused. Values of credentials are
given to the job's processes, and stand neither in its metadata nor in what these commands print.

Flow: job file and options -> a folder with `job.yaml` and `tasks.jsonl` -> Ray's dashboard -> on a node of the cluster
`gym-capture rollouts run job.yaml --on ray`. The others ask the dashboard about jobs that were submitted so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import httpx
import typer
import yaml

from gym_capture.commands.loading import one_line
from gym_capture.errors import ConfigError

if TYPE_CHECKING:
    from gym_capture.rollouts.jobfile import JobFile

_ANSWERS_WITHIN_S: Final = 10.0
_OUT: Final = "gym-capture.out"
_ENV: Final = "gym-capture.env"
_BUILD: Final = "gym-capture.build"
_JOB_FILE: Final = "job.yaml"
_TASKS_FILE: Final = "tasks.jsonl"
_COMMAND: Final = f"exec python -m gym_capture.cli rollouts run {_JOB_FILE} --on ray"
_OVER: Final = ("SUCCEEDED", "FAILED", "STOPPED")
_STOP_MARGIN_S: Final = 20.0
_SHOWN: Final = 200

Address = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="The cluster: its dashboard (http://head:8265), or as Ray knows it; by default, as Ray finds it.",
    ),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="What `submit` printed.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON on stdout.")]


def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="A job file (docs/jobs.md).")],
    out: Annotated[
        Path | None, typer.Option(help="The job's directory, as the cluster's nodes know it: an absolute path.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the job file: samples=8.", metavar="KEY=VALUE")
    ] = None,
    package: Annotated[
        list[Path] | None,
        typer.Option(help="A folder with a package of your own that the job imports. It is copied to the nodes."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="An environment variable that the job gets with the value that it has here.", metavar="NAME"),
    ] = None,
    build_out: Annotated[
        str | None,
        typer.Option(
            "--build", help="Build while it plays, into this directory: an absolute path, or a URI.", metavar="OUT"
        ),
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Have a Ray cluster run a job, with its rollouts spread over the nodes. Prints the id of the submission.

    A job that was interrupted goes on when it is submitted again with the same directory.
    """
    from gym_capture.commands.job_files import job_of_options

    job = job_of_options(job_file, {"--out": ("out", out)}, set_ or ())
    built = None if build_out is None or "://" in build_out else Path(build_out)
    for key, path in (("out", job.out), ("endpoint.secret_file", job.endpoint.secret_file), ("--build", built)):
        if path is not None and not path.is_absolute():
            raise ConfigError(
                f"{key}: {path} is relative, and the job's folder on the cluster goes with the job: name an absolute "
                "path, on storage that the nodes share"
            )
    values = _values(env or ())
    for folder in package or ():
        if not folder.is_dir():
            raise ConfigError(f"--package {folder}: there is no such folder")
    with _asking(address) as client, tempfile.TemporaryDirectory(prefix="gym-capture-") as packed:
        _pack(job, Path(packed))
        for other in client.list_jobs():
            if (other.metadata or {}).get(_OUT) == str(job.out) and _state(other) not in _OVER:
                raise ConfigError(
                    f"{job.out} has a job that runs, {other.submission_id}: `gym-capture rollouts stop` ends it"
                )
        submitted = client.submit_job(
            entrypoint=_COMMAND if build_out is None else f"{_COMMAND} --build {shlex.quote(build_out)}",
            submission_id=f"{_spelt(job.out.name)}-{uuid.uuid4().hex[:8]}",
            metadata={
                _OUT: str(job.out),
                _ENV: ",".join(sorted(values)),
                **({} if build_out is None else {_BUILD: build_out}),
            },
            runtime_env={
                "working_dir": packed,
                # Not even empty, if there are none: Ray 2.60 takes an empty list for a package without a name.
                **({"py_modules": [str(each.resolve()) for each in package]} if package else {}),
                "env_vars": {
                    **values,
                    # It has its rollouts end before it does.
                    "RAY_JOB_STOP_WAIT_TIME_S": str(int(3 * job.limits.close_timeout_s + _STOP_MARGIN_S)),
                },
            },
        )
    typer.echo(json.dumps({"id": submitted, "out": str(job.out)}) if as_json else submitted)


def status(
    job_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Of one job; else of all.")] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Show submitted jobs: what they do, where their rows are, and what they said last."""
    with _asking(address) as client:
        if job_id is None:
            found = [_shown(job) for job in client.list_jobs() if _OUT in (job.metadata or {})]
        else:
            found = [{**_shown(client.get_job_info(job_id)), "said": _last_line(client.get_job_logs(job_id))}]
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
        return
    if not found:
        typer.echo("no rollout jobs were submitted to this cluster")
    for each in found:
        typer.echo("  ".join(str(each[key]) for key in ("id", "state", "out") if each[key] is not None))
        for key in ("message", "said"):
            if each.get(key):
                typer.echo(f"  {one_line(each[key])[:_SHOWN]}")


def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    address: Address = None,
) -> None:
    """Print what a submitted job has said."""
    with _asking(address) as client:
        if not follow:
            typer.echo(client.get_job_logs(job_id), nl=False)
            return
        client.get_job_info(job_id)  # of an unknown one the stream would just end
        asyncio.run(_follow(client, job_id))


async def _follow(client: Any, job_id: str) -> None:
    async for lines in client.tail_job_logs(job_id):
        typer.echo(lines, nl=False)


def stop(job_id: JobId, address: Address = None, as_json: AsJson = False) -> None:
    """End a submitted job, with its rollouts. What is over is kept; submitted again, the job goes on."""
    with _asking(address) as client:
        stopped = client.stop_job(job_id)
        state = _state(client.get_job_info(job_id))
    if as_json:
        typer.echo(json.dumps({"id": job_id, "stopped": stopped}))
    else:
        typer.echo(f"{job_id} is being stopped" if stopped else f"{job_id} was over before: {state}")


# --- what travels -----------------------------------------------------------------------------------------------------


def _pack(job: JobFile, folder: Path) -> None:
    """Puts the job into a folder, as the cluster is to read it."""
    data = job.model_dump(mode="json")
    if job.tasks.file is not None:
        try:
            shutil.copyfile(job.tasks.file, folder / _TASKS_FILE)
        except OSError as error:
            raise ConfigError(f"{job.tasks.file}: the tasks cannot be read: {error.strerror}") from None
        data["tasks"] = {"file": _TASKS_FILE}
    # It will be a process of the cluster that it is submitted to.
    data["endpoint"]["ray_address"] = "auto"
    (folder / _JOB_FILE).write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _values(names: list[str] | tuple[()]) -> Mapping[str, str]:
    absent = [name for name in names if name not in os.environ]
    if absent:
        raise ConfigError(f"--env {absent[0]}: there is no such variable here (a name, without a value)")
    return {name: os.environ[name] for name in names}


def _spelt(name: str) -> str:
    """A name as ids of submissions can have it."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name)


# --- the cluster ------------------------------------------------------------------------------------------------------


def _shown(job: Any) -> dict[str, Any]:
    metadata = job.metadata or {}
    state = _state(job)
    return {
        "id": job.submission_id or job.job_id,
        "state": state,
        "out": metadata.get(_OUT),
        "build": metadata.get(_BUILD),
        "env": [name for name in metadata.get(_ENV, "").split(",") if name],
        "started_at": None if job.start_time is None else job.start_time / 1000,
        "ended_at": None if not job.end_time else job.end_time / 1000,
        # Of one that runs or went well Ray says nothing new.
        "message": job.message if state in ("PENDING", "FAILED") else None,
    }


def _state(job: Any) -> str:
    return str(job.status.value)


def _last_line(text: str) -> str | None:
    lines = text.split("\n")
    return next((line for line in reversed(lines) if line.strip()), None)


@contextmanager
def _asking(address: str | None) -> Iterator[Any]:
    """A client of the cluster's dashboard. What goes wrong with it, here or in the block, is a `ConfigError`."""
    import aiohttp
    import requests
    from ray.dashboard.modules.dashboard_sdk import SubmissionClient
    from ray.exceptions import AuthenticationError, RayError
    from ray.job_submission import JobSubmissionClient

    # They tell of each step that went well. The second is private: by its name alone, which may change without harm.
    for name in (SubmissionClient.__module__, "ray._private.runtime_env.packaging"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        if address is not None and os.environ.get(name, address) != address:
            taken = f"{name} is {os.environ[name]}, which Ray takes instead of --ray-address {address}: unset it"
            raise ConfigError(taken)
    where = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if where.startswith(("http://", "https://")):
            httpx.get(where, timeout=_ANSWERS_WITHIN_S)  # Ray would wait without an end
        yield JobSubmissionClient(address)
    except BrokenPipeError:  # of what reads the output
        raise
    except AuthenticationError as error:
        raise ConfigError(
            f"the cluster at {where} does not admit this: {one_line(str(error))[:_SHOWN]} - Ray keeps its token in "
            "~/.ray/auth_token, and takes it with RAY_AUTH_MODE=token"
        ) from None
    except (
        *(ConnectionError, TimeoutError, httpx.HTTPError, httpx.InvalidURL),
        *(requests.RequestException, aiohttp.ClientError),
    ) as error:
        raise ConfigError(
            f"no dashboard of a Ray cluster answers at {where}: {one_line(str(error) or type(error).__name__)[:_SHOWN]}"
        ) from None
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"the cluster at {where} says: {_said(error)}") from None


def _said(error: Exception) -> str:
    """Ray's own words of a request that failed: without the trace of its server."""
    text = one_line(str(error))
    return text.removeprefix("Request failed with status code ")[:_SHOWN]
