"""A small process between a job and a program that it starts: `supervised` runs this file as a script.

Invariant: when this process ends by itself, nothing that the program started is left - not what it put into sessions
of its own, not what a dead parent left behind: all of it is handed to this process, which is their *subreaper*. It ends
when the program does, when it is told to, and when whoever started it is gone, whatever ended that one.

Flow: `supervisor.py MAX_FILE_BYTES STDIN_FILE PROGRAM ARGUMENT...`, with one end of a socket as standard input. The
program runs in a session of its own, with standard input from the file. When it is over, or the socket's other end is
closed, every child is killed until there are none; then one line of JSON goes to the socket: `status`, `signal`,
`error` (it could not be started), `left` (some children could not be killed).

Only the standard library, and little of it: it starts once for each rollout.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 5.0
"""How long children are killed that go on making children, or that may not be killed."""


def main(arguments: list[str]) -> None:
    max_file_bytes, stdin_file, *command = arguments
    control = socket.socket(fileno=os.dup(0))  # closed in the program, as all that is opened here
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this system has no subreapers")
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: control.shutdown(socket.SHUT_RD))

    report: dict[str, object] = {}
    program = _started(command, stdin_file, int(max_file_bytes), libc, report)
    ended: dict[int, int] = {}
    while program is not None and program not in ended:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if control.fileno() in readable:
            break
        os.read(woken, 4096)
        _reap(ended)
    left = _kill_all(ended)
    if program in ended:
        code = os.waitstatus_to_exitcode(ended[program])
        report |= {"status": code} if code >= 0 else {"signal": -code}
    report["left"] = left
    try:
        control.sendall(json.dumps(report).encode() + b"\n")
    except OSError:  # nobody is there to read it
        return


def _started(
    command: list[str], stdin_file: str, max_file_bytes: int, libc: ctypes.CDLL, report: dict[str, object]
) -> int | None:
    failed, failure = os.pipe()
    parent = os.getpid()
    program = os.fork()
    if program == 0:
        try:
            os.setsid()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            os.dup2(os.open(stdin_file, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if max_file_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and programs expect
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)
        except (OSError, ValueError) as error:
            os.write(failure, str(error).encode())
        finally:
            os._exit(127)
    os.close(failure)
    with os.fdopen(failed, "rb") as pipe:
        said = pipe.read()
    if said:
        report["error"] = said.decode(errors="replace")
        return None
    return program


def _reap(ended: dict[int, int]) -> bool:
    """Notes who is over. False: there are no children any more."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        ended[pid] = status


def _kill_all(ended: dict[int, int]) -> bool:
    """Kills children until there are none: those of a killed one become ours. True: some could not be killed.

    Only own children are killed: until this process has waited for one, its number names no other process.
    """
    until = time.monotonic() + _PATIENCE_S
    while _reap(ended):
        if time.monotonic() > until:
            return True
        for pid in _children():
            with suppress(PermissionError):  # it runs as another user
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return False


def _children() -> list[int]:
    own = str(os.getpid())
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it is over
            continue
        if parent == own and state != "Z":
            found.append(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
