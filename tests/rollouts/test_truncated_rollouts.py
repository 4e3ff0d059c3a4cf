"""A conversation that outgrows the model's context is a rollout that ended there, from the gateway to the trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import pytest

from gym_capture.build.builder import BuildOptions
from gym_capture.capture.operations import Clear, Close
from gym_capture.data.groups import build_groups
from gym_capture.data.requests import groups_of, read_requests
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, saying
from gym_capture.models import tiny_dir
from gym_capture.rollouts.environment import Observation, Register, Score
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome
from gym_capture.rollouts.harnesses.command import command
from gym_capture.rollouts.harnesses.tool_loop import tool_loop
from gym_capture.rollouts.job import JobOptions, JobSummary
from gym_capture.rollouts.on_graph import play_on_graph
from tests.serving.replica import STOP, Replica, listening
from trainer_bridge.stream import read_rollouts


class Insisting(Register):
    """It has tools, which the policy never calls, and scores what was said last."""

    async def score(self, answer: str) -> Score:
        return Score({"answer": 0.25 if answer == "word " * 20 else 0.0})


async def play(replica: Replica, directory: Path) -> JobSummary:
    async with listening(replica.app) as client:
        return await play_on_graph(
            url=str(client.base_url),
            tasks=Insisting.tasks(1),
            make_environment=Insisting,
            harness=tool_loop(max_calls=20, forced_calls=19),
            options=JobOptions(job_id="job", samples=1),
            settings={},
            clear=lambda rollout_id: replica.state.write(Clear(rollout_id)),
            close=lambda rollout_id: replica.state.write(Close(rollout_id)),
            directory=directory,
        )


def replica_of(max_model_len: int) -> Replica:
    template = HfChatTemplate.from_model_dir(tiny_dir())

    def script(call: EngineCall) -> Script:
        return saying(template, "word " * 20, stop_token=STOP)

    return Replica(template, script, max_model_len=max_model_len)


async def test_it_keeps_its_records_is_scored_as_it_stands_and_a_filter_can_leave_it_out(tmp_path: Path) -> None:
    replica = replica_of(1024)
    (row,) = (await play(replica, tmp_path)).rows
    assert 1 < row.n_calls < 20
    assert (row.status, row.truncated, row.failed_call) == ("finished", True, row.n_calls + 1)
    assert (row.reward, row.attempt, row.error) == (0.25, 1, None)
    assert len(await replica.state.entries(row.rollout_id)) == row.n_calls
    (written,) = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert (written["truncated"], written["failed_call"]) == (True, row.n_calls + 1)

    groups = groups_of(read_requests(tmp_path / "rollouts.jsonl").table)
    built = [each async for each in build_groups(groups, replica.state.freeze, options=BuildOptions(), scale="none")]
    ((summaries, table),) = built
    assert [(summary.truncated, summary.masked) for summary in summaries] == [(True, False)]
    (rollout,) = read_rollouts([table])
    assert (rollout.truncated, rollout.masked, rollout.reward) == (True, False, 0.25)
    assert rollout.sequences[0].finish_reason == "stop", "no call ran into a limit: a further one was refused"


async def test_a_task_that_does_not_fit_is_a_failure_and_not_tried_again(tmp_path: Path) -> None:
    replica = replica_of(32)
    (row,) = (await play(replica, tmp_path)).rows
    assert (row.status, row.truncated, row.error, row.failed_call, row.attempt) == ("failed", False, "refused", 1, 1)
    assert row.reward is None


CALLER: Final = """
import json, os, sys, urllib.error, urllib.request

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 40}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))

start = [{"role": "user", "content": os.environ["GYM_CAPTURE_TASK"]}]
messages = list(start)
try:
    while True:
        messages.append(ask(messages)["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on."})
except urllib.error.HTTPError:
    pass
"""
"""An agent that goes on until it is refused."""


async def played(program: str, *, task: str = "Count.", max_model_len: int = 200, **options: float) -> Outcome:
    replica = replica_of(max_model_len)
    async with listening(replica.app) as client:
        return await command(command=[sys.executable, "-c", program], **options).run(  # type: ignore[arg-type]
            endpoint=Endpoint(str(client.base_url.join("/ng-rollout/r1/v1"))),
            observation=Observation(({"role": "user", "content": task},)),
            environment=Register(),
        )


@pytest.mark.parametrize(
    ("end", "answer"), [("sys.exit(3)", ""), ("print('so far')", "so far"), ("os.kill(os.getpid(), 9)", "")]
)
async def test_TR_10_a_program_is_truncated_whatever_it_makes_of_a_refusal(end: str, answer: str) -> None:
    outcome = await played(CALLER + end)
    assert isinstance(outcome, Completed), outcome
    assert (outcome.answer, outcome.truncated) == (answer, True)
    assert outcome.failed_call is not None
    assert outcome.failed_call > 2


async def test_a_program_that_begins_a_shorter_conversation_and_ends_is_not_truncated() -> None:
    assert await played(f"{CALLER}ask(start)\nprint('done')") == Completed("done", n_calls=0)
    outcome = await played(f"{CALLER}ask(start)\nsys.exit(3)")
    assert isinstance(outcome, Failed)
    assert outcome.reason == "command_failed"


@pytest.mark.parametrize("task", ["word " * 300, "word " * 100_000])
async def test_a_program_whose_task_does_not_fit_is_refused_and_not_tried_again(task: str) -> None:
    program = CALLER.replace('os.environ["GYM_CAPTURE_TASK"]', 'open(os.environ["GYM_CAPTURE_TASK_FILE"]).read()')
    outcome = await played(program, task=task)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable, outcome.failed_call) == ("refused", False, 1)
