"""A harness for any program: it is started for each rollout and told where the policy is and what to do.

Invariant: a program finds its own home and work folder, the environment variables that `TOLD` lists, and of this
process's only those of `supervised.PASSED_ON`. When `run` returns or is cancelled, the program, what it started and its
folders are gone (the work folder stays if the environment gave it: it is scored afterwards). A program that fails or
does not end is a `Failed` with what it wrote last, never an empty answer.

Flow: folders -> the `Program` says what to run -> `run_supervised` -> the `Program` reads the outcome from what was
written -> the graph says whether its last call was too long (`outgrown`). Claude Code, Codex and others are such
programs; `command` makes one of a command line.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.environment import Environment, Observation
from gym_capture.rollouts.folders import read_below, remove, write_below
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome, RepeatableHarness
from gym_capture.rollouts.outgrown import OutgrownContext
from gym_capture.rollouts.supervised import Bounds, Ended, passed_on, run_supervised

_LONGEST_DETAIL: Final = 500
_LONGEST_VARIABLE: Final = 100_000
"""Linux takes no variable and no argument that is longer than 128 KiB."""
_TASK_FILE: Final = "task.txt"
_ANSWER_FILE: Final = "answer.txt"

TOLD: Final[Mapping[str, str]] = {
    "HOME": "a folder of this rollout's own",
    "TMPDIR": "another one",
    "GYM_CAPTURE_TASK": "the task, if it is not longer than 100,000 bytes",
    "GYM_CAPTURE_TASK_FILE": "a file with the task",
    "GYM_CAPTURE_MESSAGES_FILE": "a file with the task as the environment wrote it: a JSON list of messages",
    "GYM_CAPTURE_ANSWER_FILE": "where to write the answer, with `answer: file`",
    "GYM_CAPTURE_MODEL": "the model to ask for",
    "OPENAI_BASE_URL": "the rollout, for clients of OpenAI's APIs",
    "OPENAI_API_BASE": "the same, under its older name",
    "OPENAI_API_KEY": "the rollout's token",
    "ANTHROPIC_BASE_URL": "the rollout, for clients of Anthropic's API",
    "ANTHROPIC_API_KEY": "the rollout's token",
}
"""The variables that a program finds in its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One rollout, as a program is told of it."""

    endpoint: Endpoint
    model: str
    system: str
    """The environment's words as the system; may be empty."""
    task: str
    """Its words as the user."""
    folder: Path
    """Of this rollout; holds the others, but for a work folder that is the environment's."""
    work: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def answer_file(self) -> Path:
        return self.folder / _ANSWER_FILE

    @property
    def whole_task(self) -> str:
        """For programs that take one text."""
        return f"{self.system}\n\n{self.task}" if self.system else self.task

    def answer(self, *, limit: int) -> str | Failed:
        """The contents of the program's answer file."""
        try:
            return read_below(self.folder, _ANSWER_FILE, limit=limit).decode(errors="replace").strip()
        except OSError as error:
            return Failed(AttemptFailure.NO_ANSWER, f"the file for the answer: {error.strerror}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A program to run."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides what every program is told."""
    home_files: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    """Its standard input, which is empty otherwise."""


class Program(Protocol):
    """A kind of program."""

    def invocation(self, play: Play) -> Invocation:
        """The program of a rollout."""
        ...

    def outcome(self, ended: Ended, play: Play) -> Outcome:
        """The outcome, once it ended by itself - well or not."""
        ...


class CommandHarness(RepeatableHarness):
    """Runs a program for each rollout."""

    def __init__(
        self,
        program: Program,
        *,
        model: str,
        bounds: Bounds,
        environment: Mapping[str, str],
        repeats: bool = False,
    ) -> None:
        """`environment` is what the programs get besides what `TOLD` lists."""
        self._repeats = repeats
        self._program = program
        self._model = model
        self._bounds = bounds
        self._environment = environment
        self._context = OutgrownContext()

    @property
    def repeats(self) -> bool:
        return self._repeats

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        if observation.tools:
            raise ConfigError(
                "the environment has tools that are called through the harness, and a program has no way to do that: "
                "play it with the tool-loop harness or one of your own"
            )
        folder = Path(tempfile.mkdtemp(prefix="gym-capture-"))
        try:
            play = Play(
                endpoint=endpoint,
                model=self._model,
                system=_said_by(observation, "system", "developer"),
                task=_said_by(observation, "user"),
                folder=folder,
                work=observation.work_folder or folder / "work",
            )
            return await self._play(play, observation)
        finally:
            await asyncio.to_thread(remove, folder)  # a thread goes on when this is cancelled again

    async def close(self) -> None:
        """Nothing is shared."""

    async def _play(self, play: Play, observation: Observation) -> Outcome:
        invocation = self._program.invocation(play)
        for name in ("home", "tmp", "work"):
            (play.folder / name).mkdir()
        write_below(play.folder, _TASK_FILE, play.whole_task.encode())
        write_below(play.folder, "messages.json", json.dumps(list(observation.messages)).encode())
        stdin = None if invocation.stdin is None else play.folder / "stdin.txt"
        if invocation.stdin is not None:
            write_below(play.folder, "stdin.txt", invocation.stdin.encode())
        for name, content in invocation.home_files.items():
            write_below(play.home, name, content.encode())
        too_long = [part for part in invocation.command if len(part.encode()) > _LONGEST_VARIABLE]
        if too_long or any("\0" in part for part in invocation.command):
            raise ConfigError(
                "the task does not fit into an argument of a command: let the program read it from its standard input "
                "or from the file that GYM_CAPTURE_TASK_FILE names"
            )
        ended = await run_supervised(
            invocation.command,
            folder=play.work,
            environment={**self._told(play), **self._environment, **invocation.environment},
            stdin=stdin,
            bounds=self._bounds,
        )
        if ended.error or ended.left:
            return _failed(AttemptFailure.COMMAND_FAILED, ended.error or "some of it could not be killed", ended)
        return await self._context.settle(self._outcome(ended, play), play.endpoint)

    def _outcome(self, ended: Ended, play: Play) -> Outcome:
        """By the program's own account."""
        if ended.timed_out:
            return _failed(AttemptFailure.COMMAND_TIMEOUT, f"it ran for {self._bounds.timeout_s:g} s", ended)
        if ended.too_much:
            said = f"it wrote more than {self._bounds.stdout_bytes} bytes to its standard output"
            return _failed(AttemptFailure.COMMAND_FAILED, said, ended)
        return self._program.outcome(ended, play)

    def _told(self, play: Play) -> dict[str, str]:
        told = {
            "HOME": str(play.home),
            "TMPDIR": str(play.folder / "tmp"),
            "GYM_CAPTURE_TASK": play.whole_task,
            "GYM_CAPTURE_TASK_FILE": str(play.folder / _TASK_FILE),
            "GYM_CAPTURE_MESSAGES_FILE": str(play.folder / "messages.json"),
            "GYM_CAPTURE_ANSWER_FILE": str(play.answer_file),
            "GYM_CAPTURE_MODEL": play.model,
            "OPENAI_BASE_URL": play.endpoint.base_url,
            "OPENAI_API_BASE": play.endpoint.base_url,
            "OPENAI_API_KEY": play.endpoint.api_key,
            "ANTHROPIC_BASE_URL": play.endpoint.anthropic_base_url,
            "ANTHROPIC_API_KEY": play.endpoint.api_key,
        }
        if len(play.whole_task.encode()) > _LONGEST_VARIABLE or "\0" in play.whole_task:
            del told["GYM_CAPTURE_TASK"]
        return {**passed_on(), **told}


def failed_by_status(ended: Ended, *, said: str = "") -> Failed:
    """The failure of a program that did not end well, with its words: by default the last that it wrote."""
    how = f"exit status {ended.status}" if ended.status is not None else f"killed by signal {ended.signal}"
    return _failed(AttemptFailure.COMMAND_FAILED, how, ended, said=said)


def installed(program: Sequence[str], *, hint: str) -> list[str]:
    """The command with the whole path of its program. Raises `ConfigError` with `hint` if it is not installed."""
    if not program:
        raise ConfigError("the command is empty")
    found = shutil.which(program[0])
    if found is None:
        raise ConfigError(f"{program[0]} is not on the PATH or cannot be executed{': ' if hint else ''}{hint}")
    return [str(Path(found).absolute()), *program[1:]]


def words(command: str | Sequence[str]) -> list[str]:
    """A command, as words. Raises `ConfigError`."""
    try:
        return shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"not a command: {command!r}: {error}") from None


