"""`gym-capture`: the command line's root.

Invariant: only the module of the command that runs is imported, and whatever ends a command - an error, Ctrl-C,
SIGTERM - unwinds through its `finally` blocks, so that nothing it started stays behind.

Flow: `main` finds the command's name among the arguments -> imports that one module (the others are listed by the
summary in `COMMANDS`) -> runs it -> turns the outcome into one of `EXIT_CODES`. docs/cli.md is the reference:
`commands/reference.py` writes it.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from gym_capture.errors import GymCaptureError
from gym_capture.extras import how_to_install
from gym_capture.printable import printable

_PROGRAM: Final = "gym-capture"
_COMPLETE: Final = "_GYM_CAPTURE_COMPLETE"
_PIPE_CLOSED: Final = 141
EXIT_CODES: Final[Mapping[int, str]] = {
    0: "done",
    1: "the command ran, and what it checked, or was to do, did not hold: its `--help` says when",
    2: "a wrong command line, configuration or environment: one line on stderr says what",
    130: "interrupted by Ctrl-C",
    _PIPE_CLOSED: "what read the output has gone, as with `| head`",
    143: "terminated by SIGTERM",
}
_UNWRITABLE: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


SERVE: Final = "Serve a policy"
ROLL_OUT: Final = "Roll out"
BUILD: Final = "Build trajectories"
TRAIN: Final = "Train"
LOOK: Final = "Look"
CHECK: Final = "Check"
"""Panels of `--help`."""


class Command(NamedTuple):
    """A subcommand, known by its summary until it runs."""

    name: str
    module: str
    panel: str
    summary: str
    is_group: bool = False
    """The module has a `typer.Typer` named `app` instead of a function named `command`."""
    renamed: Mapping[str, str] = {}
    """Options by the names that they had before, which still work, with a warning."""


COMMANDS: tuple[Command, ...] = (
    Command(
        *("demo", "demo", SERVE, "Serve a small model, roll out an agent, build, train one step: a table."),
        renamed={"--keep": "--out"},
    ),
    Command("serve", "serve", SERVE, "Serve a graph: a Serve config, or a model folder alone. Ctrl-C ends it."),
    Command("weights", "weights", SERVE, "Push weights to a graph that serves, and see which it serves.", True),
    Command("state", "state", SERVE, "End the state actors of a stopped graph.", True),
    Command("token", "token", SERVE, "Print the tokens that a server with a secret asks its clients for."),
    Command("model", "model", SERVE, "Prepare a small model folder from a package, without a hub."),
    Command(
        *("rollouts", "rollouts", ROLL_OUT, "Run rollout jobs against a served policy.", True),
        renamed={"--address": "--ray-address", "--model": "--model-name"},
    ),
    Command(
        *("try-job", "try_job", ROLL_OUT, "Play a job against a small graph of its own: is every token exact?"),
        renamed={"--keep": "--out"},
    ),
    Command("build", "build", BUILD, "Build from a directory of records or token captures: Parquet files."),
    Command("build-job", "build_job", BUILD, "Build on a cluster from a graph's records: the Ray Data job."),
    Command("export", "export", BUILD, "Export built trajectories to the files that a trainer reads."),
    Command("learn", "learn", TRAIN, "Train a small policy while it is served, with prefix supply and without."),
    Command("train", "train", TRAIN, "Train the reference GRPO trainer over built trajectories, with checkpoints."),
    Command(
        *("train-step", "train_step", TRAIN, "Train one step of the reference GRPO trainer on built trajectories."),
        renamed={"--rollouts": "--limit"},
    ),
    Command(
        *("records", "records", LOOK, "List, verify and export the records that a graph keeps.", True),
        renamed={"--rollouts": "--rollout"},
    ),
    Command("ui", "ui", LOOK, "Look into records and trajectories in a browser: every token, why it was trained."),
    Command(
        "inspect", "inspect", LOOK, "Look into one rollout in the terminal: its calls as a tree, its trajectories."
    ),
    Command("explain", "explain", LOOK, "Explain a reason: why something was masked, excluded or not continued."),
    Command("doctor", "doctor", CHECK, "Check this machine, its Ray environment and a model: what to mend, and how."),
    Command("check-configs", "check_configs", CHECK, "Validate Serve configurations and job files, misspelt keys too."),
    Command("audit-template", "audit_template", CHECK, "Show which turns of a chat template are continued exactly."),
    Command(
        *("verify-logprobs", "verify_logprobs", CHECK, "Score recorded generations again, name calls that differ."),
        renamed={"--rollouts": "--limit"},
    ),
    Command("conformance", "conformance", CHECK, "Put a store of your own through the checks that ours pass."),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the `gym-capture` script. Always ends in `SystemExit`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    terminated = _terminate_like_an_interrupt()
    try:
        app = build_app(_completed_words() or arguments)
        app(args=_renamed(arguments), prog_name=_PROGRAM)
    except GymCaptureError as error:
        _print_error(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = how_to_install(error)
        if missing is None:
            raise
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(missing)}")
        sys.exit(2)
    except KeyboardInterrupt:  # while the command's module is imported: typer answers for what comes after
        raise SystemExit(143 if terminated() else 130) from None
    except OSError as error:
        # What a command writes to files, it answers for itself: this is what it prints.
        if error.errno not in _UNWRITABLE:
            raise
        _end_without_output(error)
    except SystemExit as stop:
        # Typer and rich both end with 1 when a pipe is closed, which is no finding of the command's.
        if isinstance(stop.__context__, BrokenPipeError):
            _write_no_more()
            raise SystemExit(_PIPE_CLOSED) from None
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _write_no_more()
            raise SystemExit(_PIPE_CLOSED) from None
        except OSError as error:
            if error.errno in _UNWRITABLE:
                _end_without_output(error)
        raise SystemExit(143 if terminated() and stop.code == 130 else stop.code) from None


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The whole command line, with the module of the command that `arguments` name imported and no other."""
    chosen = _chosen(arguments)
    app = typer.Typer(
        help="Exact token capture for distributed agent rollouts: serve, roll out, build trajectories, train.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for command in COMMANDS:
        if command is not chosen:
            app.command(command.name, help=command.summary, rich_help_panel=command.panel)(_listed_only)
            continue
        module = importlib.import_module(f"gym_capture.commands.{command.module}")
        if command.is_group:
            app.add_typer(module.app, name=command.name, help=command.summary, rich_help_panel=command.panel)
        else:
            app.command(command.name, rich_help_panel=command.panel)(module.command)
    return app


def _chosen(arguments: Sequence[str]) -> Command | None:
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    return next((command for command in COMMANDS if command.name == name), None)


def _completed_words() -> list[str]:
    """The words on the line that a shell asks to complete, by the protocol of typer's completion scripts."""
    if _COMPLETE not in os.environ:
        return []
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:]


def _renamed(arguments: Sequence[str]) -> list[str]:
    """The command line, with options that have another name today under that name."""
    command = _chosen(arguments)
    renamed = {} if command is None else command.renamed
    words: list[str] = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if option in renamed and "--" not in words:
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                f"[yellow]warning:[/] {option} is now {renamed[option]}; the old name will go"
            )
            word = renamed[option] + equals + value
        words.append(word)
    return words


def _root() -> None:
    """With a callback the root is a group even when it has one command."""


def _listed_only() -> None:
    """Stands for a command in the listing; the one that runs is never a stand-in."""


def _print_error(text: str) -> None:
    # Where stderr cannot be written either, the exit code still says it.
    with suppress(OSError):
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(printable(text))}")


def _end_without_output(error: OSError) -> NoReturn:
    _print_error(f"cannot write the output: {error.strerror or error}")
    _write_no_more()
    sys.exit(2)


def _write_no_more() -> None:
    """What is left in the buffer must not be tried again when the interpreter ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.__stdout__.fileno() if sys.__stdout__ else 1)


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
