"""A rollout job, ready to be played on the graph that its file names: for whoever builds, trains, or just plays.

Invariant: what can be known to be wrong is said before anything is played.

Flow: `JobFile` -> tasks, environment and harness are made -> the server is asked whether it is a graph -> `playable`
gives what plays, with what is counted meanwhile going to `progress` and to the cluster's metrics.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx

from gym_capture.auth import Keyring
from gym_capture.errors import ConfigError, StoreError
from gym_capture.rollouts.job import at_once
from gym_capture.rollouts.ledger import read_job

if TYPE_CHECKING:
    from gym_capture.commands.rollout_view import View
    from gym_capture.data.sources import SourceSpec
    from gym_capture.rollout_counts import RolloutCounts
    from gym_capture.rollouts.attempt import Outcome
    from gym_capture.rollouts.environment import Task
    from gym_capture.rollouts.exchanges import Exchanges
    from gym_capture.rollouts.job import JobOptions, JobSummary
    from gym_capture.rollouts.jobfile import JobFile
    from gym_capture.rollouts.ledger import RolloutRow
    from gym_capture.rollouts.progress import Counting, JobProgress

_ANSWERS_WITHIN_S: Final = 10.0
_COUNTED_WITHIN_S: Final = 5.0
"""A rollout that is over waits no longer for what is recorded of it."""


class On(StrEnum):
    """Where rollouts are played."""

    HERE = "here"
    RAY = "ray"


@dataclass(frozen=True, kw_only=True)
class Playable:
    """A job that can be played, once."""

    options: JobOptions
    tasks: Sequence[Task]
    exchanges: Exchanges
    play: Callable[[Callable[[RolloutRow], None]], Awaitable[JobSummary]]
    """Plays what has no row yet. Tells of each rollout that is over, those of earlier runs first."""


@asynccontextmanager
async def playable(
    job: JobFile,
    on: On,
    *,
    progress: JobProgress,
    note: Callable[[str], None],
    may_begin: Callable[[str], Awaitable[object]] = at_once,
    joined: bool = False,
) -> AsyncIterator[Playable]:
    """`note` is told what the user should know, `may_begin` is waited for before each rollout. `joined`: this process
    is on the graph's cluster already. Raises `ConfigError`."""
    from gym_capture.commands.fence import connected_fence, fence_of
    from gym_capture.commands.rollout_view import watching
    from gym_capture.rollouts.exchanges import Exchanges
    from gym_capture.rollouts.job import JobRun
    from gym_capture.rollouts.jobfile import prepare, tasks_of
    from gym_capture.rollouts.on_graph import endpoints, play_on_graph, watched
    from gym_capture.rollouts.on_ray import on_ray
    from gym_capture.rollouts.progress import looking
    from gym_capture.rollouts.rows import exchange_of

    endpoint = job.endpoint
    keyring = None if endpoint.secret_file is None else Keyring.from_file(endpoint.secret_file)
    options = job.options(job.job_id or id_of(job.out))
    prepared = await prepare(job) if on is On.HERE else None  # on Ray, the workers make what plays
    tasks = await tasks_of(job) if prepared is None else prepared.tasks
    check_server(endpoint.url)
    fence = fence_of(endpoint.namespace) if joined else connected_fence(endpoint.ray_address, endpoint.namespace)
    await fence.claim(options.job_id, note)
    resume = fence if job.resume_turns else None
    counting, metrics = recorded(endpoint.namespace, options.job_id)

    with Exchanges(job.out) as exchanges:

        def keep(row: RolloutRow, outcome: Outcome) -> None:
            exchanges.add(row.rollout_id, exchange_of(outcome))

        async def play_here(on_over: Callable[[RolloutRow], None]) -> JobSummary:
            assert prepared is not None
            return await play_on_graph(
                url=endpoint.url,
                tasks=tasks,
                make_environment=prepared.make_environment,
                harness=prepared.harness,
                options=options,
                settings=job.settings,
                clear=fence.clear,
                close=fence.close,
                resume=resume,
                directory=job.out,
                on_row=on_over,
                on_kept=on_over,
                keep=keep,
                counting=counting,
                may_begin=may_begin,
                progress=progress,
                keyring=keyring,
                note=note,
            )

        async def play_on_ray(on_over: Callable[[RolloutRow], None]) -> JobSummary:
            to = endpoints(endpoint.url, keyring)
            async with (
                on_ray(job, endpoint=to, clear=fence.clear, close=fence.close, resume=resume, note=note) as attempts,
                watched(endpoint.url, options, note) as outage,
            ):
                run = JobRun(
                    tasks=tasks,
                    options=options,
                    attempts=attempts,
                    settings=job.settings,
                    directory=job.out,
                    resume=resume,
                    keep=keep,
                    counting=counting,
                    outage=outage,
                    may_begin=may_begin,
                )
                return await run.run(on_row=on_over, on_kept=on_over, progress=progress)

        async with looking(progress, counting), watching(progress, metrics):
            yield Playable(
                options=options,
                tasks=tasks,
                exchanges=exchanges,
                play=play_here if on is On.HERE else play_on_ray,
            )


def check_server(url: str) -> None:
    """Raises `ConfigError` if nothing answers at `url`, or if what answers is no graph."""
    at = f"{url.rstrip('/')}/stats"
    try:
        answer = httpx.get(at, timeout=_ANSWERS_WITHIN_S, trust_env=False)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url {url} is not a URL such as http://127.0.0.1:8000: {error}") from None
    except httpx.TransportError as error:
        raise ConfigError(
            f"no graph answers at {url} ({error or type(error).__name__}): is `serve run` up? --url names another place"
        ) from None
    if answer.status_code >= 500:
        return  # of a graph that starts, or one of whose actors does: the calls will tell
    try:
        is_graph = answer.status_code == 200 and "capture" in answer.json()
    except (ValueError, TypeError, RecursionError):
        is_graph = False
    if not is_graph:
        # HAProxy says 404, too, as long as it has no replica.
        starting = f"; or the graph is starting: wait until {url}/healthz answers" if answer.status_code == 404 else ""
        raise ConfigError(
            f"what answers at {url} is no gym-capture graph: HTTP {answer.status_code} from {at}. Name scheme, host "
            f"and port only, without /v1{starting}"
        )


def id_of(out: Path) -> str:
    """That of the job in `out`, if there is one, else a new one.

    A name alone would do harm: a job in another folder of the same name would take the first one's rollout ids, and
    clearing them before it plays would put its tokens under the first one's rewards.
    """
    found = read_job(out)
    return f"{out.resolve().name}-{uuid.uuid4().hex[:8]}" if found is None else str(found["job_id"])


def records_of(namespace: str) -> SourceSpec:
    """The source of the graph's records."""
    from gym_capture.data.sources import SourceSpec

    return SourceSpec(import_path="gym_capture.serving.state:connect", kwargs={"namespace": namespace})


def recorded(namespace: str, job_id: str) -> tuple[Counting, View]:
    """What is recorded of a job's rollouts, as its graph's state actors say, and the view that exports its numbers.

    For a process that has joined the cluster."""
    from gym_capture.rollouts.metrics import JobMetrics
    from gym_capture.serving.state import connect

    state = connect(namespace=namespace)

    async def counting(rollout_ids: Sequence[str]) -> Sequence[RolloutCounts] | None:
        try:
            async with asyncio.timeout(_COUNTED_WITHIN_S):
                return await state.counts(rollout_ids)
        except (StoreError, TimeoutError):  # it restarts: the job goes on without
            return None

    return counting, JobMetrics(namespace=namespace, job_id=job_id)
