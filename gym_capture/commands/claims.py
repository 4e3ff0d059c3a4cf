"""One process at a time plays a job on a graph.

Invariant: while a process that has claimed a job id lives, no other one of the graph's cluster and namespace claims it.
A claim ends with its process, however that ends: nothing is left to be cleared, and there is no lease that could run
out under a process that stands still.

A claim is an actor of that name, which Ray lets be there once, and which Ray ends with its driver. Directories of jobs
have locks of their own (`rollouts.ledger`); this is about two directories with one job id, whose jobs would clear each
other's records.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from typing import Any, Final

from gym_capture.errors import ConfigError

_PREFIX: Final = "gym-capture-job:"
_AGAIN_S: Final = 0.5
_GONE_WITHIN_S: Final = 30.0
"""Ray takes a moment to see that a process was killed, and longer if its node went with it."""
_ANSWERS_WITHIN_S: Final = 5.0


class _Claim:
    """Is there, and says for whom."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def holder(self) -> str:
        return self._holder


async def claim(job_id: str, namespace: str, *, note: Callable[[str], None], wait_s: float = _GONE_WITHIN_S) -> object:
    """Claims a job id for as long as this process lives and what is returned is held. `note` is told if it has to wait,
    which ends when it is cancelled.

    Raises `ConfigError` if another process holds it, and goes on to.
    """
    import ray

    remote = ray.remote(_Claim).options(
        name=_PREFIX + job_id, namespace=namespace, num_cpus=0, max_restarts=-1, max_task_retries=-1
    )
    ends = time.monotonic() + wait_s
    waits = False
    while True:
        try:
            return await asyncio.to_thread(remote.remote, f"process {os.getpid()} on {platform.node()}")
        except ValueError:  # so Ray says that there is one of that name
            if time.monotonic() >= ends:
                holder = await asyncio.to_thread(_holder, job_id, namespace)
                raise ConfigError(
                    f"job {job_id} is played by {holder} already: end that one, or choose another "
                    "job_id for this job, as each clears the records of the other's attempts"
                ) from None
        if not waits:
            holder = await asyncio.to_thread(_holder, job_id, namespace)
            note(f"job {job_id} is played by {holder}; waiting {wait_s:.0f} s for that to end")
            waits = True
        await asyncio.sleep(_AGAIN_S)


def _holder(job_id: str, namespace: str) -> str:
    import ray
    from ray.exceptions import RayError

    try:
        held: Any = ray.get_actor(_PREFIX + job_id, namespace=namespace)
        return str(ray.get(held.holder.remote(), timeout=_ANSWERS_WITHIN_S))
    except (ValueError, RayError):  # it has gone meanwhile, or starts
        return "another process"
