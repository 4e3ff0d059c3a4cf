"""Parts in this process, or in processes of this machine: a build without Ray.

Invariant: what an interrupt, an error or a killed parent ends leaves no process behind.

Flow: one part, or one worker -> here, part by part -> else a pool: a part for each task, their results in order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from gym_capture.data.parts import Part, Unwatched, WorkerSource, Written, write_part
from gym_capture.data.trajectory_files import Work
from gym_capture.errors import StoreError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunner:
    """A `Runner` of up to `workers` processes. With one, or for one part, the work is done in this process."""

    workers: int

    def run(self, work: Work, parts: Sequence[Part]) -> Generator[Written]:
        """See `Runner`. Raises `StoreError` if a worker died."""
        workers = min(self.workers, len(parts))
        if workers == 1:
            with WorkerSource(work.source) as source:
                for part in parts:
                    yield from _write(work, source, part)
        else:
            for written in in_processes(partial(_whole, work), parts, workers):
                yield from written


def in_processes(work: Callable[[_Task], _Result], tasks: Sequence[_Task], workers: int) -> Generator[_Result]:
    """The results of `work` on each of `tasks`, in their order, from processes of their own."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker)
    try:
        yield from pool.map(work, tasks)
    except BrokenProcessPool:
        raise StoreError("a worker process died, perhaps for lack of memory: try again with fewer workers") from None
    except BaseException:
        # Nothing that they write will be used: what an interrupt ends need not be waited for.
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """A terminal interrupts the whole process group; only the parent has something to say of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed tells nobody, and a worker would wait for its next part for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write(work: Work, source: WorkerSource, part: Part) -> Generator[Written]:
    return write_part(part, source=source, options=work.options, post=Unwatched(), staging=work.staging)


def _whole(work: Work, part: Part) -> list[Written]:
    with WorkerSource(work.source) as source:
        return list(_write(work, source, part))
