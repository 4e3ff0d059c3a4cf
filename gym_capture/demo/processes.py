"""Processes that the demo starts, and the certainty that none of them is left.

Invariant: when the context of `ChildProcesses` is left, by whatever way, every process that was started below this one
is gone. Processes that lose their parent (Ray's workers, an engine's core) do not slip away: this process is made their
new parent.

Flow: `start` runs a command in its own session with its output in a log file -> `stop` asks it to end like Ctrl-C does
-> leaving the context ends whatever still lives, and says what that was.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

import psutil

_PR_SET_CHILD_SUBREAPER: Final = 36
_KILL_S: Final = 20.0
_TAIL_BYTES: Final = 4_000
_COLORS: Final = re.compile("\x1b\\[[0-9;]*m")
_PORTS: Final = range(20_000, 30_000)
"""Above those of Ray's workers, below those that the system gives to outgoing connections: either would take a port
between the moment when it is found free and the one when a server is up."""


class Child:
    """A command that runs in its own session."""

    def __init__(self, command: Sequence[str], *, log: Path, grace_s: float) -> None:
        self.log = log
        self._grace_s = grace_s
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ends it and its process group: by SIGINT, then, if that does not help, by SIGKILL."""
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace_s)
        self.kill()

    def kill(self) -> None:
        """Ends it and its process group at once, without asking."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        """The end of what it wrote."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return _COLORS.sub("", file.read().decode("utf-8", errors="replace")).strip()


class ChildProcesses:
    """The lifetime of the demo's processes. Use as a context manager, from the main thread."""

    def __init__(self, *, grace_s: float = 20.0, linger_s: float = 5.0) -> None:
        """`grace_s`: how long a child may take to end when asked; `linger_s`: its own children, once it is gone."""
        self._grace_s = grace_s
        self._linger_s = linger_s
        self._children: list[Child] = []
        self._here_before: frozenset[psutil.Process] = frozenset()
        self.leftovers: tuple[str, ...] = ()
        """After the end: the processes that had to be killed because they outlived whoever started them."""

    def start(self, command: Sequence[str], *, log: Path) -> Child:
        child = Child(command, log=log, grace_s=self._grace_s)
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        # A shell that starts something in the background has it ignore interrupts, and its children inherit that.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._here_before = frozenset(psutil.Process().children())
        _adopt_orphans(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _Uninterrupted():
            for child in reversed(self._children):
                if child.ended() is None:
                    child.stop()
            self.leftovers = _end_descendants(self._linger_s, spare=self._here_before)
            _adopt_orphans(False)


class _Uninterrupted:
    """A second Ctrl-C must not stop the ending of processes half way; every step of it is bounded in time."""

    def __enter__(self) -> None:
        self._handlers = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now, and that nothing takes by chance until it is used."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _adopt_orphans(adopt: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _end_descendants(linger_s: float, *, spare: frozenset[psutil.Process]) -> tuple[str, ...]:
    """Waits for descendants to end and kills those that do not. Returns the names of the killed ones."""
    _, alive = psutil.wait_procs(_descendants(spare), timeout=linger_s)
    names = []
    while alive:
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                names.append(process.name())
                process.kill()
        psutil.wait_procs(alive, timeout=_KILL_S)
        alive = _descendants(spare)
    return tuple(names)


def _descendants(spare: frozenset[psutil.Process]) -> list[psutil.Process]:
    """All of them, without children that were there before and what is below those."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child not in spare:
            found.append(child)
            with suppress(psutil.NoSuchProcess):
                found += child.children(recursive=True)
    return found


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing. Unlike SIG_IGN, it is not handed on to processes started meanwhile."""
