"""Which rollout killed its worker, noted where the worker's end does not reach.

Invariant: a death is charged to what that very process said it was at, and to nothing else; so a rollout that kills
whoever builds it is found out although others share its task, and is given up after `parts.MOST_DEATHS`.

Flow: a task says what it is at *before* it begins with it (`RayPost.enter`): its part, and each rollout of a part of
which a process has died already -> if its process ends there, however that came - the system or Ray took it for its
memory, native code crashed, a node was lost - Ray runs the task again, whose first word shows that the one before was
not the last -> that is one death of what the earlier process was at.
"""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Watch:
    """The actor. It knows tasks by an id that stays when Ray runs one again."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[str, str]] = {}
        """By task: the process that runs it, and what that is at."""
        self._deaths: Counter[str] = Counter()

    def enter(self, task: str, process: str, what: str) -> int:
        """`process` begins with `what`. Returns how many processes have died of that."""
        self._charge(task, process)
        self._at[task] = (process, what)
        return self._deaths[what]

    def leave(self, task: str, process: str) -> None:
        """`process` is through with the task."""
        self._charge(task, process)
        self._at.pop(task, None)

    def _charge(self, task: str, process: str) -> None:
        before, what = self._at.get(task, (process, ""))
        if before != process:
            self._deaths[what] += 1


def start_watch() -> ActorHandle[Any]:
    """A watch that ends with its last handle, on this node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": -1, "max_task_retries": -1}
    handle: ActorHandle[Any] = ray.remote(Watch).options(**options).remote()
    return handle


class RayPost:
    """The `parts.Post` of one task's process."""

    def __init__(self, watch: ActorHandle[Any]) -> None:
        self._watch = watch
        self._task = ray.get_runtime_context().get_task_id() or ""
        self._process = uuid.uuid4().hex

    def enter(self, what: str) -> int:
        """See `Watch.enter`."""
        deaths: int = ray.get(self._watch.enter.remote(self._task, self._process, what))
        return deaths

    def leave(self) -> None:
        ray.get(self._watch.leave.remote(self._task, self._process))
