"""Files that appear together or not at all, whoever else writes to the same directory, and whoever was killed there."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gym_capture.data.staged_files import StagedFiles, staged_files
from gym_capture.errors import ConfigError


def write(staged: StagedFiles, *names: str, text: str) -> None:
    for name in names:
        staged.path(name).write_text(text)


def contents(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in out.iterdir()}


def test_the_last_of_two_that_replace_each_other_is_whole(tmp_path: Path) -> None:
    with staged_files(tmp_path, ["*.x"], what="it", overwrite=True) as slow:
        write(slow, "1.x", text="slow")
        with staged_files(tmp_path, ["*.x"], what="it", overwrite=True) as quick:
            write(quick, "1.x", "2.x", "3.x", text="quick")
        assert {path.name: path.read_text() for path in tmp_path.glob("*.x")} == dict.fromkeys(
            ("1.x", "2.x", "3.x"), "quick"
        )
        write(slow, "2.x", text="slow")
    assert contents(tmp_path) == {"1.x": "slow", "2.x": "slow"}


def test_the_first_of_two_that_do_not_is_whole_and_the_other_is_told(tmp_path: Path) -> None:
    def write_slowly() -> None:
        with staged_files(tmp_path, ["*.x"], what="it", overwrite=False) as slow:
            write(slow, "1.x", text="slow")
            with staged_files(tmp_path, ["*.x"], what="it", overwrite=False) as quick:
                write(quick, "1.x", text="quick")

    with pytest.raises(ConfigError, match=r"already holds it \(1\.x\)"):
        write_slowly()
    assert contents(tmp_path) == {"1.x": "quick"}


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\n"
        "from gym_capture.data.staged_files import staged_files\n"
        "with staged_files(pathlib.Path(sys.argv[1]), ['*.x'], what='it', overwrite=False) as staged:\n"
        "    staged.path('1.x').write_text('half')\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    with staged_files(tmp_path, ["*.x"], what="it", overwrite=False) as staged:
        assert not left.exists()
        write(staged, "1.x", text="whole")
    assert contents(tmp_path) == {"1.x": "whole"}


def test_what_nobody_can_tell_to_be_left_stays_and_is_named(tmp_path: Path) -> None:
    (tmp_path / ".parts-1").mkdir()  # version 0.1 held no lock
    with staged_files(tmp_path, ["*.x"], what="it", overwrite=False) as staged:
        assert staged.left == (".parts-1",)
        write(staged, "1.x", text="whole")
        with staged_files(tmp_path, ["*.y"], what="it", overwrite=False) as other:
            assert other.left == (".parts-1",)  # the one that is written to is nobody's leavings
    assert sorted(path.name for path in tmp_path.iterdir()) == [".parts-1", "1.x"]


def test_what_others_write_by_a_value_appears_under_its_name(tmp_path: Path) -> None:
    with staged_files(tmp_path / "out", ["*.x"], what="it", overwrite=False) as staged:
        with pickle.loads(pickle.dumps(staged.staging)).create("anything") as stream:
            stream.write(b"whole")
        with staged.staging.create("of a worker that died") as stream:
            stream.write(b"half")
        staged.add("anything", "1.x")
        assert not list((tmp_path / "out").glob("*.x"))
    assert contents(tmp_path / "out") == {"1.x": "whole"}


def test_a_place_may_be_a_uri(tmp_path: Path) -> None:
    with staged_files((tmp_path / "a b").as_uri(), ["*.x"], what="it", overwrite=False) as staged:
        write(staged, "1.x", text="whole")
    assert contents(tmp_path / "a b") == {"1.x": "whole"}


PARENT = """
import multiprocessing, time
from gym_capture.data.local_runner import in_processes

if __name__ == "__main__":
    for _ in in_processes(time.sleep, [0, 600, 600], 2):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def test_workers_of_a_build_end_with_their_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(workers) == 2
    try:
        deadline = time.monotonic() + 20
        while any(map(is_running, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
