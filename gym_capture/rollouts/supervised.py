"""Runs a program that is not trusted to end, to be brief, or to clean up after itself.

Invariant: when `run_supervised` returns or is cancelled, nothing runs on that the program started, however it tried to
get away; `supervisor` says how. What could not be killed, as processes of another user, is told: `Ended.left`. The
program gets the environment that it is given and nothing of this process's; what it writes is read to its end, and kept
within bounds.

This keeps programs from disturbing each other by accident. It is no sandbox: a program that wants to can read what this
user can read.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gym_capture.rollouts import supervisor

_KILLING_TAKES_S: Final = 10.0
_PIECE: Final = 65_536
PASSED_ON: Final = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""The variables that a program gets of this process's environment. Everything else may be a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of a program."""

    timeout_s: float | None = None
    stdout_bytes: int = 1 << 20
    """It is killed when it writes more."""
    stderr_bytes: int = 16 << 10
    """Kept of its end."""
    file_bytes: int = 1 << 30
    """The largest file that it may write; 0: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended, and what it said."""

    status: int | None = None
    """Its exit status; None: it did not end by itself."""
    signal: int | None = None
    """The signal that killed it, if not ours."""
    error: str | None = None
    """Why it could not be started."""
    timed_out: bool = False
    too_much: bool = False
    """It wrote more to its standard output than it may."""
    left: bool = False
    """Something of it may still run: it could not be killed."""
    stdout: bytes
    stderr: bytes
    """The end of it."""


def passed_on(names: Sequence[str] = ()) -> dict[str, str]:
    """The part of this process's environment that programs get, and what of it they get by `names`."""
    return {name: os.environ[name] for name in (*PASSED_ON, *names) if name in os.environ}


async def run_supervised(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: Path | None, bounds: Bounds
) -> Ended:
    """Runs `command` in `folder` to its end, or to that of its time, with `stdin` as its standard input.

    Raises `OSError` if not even the supervisor could be started.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", supervisor.__file__, str(bounds.file_bytes), str(stdin or os.devnull)),
            *command,
            cwd=folder,
            env=dict(environment),
            stdin=theirs.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        return await _Run(process, ours, bounds).ended()


class _Run:
    """A program under way."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, bounds: Bounds) -> None:
        self._process = process
        self._control = control
        self._bounds = bounds
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._too_much = asyncio.Event()

    async def ended(self) -> Ended:
        over = asyncio.create_task(self._process.wait())
        too_much = asyncio.create_task(self._too_much.wait())
        reading = [asyncio.create_task(self._read_stdout()), asyncio.create_task(self._read_stderr())]
        try:
            done, _ = await asyncio.wait(
                (over, too_much), timeout=self._bounds.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            # Also when this is cancelled. The supervisor takes the closed end as the order to kill everything.
            self._control.shutdown(socket.SHUT_WR)
            await asyncio.wait((over, *reading), timeout=_KILLING_TAKES_S)
            for task in (over, too_much, *reading):
                task.cancel()
            if self._process.returncode is None:
                self._process.kill()
        by_itself = over in done
        report = self._report()
        return Ended(
            status=report.status if by_itself else None,
            signal=report.signal if by_itself else None,
            error=report.error,
            timed_out=not done,
            too_much=self._too_much.is_set(),
            left=report.left,
            stdout=bytes(self._stdout),
            stderr=bytes(self._stderr),
        )

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(_PIECE):
            self._stdout += piece[: self._bounds.stdout_bytes - len(self._stdout)]
            if len(self._stdout) >= self._bounds.stdout_bytes:
                self._too_much.set()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(_PIECE):
            self._stderr += piece
            del self._stderr[: -self._bounds.stderr_bytes]

    def _report(self) -> _Report:
        self._control.setblocking(False)
        try:
            line = self._control.recv(_PIECE)
        except OSError:
            line = b""
        return _Report(**json.loads(line)) if line else _Report(error="what watches over it was killed", left=True)


@dataclass(frozen=True, slots=True)
class _Report:
    """The supervisor's last line."""

    status: int | None = None
    signal: int | None = None
    error: str | None = None
    left: bool = False
