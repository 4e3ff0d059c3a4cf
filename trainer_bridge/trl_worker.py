"""A rollout worker for TRL's `AsyncGRPOTrainer`: it trains on groups from a stream, or from the files of a build.

Invariant: samples go into the queue group by group, in order, and no further group is asked for while the queue is
full. What ends the stream - its end, or an error - reaches the trainer through `check_health`, after all samples
before it.

Flow: `start` -> a thread takes groups -> `trl_rollouts.project` -> `make_sample` -> `rollout_buffer`, which TRL drains.

`make_sample` is TRL's `RolloutSample`: this module needs none of TRL's packages.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from gym_capture.errors import GymCaptureError
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import TrainRollout
from trainer_bridge.trl_rollouts import project, with_arrays

__all__ = ["GroupWorker", "StreamOverError"]

_POLL_S: Final = 0.1


class StreamOverError(GymCaptureError):
    """There are no more samples, and the trainer wants some."""


class GroupWorker:
    """TRL's `RolloutWorkerProtocol`."""

    def __init__(
        self,
        groups: Iterable[Sequence[TrainRollout]],
        make_sample: Callable[..., Any],
        *,
        queue_size: int = 256,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0
        """The version that the trainer said is live."""
        self.delivery = Delivery()
        """What has gone to the trainer so far, and what was left out."""
        self._groups = groups
        self._make_sample = make_sample
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gym-capture-groups")
        self._running: Future[None] | None = None

    def start(self) -> None:
        self._running = self._thread.submit(self._run)

    def stop(self) -> None:
        """Waits for the stream to give the group that it is asked for."""
        self._stopped.set()
        self._thread.shutdown()

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """TRL asks when it waits. Raises if nothing can come any more; a slow stream is no fault.

        Raises `StreamOverError`.
        """
        if self._running is None or not self._running.done() or not self.rollout_buffer.empty():
            return
        error = self._running.exception()
        if error is not None:
            raise StreamOverError(f"the stream of groups broke: {error}") from error
        raise StreamOverError("all groups are trained: set max_steps to what they make, or give the worker more groups")

    def _run(self) -> None:
        for group in self._groups:
            for row in project(group, self.delivery):
                if not self._put(self._make_sample(**with_arrays(row), enqueued_at=time.time())):
                    return

    def _put(self, sample: Any) -> bool:
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
