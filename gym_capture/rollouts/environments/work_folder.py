"""An environment for agents that are programs: a folder to work in, scored by what is in it afterwards.

Invariant: everything follows from the task's data: the files to begin with, and the check. What an agent leaves behind
(links that lead elsewhere, FIFOs, files without end, too much of it, a program under test that hangs or starts others)
is a wrong result and costs its reward. It neither reaches a file outside of the folder nor holds the job up. The files
of the check come into the folder when the agent is done, so it has not seen them.

Flow: `reset` makes the folder -> the agent works in it -> `score` compares files, and runs a command -> `close` removes
the folder.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Observation, Score, Task
from gym_capture.rollouts.folders import checked_name, is_larger, read_below, remove, write_below
from gym_capture.rollouts.supervised import Bounds, passed_on, run_supervised

_WORDS: Final = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "spruce", "willow")


class Check(BaseModel):
    """The rule of the reward: all of it for all that is asked; half for half of the files, or for one of two kinds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    expected: dict[str, str] = {}
    """Files that have to be there, and their text; white space at its end does not count."""
    command: list[str] = []
    """Is run in the folder; exit status 0 is right."""
    files: dict[str, str] = {}
    """Put into the folder before the command runs, in place of what the agent has there under these names."""
    timeout_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _asks_for_something(self) -> Check:
        if not self.expected and not self.command:
            raise ValueError("a check needs `expected` files, a `command`, or both")
        return self


class FolderTask(BaseModel):
    """The data of a task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    system: str = ""
    files: dict[str, str] = {}
    """The contents of the folder when the agent starts, by name."""
    check: Check

    @field_validator("files")
    @classmethod
    def _names_are_below(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            checked_name(name)
        return files

    @model_validator(mode="after")
    def _names_of_the_check_are_too(self) -> FolderTask:
        for name in (*self.check.expected, *self.check.files):
            checked_name(name)
        return self


class WorkFolder:
    """One folder. `max_bytes` is what may be in it when it is scored."""

    def __init__(self, *, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._own: Path | None = None
        self._check: Check | None = None

    @staticmethod
    def tasks(count: int, *, seed: int = 0) -> list[Task]:
        """Files to sort: tasks that any coding agent can be tried on."""
        rng = random.Random(seed)
        made = []
        for index in range(count):
            words = rng.sample(_WORDS, 5)
            data = {
                "prompt": "Sort the lines of words.txt alphabetically and write them to sorted.txt.",
                "files": {"words.txt": "\n".join(words) + "\n"},
                "check": {"expected": {"sorted.txt": "\n".join(sorted(words)) + "\n"}},
            }
            made.append(Task(f"sort-{seed}-{index}", data))
        return made

    async def reset(self, task: Task) -> Observation:
        try:
            found = FolderTask.model_validate(task.data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "data"
            raise ConfigError(f"task {task.task_id}, {where}: {first['msg']}") from None
        program = found.check.command[0] if found.check.command else None
        if program is not None and "/" not in program and shutil.which(program) is None:
            raise ConfigError(f"task {task.task_id}: its check runs {program}, which is not on the PATH")
        self._check = found.check
        self._own = Path(tempfile.mkdtemp(prefix="gym-capture-work-"))
        work = self._own / "work"
        work.mkdir()
        for name, text in found.files.items():
            write_below(work, name, text.encode())
        system = ({"role": "system", "content": found.system},) if found.system else ()
        return Observation((*system, {"role": "user", "content": found.prompt}), work_folder=work)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"Error: there is no tool {name!r}; work in the folder."

    async def score(self, answer: str) -> Score:
        if self._own is None or self._check is None:
            raise ConfigError("a work folder is scored after it was reset")
        work, check = self._own / "work", self._check
        if await asyncio.to_thread(is_larger, work, limit=self._max_bytes):
            return Score({"too_large": 0.0})
        kinds = bool(check.expected) + bool(check.command)
        components = {}
        if check.expected:
            right = await asyncio.to_thread(_right, work, check.expected)
            components["files"] = right / len(check.expected) / kinds
        if check.command:
            components["command"] = await self._passes(self._own, check) / kinds
        return Score(components)

    async def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await asyncio.to_thread(remove, own)

    async def _passes(self, own: Path, check: Check) -> bool:
        work, home = own / "work", own / "home"
        home.mkdir(exist_ok=True)
        try:
            for name, text in check.files.items():
                await asyncio.to_thread(write_below, work, name, text.encode())
        except OSError:  # the agent has a link or a file in place of a folder, or a folder in place of the file
            return False
        ended = await run_supervised(
            check.command,
            folder=work,
            environment={**passed_on(), "HOME": str(home)},
            stdin=None,
            bounds=Bounds(timeout_s=check.timeout_s, file_bytes=self._max_bytes),
        )
        return ended.status == 0


def _right(work: Path, expected: Mapping[str, str]) -> int:
    """How many of the files are as they should be."""
    right = 0
    for name, text in expected.items():
        try:
            found = read_below(work, name, limit=2 * len(text.encode()) + 4096)
        except OSError:
            continue
        right += found.rstrip() == text.encode().rstrip()
    return right
