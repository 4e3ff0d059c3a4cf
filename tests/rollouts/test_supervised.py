"""Programs that a rollout starts: however they try, nothing of them runs on, and nothing of ours gets to them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Final

import pytest

from gym_capture.rollouts.supervised import PASSED_ON, Bounds, Ended, passed_on, run_supervised

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = (sys.executable, "-I", "-S", "-c")
SLEEPER: Final = "import os, time; open({name!r}, 'w').write(str(os.getpid())); time.sleep(600)"

ANY: Final = Bounds()

# What a daemon does: a session of its own, a parent that is gone, an environment that does not say whose it is.
DAEMON: Final = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", {sleeper!r}], {{}})
    os._exit(0)
while not (os.path.exists({name!r}) and os.path.getsize({name!r})):
    time.sleep(0.01)
"""


def ran(script: str, folder: Path, *arguments: str, bounds: Bounds = ANY, stdin: Path | None = None) -> Ended:
    return asyncio.run(
        run_supervised(
            [*PYTHON, textwrap.dedent(script), *arguments],
            folder=folder,
            environment=passed_on(),
            stdin=stdin,
            bounds=bounds,
        )
    )


def daemon(name: str) -> str:
    return DAEMON.format(name=name, sleeper=SLEEPER.format(name=name))


def is_over(pid_file: Path) -> bool:
    """Whether the process that wrote its number there is gone; one that nobody waited for yet is."""
    try:
        stat = Path(f"/proc/{int(pid_file.read_text())}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def wait_for(file: Path) -> None:
    until = time.monotonic() + 30
    while not (file.exists() and file.stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_a_program_says_and_how_it_ends_is_told(tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.write_text("six times seven")
    script = "import os, sys; print(sys.stdin.read(), os.getcwd(), sys.argv[1]); sys.stderr.write('hm'); sys.exit(3)"
    ended = ran(script, tmp_path, "x y", stdin=task)
    assert (ended.status, ended.signal, ended.error, ended.timed_out, ended.left) == (3, None, None, False, False)
    assert (ended.stdout.decode(), ended.stderr) == (f"six times seven {tmp_path} x y\n", b"hm")
    assert ran("import os; os.kill(os.getpid(), 11)", tmp_path).signal == 11


async def test_a_program_that_cannot_be_started_is_told_apart(tmp_path: Path) -> None:
    ended = await run_supervised(
        ["no-such-program"], folder=tmp_path, environment=passed_on(), stdin=None, bounds=Bounds()
    )
    assert ended.status is None
    assert ended.error is not None
    assert "No such file or directory" in ended.error


def test_secrets_of_this_process_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("WANTED", "yes")
    ended = ran("import json, os; print(json.dumps(dict(os.environ)))", tmp_path)
    assert set(json.loads(ended.stdout)) <= set(PASSED_ON) | {"LC_CTYPE"}
    assert passed_on(["WANTED", "UNSET"])["WANTED"] == "yes"


def test_nothing_of_ours_is_open_in_the_program(tmp_path: Path) -> None:
    with open(tmp_path / "held", "w"):
        ended = ran(
            "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1]))", tmp_path
        )
    opened = ended.stdout.decode().split()
    assert len(opened) == 3, opened
    assert "socket" not in opened[0]


def test_a_daemon_does_not_outlive_the_program(tmp_path: Path) -> None:
    ended = ran(daemon("pid"), tmp_path)
    assert (ended.status, ended.left) == (0, False)
    assert is_over(tmp_path / "pid")


def test_time_is_up_for_all_children_at_once(tmp_path: Path) -> None:
    script = daemon("pid") + SLEEPER.format(name="self")
    ended = ran(script, tmp_path, bounds=Bounds(timeout_s=1.5))
    assert (ended.timed_out, ended.status, ended.signal) == (True, None, None)
    assert is_over(tmp_path / "pid")
    assert is_over(tmp_path / "self")


async def test_a_program_that_ignores_signals_is_killed_with_its_job(tmp_path: Path) -> None:
    script = f"import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; {SLEEPER.format(name='pid')}"

    running = asyncio.create_task(
        run_supervised([*PYTHON, script], folder=tmp_path, environment=passed_on(), stdin=None, bounds=Bounds())
    )
    await asyncio.to_thread(wait_for, tmp_path / "pid")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert is_over(tmp_path / "pid")


def test_processes_that_go_on_making_processes_are_killed(tmp_path: Path) -> None:
    script = """
    import os, time
    pids = os.open("pids", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    if os.fork():
        time.sleep(600)
    while True:
        os.write(pids, b"%d\\n" % os.getpid())
        if os.fork():
            os._exit(0)
    """
    ended = ran(script, tmp_path, bounds=Bounds(timeout_s=1.5))
    assert not ended.left
    # Of the last one that got as far as writing it.
    (tmp_path / "pid").write_text((tmp_path / "pids").read_text().split()[-1])
    assert is_over(tmp_path / "pid")


def test_a_killed_job_leaves_no_program_behind(tmp_path: Path) -> None:
    script = daemon("pid") + SLEEPER.format(name="self")
    job = f"""
import asyncio, sys
from pathlib import Path
from gym_capture.rollouts.supervised import Bounds, passed_on, run_supervised
asyncio.run(run_supervised([sys.executable, "-I", "-S", "-c", {script!r}], folder=Path({str(tmp_path)!r}),
            environment=passed_on(), stdin=None, bounds=Bounds()))
"""
    with subprocess.Popen([sys.executable, "-c", job], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        wait_for(tmp_path / "self")
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while not (is_over(tmp_path / "pid") and is_over(tmp_path / "self")):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_program_dies_with_a_supervisor_that_it_kills(tmp_path: Path) -> None:
    script = f"import os, signal; os.kill(os.getppid(), signal.SIGKILL); {SLEEPER.format(name='pid')}"
    ended = ran(script, tmp_path)
    assert ended.error is not None
    assert ended.left
    told = tmp_path / "pid"
    until = time.monotonic() + 30  # the kernel kills it, in its own time
    while told.exists() and told.read_text() and not is_over(told):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_output_is_bounded(tmp_path: Path) -> None:
    script = "import sys\nsys.stderr.write('a' * 1000 + 'the end\\n')\nwhile True: sys.stdout.write('x' * 1000)"
    ended = ran(script, tmp_path, bounds=Bounds(stdout_bytes=5000, stderr_bytes=10))
    assert (ended.too_much, ended.timed_out, len(ended.stdout)) == (True, False, 5000)
    assert ended.stderr == b"aathe end\n"


def test_files_are_bounded(tmp_path: Path) -> None:
    ended = ran("open('large', 'wb').write(b'x' * 9000)", tmp_path, bounds=Bounds(file_bytes=1000))
    assert b"File too large" in ended.stderr
    assert (tmp_path / "large").stat().st_size == 1000
