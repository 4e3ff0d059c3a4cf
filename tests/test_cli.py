"""The command line's root: it is fast, it is quiet about what a person can put right, and it unwinds."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from gym_capture import cli

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
cli.COMMANDS += (cli.Command("probe", "probe", "probe"),)
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
