"""Waiting for other people's code for as long as it was given, and no longer.

Invariant: `wait` returns within the limit and one grace period, whatever the work does: it may raise anything, swallow
its cancellation or never end. Work that does not end is left to itself and counted, and `run` ends without it. (Work
that blocks the thread instead of awaiting is beyond this: everything stands still with it.)

Flow: the work becomes a task -> it ends in time, or is cancelled and gets the grace period to let go -> what became of
it, as a value. Only a cancellation of the waiter itself passes through, once the work was given its grace period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

_T = TypeVar("_T")


class Value(NamedTuple, Generic[_T]):
    """The work ended in time."""

    value: _T


class Raised(NamedTuple):
    """The work raised in time."""

    error: BaseException


class Late(NamedTuple):
    """The work was not over in time."""

    still_runs: bool
    """It did not end when it was cancelled either."""


Ended: TypeAlias = Value[_T] | Raised | Late


class Patience:
    """How long cancelled work is waited for, and what did not end by then."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._left_running: set[asyncio.Task[Any]] = set()

    @property
    def left_running(self) -> int:
        """How much work still runs although it was cancelled."""
        return len(self._left_running)

    async def wait(self, work: Callable[[], Awaitable[_T]], *, limit_s: float) -> Ended[_T]:
        task = asyncio.create_task(_contained(work))
        try:
            await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            await self._stop(task)
            raise
        if not task.done():
            await self._stop(task)
            return Late(still_runs=not task.done())
        if task.cancelled():
            return Raised(asyncio.CancelledError("of its own"))
        error = task.exception()
        return task.result() if error is None else Raised(error)

    async def _stop(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        # Held, as the loop itself holds tasks weakly; looked at in the end, or asyncio would report what it raised.
        self._left_running.add(task)
        task.add_done_callback(self._over)
        await asyncio.wait({task}, timeout=self._grace_s)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._left_running.discard(task)
        if not task.cancelled():
            task.exception()


async def _contained(work: Callable[[], Awaitable[_T]]) -> Value[_T] | Raised:
    try:
        return Value(await work())
    except SystemExit as stop:  # out of a task it would end the event loop
        return Raised(stop)


def run(main: Coroutine[Any, Any, _T], *, grace_s: float = 1.0) -> _T:
    """`asyncio.run`, but for tasks that do not end when they are cancelled: those are waited for no longer than
    `grace_s`."""
    runner = asyncio.Runner()
    try:
        return runner.run(main)
    finally:
        loop = runner.get_loop()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=grace_s))
        if all(task.done() for task in tasks):
            runner.close()
        else:
            # The runner would wait for them. Those that stay are known to the caller, who need not hear of them again.
            loop.set_exception_handler(lambda _loop, _context: None)
            loop.close()
