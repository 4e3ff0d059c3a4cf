"""The command line's root: it is fast, it is quiet about what a person can put right, and it unwinds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from gym_capture import cli

COMMAND = (sys.executable, "-m", "gym_capture.cli")
HEAVY = ("ray", "torch", "vllm", "transformers", "pyarrow", "openai", "fastapi")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    done = run_python(f"""
        import sys
        from gym_capture import cli
        try:
            cli.main(["--help"])
        finally:
            print("loaded", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
    """)
    assert done.returncode == 0, done.stderr
    assert all(command.name in done.stdout for command in cli.COMMANDS)
    assert done.stderr.strip() == "loaded []"


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command.name, "--help"])
    assert stop.value.code == 0
    assert f"gym-capture {command.name}" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error_that_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["check-config"])
    assert stop.value.code == 2
    assert "check-configs" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "--help", "explain no_match"])
def test_a_reader_that_leaves_is_no_error(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *command.split()], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["explain --json", "--help", "explain no_match"])
def test_a_full_disk_under_the_output_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *command.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")


def test_a_full_disk_under_stderr_too_leaves_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "explain", "nonsense"], stdout=full, stderr=full, check=False)
    assert done.returncode == 2


def test_an_option_by_its_name_of_before_works_and_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["records", "export", "--rollouts=one", "--help"])
    assert stop.value.code == 0
    assert "--rollouts is now --rollout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("gym-capture rec", {"records"}),
        ("gym-capture records li", {"list"}),
        ("gym-capture rollouts run --on ", {"here", "ray"}),
        ("gym-capture build --delivery ma", {"main_chain"}),
        ("gym-capture explain missing_r", {"missing_reward"}),
    ],
)
def test_a_shell_completes(words: str, found: set[str]) -> None:
    asked = {"_GYM_CAPTURE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(COMMAND, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert (set(done.stdout.split()), done.stderr) == (found, "")


def with_command(body: str) -> str:
    """A program that runs `gym-capture probe`, whose body is given."""
    return f"""
import asyncio, sys, time, types
from gym_capture import cli
from gym_capture.errors import ConfigError

def command() -> None:
{textwrap.indent(textwrap.dedent(body), "    ")}

module = types.ModuleType("gym_capture.commands.probe")
module.command = command
sys.modules[module.__name__] = module
cli.COMMANDS += (cli.Command("probe", "probe", cli.CHECK, "probe"),)
cli.main(["probe"])
"""


def test_an_error_of_ours_is_one_line_and_exit_code_2() -> None:
    done = run_python(with_command('raise ConfigError("model: no such folder [x]", rollout_id="r1")'))
    assert done.returncode == 2
    assert done.stderr.strip() == "error: model: no such folder [x] (rollout r1)"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("sleep", ["time.sleep(60)", "asyncio.run(asyncio.sleep(60))"])
def test_a_signal_unwinds_through_finally(number: signal.Signals, code: int, sleep: str) -> None:
    program = with_command(f"""
        try:
            print("ready", flush=True)
            {sleep}
        finally:
            print("cleaned up", flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert rest == "cleaned up\n"
    assert process.returncode == code


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_a_command_is_imported_is_no_traceback(number: str, code: int) -> None:
    done = run_python(f"""
        import signal
        from gym_capture import cli

        def interrupted(name: str) -> None:
            signal.raise_signal(signal.{number})

        cli.importlib.import_module = interrupted
        cli.main(["explain"])
    """)
    assert (done.returncode, done.stderr) == (code, "")
