"""The tool loop against an HTTP server, through the real SDK."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from gym_capture.errors import ConfigError
from gym_capture.rollouts.environment import Environment, Register, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome
from gym_capture.rollouts.harnesses.tool_loop import ToolLoop, ToolLoopOptions
from tests.rollouts.scripted_server import Call, Script, Server, completion, sdk, serving, solve, tool_call

DEFAULTS = ToolLoopOptions()
TASK = Task("t", {"start": 4, "steps": [["add", 7], ["multiply", 3]]})


def play(
    script: Script, *, options: ToolLoopOptions = DEFAULTS, environment: Environment | None = None
) -> tuple[Outcome, Server]:
    async def run() -> tuple[Outcome, Server]:
        session = environment or Register()
        async with serving(script) as server, sdk() as client:
            observation = await session.reset(TASK)
            outcome = await ToolLoop(client, options).run(
                endpoint=Endpoint(server.base_url("r1"), "token-of-r1"), observation=observation, environment=session
            )
            return outcome, server

    return asyncio.run(run())


def test_a_rollout_is_several_calls_of_one_growing_conversation_with_the_same_tools() -> None:
    outcome, server = play(solve)
    assert outcome == Completed("It holds 33.", n_calls=3)
    bodies = [call.body for call in server.calls]
    assert [body["tool_choice"] for body in bodies] == ["required", "required", "none"]
    assert bodies[0]["tools"] == bodies[1]["tools"] == bodies[2]["tools"]
    for earlier, later in itertools.pairwise(bodies):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
    assert [message["role"] for message in bodies[2]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert {call.token for call in server.calls} == {"token-of-r1"}


def test_the_assistant_message_is_echoed_as_it_was_received() -> None:
    message = {
        "content": "let me see",
        "reasoning_content": "hm",
        "tool_calls": [tool_call("add", '{ "number":7 }'), tool_call("add", '{"number": 1}')],
    }

    async def script(call: Call) -> web.Response:
        first = len(call.body["messages"]) == 2
        return completion(message if first else {"content": "11"})

    _, server = play(script, options=ToolLoopOptions(forced_calls=0))
    echoed = server.calls[1].body["messages"]
    assert echoed[2] == {"role": "assistant", **message}
    assert [(answer["role"], answer["tool_call_id"]) for answer in echoed[3:]] == [
        ("tool", call["id"]) for call in message["tool_calls"]
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", '{"number": 1', "Error: the arguments are not valid JSON"),
        ("add", "[1]", "Error: the arguments must be a JSON object."),
        ("add", "", "Error: number must be an integer"),
        ("divide", '{"number": 1}', "Error: there is no tool 'divide'"),
        ("add", "[" * 100_000, "Error: the arguments are not valid JSON"),
    ],
)
def test_a_bad_tool_call_goes_back_to_the_model_as_text(name: str, arguments: str, text: str) -> None:
    async def script(call: Call) -> web.Response:
        if len(call.body["messages"]) == 2:
            return completion({"content": None, "tool_calls": [tool_call(name, arguments)]})
        return completion({"content": "done"})

    outcome, server = play(script, options=ToolLoopOptions(forced_calls=1))
    assert isinstance(outcome, Completed)
    assert server.calls[1].body["messages"][-1]["content"].startswith(text)


def test_a_forced_call_that_came_back_as_text_is_asked_for_again() -> None:
    async def script(call: Call) -> web.Response:
        return completion({"content": "I would rather talk."})

    outcome, server = play(script)
    assert outcome == Completed("I would rather talk.", n_calls=3)
    last = server.calls[2].body["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]


def test_an_answer_ends_the_loop_before_its_limit() -> None:
    async def script(call: Call) -> web.Response:
        return completion({"content": "33"})

    outcome, _ = play(script, options=ToolLoopOptions(forced_calls=0, max_calls=5))
    assert outcome == Completed("33", n_calls=1)


def status(code: int) -> Script:
    async def script(call: Call) -> web.Response:
        return web.json_response({"error": {"message": "no", "type": "x"}}, status=code)

    return script


async def hang(call: Call) -> web.Response:
    await asyncio.sleep(60)
    return completion({"content": "late"})


async def no_choices(call: Call) -> web.Response:
    return web.json_response({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []})


@pytest.mark.parametrize(
    ("script", "reason", "retryable"),
    [
        (status(503), "server_error", True),
        (status(429), "server_error", True),
        (status(400), "refused", False),
        (status(404), "refused", True),
        (status(401), "unauthorized", False),
        (status(403), "unauthorized", False),
        (hang, "call_timeout", True),
        (no_choices, "malformed_reply", True),
    ],
)
def test_what_the_server_does_wrong_is_a_value_with_a_name(script: Script, reason: str, retryable: bool) -> None:
    outcome, _ = play(script, options=ToolLoopOptions(call_timeout_s=0.5))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (reason, retryable)


@pytest.mark.parametrize("fits", [0, 1, 2])
def test_TR_10_a_conversation_that_outgrows_the_context_ends_with_what_was_said_by_then(fits: int) -> None:
    calls = iter(range(fits))

    async def script(call: Call) -> web.Response:
        if next(calls, None) is not None:
            return completion({"content": "so far"})
        error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=400)

    outcome, server = play(script)
    assert len(server.calls) == fits + 1
    if fits:
        assert outcome == Completed("so far", n_calls=fits, truncated=True, failed_call=fits + 1)
    else:  # nothing was generated: it is the task that does not fit
        assert isinstance(outcome, Failed)
        assert (outcome.reason, outcome.retryable, outcome.failed_call) == ("refused", False, 1)


@pytest.mark.parametrize("code", [429, 503, 529])
def test_a_server_that_is_busy_is_asked_again_when_it_says_and_no_attempt_is_used_up(code: int) -> None:
    refusals = iter(range(7))  # more than the library's own tries

    async def script(call: Call) -> web.Response:
        if next(refusals, None) is None:
            return completion({"content": "33"})
        body = {"error": {"message": "2 calls run here and 2 wait", "type": "overloaded"}}
        return web.json_response(body, status=code, headers={"Retry-After": "0.01"})

    outcome, server = play(script, options=ToolLoopOptions(forced_calls=0))
    assert outcome == Completed("33", n_calls=1)
    assert len(server.calls) == 8


async def test_a_server_that_is_not_there_is_a_failed_connection() -> None:
    async def run() -> Outcome:
        environment = Register()
        observation = await environment.reset(TASK)
        async with sdk() as client:
            return await ToolLoop(client).run(
                endpoint=Endpoint("http://127.0.0.1:9/v1"), observation=observation, environment=environment
            )

    outcome = await run()
    assert isinstance(outcome, Failed)
    assert outcome.reason == "connection"


def test_a_failure_says_how_far_the_rollout_came() -> None:
    async def script(call: Call) -> web.Response:
        return await (solve(call) if len(call.body["messages"]) < 5 else status(500)(call))

    outcome, _ = play(script)
    assert isinstance(outcome, Failed)
    assert outcome.n_calls == 2


class Recorder(Register):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Mapping[str, Any]]] = []

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.seen.append((name, arguments))
        return await super().call_tool(name, arguments)


def test_the_environment_gets_parsed_arguments() -> None:
    environment = Recorder()
    play(solve, environment=environment)
    assert environment.seen == [("add", {"number": 7}), ("multiply", {"number": 3})]
    assert json.dumps(environment.seen)


def test_options_that_leave_no_call_for_the_answer_are_refused() -> None:
    with pytest.raises(ConfigError, match="forced_calls"):
        ToolLoopOptions(max_calls=2, forced_calls=2)


async def test_a_tool_call_is_carried_out_once_however_often_what_follows_is_sent() -> None:
    """The state of the session would count it twice."""
    carried_out: list[str] = []

    class Noted(Register):
        async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
            carried_out.append(name)
            return await super().call_tool(name, arguments)

    async def script(call: Call) -> web.Response:
        if len(server.calls) == 2:  # the first one that has the output of a tool
            return web.json_response({"error": {"message": "try again"}}, status=500)
        return await solve(call)

    environment = Noted()
    observation = await environment.reset(TASK)
    async with serving(script) as server, sdk(max_retries=1) as client:
        outcome = await ToolLoop(client).run(
            endpoint=Endpoint(server.base_url("r1")), observation=observation, environment=environment
        )
    assert outcome == Completed("It holds 33.", n_calls=3)
    assert (carried_out, len(server.calls)) == (["add", "multiply"], 4)
    assert (await environment.score("33")).reward == pytest.approx(1.0)
