"""What a job names is made before anything is played, or refused with what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Register, Task
from gym_capture.rollouts.jobfile import JobFile, Prepared, prepare, read_tasks

HERE = __name__
made: list[str] = []


class Tracked(Register):
    """Says when it is made and closed."""

    def __init__(self, *, fault: str = "") -> None:
        super().__init__()
        made.append("made")
        if fault:
            raise LookupError(fault)

    async def close(self) -> None:
        made.append("closed")


class Idle(Register):
    @staticmethod
    def tasks(count: int, *, seed: int = 0, steps: int = 2) -> list[Task]:
        return []


class Torn(Register):
    """Makes tasks that are none, or fails at it."""

    @staticmethod
    def tasks(count: int, *, seed: int = 0, broken: bool = False) -> list[Task]:  # type: ignore[override]
        if broken:
            raise LookupError("no such game")
        return [Task("a"), ("b", {})]  # type: ignore[list-item]


def job(**keys: Any) -> JobFile:
    return JobFile.model_validate({"format_version": 1, "out": "unused", **keys})


def prepared(**keys: Any) -> Prepared:
    async def run() -> Prepared:
        ready = await prepare(job(**keys))
        await ready.harness.close()
        return ready

    return asyncio.run(run())


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_job_of_defaults_is_ready() -> None:
    ready = prepared()
    assert list(ready.tasks) == Register.tasks(4, seed=0)
    assert isinstance(ready.make_environment(), Register)


def test_tasks_are_made_up_by_the_environment() -> None:
    assert list(prepared(tasks={"count": 2, "seed": 5}).tasks) == Register.tasks(2, seed=5)
    with pytest.raises(ConfigError, match="made no tasks"):
        prepared(environment={"name": f"{HERE}:Idle"})
    with pytest.raises(ConfigError, match=r"environment '.*:Torn' cannot make tasks: LookupError: no such game"):
        prepared(environment={"name": f"{HERE}:Torn", "broken": True})
    with pytest.raises(ConfigError, match=r"environment '.*:Torn' made a task that is no `Task`: \('b', {}\)"):
        prepared(environment={"name": f"{HERE}:Torn"})


def test_one_environment_is_tried_and_closed() -> None:
    made.clear()
    prepared(environment={"name": f"{HERE}:Tracked"})
    assert made == ["made", "closed"]
    with pytest.raises(ConfigError, match=r"environment '.*:Tracked' cannot be made: LookupError: 'no such game'"):
        prepared(environment={"name": f"{HERE}:Tracked", "fault": "'no such game'"})


def test_tasks_are_read_from_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", '{"task_id": "a", "data": {"start": 1}}', "", '{"task_id": 7}')
    assert read_tasks(path) == [Task("a", {"start": 1}), Task("7")]
    assert prepared(tasks={"file": str(path)}).tasks == read_tasks(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a task: JSONDecodeError"),
        ("[]", "not a task: TypeError: must be an object: got list"),
        ('"text"', "not a task: TypeError: must be an object: got str"),
        ('{"data": {}}', "not a task: KeyError: 'task_id'"),
        ('{"task_id": null}', "not a task: TypeError: task_id must be a string: got None"),
        ('{"task_id": true}', "not a task: TypeError: task_id must be a string: got True"),
        ('{"task_id": "b", "data": []}', "not a task: TypeError: data must be an object: got list"),
        ('{"task_id": "b", "prompt": "x"}', "not a task: ValueError: unknown key 'prompt': what the environment"),
        ('{"task_id": "a"}', "task_id 'a' is in line 1 already"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "tasks.jsonl", '{"task_id": "a"}', line)
    with pytest.raises(ConfigError) as refused:
        read_tasks(path)
    assert str(refused.value).startswith(f"{path}, line 2: {problem}")


@pytest.mark.parametrize("lines", [[], [""]])
def test_a_file_without_tasks_is_refused(tmp_path: Path, lines: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="there are no tasks in it"):
        read_tasks(write(tmp_path / "tasks.jsonl", *lines))
