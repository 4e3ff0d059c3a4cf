"""A rollout job on a served graph: what `gym-capture rollouts run` and the demo play.

Invariant: each attempt's calls carry its rollout id in their base URL, so the graph records them under it, and its own
token if the graph has a secret. The harness is closed once, however the job ended, in the time that a tear-down has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gym_capture.auth import Keyring
from gym_capture.rollouts.attempt import Outcome, TurnResume
from gym_capture.rollouts.environment import EnvironmentFactory, Task
from gym_capture.rollouts.harness import Endpoint, Harness
from gym_capture.rollouts.job import JobOptions, JobSummary, RolloutJob, at_once
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.outage import Outage, asking
from gym_capture.rollouts.patience import Patience
from gym_capture.rollouts.progress import Counting, JobProgress, uncounted


async def play_on_graph(
    *,
    url: str,
    tasks: Sequence[Task],
    make_environment: EnvironmentFactory,
    harness: Harness,
    options: JobOptions,
    settings: Mapping[str, Any],
    clear: Callable[[str], Awaitable[object]],
    close: Callable[[str], Awaitable[object]],
    resume: TurnResume | None = None,
    directory: Path,
    on_row: Callable[[RolloutRow], None] = lambda row: None,
    on_kept: Callable[[RolloutRow], None] = lambda row: None,
    keep: Callable[[RolloutRow, Outcome], None] = lambda row, outcome: None,
    counting: Counting = uncounted,
    may_begin: Callable[[str], Awaitable[object]] = at_once,
    progress: JobProgress | None = None,
    keyring: Keyring | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> JobSummary:
    """Plays the job against the graph at `url` (scheme, host and port), with its keyring if it has a secret. `note` is
    told what the user should know."""
    async with watched(url, options, note) as outage:
        job = RolloutJob(
            tasks=tasks,
            options=options,
            harness=harness,
            make_environment=make_environment,
            endpoint=endpoints(url, keyring),
            clear=clear,
            close=close,
            resume=resume,
            settings=settings,
            directory=directory,
            keep=keep,
            counting=counting,
            outage=outage,
            may_begin=may_begin,
        )
        try:
            return await job.run(on_row=on_row, on_kept=on_kept, progress=progress)
        finally:
            # The rollouts are over: how this ends changes nothing of them.
            limit_s = options.close_timeout_s
            await Patience(grace_s=limit_s).wait(harness.close, limit_s=limit_s)


@asynccontextmanager
async def watched(url: str, options: JobOptions, note: Callable[[str], None]) -> AsyncIterator[Outage]:
    """Knows, for a job, when the graph at `url` is away."""
    async with asking(url) as is_well:
        yield Outage(is_well, limit_s=options.outage_timeout_s, note=note)


def endpoints(url: str, keyring: Keyring | None) -> Callable[[str], Endpoint]:
    """Where the calls of a rollout id go, and what admits them."""
    root = url.rstrip("/")

    def endpoint(rollout_id: str) -> Endpoint:
        base_url = f"{root}/ng-rollout/{rollout_id}/v1"
        return Endpoint(base_url) if keyring is None else Endpoint(base_url, keyring.rollout_token(rollout_id))

    return endpoint
