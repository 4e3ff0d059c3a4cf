"""When `ChildProcesses` is left, nothing that was started is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from gym_capture.demo.processes import ChildProcesses

# A process that starts another in a session of its own, says both process ids, and ignores what asks it to end.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), orphan.pid, flush=True)
{then}
"""
STAY, LEAVE = "time.sleep(600)", "sys.exit(0)"

# Runs in a process of its own, because whoever uses `ChildProcesses` adopts orphans for good.
PROGRAM = """
import sys, time
from pathlib import Path
from gym_capture.demo.processes import ChildProcesses
log = Path(sys.argv[1])
children = ChildProcesses(grace_s=0.5, linger_s=0.1)
try:
    with children:
        child = children.start([sys.executable, "-c", sys.argv[2]], log=log)
        while len(log.read_text().split()) < 2:
            time.sleep(0.01)
        print(log.read_text(), flush=True)
        {then}
finally:
    print("left over:", *children.leftovers, flush=True)
"""


def keep_house(tmp_path: Path, *, child: str, then: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(then=then)
    command = [sys.executable, "-c", program, str(tmp_path / "log"), STUBBORN.format(then=child)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("child", [STAY, LEAVE], ids=["stays", "leaves an orphan"])
@pytest.mark.parametrize(
    ("then", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("child.stop()", 0)], ids=["end", "error", "stop"]
)
def test_children_and_orphans_end_with_the_context(tmp_path: Path, child: str, then: str, code: int) -> None:
    process = keep_house(tmp_path, child=child, then=then)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    first, last = output.split("\n")[0], output.strip().split("\n")[-1]
    assert not any(psutil.pid_exists(int(pid)) for pid in first.split())
    assert last.startswith("left over: python"), "the orphan had to be killed"


def test_an_interrupt_ends_them_too_and_a_second_one_does_not_stop_that(tmp_path: Path) -> None:
    process = keep_house(tmp_path, child=STAY, then="time.sleep(600)")
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_child_that_listens_ends_by_the_interrupt(tmp_path: Path) -> None:
    listening = textwrap.dedent("""
        import time
        try:
            print("up", flush=True)  # inside: the interrupt may come at once
            time.sleep(600)
        except KeyboardInterrupt:
            print("down", flush=True)
    """)
    with ChildProcesses() as children:
        child = children.start([sys.executable, "-c", listening], log=tmp_path / "log")
        while child.log_tail() != "up":
            assert child.ended() is None
        child.stop()
        assert child.log_tail() == "up\ndown"
    assert children.leftovers == ()
