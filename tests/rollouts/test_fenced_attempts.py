"""An agent of an attempt that was given up gets no further, and nothing of it is in what is trained.

The gateway, the call service, the store, the ledger and the builder are the real ones; the engine is scripted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from gym_capture.auth import Keyring
from gym_capture.build.builder import build
from gym_capture.capture.operations import Clear, Close
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, saying
from gym_capture.models import tiny_dir
from gym_capture.rollouts import patience
from gym_capture.rollouts.environment import Environment, Observation, Register, Score, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome
from gym_capture.rollouts.job import JobOptions, JobSummary
from gym_capture.rollouts.on_graph import play_on_graph
from tests.serving.replica import STOP, Replica, listening, until

KEYS = Keyring(b"0123456789abcdef0123456789abcdef")
TASK = Task("task")


@pytest.fixture(scope="module")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


@dataclass
class Agent:
    """One attempt of an agent: it asks, and hears the answer or the status."""

    endpoint: Endpoint
    said: list[str] = field(default_factory=list)

    @property
    def rollout_id(self) -> str:
        return self.endpoint.base_url.split("/")[-2]

    async def ask(self) -> int:
        messages = [{"role": "user", "content": "hi"}]
        for text in self.said:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            reply = await client.post(
                f"{self.endpoint.base_url}/chat/completions",
                json={"model": "policy", "messages": messages},
                headers={"authorization": f"Bearer {self.endpoint.api_key}"},
            )
        if reply.status_code == 200:
            self.said.append(reply.json()["choices"][0]["message"]["content"])
        return reply.status_code


Play = Callable[[Agent], Awaitable[Outcome]]


class Agents:
    """A harness whose attempts go as `play` says."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(self, *, endpoint: Endpoint, observation: Observation, environment: Environment) -> Outcome:
        return await self._play(Agent(endpoint))

    async def close(self) -> None:
        """Nothing is held."""


class Rewards(Register):
    """The answer is the reward."""

    async def reset(self, task: Task) -> Observation:
        return Observation(({"role": "user", "content": "hi"},))

    async def score(self, answer: str) -> Score:
        return Score({"answer": float(answer)})


@dataclass
class Server:
    replica: Replica
    url: str

    async def play(self, play: Play, directory: Path, **options: float) -> JobSummary:
        return await play_on_graph(
            url=self.url,
            tasks=[TASK],
            make_environment=Rewards,
            harness=Agents(play),
            options=JobOptions(job_id="job", samples=1, retry_wait_s=0.0, **options),  # type: ignore[arg-type]
            settings={},
            clear=lambda rollout_id: self.replica.state.write(Clear(rollout_id)),
            close=lambda rollout_id: self.replica.state.write(Close(rollout_id)),
            directory=directory,
            keyring=KEYS,
        )

    async def recorded(self, rollout_id: str) -> int:
        return len(await self.replica.state.entries(rollout_id))


@asynccontextmanager
async def served(template: HfChatTemplate) -> AsyncIterator[Server]:
    """Its policy says how often it was asked."""

    def script(call: EngineCall) -> Script:
        return saying(template, f"reply {len(replica.engine.calls)}", stop_token=STOP)

    replica = Replica(template, script, keyring=KEYS)
    async with listening(replica.app) as client:
        yield Server(replica, str(client.base_url).rstrip("/"))


