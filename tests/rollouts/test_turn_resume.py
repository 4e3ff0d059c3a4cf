"""A rollout that was cut goes on from its records: what is repeated costs no compute, and nothing is trained twice.

The gateway, the call service, the store, the ledger and the builder are the real ones; the engine is scripted, and its
calls are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gym_capture.build.builder import build
from gym_capture.commands.fence import Fence
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, saying
from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.models import tiny_dir
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts import patience
from gym_capture.rollouts.attempt import Before, Outcome, Replayed, Scored
from gym_capture.rollouts.environment import Task
from gym_capture.rollouts.harness import Completed, Failed
from gym_capture.rollouts.harness import Outcome as Ended
from gym_capture.rollouts.job import JobOptions, JobRun, JobSummary
from gym_capture.rollouts.jobfile import JobFile, prepare
from gym_capture.rollouts.on_graph import endpoints, play_on_graph
from tests.rollouts.test_fenced_attempts import KEYS, TASK, Agent, Agents, Rewards
from tests.serving.replica import STOP, Replica, listening

Play = Callable[[Agent], Awaitable[Ended]]


@pytest.fixture(scope="module")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


async def play_job(url: str, play: Play, directory: Path, fence: Fence, *, resumes: bool, **options: Any) -> JobSummary:
    return await play_on_graph(
        url=url,
        tasks=[TASK],
        make_environment=Rewards,
        harness=Agents(play),
        options=JobOptions(job_id="job", samples=1, retry_wait_s=0.0, **options),
        settings={},
        clear=fence.clear,
        close=fence.close,
        resume=fence if resumes else None,
        directory=directory,
        keyring=KEYS,
    )


@dataclass
class Server:
    replica: Replica
    url: str
    directory: Path

    def __post_init__(self) -> None:
        self.fence = Fence(self.replica.state)  # type: ignore[arg-type]

    async def play(self, play: Play, *, resumes: bool = True, **options: Any) -> JobSummary:
        return await play_job(self.url, play, self.directory, self.fence, resumes=resumes, **options)

    async def cut(self, calls: int, **options: Any) -> None:
        """Plays an attempt of so many calls, and ends the job then, as Ctrl-C does."""
        reached = asyncio.Event()
        job = asyncio.ensure_future(self.play(partial(hangs_after, calls, reached.set), **options))
        reaching = asyncio.ensure_future(reached.wait())
        await asyncio.wait({job, reaching}, return_when=asyncio.FIRST_COMPLETED)
        assert not job.done()
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job

    def agent(self, rollout_id: str) -> Agent:
        return Agent(endpoints(self.url, KEYS)(rollout_id))

    @property
    def generated(self) -> int:
        """Calls that the engine was asked for."""
        return len(self.replica.engine.calls)


async def hangs_after(calls: int, reached: Callable[[], object], agent: Agent) -> Ended:
    for _ in range(calls):
        assert await agent.ask() == 200
    reached()
    await asyncio.Event().wait()
    raise AssertionError


async def makes(calls: int, agent: Agent) -> Ended:
    for _ in range(calls):
        assert await agent.ask() == 200
    return Completed("1", n_calls=calls)


@asynccontextmanager
async def served(template: HfChatTemplate, directory: Path) -> AsyncIterator[Server]:
    """Its policy says how often it was asked."""

    def script(call: EngineCall) -> Script:
        return saying(template, f"reply {len(replica.engine.calls)}", stop_token=STOP)

    replica = Replica(template, script, keyring=KEYS)
    replica.service._clock = itertools.count(1.0).__next__
    async with listening(replica.app) as client:
        yield Server(replica, str(client.base_url).rstrip("/"), directory / "job")


async def test_a_rollout_whose_driver_was_killed_goes_on_where_it_was_cut(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    async with served(template, tmp_path) as server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, server.url, str(server.directory)),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert driver.stdout is not None
        assert await driver.stdout.readline() == b"hangs\n", (await driver.communicate())[1]
        driver.send_signal(signal.SIGKILL)
        await driver.communicate()
        first = await server.replica.state.entries("job.task.0-a1")
        assert (len(first), server.generated) == (2, 2)

        (row,) = (await server.play(partial(makes, 4))).rows
        assert (row.rollout_id, row.status, row.replayed_calls, row.diverged_at) == (
            *("job.task.0-a2", "finished", 2, None),
        )
        assert server.generated == 4
        snapshot = await server.replica.state.snapshot("job.task.0-a2")
        for record, of in zip(snapshot.entries, first, strict=False):
            assert record.prompt_token_ids.tolist() == of.prompt_token_ids.tolist()
            assert record.generation_token_ids.tolist() == of.generation_token_ids.tolist()
            assert record.generation_log_probs.tolist() == of.generation_log_probs.tolist()
            assert record.policy.replayed_from == of.model_call_id
        built = build(snapshot)
        assert (built.masked, built.counts.n_calls, len(built.trajectories)) == (False, 4, 1)
        # Trained once: nothing is left of the one that was cut, and its agent is refused.
        assert await server.replica.state.store.rollout_ids() == ["job.task.0-a2"]
        assert await server.agent("job.task.0-a1").ask() == 409
        assert json.loads((server.directory / "rollouts.jsonl").read_text())["replayed_calls"] == 2


async def test_while_the_next_attempt_plays_the_one_before_is_refused_and_masked(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    async with served(template, tmp_path) as server:
        await server.cut(2)

        async def looks(agent: Agent) -> Ended:
            assert await server.agent("job.task.0-a1").ask() == 409
            built = build(await server.replica.state.snapshot("job.task.0-a1"))
            assert (built.masked, built.counts.n_calls) == (True, 2)
            return await makes(3, agent)

        (row,) = (await server.play(looks)).rows
        assert (row.replayed_calls, server.generated) == (2, 3)


async def test_a_call_that_was_under_way_is_generated_anew(template: HfChatTemplate, tmp_path: Path) -> None:
    async with served(template, tmp_path) as server:
        state = server.replica.state

        async def third_hangs(agent: Agent) -> Ended:
            await makes(2, agent)
            state.gate.clear()
            state.put_begins.clear()
            return await makes(1, agent)

        job = asyncio.ensure_future(server.play(third_hangs))
        async with asyncio.timeout(60):
            while server.generated < 3:  # noqa: ASYNC110 - the third, which nothing announces
                await asyncio.sleep(0.005)
            await state.put_begins.wait()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        again = asyncio.ensure_future(server.play(partial(makes, 3)))
        state.gate.set()
        (row,) = (await again).rows
        assert row.replayed_calls in (2, 3)  # its record was written, or it came too late
        assert server.generated == 3 + (3 - row.replayed_calls)


async def test_an_attempt_that_was_cut_while_it_repeated_loses_nothing(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    async with served(template, tmp_path) as server:
        await server.cut(3)
        await server.cut(1)
        assert server.generated == 3
        (row,) = (await server.play(partial(makes, 4))).rows
        assert (row.attempt, row.replayed_calls, row.diverged_at, server.generated) == (3, 3, None, 4)
        assert await server.replica.state.store.rollout_ids() == ["job.task.0-a3"]


async def test_an_attempt_that_was_lost_while_it_repeated_loses_nothing(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    """In one run of the job: the records of the attempts before are there until the rollout is over."""
    async with served(template, tmp_path) as server:
        await server.cut(3)

        async def lost_once(agent: Agent) -> Ended:
            if agent.rollout_id.endswith("-a2"):
                await makes(1, agent)
                return Failed(AttemptFailure.NODE_LOST, "gone")
            return await makes(4, agent)

        (row,) = (await server.play(lost_once)).rows
        assert (row.attempt, row.replayed_calls, row.diverged_at, server.generated) == (3, 3, None, 4)
        assert await server.replica.state.store.rollout_ids() == ["job.task.0-a3"]


@pytest.mark.parametrize("step", ["clear", "reset"])
async def test_an_attempt_that_failed_before_its_agent_began_is_none_that_came_to_an_end(
    template: HfChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """What was cut before it is as good as it was."""
    async with served(template, tmp_path) as server:
        await server.cut(2)
        fails = iter([True])
        owner = {"clear": server.fence, "reset": Rewards}[step]
        original = getattr(owner, step)

        async def fails_once(*args: Any) -> Any:
            if next(fails, False):
                raise StoreUnavailableError("down")
            return await original(*args)

        monkeypatch.setattr(owner, step, fails_once)
        (row,) = (await server.play(partial(makes, 3))).rows
        assert (row.attempt, row.replayed_calls, server.generated) == (3, 2, 3)


async def test_an_agent_that_asks_otherwise_is_answered_live_and_that_is_said(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    async with served(template, tmp_path) as server:
        await server.cut(3)

        async def otherwise(agent: Agent) -> Ended:
            assert await agent.ask() == 200
            agent.said[0] += "!"
            assert await agent.ask() == 200
            agent.said[:] = [agent.said[0][:-1]]
            assert await agent.ask() == 200  # what it asked in the first attempt: it is still there
            return Completed("1", n_calls=3)

        (row,) = (await server.play(otherwise)).rows
        assert (row.replayed_calls, row.diverged_at, server.generated) == (2, 2, 4)


async def test_without_it_what_was_cut_is_closed_and_played_anew(template: HfChatTemplate, tmp_path: Path) -> None:
    """Also what an earlier run had handed on."""
    async with served(template, tmp_path) as server:
        await server.cut(2)
        await server.cut(1)
        (row,) = (await server.play(partial(makes, 2), resumes=False)).rows
        assert (row.attempt, row.replayed_calls, server.generated) == (3, 0, 4)
        assert await server.replica.state.store.rollout_ids() == ["job.task.0-a3"]


async def test_an_attempt_that_failed_is_no_script_for_the_next(template: HfChatTemplate, tmp_path: Path) -> None:
    """Nor is what it went on from: another sample may end better."""
    async with served(template, tmp_path) as server:
        await server.cut(2)

        async def fails_once(agent: Agent) -> Ended:
            ended = await makes(2, agent)
            return Failed("mine", "no luck") if agent.rollout_id.endswith("-a2") else ended

        (row,) = (await server.play(fails_once)).rows
        assert (row.attempt, row.replayed_calls, server.generated) == (3, 0, 4)


@pytest.mark.parametrize("dies_at", ["hand_on", "go_on", "over"])
async def test_a_driver_that_dies_between_two_steps(
    template: HfChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    """Before the attempt begins, or when it is over and has no row yet."""
    async with served(template, tmp_path) as server:
        await server.cut(2)

        died = asyncio.Event()
        step = getattr(server.fence, dies_at)

        async def dies(*args: Any) -> None:
            await step(*args)
            died.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(server.fence, dies_at, dies)
        job = asyncio.ensure_future(server.play(partial(makes, 3)))
        await died.wait()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        monkeypatch.undo()
        (row,) = (await server.play(partial(makes, 3))).rows
        assert (row.attempt, row.replayed_calls, server.generated) == (3, 3 if dies_at == "over" else 2, 3)
        assert await server.replica.state.store.rollout_ids() == ["job.task.0-a3"]


async def test_a_count_that_cannot_be_told_costs_no_rollout(
    template: HfChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(template, tmp_path) as server:
        await server.cut(1)

        async def down(*_: object) -> Replayed:
            raise StoreUnavailableError("down")

        monkeypatch.setattr(server.fence, "over", down)
        (row,) = (await server.play(partial(makes, 1))).rows
        assert (row.status, row.reward, row.note) == (
            *("finished", 1.0, "what it repeated of earlier attempts cannot be told: down"),
        )


async def test_an_attempt_whose_node_was_lost_is_continued(tmp_path: Path) -> None:
    plays: list[Before] = []

    class Runner:
        left_running = 0

        async def place(self) -> Any:
            return self.play

        async def play(self, rollout_id: str, task: Task, *, before: Before) -> Outcome:
            plays.append(before)
            if len(plays) in (2, 3):
                return Outcome(Failed(AttemptFailure.NODE_LOST, "gone"), None)
            if len(plays) == 1:
                return Outcome(Failed("mine", "no luck"), None)
            return Outcome(Scored(answer="", n_calls=3, reward=1.0, components={}, completed=Completed("", 3)), None)

    class Resume:
        async def hand_on(self, rollout_id: str) -> None: ...

        async def go_on(self, rollout_id: str, source: str) -> None: ...

        async def over(self, rollout_id: str, sources: Any) -> Replayed:
            return Replayed(calls=2, diverged_at=3)

    options = JobOptions(job_id="job", samples=1, retry_wait_s=0.0, max_attempts=4)
    job = JobRun(tasks=[TASK], options=options, attempts=Runner(), settings={}, directory=tmp_path, resume=Resume())
    summary = await job.run()
    a1, a2, a3 = (f"job.task.0-a{number}" for number in (1, 2, 3))
    assert plays == [Before([], []), Before([a1], []), Before([a1], [a2]), Before([a1], [a2, a3])]
    (row,) = summary.rows
    assert (row.attempt, row.replayed_calls, row.diverged_at, summary.replayed_calls) == (4, 2, 3, 2)


@pytest.mark.parametrize(
    ("harness", "says_so"),
    [
        ({"name": "tool-loop"}, True),
        ({"name": "command", "command": "true", "repeats": True}, True),
        ({"name": "command", "command": "true"}, False),
        ({"name": "remote-agent", "url": "http://127.0.0.1:1"}, False),
    ],
)
async def test_a_harness_that_does_not_say_that_it_repeats_is_refused_before_anything_runs(
    tmp_path: Path, harness: Mapping[str, Any], says_so: bool
) -> None:
    job = JobFile.model_validate(
        {"format_version": 1, "out": tmp_path, "harness": harness, "environment": {"name": "register"}}
    )
    await (await prepare(job)).harness.close()
    resuming = job.model_copy(update={"resume_turns": True})
    assert resuming.settings == job.settings
    if says_so:
        await (await prepare(resuming)).harness.close()
        return
    with pytest.raises(ConfigError, match="does not say that its agents ask the same again"):
        await prepare(resuming)


async def _drive(url: str, directory: Path) -> None:
    """A driver of its own: the first attempt, of which there is nothing to clear or to close."""

    class Nowhere:
        async def write(self, operation: object) -> int:
            return 0

    play = partial(hangs_after, 2, lambda: print("hangs", flush=True))
    await play_job(url, play, directory, Fence(Nowhere()), resumes=False)  # type: ignore[arg-type]


if __name__ == "__main__":
    patience.run(_drive(sys.argv[1], Path(sys.argv[2])))
