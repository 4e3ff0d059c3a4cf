"""All benchmarks as one command: each comes to an end, none keeps the others from running, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS, Benchmark

ROOT = Path(__file__).parents[2]

PROGRAMS = {
    "good": """
        import json
        print("a library says something")
        print(json.dumps({"benchmark": "good.one", "times": 2.0, "target": 1.0, "ok": True}))
    """,
    "below": """
        import json, sys
        print(json.dumps({"benchmark": "below.one", "times": 0.5, "target": 1.0, "ok": False}))
        sys.exit(1)
    """,
    "crashed": """
        raise RuntimeError("what went wrong")
    """,
    "stuck": """
        import json, pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        pathlib.Path("stuck.pid").write_text(str(child.pid))
        print(json.dumps({"benchmark": "stuck.ready"}), flush=True)
        time.sleep(600)
    """,
}


@pytest.fixture
def runner(tmp_path: Path) -> list[str]:
    """The command, over programs instead of benchmarks."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "__init__.py").touch()
    for name, program in PROGRAMS.items():
        (tmp_path / "programs" / f"{name}.py").write_text(textwrap.dedent(program))
    (tmp_path / "run.py").write_text(
        textwrap.dedent("""
        import sys
        from benchmarks import __main__ as runner

        class Program(runner.Benchmark):
            def command(self, *, quick):
                return [sys.executable, "-m", f"programs.{self.name}"]

        limits = dict(good=60, below=60, crashed=60, stuck=float(sys.argv[1]))
        runner.BENCHMARKS = tuple(Program(name, limit) for name, limit in limits.items())
        sys.exit(runner.main(sys.argv[2:]))
        """)
    )
    return [sys.executable, str(tmp_path / "run.py")]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}", "COLUMNS": "200"}


def test_one_that_fails_does_not_keep_the_others_from_running(tmp_path: Path, runner: list[str]) -> None:
    command = [*runner, "3", "crashed", "below", "stuck", "good"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stderr
    assert [json.loads(line)["benchmark"] for line in ran.stdout.splitlines()] == [
        "below.one",
        "stuck.ready",
        "good.one",
    ]
    assert "RuntimeError: what went wrong" in ran.stderr
    marks = {words[1]: words[0] for line in ran.stderr.splitlines() if len(words := line.split()) > 2}
    expected = {"good": "✓", "good.one": "✓", "below": "✗", "below.one": "✗", "crashed": "✗", "stuck": "✗"}
    assert expected.items() <= marks.items()
    assert "not done after 3 s" in ran.stderr
    assert not psutil.pid_exists(int((tmp_path / "stuck.pid").read_text()))


def test_all_well_is_exit_code_0(tmp_path: Path, runner: list[str]) -> None:
    ran = subprocess.run([*runner, "1", "good"], cwd=tmp_path, env=environment(), capture_output=True, timeout=60)
    assert ran.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_of_it(tmp_path: Path, runner: list[str], number: signal.Signals) -> None:
    with subprocess.Popen(
        [*runner, "600", "stuck", "good"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert b"stuck.ready" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"interrupted" in errors
    assert not psutil.pid_exists(int((tmp_path / "stuck.pid").read_text()))


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_each_benchmark_has_the_options_that_it_is_run_with(benchmark: Benchmark) -> None:
    source = (ROOT / "benchmarks" / f"{benchmark.name}.py").read_text(encoding="utf-8")
    given = [each for each in (*benchmark.arguments, *benchmark.quick) if each.startswith("--")]
    assert [option for option in given if f'"{option}"' not in source] == []
