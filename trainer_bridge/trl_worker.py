"""A rollout worker for TRL's `AsyncGRPOTrainer`: it trains on groups from a stream, or from the files of a build.

Invariant: samples go into the queue group by group, in order, and no further group is asked for while the queue is
full. What ends the stream - its end, or an error - reaches the trainer through `check_health`, after all samples
before it.

Flow: `start` -> a thread takes groups -> `trl_rollouts.project` -> `make_sample` -> `rollout_buffer`, which TRL drains.
`HandedOver` gives the groups of a stream, which no later run of the trainer gets again.

`make_sample` is TRL's `RolloutSample`: this module needs none of TRL's packages.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from gym_capture.durable_files import replace_file
from gym_capture.errors import ConfigError, GymCaptureError
from trainer_bridge.groups import Group, GroupSource, GroupStream, Position, StreamOptions
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import TrainRollout
from trainer_bridge.trl_rollouts import project, with_arrays

__all__ = ["GroupWorker", "HandedOver", "StreamOverError"]

_POLL_S: Final = 0.1


class StreamOverError(GymCaptureError):
    """There are no more samples, and the trainer wants some."""


class HandedOver:
    """The groups of a source, for a `GroupWorker`: no later run of the trainer gets them again.

    A group is settled in the file `position` before TRL may have it, and its records go where the source retires them:
    TRL does not say which samples are in a checkpoint. So a trainer that starts again trains no group twice, and does
    not get those that were in the queue, or behind the checkpoint, when it stopped.
    """

    def __init__(self, source: GroupSource, position: Path, options: StreamOptions | None = None) -> None:
        """Raises `ConfigError` for a file that is something else."""
        self._source = source
        self._position = position
        self._options = options
        self._settled = _read(position)
        self._changes = threading.Lock()
        self._open: GroupStream | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Group]:
        """Once. The stream is open as long as its thread iterates."""
        with GroupStream(self._source, self._options, position=self._settled) as stream:
            with self._changes:
                self._open = None if self._ended else stream
            try:
                if self._open is not None:
                    yield from self._groups(stream)
            finally:
                with self._changes:
                    self._open = None

    def end(self) -> None:
        """There are no more, also for whoever waits for one. For other threads."""
        with self._changes:
            self._ended = True
            if self._open is not None:
                self._open.end()

    def _groups(self, stream: GroupStream) -> Iterator[Group]:
        for group in stream:
            settled = stream.trained([group])
            self._position.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._position, json.dumps(settled.as_json()).encode())
            stream.acknowledge(settled)
            yield group


def _read(position: Path) -> Position | None:
    if not position.exists():
        return None
    try:
        return Position.from_json(json.loads(position.read_bytes()))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{position} is no position in a stream of groups: {error}") from None


class GroupWorker:
    """TRL's `RolloutWorkerProtocol`."""

    def __init__(
        self,
        groups: HandedOver | Iterable[Sequence[TrainRollout]],
        make_sample: Callable[..., Any],
        *,
        queue_size: int = 256,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0
        """The version that the trainer said is live, as the trainer counts."""
        self.versions_before = 0
        """What the graph's version is ahead of the trainer's: it served before this trainer began (`GraphWeights`)."""
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
        """Ends the stream of `HandedOver`. Other groups are waited for, if one has been asked for."""
        self._stopped.set()
        if isinstance(self._groups, HandedOver):
            self._groups.end()
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
                row["model_version"] -= self.versions_before
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
