"""Wires the tool loop to a served graph: what `gym-capture rollouts run` and the demo play.

Invariant: each rollout's calls carry its id in their base URL, so the graph records them under it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import openai

from gym_capture.auth import Keyring
from gym_capture.rollouts.environment import EnvironmentFactory, Task
from gym_capture.rollouts.harness import Endpoint, ToolLoop, ToolLoopOptions
from gym_capture.rollouts.job import JobOptions, JobSummary, RolloutJob
from gym_capture.rollouts.ledger import RolloutRow


async def run_tool_agent(
    *,
    url: str,
    tasks: Sequence[Task],
    make_environment: EnvironmentFactory,
    job: JobOptions,
    loop: ToolLoopOptions,
    clear: Callable[[str], Awaitable[None]],
    directory: Path,
    on_row: Callable[[RolloutRow], None],
    keyring: Keyring | None = None,
) -> JobSummary:
    """Plays the job against the graph at `url` (scheme, host and port), with its keyring if it has a secret."""
    root = url.rstrip("/")
    # The job bounds how many calls are in flight; a second bound in the client would only make calls wait unseen.
    unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    http_client = openai.DefaultAsyncHttpxClient(limits=unbounded)

    def endpoint(rollout_id: str) -> Endpoint:
        base_url = f"{root}/ng-rollout/{rollout_id}/v1"
        return Endpoint(base_url) if keyring is None else Endpoint(base_url, keyring.rollout_token(rollout_id))

    async with openai.AsyncOpenAI(base_url=root, api_key="unused", http_client=http_client) as client:
        return await RolloutJob(
            tasks=tasks,
            options=job,
            harness=ToolLoop(client, loop),
            make_environment=make_environment,
            endpoint=endpoint,
            clear=clear,
            directory=directory,
        ).run(on_row=on_row)
