"""`gym-capture`: the command line's root.

Invariant: only the module of the command that runs is imported, and whatever ends a command - an error, Ctrl-C,
SIGTERM - unwinds through its `finally` blocks, so that nothing it started stays behind.

Flow: `main` finds the command's name among the arguments -> imports that one module (the others are listed by the
summary in `COMMANDS`) -> runs it -> turns the outcome into an exit code:

    0  done            1  the command ran, and what it checked did not hold
    2  a wrong command line, configuration or environment: one line on stderr says what
    130 / 143  interrupted by Ctrl-C / terminated
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.errors import GymCaptureError

_UNWRITABLE: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


class Command(NamedTuple):
    """A subcommand, known by its summary until it runs."""

    name: str
    module: str
    summary: str
    is_group: bool = False
    """The module has a `typer.Typer` named `app` instead of a function named `command`."""


COMMANDS: tuple[Command, ...] = (
    Command("demo", "demo", "Serve a small model, roll out an agent, build trajectories, train one step: a table."),
    Command(
        "learn", "learn", "Train a small policy while it is served, with prefix supply and without: does it learn?"
    ),
    Command("try-job", "try_job", "Play a job against a small graph of its own, and check that every token is exact."),
    Command("rollouts", "rollouts", "Run rollout jobs against a served policy.", is_group=True),
    Command("build-job", "build_job", "Build trajectories on a cluster from a graph's records: the Ray Data job."),
    Command("export", "export", "Export built trajectories to the files that a trainer reads."),
    Command("train", "train", "Train the reference GRPO trainer over built trajectories, with checkpoints."),
    Command("train-step", "train_step", "Train one step of the reference GRPO trainer on built trajectories."),
    Command("verify-logprobs", "verify_logprobs", "Score recorded generations again, and name the calls that differ."),
    Command("model", "model", "Prepare a small model folder from a package, without a hub."),
    Command("build", "build", "Build trajectories from a directory of token captures: Parquet files."),
    Command("records", "records", "List, verify and export the records that a graph keeps.", is_group=True),
    Command("explain", "explain", "Explain a reason: why something was masked, excluded or not continued."),
    Command("conformance", "conformance", "Put a store of your own through the checks that ours pass."),
    Command(
        "audit-template", "audit_template", "Show which turns of a chat template are continued from their exact ids."
    ),
    Command("token", "token", "Print the tokens that a server with a secret asks its clients for."),
    Command("weights", "weights", "Push weights to a graph that serves, and see which it serves.", is_group=True),
    Command("state", "state", "End the state actors of a stopped graph.", is_group=True),
    Command("check-configs", "check_configs", "Validate Ray Serve configuration files, misspelt keys included."),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the `gym-capture` script. Always ends in `SystemExit`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    terminated = _terminate_like_an_interrupt()
    try:
        build_app(arguments)(args=list(arguments), prog_name="gym-capture")
    except GymCaptureError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(2)
    except OSError as error:
        # What a command writes to files, it answers for itself: this is what it prints.
        if error.errno not in _UNWRITABLE:
            raise
        _end_without_output(error)
    except SystemExit as stop:
        try:
            sys.stdout.flush()
        except OSError as error:
            if error.errno in _UNWRITABLE:
                _end_without_output(error)
        raise SystemExit(143 if terminated() and stop.code == 130 else stop.code) from None


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The whole command line, with the module of the command that `arguments` name imported and no other."""
    app = typer.Typer(
        help="Exact token capture for distributed agent rollouts: serve, roll out, build trajectories, train.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    app.callback()(_root)
    for command in COMMANDS:
        if command.name != chosen:
            app.command(command.name, help=command.summary)(_listed_only)
            continue
        module = importlib.import_module(f"gym_capture.commands.{command.module}")
        if command.is_group:
            app.add_typer(module.app, name=command.name, help=command.summary)
        else:
            app.command(command.name)(module.command)
    return app


def _root() -> None:
    """With a callback the root is a group even when it has one command."""


def _listed_only() -> None:
    """Stands for a command in the listing; the one that runs is never a stand-in."""


def _end_without_output(error: OSError) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]error:[/] cannot write the output: {escape(error.strerror or str(error))}"
    )
    # What is left in the buffer must not be tried again when the interpreter ends.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    sys.exit(2)


def _terminate_like_an_interrupt() -> Callable[[], bool]:
    """Makes SIGTERM unwind like Ctrl-C, also inside an event loop. Returns whether it has come."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    # A shell that starts a command in the background has it ignore interrupts, and Ray's jobs have them blocked; then
    # neither signal would end it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, handler)
    return lambda: bool(received)


if __name__ == "__main__":
    main()