async def test_RJ_02_an_agent_that_outlives_its_attempt_is_refused_and_never_trained(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    second_plays, tried_again = asyncio.Event(), asyncio.Event()
    statuses: list[int] = []

    async def play(agent: Agent) -> Outcome:
        assert await agent.ask() == 200
        if agent.rollout_id.endswith("-a1"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # swallowed: it goes on
                await second_plays.wait()
                statuses.extend([await agent.ask(), await agent.ask()])
                tried_again.set()
            return Completed("1.0", n_calls=3)
        second_plays.set()
        await tried_again.wait()
        assert await agent.ask() == 200
        return Completed("0.25", n_calls=2)

    async with served(template) as server:
        before = Endpoint(f"{server.url}/ng-rollout/before/v1", KEYS.rollout_token("before"))
        assert await Agent(before).ask() == 200
        # Time enough for calls, of which the first took longer.
        summary = await server.play(play, tmp_path, rollout_timeout_s=3.0, close_timeout_s=0.05, max_attempts=2)
        (row,) = summary.rows
        assert statuses == [409, 409]
        assert (row.rollout_id, row.attempt, row.status, row.reward) == ("job.task.0-a2", 2, "finished", 0.25)
        assert summary.failures == {"rollout_timeout": 1}
        assert await server.recorded("job.task.0-a1") == 0
        snapshot = await server.replica.state.snapshot(row.rollout_id)
        built = build(snapshot)
        assert (built.masked, built.counts.n_calls, len(built.trajectories)) == (False, 2, 1)
        assert {entry.rollout_id for entry in snapshot.entries} == {row.rollout_id}
        assert len(server.replica.engine.calls) == 1 + 3, "a refused call costs no compute"


async def test_RJ_02_a_call_under_way_ends_with_its_attempt(template: HfChatTemplate, tmp_path: Path) -> None:
    first: list[asyncio.Task[int]] = []

    async with served(template) as server:
        state = server.replica.state
        state.gate.clear()

        async def play(agent: Agent) -> Outcome:
            if not first:
                first.append(asyncio.create_task(agent.ask()))
                await state.put_begins.wait()
                return Failed("mine", "given up with a call in flight")
            state.gate.set()
            assert await agent.ask() == 200
            return Completed("0.5", n_calls=1)

        summary = await server.play(play, tmp_path, max_attempts=2)
        assert await first[0] == 409
        assert [(row.rollout_id, row.reward) for row in summary.rows] == [("job.task.0-a2", 0.5)]
        assert (await state.snapshot("job.task.0-a1")).version == 0
        assert await server.recorded("job.task.0-a2") == 1


async def test_an_agent_that_was_slow_to_begin_is_refused_although_nothing_was_recorded(
    template: HfChatTemplate, tmp_path: Path
) -> None:
    agents: list[Agent] = []

    async def play(agent: Agent) -> Outcome:
        agents.append(agent)
        if len(agents) == 1:
            return Failed("mine", "before its first call")
        assert await agents[0].ask() == 409
        assert await agent.ask() == 200
        return Completed("1", n_calls=1)

    async with served(template) as server:
        summary = await server.play(play, tmp_path)
        assert summary.finished == 1
        # Its token is good for nothing else: not for the attempt that stands for it now.
        first, second = agents
        assert await Agent(Endpoint(second.endpoint.base_url, first.endpoint.api_key)).ask() == 403


async def test_RJ_02_a_driver_that_is_killed_with_a_call_in_flight(template: HfChatTemplate, tmp_path: Path) -> None:
    directory = tmp_path / "job"

    async def again(agent: Agent) -> Outcome:
        assert await agent.ask() == 200
        return Completed("1", n_calls=1)

    async with served(template) as server:
        state = server.replica.state
        state.gate.clear()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, server.url, str(directory)), env=environment, stderr=subprocess.PIPE
        )
        await until(lambda: state.put_begins.is_set() or driver.returncode is not None)
        assert driver.returncode is None, await driver.communicate()
        driver.send_signal(signal.SIGKILL)
        await driver.communicate()
        state.gate.set()

        summary = await server.play(again, directory)
        (row,) = summary.rows
        assert (row.rollout_id, row.attempt, summary.failures) == ("job.task.0-a2", 2, {})
        assert await server.recorded("job.task.0-a2") == 1
        assert (await state.snapshot("job.task.0-a1")).version == 0
        orphan = Endpoint(f"{server.url}/ng-rollout/job.task.0-a1/v1", KEYS.rollout_token("job.task.0-a1"))
        assert await Agent(orphan).ask() == 409
        # Over is over.
        calls = len(server.replica.engine.calls)
        assert (await server.play(again, directory)).resumed == 1
        assert len(server.replica.engine.calls) == calls


async def _drive(url: str, directory: Path) -> None:
    """A driver of its own: the first attempt, of which there is nothing to clear or to close."""

    async def play(agent: Agent) -> Outcome:
        await agent.ask()
        return Completed("1", n_calls=1)

    async def nothing(rollout_id: str) -> None:
        """To clear, or to close."""

    await play_on_graph(
        url=url,
        tasks=[TASK],
        make_environment=Rewards,
        harness=Agents(play),
        options=JobOptions(job_id="job", samples=1),
        settings={},
        clear=nothing,
        close=nothing,
        directory=directory,
        keyring=KEYS,
    )


if __name__ == "__main__":
    patience.run(_drive(sys.argv[1], Path(sys.argv[2])))
