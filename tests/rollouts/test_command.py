"""Any program as a harness: what it is told, what becomes of what it says, and of what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.catalog import harness_factory
from gym_capture.rollouts.environment import Observation, Register
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Harness, Outcome
from gym_capture.rollouts.harnesses.command import TOLD
from gym_capture.rollouts.supervised import PASSED_ON
from tests.rollouts.scripted_server import Call, completion, serving

ENDPOINT: Final = Endpoint("http://127.0.0.1:9/ng-rollout/r1/v1", "token-of-r1")
MESSAGES: Final[Sequence[Mapping[str, Any]]] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "{model}? $HOME"}]},
)
WHOLE: Final = "Be brief.\n\nWhat is {model}? $HOME"


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(script), *arguments]


def command(words: Sequence[str] | str, **options: Any) -> Harness:
    return harness_factory("command")(command=words, **options)


def play(
    harness: Harness,
    *,
    endpoint: Endpoint = ENDPOINT,
    messages: Sequence[Mapping[str, Any]] = MESSAGES,
    work_folder: Path | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Outcome:
    observation = Observation(tuple(messages), tools=tuple(tools), work_folder=work_folder)
    return asyncio.run(harness.run(endpoint=endpoint, observation=observation, environment=Register()))


def answer_of(harness: Harness, **rollout: Any) -> str:
    outcome = play(harness, **rollout)
    assert isinstance(outcome, Completed), outcome
    return outcome.answer


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders of rollouts are made: what is left of them shows."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_program_is_told_of_its_rollout_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("WANTED", "yes")
    script = """
    import json, os
    task = open(os.environ["GYM_CAPTURE_TASK_FILE"]).read()
    messages = json.load(open(os.environ["GYM_CAPTURE_MESSAGES_FILE"]))
    print(json.dumps([dict(os.environ), os.getcwd(), task, messages, os.listdir()]))
    """
    told, work, task, messages, there = json.loads(
        answer_of(command(python(script), model="m", pass_on=["WANTED"], environment={"EXTRA": "1"}))
    )
    assert told.keys() - {*PASSED_ON, "LC_CTYPE"} == {*TOLD, "WANTED", "EXTRA"}
    assert (told["WANTED"], told["EXTRA"], told["GYM_CAPTURE_MODEL"]) == ("yes", "1", "m")
    assert told["OPENAI_BASE_URL"] == told["OPENAI_API_BASE"] == ENDPOINT.base_url
    assert told["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9/ng-rollout/r1"
    assert told["OPENAI_API_KEY"] == told["ANTHROPIC_API_KEY"] == "token-of-r1"
    assert told["GYM_CAPTURE_TASK"] == task == WHOLE
    assert messages == list(MESSAGES)
    assert there == []
    folders = [told["HOME"], told["TMPDIR"], work]
    assert len({*folders}) == 3
    assert os.environ["HOME"] not in folders


def test_places_in_the_words_are_filled_in_once() -> None:
    words = python(
        "import sys; print(sys.argv[1:])", "{task}", "--to={base_url}", "{anthropic_base_url}", "{print}", "${HOME}"
    )
    assert answer_of(command(words, model="m")) == str(
        [WHOLE, f"--to={ENDPOINT.base_url}", ENDPOINT.anthropic_base_url, "{print}", "${HOME}"]
    )


def test_a_command_may_be_one_line(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("found")
    assert answer_of(command(f"cat '{tmp_path}/a b.txt'")) == "found"


def test_the_task_may_come_by_standard_input_and_the_answer_by_a_file() -> None:
    script = (
        "import os, sys; open(os.environ['GYM_CAPTURE_ANSWER_FILE'], 'w').write(sys.stdin.read()[:8]); print('log')"
    )
    assert answer_of(command(python(script), stdin=True, answer="file")) == "Be brief"
    assert answer_of(command(python("import sys; print(len(sys.stdin.read()))"))) == "0"


@pytest.mark.parametrize(
    "script",
    [
        "",
        "import os; os.symlink('/etc/passwd', '{0}')",
        "import os; os.mkfifo('{0}')",
        "open('{0}', 'w').write('x' * 99)",
    ],
    ids=["nothing", "link", "fifo", "too large"],
)
def test_an_answer_file_that_is_none_is_no_answer(script: str) -> None:
    code = f"import os, sys\n{script.replace('{0}', '{1}')}".replace("'{1}'", "sys.argv[1]")
    outcome = play(command(python(code, "{answer_file}"), answer="file", max_output_bytes=50))
    assert isinstance(outcome, Failed)
    assert outcome.reason == AttemptFailure.NO_ANSWER


@pytest.mark.parametrize(
    ("script", "options", "reason", "detail"),
    [
        ("import sys; sys.exit('no model')", {}, AttemptFailure.COMMAND_FAILED, "exit status 1: no model"),
        ("print('why'); raise SystemExit(4)", {}, AttemptFailure.COMMAND_FAILED, "exit status 4: why"),
        ("import os; os.kill(os.getpid(), 9)", {}, AttemptFailure.COMMAND_FAILED, "killed by signal 9"),
        (
            "import time; print('waits', flush=True); time.sleep(600)",
            {"timeout_s": 1},
            AttemptFailure.COMMAND_TIMEOUT,
            "it ran for 1 s: waits",
        ),
        (
            "while True: print('x' * 99)",
            {"max_output_bytes": 5000},
            AttemptFailure.COMMAND_FAILED,
            "more than 5000 bytes",
        ),
    ],
)
def test_what_goes_wrong_is_a_failure_with_the_programs_last_words(
    script: str, options: Mapping[str, Any], reason: AttemptFailure, detail: str
) -> None:
    outcome = play(command(python(script), **options))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (reason, True)
    assert detail in outcome.detail
    assert len(outcome.detail) < 700


def test_nothing_is_left_of_a_rollout_but_the_work_folder_of_its_environment(
    tmp_path: Path, own_temporary_folder: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = """
    import os
    os.makedirs(os.environ["HOME"] + "/locked/below")
    os.chmod(os.environ["HOME"] + "/locked", 0)
    os.symlink("/", os.environ["HOME"] + "/root")
    open("made", "w").write("by the agent")
    """
    assert answer_of(command(python(script)), work_folder=work) == ""
    assert (work / "made").read_text() == "by the agent"
    assert list(own_temporary_folder.iterdir()) == []


async def test_a_cancelled_rollout_leaves_nothing(own_temporary_folder: Path) -> None:
    harness = command(python("import time; open('runs', 'w').close(); time.sleep(600)"))
    observation = Observation(tuple(MESSAGES))
    running = asyncio.create_task(harness.run(endpoint=ENDPOINT, observation=observation, environment=Register()))
    await asyncio.to_thread(wait_until, lambda: bool(list(own_temporary_folder.glob("*/work/runs"))))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert list(own_temporary_folder.iterdir()) == []


async def test_many_rollouts_at_a_time_do_not_meet() -> None:
    script = """
    import os, sys
    open("mine", "x").write(sys.argv[1])
    print(open("mine").read(), os.listdir(), os.listdir(os.environ["HOME"]))
    """
    harness = command(python(script, "{base_url}"))

    async def run() -> list[Outcome]:
        observation = Observation(tuple(MESSAGES))
        runs = [
            harness.run(endpoint=Endpoint(f"http://r{n}/v1"), observation=observation, environment=Register())
            for n in range(12)
        ]
        return await asyncio.gather(*runs)

    assert await run() == [Completed(f"http://r{n}/v1 ['mine'] []", n_calls=0) for n in range(12)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": "no-such-agent --task {task}"}, "no-such-agent is not on the PATH"),
        ({"command": []}, "the command is empty"),
        ({"command": "echo 'half"}, "not a command"),
        ({"command": "echo {taks}"}, "the command has {taks}: did you mean {task}?"),
        ({"command": "echo", "answer": "strerr"}, "option answer: Input should be 'stdout' or 'file'"),
        ({}, "needs the option command"),
        ({"command": "echo", "time_out": 1}, "no option 'time_out' (did you mean 'timeout_s'?)"),
    ],
)
def test_a_command_that_cannot_run_is_said_before_anything_does(options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        harness_factory("command")(**options)
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"tools": [{"type": "function"}]}, "the environment has tools"),
        ({"messages": [{"role": "assistant", "content": "Hello."}]}, "cannot be told a turn of 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text alone"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "does not fit into an argument"),
    ],
)
def test_a_task_that_a_program_cannot_be_told_is_refused(rollout: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        play(command("echo {task}"), **rollout)


def test_a_long_task_comes_by_file_or_standard_input() -> None:
    script = "import os, sys; print(len(sys.stdin.read()), 'GYM_CAPTURE_TASK' in os.environ)"
    assert answer_of(command(python(script), stdin=True), messages=[{"role": "user", "content": "x" * 200_000}]) == (
        "200000 False"
    )


async def test_a_program_calls_the_policy_as_its_rollout() -> None:
    script = """
    import json, os, urllib.request
    messages = json.load(open(os.environ["GYM_CAPTURE_MESSAGES_FILE"]))
    body = {"model": os.environ["GYM_CAPTURE_MODEL"], "messages": messages}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
    print(json.load(reply)["choices"][0]["message"]["content"])
    """

    async def script_of_the_policy(call: Call) -> Any:
        return completion({"content": f"{call.rollout_id} {call.token} {len(call.body['messages'])}"})

    async def run() -> Outcome:
        async with serving(script_of_the_policy) as server:
            return await command(python(script)).run(
                endpoint=Endpoint(server.base_url("r7"), "token-of-r7"),
                observation=Observation(tuple(MESSAGES)),
                environment=Register(),
            )

    assert await run() == Completed("r7 token-of-r7 2", n_calls=0)
