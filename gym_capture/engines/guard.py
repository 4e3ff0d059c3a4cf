"""No engine process outlives the process that holds it.

Invariant: once a holder is gone, however it went (a SIGKILL, the kernel's OOM killer), its engine processes are killed
within a second or two: nobody could reach them any more, and they would keep the accelerator's memory.

Flow: `start_guard` starts this file as a process of its own -> it notes the holder's engine processes as they appear
-> the holder ends -> it kills those that are left, and ends. Their own workers end with them.

vLLM's engine process notices a holder that dies before it is connected; later it would wait for requests forever.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

_POLL_MS: Final = 1_000
_START_TIME_FIELD: Final = 22 - 3
"""In /proc/PID/stat, behind the name in brackets, with which the third field begins."""

Known: TypeAlias = dict[int, int]
"""Processes by id, with the time at which each was started: ids are given out again."""


def start_guard(*, title: str) -> subprocess.Popen[bytes] | None:
    """Guards those children of this process whose title starts with `title`, until this process ends, or the guard is
    terminated. None where there is no Linux to do so.
    """
    if sys.platform != "linux":
        return None
    # -I and -S: it needs nothing but the standard library, and is there in a moment.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), title],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to the holder's group is not meant for it
    )


def guard(holder: int, title: str) -> None:
    """Returns once `holder` and its engine processes are gone."""
    try:
        handle = os.pidfd_open(holder)
    except ProcessLookupError:
        return
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    known: Known = {}
    while not ended.poll(_POLL_MS):
        known |= children(holder, title)
    kill(known)


def kill(known: Known) -> None:
    """Kills those that are still the processes they were."""
    for process, started in known.items():
        if _started(process) == started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def children(holder: int, title: str) -> Known:
    """The children of `holder` whose title starts with `title`."""
    found: Known = {}
    with suppress(OSError):  # the holder ends meanwhile
        for ids in Path(f"/proc/{holder}/task").glob("*/children"):
            with suppress(OSError):  # ...or one of its threads: another has its children then
                for child in map(int, ids.read_text().split()):
                    started = _started(child)
                    if started is not None and _title(child).startswith(title):
                        found[child] = started
    return found


def _title(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    return ""


def _started(process: int) -> int | None:
    """Clock ticks after boot; None for a process that is gone."""
    with suppress(OSError):
        _, _, fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")
        return int(fields.split()[_START_TIME_FIELD])
    return None


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