def command(
    *,
    command: str | list[str],
    stdin: bool = False,
    answer: Literal["stdout", "file"] = "stdout",
    model: str = "policy",
    environment: dict[str, str] | None = None,
    pass_on: list[str] | None = None,
    timeout_s: float | None = None,
    max_output_bytes: int = 1 << 20,
    max_file_bytes: int = 1 << 30,
    repeats: bool = False,
) -> CommandHarness:
    """Any command. In its words `{task}` and the other names of `_PLACES` stand for what is the rollout's own.

    The answer is what it writes to its standard output, or to the file that `GYM_CAPTURE_ANSWER_FILE` names.
    `environment` adds variables to its environment, `pass_on` names those of this process that it gets as well.
    `repeats` says that it asks the same again when it gets the same replies (`RepeatableHarness`).
    """
    parts = installed(words(command), hint="")
    for part in parts:
        for name in re.findall(r"\{([a-z_]+)\}", part):
            close = get_close_matches(name, _PLACES, n=1)
            if name not in _PLACES and close:
                raise ConfigError(f"the command has {{{name}}}: did you mean {{{close[0]}}}?")
    return CommandHarness(
        _AnyCommand(parts, stdin=stdin, answer=answer, limit=max_output_bytes),
        model=model,
        bounds=Bounds(timeout_s=timeout_s, stdout_bytes=max_output_bytes, file_bytes=max_file_bytes),
        environment={**passed_on(pass_on or ()), **(environment or {})},
        repeats=repeats,
    )


