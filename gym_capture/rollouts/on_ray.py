"""Attempts on the nodes of a Ray cluster: worker processes, spread over the nodes, that each play many rollouts.

Invariant: an attempt that was placed becomes an outcome, whatever becomes of its worker: one that is lost, with its
node or alone, gives `node_lost`, which the job plays again elsewhere; one that does not answer in the time that its
attempt can take is killed. A cancelled attempt is cancelled where it is played, and waited for as long as its tear-down
may take. When the runner is closed its workers are gone; when the job's process is gone, Ray ends them. Only the job's
process writes rows, decides on attempts and knows the graph's secret: a worker gets the token of a rollout.

Flow: workers are asked for, as many as `concurrency` needs and at least one a node -> each makes the job's environment
and harness from their names -> `place` finds the one with most room -> `play` there (`attempt.Attempts`) -> outcome. A
lost worker is replaced. A cluster that has no room for all of them plays in those that it has, until there is more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from gym_capture.cluster.replies import cause_of
from gym_capture.errors import ConfigError, described
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.attempt import FIRST, Attempts, Before, Outcome, Play, TurnResume, make_ready
from gym_capture.rollouts.environment import Task
from gym_capture.rollouts.harness import Endpoint, Failed
from gym_capture.rollouts.jobfile import JobFile, prepare_environment, prepare_harness
from gym_capture.rollouts.patience import Late, Patience, Raised

_SPARE_CALLS: Final = 4
"""Of a worker, beside its rollouts: they are opened and closed by calls, too."""
_ANSWER_S: Final = 10.0
"""Seconds that an answer may take on its way, when what it is about must be over."""
_STARTS: Final = 3
"""Workers in a row that may be lost before one has started."""
_NO_ROOM_AFTER_S: Final = 30.0
_LONGEST: Final = 500


@dataclass(frozen=True, slots=True)
class _Opened:
    """A worker's account of itself."""

    node: str
    sees_directory: bool


class _Worker:
    """A process that plays rollouts: an actor."""

    async def open(self, job: JobFile, mark: Path) -> _Opened:
        """Makes what all of the job's attempts have in common. Raises `ConfigError`."""
        limits = job.limits
        make_environment = await prepare_environment(job)
        self._attempts = Attempts(
            harness=prepare_harness(job),
            make_environment=make_environment,
            endpoint=Endpoint,
            clear=_done_already,
            close=_done_already,
            patience=Patience(grace_s=limits.close_timeout_s),
            rollout_timeout_s=limits.rollout_timeout_s,
            close_timeout_s=limits.close_timeout_s,
        )
        return _Opened(ray.util.get_node_ip_address(), await asyncio.to_thread(mark.exists))

    async def play(self, endpoint: Endpoint, rollout_id: str, task: Task) -> Outcome:
        return await replace(self._attempts, endpoint=lambda _: endpoint).play(rollout_id, task)

    async def close(self) -> None:
        await self._attempts.harness.close()


async def _done_already(rollout_id: str) -> None:
    """The job's process closes and clears."""


