"""The work folder: what an agent may leave behind, and what it is worth."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from gym_capture.errors import ConfigError
from gym_capture.rollouts.catalog import environment_factory, harness_factory, task_maker
from gym_capture.rollouts.environment import Score, Task
from gym_capture.rollouts.environments.work_folder import WorkFolder
from gym_capture.rollouts.harness import Completed, Endpoint

PYTHON: Final = (sys.executable, "-I", "-S", "-c")
EXPECTED: Final = {"expected": {"a.txt": "one\n", "b/c.txt": "two"}}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def scored(
    check: Mapping[str, Any],
    agent: Callable[[Path], None],
    *,
    files: Mapping[str, str] | None = None,
    **options: Any,
) -> Score:
    """The score of what `agent` does in the folder."""

    async def run() -> Score:
        environment = environment_factory("work-folder")(**options)
        task = Task("t", {"prompt": "Work.", "files": files or {}, "check": check})
        observation = await environment.reset(task)
        assert observation.work_folder is not None
        try:
            agent(observation.work_folder)
            return await environment.score("done")
        finally:
            await environment.close()
            assert not observation.work_folder.exists()

    return asyncio.run(run())


def write(files: Mapping[str, str]) -> Callable[[Path], None]:
    def agent(work: Path) -> None:
        for name, text in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text)

    return agent


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({}, 0.0),
        ({"a.txt": "one"}, 0.5),
        ({"a.txt": "one\n\n", "b/c.txt": "two\n"}, 1.0),
        ({"a.txt": " one", "b/c.txt": "TWO"}, 0.0),
        ({"a.txt": "one\n" + " " * 10_000, "b/c.txt": "two"}, 0.5),
    ],
)
def test_files_are_compared_but_for_white_space_at_their_end(files: Mapping[str, str], reward: float) -> None:
    score = scored(EXPECTED, write(files))
    assert score.reward == reward
    assert set(score.components) == {"files"}


def test_the_folder_begins_with_the_files_of_the_task() -> None:
    seen: dict[str, str] = {}

    def agent(work: Path) -> None:
        seen.update({str(file.relative_to(work)): file.read_text() for file in work.rglob("*") if file.is_file()})

    scored(EXPECTED, agent, files={"src/main.py": "print()", "README": "hi"})
    assert seen == {"src/main.py": "print()", "README": "hi"}


@pytest.mark.parametrize("kind", ["link", "folder link", "fifo", "device link"])
def test_what_is_no_file_of_the_folder_is_not_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("two")

    def agent(work: Path) -> None:
        if kind == "folder link":
            (work / "b").symlink_to(tmp_path)
            return
        (work / "b").mkdir()
        if kind == "fifo":
            os.mkfifo(work / "b" / "c.txt")
        else:
            (work / "b" / "c.txt").symlink_to("/dev/zero" if kind == "device link" else tmp_path / "c.txt")

    assert scored(EXPECTED, agent).reward == 0.0


def test_too_much_is_worth_nothing() -> None:
    files = {"a.txt": "one", "b/c.txt": "two", "junk": "x" * 10_000}
    assert scored(EXPECTED, write(files), max_bytes=9_000).components == {"too_large": 0.0}
    assert scored(EXPECTED, write(files), max_bytes=90_000).reward == 1.0


def check_with(script: str, **more: Any) -> dict[str, Any]:
    return {"command": [*PYTHON, script], **more}


def test_a_command_says_what_it_is_worth() -> None:
    check = check_with("import sys; sys.exit(open('a.txt').read() != 'one')")
    assert scored(check, write({"a.txt": "one"})).components == {"command": 1.0}
    assert scored(check, write({"a.txt": "two"})).components == {"command": 0.0}
    both = {**check, **EXPECTED}
    assert scored(both, write({"a.txt": "one"})).components == {"files": 0.25, "command": 0.5}


def test_the_files_of_a_check_come_when_the_agent_is_done_and_stand_above_its_own(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    check = {
        "command": [sys.executable, "-I", "-S", "tests/check.py"],
        "files": {"tests/check.py": "raise SystemExit(0)"},
    }

    def agent(work: Path) -> None:
        assert list(work.iterdir()) == []
        (work / "tests").mkdir()
        (work / "tests" / "check.py").symlink_to(outside)

    assert scored(check, agent).reward == 1.0
    assert outside.read_text() == "untouched"

    def escaping(work: Path) -> None:
        (work / "tests").symlink_to(tmp_path)

    assert scored(check, escaping).reward == 0.0
    assert not (tmp_path / "check.py").exists()
    assert scored(check, write({"tests": "a file"})).reward == 0.0


def test_a_check_that_does_not_end_is_worth_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    open({str(pid_file)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    assert scored(check_with(script, timeout_s=1.0), write({})).reward == 0.0
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_a_check_fills_no_disk() -> None:
    check = check_with("with open('large', 'wb') as file: file.write(b'x' * 9_000)")
    assert scored(check, write({}), max_bytes=5_000).reward == 0.0
    assert scored(check, write({}), max_bytes=50_000).reward == 1.0


def test_a_check_sees_no_secret_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    assert (
        scored(check_with("import os, sys; sys.exit('AWS_SECRET_ACCESS_KEY' in os.environ)"), write({})).reward == 1.0
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"check": EXPECTED}, "task t, prompt: Field required"),
        ({"prompt": "p", "check": {}}, "task t, check: Value error, a check needs"),
        ({"prompt": "p", "check": EXPECTED, "fiels": {}}, "task t, fiels: Extra inputs"),
        ({"prompt": "p", "check": EXPECTED, "files": {"../x": ""}}, "'../x' does not name a file below a folder"),
        ({"prompt": "p", "check": {"expected": {"/etc/x": ""}}}, "'/etc/x' does not name a file below a folder"),
        ({"prompt": "p", "check": {"command": ["no-such-checker"]}}, "runs no-such-checker, which is not on the PATH"),
    ],
)
async def test_a_task_that_cannot_be_played_is_named(data: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        await WorkFolder().reset(Task("t", data))
    assert said in raised.value.message


async def test_a_program_solves_the_tasks_that_it_makes_up(own_temporary_folder: Path) -> None:
    async def run() -> list[float]:
        harness = harness_factory("command")(command=["sh", "-c", "LC_ALL=C sort words.txt > sorted.txt"])
        rewards = []
        for task in task_maker("work-folder")(3, seed=1):
            environment = environment_factory("work-folder")()
            observation = await environment.reset(task)
            outcome = await harness.run(
                endpoint=Endpoint("http://unused/v1"), observation=observation, environment=environment
            )
            assert isinstance(outcome, Completed)
            rewards.append((await environment.score(outcome.answer)).reward)
            await environment.close()
        return rewards

    assert await run() == [1.0, 1.0, 1.0]
    assert list(own_temporary_folder.iterdir()) == []
    assert WorkFolder.tasks(2, seed=5) == WorkFolder.tasks(4, seed=5)[:2]
