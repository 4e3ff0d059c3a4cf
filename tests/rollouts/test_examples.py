"""The examples of the documentation, run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from aiohttp import web

from gym_capture.demo.processes import free_port
from gym_capture.rollouts.catalog import ENVIRONMENTS, HARNESSES, environment_factory, harness_factory, task_maker
from gym_capture.rollouts.environment import Observation, Register, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome
from gym_capture.rollouts.harnesses.command import TOLD
from tests.rollouts import scripted_agent
from tests.rollouts.scripted_server import Call, Server, completion, serving, tool_call

DOCS: Final = Path(__file__).parents[2] / "docs"


async def test_an_agent_of_an_sdk_is_a_program_whose_turns_are_echoed_as_they_were() -> None:
    said = ["I compute it.\n<code>\nx = 6 * 7\nprint(x)\n", "I have it.\n<code>\nfinal_answer(x)\n"]

    async def policy(call: Call) -> web.Response:
        step = sum(message["role"] == "assistant" for message in call.body["messages"])
        reply = json.loads(completion({"content": said[step]}).body)
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}  # which smolagents adds up
        return web.json_response({**reply, "usage": usage})

    async def run() -> tuple[Outcome, Server]:
        harness = harness_factory("command")(command=[sys.executable, str(DOCS / "examples" / "smolagents_agent.py")])
        observation = Observation(({"role": "user", "content": "What is six times seven?"},))
        async with serving(policy) as server:
            endpoint = Endpoint(server.base_url("r1"), "token-of-r1")
            return await harness.run(endpoint=endpoint, observation=observation, environment=Register()), server

    outcome, server = await run()
    assert outcome == Completed("42", n_calls=0)
    assert [(call.rollout_id, call.token) for call in server.calls] == [("r1", "token-of-r1")] * 2
    for earlier, later in itertools.pairwise(call.body["messages"] for call in server.calls):
        assert later[: len(earlier)] == earlier
        assert text_of(later[len(earlier)]).removesuffix("</code>").rstrip() == said[0].rstrip()


def module_of(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one block of Python on a page of the documentation, as a module."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    module = ModuleType(name)
    exec(compile(code, page, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)


async def test_the_environment_of_the_documentation_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    module_of("environments.md", "my_module", monkeypatch)
    options = {"tries": 5, "largest": 50}
    tasks = task_maker("my_module:HigherOrLower")(2, seed=3, **options)
    assert tasks == task_maker("my_module:HigherOrLower")(4, seed=3, **options)[:2]

    async def policy(call: Call) -> web.Response:
        """Halves what is left."""
        low, high = 1, 50
        asked = [message for message in call.body["messages"] if message["role"] == "assistant"]
        told = [message["content"] for message in call.body["messages"] if message["role"] == "tool"]
        for message, answer in zip(asked, told, strict=True):
            guess = json.loads(message["tool_calls"][0]["function"]["arguments"])["number"]
            if answer == "that is it":
                return completion({"content": f"{guess}."})
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        return completion(
            {"content": None, "tool_calls": [tool_call("guess", json.dumps({"number": (low + high) // 2}))]}
        )

    async def run() -> list[float]:
        harness = harness_factory("tool-loop")(max_calls=12, forced_calls=0)
        rewards = []
        async with serving(policy) as server:
            for task in tasks:
                environment = environment_factory("my_module:HigherOrLower")(**options)
                observation = await environment.reset(task)
                outcome = await harness.run(
                    endpoint=Endpoint(server.base_url("r1")), observation=observation, environment=environment
                )
                assert isinstance(outcome, Completed)
                rewards.append((await environment.score(outcome.answer)).reward)
                await environment.close()
        await harness.close()
        return rewards

    assert max(await run()) == 1.5


async def test_the_remote_agent_of_the_documentation_has_the_policy_act_and_answer() -> None:
    async def policy(asked: scripted_agent.Asked) -> web.StreamResponse:
        results = [item for item in asked.body["input"] if item["type"] == "function_call_output"]
        assert asked.headers["authorization"] == "Bearer token-of-r1"
        assert asked.body["tool_choice"] == ("required" if len(results) < 2 else "none")
        if len(results) == 2:
            return scripted_agent.response(scripted_agent.message(results[-1]["output"]))
        return scripted_agent.response(scripted_agent.call(f"c{len(results)}", "add", {"number": 4}))

    port, environment = free_port(), Register()
    observation = await environment.reset(Register.tasks(1)[0])
    async with scripted_agent.agent(policy) as served:
        with scripted_agent.process(
            [str(DOCS / "examples" / "remote_agent.py"), "--port", str(port)], port=port
        ) as url:
            harness = harness_factory("remote-agent")(url=url)
            endpoint = Endpoint(f"{served.url}/v1", "token-of-r1")
            outcome = await harness.run(endpoint=endpoint, observation=observation, environment=environment)
    told = await environment.call_tool("add", {"number": 0})
    assert isinstance(outcome, Completed)
    assert (replace(outcome, response=None), len(served.asked)) == (Completed(told, n_calls=0), 3)


async def test_the_harness_of_the_documentation_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    module_of("harnesses.md", "my_module", monkeypatch)
    observation = Observation(({"role": "user", "content": "Hi."},))

    async def answers(call: Call) -> web.Response:
        assert call.body["max_tokens"] == 7
        return completion({"content": "Hello."})

    async def refuses(call: Call) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=400)

    harness = harness_factory("my_module:OneQuestion")(max_tokens=7)
    outcomes = []
    for policy in (answers, refuses):
        async with serving(policy) as server:
            endpoint = Endpoint(server.base_url("r1"))
            outcomes.append(await harness.run(endpoint=endpoint, observation=observation, environment=Register()))
    await harness.close()
    answered, refused = outcomes
    assert answered == Completed("Hello.", n_calls=1)
    assert isinstance(refused, Failed)


def test_the_pages_list_what_there_is() -> None:
    harnesses = (DOCS / "harnesses.md").read_text()
    for name in HARNESSES:
        assert f"| `{name}` |" in harnesses
    for name, meaning in TOLD.items():
        assert f"| `{name}` | {meaning} |" in harnesses
    environments = (DOCS / "environments.md").read_text()
    for name in ENVIRONMENTS:
        assert f"| `{name}` |" in environments


def test_the_folder_task_of_the_documentation_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # its check runs `python`
    (block,) = re.findall(
        r"^```json\n(.*?)^```$", (DOCS / "environments.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    task = Task(**json.loads(block))

    async def run(agent: str) -> float:
        environment = environment_factory("work-folder")()
        observation = await environment.reset(task)
        await harness_factory("command")(command=["sh", "-c", agent]).run(
            endpoint=Endpoint("http://unused/v1"), observation=observation, environment=environment
        )
        score = await environment.score("")
        await environment.close()
        return score.reward

    assert asyncio.run(run("true")) == 0.0
    assert asyncio.run(run("sed -i 's/a - b/a + b/' calc.py")) == 1.0
    assert asyncio.run(run("echo 'add = lambda a, b: b + a' > calc.py")) == 0.5


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