class _Place:
    """A worker as the job sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.busy = 0


class RayRunner:
    """Plays attempts in workers on the cluster that this process is a driver of: an `AttemptRunner`."""

    def __init__(
        self,
        job: JobFile,
        *,
        endpoint: Callable[[str], Endpoint],
        clear: Callable[[str], Awaitable[object]],
        close: Callable[[str], Awaitable[object]],
        note: Callable[[str], None],
        resume: TurnResume | None,
    ) -> None:
        self._job = job
        self._endpoint = endpoint
        self._clear = clear
        self._close = close
        self._note = note
        self._resume = resume
        self._node = ray.util.get_node_ip_address()
        self._mark = job.out.absolute() / f"seen-{uuid4().hex}"
        self._open: list[_Place] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._lost_in_a_row = 0
        self._broken: ConfigError | None = None
        self._unshared: set[str] = set()
        limits = job.limits
        self._patience = Patience(grace_s=limits.close_timeout_s)
        self._tear_down_s = 2 * limits.close_timeout_s + _ANSWER_S

    @property
    def left_running(self) -> int:
        """None: what does not end, ends with its worker, and workers are ended."""
        return 0

    def start(self) -> None:
        """Asks for the workers. Raises `ConfigError` if the job's directory cannot be written."""
        try:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
        except OSError as error:
            raise ConfigError(f"a rollout job cannot be kept in {self._mark.parent}: {error.strerror}") from None
        concurrency = self._job.limits.concurrency
        nodes = sum(node["Alive"] for node in ray.nodes())
        needed = math.ceil(concurrency / self._job.ray.rollouts_per_worker)
        for _ in range(min(concurrency, max(needed, nodes))):
            self._start_one()

    async def close(self) -> None:
        """Ends the workers, and with them whatever still runs there."""
        for task in self._starting:
            task.cancel()
        limit_s = self._job.limits.close_timeout_s
        if self._open:
            closing = [asyncio.ensure_future(_reply(place.actor.close.remote())) for place in self._open]
            _, late = await asyncio.wait(closing, timeout=limit_s)
            for task in late:
                task.cancel()
            # How a harness closes changes nothing of what was played.
            await asyncio.gather(*closing, return_exceptions=True)
        await asyncio.gather(*self._starting, return_exceptions=True)
        for place in self._open:
            ray.kill(place.actor)
        self._mark.unlink(missing_ok=True)

    async def place(self) -> Play:
        capacity = self._job.ray.rollouts_per_worker
        async with self._changed:
            while self._broken is None:
                place = min(self._open, key=lambda place: place.busy, default=None)
                if place is not None and place.busy < capacity:
                    place.busy += 1
                    return partial(self._play, place)
                try:
                    async with asyncio.timeout(_NO_ROOM_AFTER_S if not self._open else None):
                        await self._changed.wait()
                except TimeoutError:
                    self._note(self._no_room())
            raise self._broken

    async def _play(self, place: _Place, rollout_id: str, task: Task, *, before: Before = FIRST) -> Outcome:
        try:
            limit_s = self._job.limits.rollout_timeout_s
            ready = partial(
                make_ready, rollout_id, before=before, clear=self._clear, close=self._close, resume=self._resume
            )
            match await self._patience.wait(ready, limit_s=limit_s):
                case Raised(error):
                    return Outcome(Failed(AttemptFailure.NOT_CLEARED, described(error)), None)
                case Late():
                    return Outcome(Failed(AttemptFailure.NOT_CLEARED, f"not cleared after {limit_s:g} s"), None)
            reference = place.actor.play.remote(self._endpoint(rollout_id), rollout_id, task)
            playing = asyncio.ensure_future(_reply(reference))
            playing.add_done_callback(_looked_at)
            try:
                await asyncio.wait({playing}, timeout=limit_s + self._tear_down_s)
            except asyncio.CancelledError:
                ray.cancel(reference)
                await asyncio.wait({playing}, timeout=self._tear_down_s)
                raise
            if not playing.done():
                playing.cancel()
                await self._lose(place)
                detail = f"not over after {limit_s:g} s, and its worker did not answer: it was killed"
                return Outcome(Failed(AttemptFailure.ROLLOUT_TIMEOUT, detail), None)
            return await self._outcome(place, playing)
        finally:
            async with self._changed:
                place.busy -= 1
                self._changed.notify()

    async def _outcome(self, place: _Place, playing: asyncio.Future[Any]) -> Outcome:
        try:
            outcome: Outcome = playing.result()
        except RayTaskError as error:
            return Outcome(Failed(AttemptFailure.EXCEPTION, described(cause_of(error))), None)
        except (RayError, asyncio.CancelledError) as error:
            # Also for a worker that cannot be reached: what it may go on with must not be another attempt's.
            await self._lose(place)
            return Outcome(Failed(AttemptFailure.NODE_LOST, _brief(error)), None)
        return outcome

    async def _lose(self, place: _Place) -> None:
        """Takes a worker out, for good, and asks for another one. The first of its rollouts that notices does that."""
        if place not in self._open:
            return
        self._open.remove(place)
        ray.kill(place.actor)
        self._start_one()

    def _start_one(self) -> None:
        task = asyncio.create_task(self._started())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _started(self) -> None:
        """One worker, in the end: as often as it takes."""
        options = self._job.ray
        while self._broken is None:
            actor = (
                ray.remote(_Worker)
                .options(
                    num_cpus=options.num_cpus,
                    resources=options.resources,
                    scheduling_strategy="SPREAD",
                    max_concurrency=options.rollouts_per_worker + _SPARE_CALLS,
                )
                .remote()
            )
            try:
                opened: _Opened = await _reply(actor.open.remote(self._job, self._mark))
            except asyncio.CancelledError:
                ray.kill(actor)
                raise
            except RayTaskError as error:
                ray.kill(actor)
                cause = cause_of(error)
                await self._break(cause if isinstance(cause, ConfigError) else ConfigError(described(cause)))
            except RayError as error:
                self._lost_in_a_row += 1
                if self._lost_in_a_row >= _STARTS:
                    await self._break(ConfigError(f"workers that play rollouts do not start: {_brief(error)}"))
            else:
                self._lost_in_a_row = 0
                self._say_where(opened)
                self._open.append(_Place(actor))  # at once: `close` ends what is in there
                async with self._changed:
                    self._changed.notify_all()
                return

    async def _break(self, error: ConfigError) -> None:
        async with self._changed:
            self._broken = error
            self._changed.notify_all()

    def _say_where(self, opened: _Opened) -> None:
        if opened.sees_directory or opened.node in self._unshared:
            return
        self._unshared.add(opened.node)
        self._note(
            f"{self._mark.parent} is on node {self._node} only, {opened.node} does not have it: should {self._node} be "
            "lost, so are the rows of this job. Name a directory on storage that all nodes share"
        )

    def _no_room(self) -> str:
        options = self._job.ray
        asked = [f"{options.num_cpus:g} CPUs", *(f"{amount:g} {name}" for name, amount in options.resources.items())]
        return (
            f"the cluster has had no room for a worker yet: each asks a node for {', '.join(asked)} (`ray` of the job)"
        )


@asynccontextmanager
async def on_ray(
    job: JobFile,
    *,
    endpoint: Callable[[str], Endpoint],
    clear: Callable[[str], Awaitable[object]],
    close: Callable[[str], Awaitable[object]],
    note: Callable[[str], None],
    resume: TurnResume | None = None,
) -> AsyncIterator[RayRunner]:
    """Workers for a job, from a process that has joined the cluster. `note` is told what its user should know."""
    runner = RayRunner(job, endpoint=endpoint, clear=clear, close=close, note=note, resume=resume)
    try:
        runner.start()
        yield runner
    finally:
        await runner.close()


async def _reply(reference: Any) -> Any:
    return await reference


def _looked_at(playing: asyncio.Future[Any]) -> None:
    """Asyncio reports what was raised and nobody looked at, such as that a cancelled attempt was cancelled."""
    if not playing.cancelled():
        playing.exception()


def _brief(error: BaseException) -> str:
    """Ray's words, which are many, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]