_PLACES: Final = (
    *("task", "task_file", "answer_file", "model", "base_url", "anthropic_base_url", "api_key", "home", "work"),
)


@dataclass(frozen=True)
class _AnyCommand:
    """A command of the user's own."""

    command: Sequence[str]
    stdin: bool
    answer: Literal["stdout", "file"]
    limit: int

    def invocation(self, play: Play) -> Invocation:
        values = {
            "task": play.whole_task,
            "task_file": str(play.folder / _TASK_FILE),
            "answer_file": str(play.answer_file),
            "model": play.model,
            "base_url": play.endpoint.base_url,
            "anthropic_base_url": play.endpoint.anthropic_base_url,
            "api_key": play.endpoint.api_key,
            "home": str(play.home),
            "work": str(play.work),
        }
        place = re.compile("|".join(rf"\{{{name}\}}" for name in _PLACES))
        # In one pass: what stands in a task is not looked at again.
        parts = [place.sub(lambda found: values[found[0][1:-1]], part) for part in self.command]
        return Invocation(command=parts, stdin=play.whole_task if self.stdin else None)

    def outcome(self, ended: Ended, play: Play) -> Outcome:
        if ended.status != 0:
            return failed_by_status(ended)
        if self.answer == "file":
            found = play.answer(limit=self.limit)
            return found if isinstance(found, Failed) else Completed(found, n_calls=0)
        return Completed(ended.stdout.decode(errors="replace").strip(), n_calls=0)


def _failed(reason: AttemptFailure, how: str, ended: Ended, *, said: str = "") -> Failed:
    """With the end of what it wrote, which is where programs say what is wrong."""
    said = said or (ended.stderr.strip() or ended.stdout.strip()).decode(errors="replace")[-_LONGEST_DETAIL:]
    return Failed(reason, f"{how}: {said}" if said else how)


def _said_by(observation: Observation, *roles: str) -> str:
    """The text of the messages of `roles`. Raises `ConfigError` if a program cannot be told it."""
    texts = []
    for message in observation.messages:
        if message["role"] not in ("system", "developer", "user"):
            raise ConfigError(f"a program begins a conversation: it cannot be told a turn of {message['role']!r}")
        if message["role"] in roles:
            texts.append(_text(message["content"]))
    return "\n\n".join(text for text in texts if text)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content or [] if isinstance(part, Mapping) and part.get("type") == "text"]
    if texts and len(texts) == len(content):
        return "".join(map(str, texts))
    raise ConfigError("a program can be told text alone: the task has other content")
