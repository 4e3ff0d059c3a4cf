"""Which processes a guard takes for engines, and which it kills. serving/test_vllm_replica_e2e.py has a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from gym_capture.engines.guard import children, guard, kill, start_guard

TITLE = "Title::"


def sleeping(title: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([title, "-c", "import time; time.sleep(600)"], executable=sys.executable)


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping(f"{TITLE}Core") as process:
        yield process
        process.kill()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping("other") as process:
        yield process
        process.kill()


def test_engines_are_found_by_their_title_and_killed(
    engine: subprocess.Popen[bytes], other: subprocess.Popen[bytes]
) -> None:
    found = children(os.getpid(), TITLE)
    assert set(found) == {engine.pid}
    kill(found)
    engine.wait(30)
    assert other.poll() is None
    assert children(os.getpid(), TITLE) == {}


def test_an_id_that_was_given_out_again_is_left_alone(engine: subprocess.Popen[bytes]) -> None:
    kill({engine.pid: children(os.getpid(), TITLE)[engine.pid] - 1})
    assert psutil.Process(engine.pid).is_running()
    assert engine.poll() is None


def test_a_holder_that_is_gone_has_nothing_to_guard() -> None:
    with sleeping("gone") as process:
        process.kill()
    assert children(process.pid, TITLE) == {}
    guard(process.pid, TITLE)


def test_a_guard_ends_when_it_is_told_to() -> None:
    process = start_guard(title=TITLE)
    assert process is not None
    with process:
        process.terminate()
    assert process.returncode is not None
