"""A remote agent, over real sockets: what it is told, what is carried out for it, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from aiohttp import web

from gym_capture.errors import ConfigError
from gym_capture.reasons import AttemptFailure
from gym_capture.rollouts.catalog import harness_factory
from gym_capture.rollouts.environment import Observation, Register, Score, Task
from gym_capture.rollouts.harness import Completed, Endpoint, Failed, Outcome
from gym_capture.rollouts.harnesses import remote_agent
from tests.rollouts.scripted_agent import Asked, agent, call, message, output, response, wire
from tests.rollouts.scripted_job import make

ENDPOINT: Final = Endpoint("http://127.0.0.1:9/ng-rollout/r1/v1", "token-of-r1")
TASK: Final = Task("t", {"start": 2, "steps": [["add", 3], ["multiply", 4]]})
HELLO: Final = Observation(({"role": "user", "content": "Hello."},))


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agent, "_RECONNECT_WAIT_S", 0.0)


async def play(
    url: str,
    *,
    observation: Observation = HELLO,
    environment: Any = None,
    endpoint: Endpoint = ENDPOINT,
    **options: Any,
) -> Outcome:
    """How a rollout goes, but for the response that it ends with."""
    outcome = await played(url, observation=observation, environment=environment, endpoint=endpoint, **options)
    return replace(outcome, response=None) if isinstance(outcome, Completed) else outcome


async def played(
    url: str,
    *,
    observation: Observation = HELLO,
    environment: Any = None,
    endpoint: Endpoint = ENDPOINT,
    **options: Any,
) -> Outcome:
    harness = harness_factory("remote-agent")(url=url, **options)
    try:
        return await harness.run(endpoint=endpoint, observation=observation, environment=environment or Register())
    finally:
        await harness.close()


async def failed(url: str, **options: Any) -> Failed:
    outcome = await play(url, **options)
    assert isinstance(outcome, Failed), outcome
    assert url in outcome.detail
    return outcome


async def replied(*replies: web.Response | Exception, **options: Any) -> tuple[Outcome, list[Asked]]:
    """How a rollout goes whose agent gives these replies, one after the other."""
    remaining = iter(replies)

    async def script(asked: Asked) -> web.StreamResponse:
        reply = next(remaining)
        assert isinstance(reply, web.Response)
        return reply

    async with agent(script) as served:
        return await play(served.url, **options), served.asked


# --- the conversation ------------------------------------------------------------------------------------------------


async def test_calls_that_it_leaves_open_are_carried_out_until_a_message_ends_it() -> None:
    environment = Register()
    observation = await environment.reset(TASK)
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "odd": {"kept": [1.5]}}
    own = (call("s1", "web_search", {"q": "2"}), output("s1", "a number"))
    outcome, asked = await replied(
        response(thought, *own, call("c1", "add", {"number": 3})),
        response(message("Now to the product."), call("c2", "multiply", {"number": 4}, id="fc_2")),
        response(message("20")),
        observation=observation,
        environment=environment,
    )
    assert outcome == Completed("20", n_calls=0)
    assert (await environment.score("20")).reward == pytest.approx(1.0)

    opening = [{"type": "message", **said} for said in observation.messages]
    first = [thought, *own, call("c1", "add", {"number": 3}), output("c1", "The register now holds 5.")]
    second = [message("Now to the product."), call("c2", "multiply", {"number": 4}, id="fc_2")]
    second.append(output("c2", "The register now holds 20."))
    assert [request.body["input"] for request in asked] == [opening, opening + first, opening + first + second]
    for request in asked:
        assert request.body.keys() == {"model", "input", "tools"}
        assert request.body["model"] == "policy"
        assert [(tool["type"], tool["name"], tool["strict"]) for tool in request.body["tools"]] == [
            ("function", "add", True),
            ("function", "multiply", True),
        ]


async def test_it_is_told_where_to_call_the_model_in_headers_alone(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("of-the-service\n")
    _, (asked,) = await replied(response(message("Hi.")), secret_file=secret)
    assert asked.headers["x-gym-capture-base-url"] == ENDPOINT.base_url
    assert asked.headers["x-gym-capture-api-key"] == "token-of-r1"
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers["authorization"] == "Bearer of-the-service"
    assert "token-of-r1" not in json.dumps(asked.body)
    assert "tools" not in asked.body

    _, (asked,) = await replied(response(message("Hi.")), graph_url="https://graph.example:8443/")
    assert asked.headers["x-gym-capture-base-url"] == "https://graph.example:8443/ng-rollout/r1/v1"
    assert "authorization" not in asked.headers


async def test_a_task_that_begins_with_turns_is_told_whole() -> None:
    function = {"name": "add", "arguments": '{"number": 1}'}
    messages: tuple[Mapping[str, Any], ...] = (
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c0", "content": "1"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": ""},
    )
    outcome, (asked, _) = await replied(
        response(call("c1", "add", {})), response(call("c0", "add", {})), observation=Observation(messages)
    )
    assert asked.body["input"] == [
        {"type": "message", "role": "developer", "content": "Be brief."},
        call("c0", "add", '{"number": 1}'),
        output("c0", "1"),
        {"type": "message", "role": "assistant", "content": "One."},
        {"type": "message", "role": "user", "content": ""},
    ]
    assert isinstance(outcome, Failed)  # the id of a call that the task itself has
    assert "'c0' is the id of an earlier call" in outcome.detail

    for observation, said in (
        (Observation(({"role": "user", "content": [{"type": "image_url", "image_url": {}}]},)), "text alone"),
        (Observation(HELLO.messages, work_folder=Path("/")), "work folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            await play("http://127.0.0.1:9", observation=observation)


async def test_what_is_wrong_with_a_call_is_its_output() -> None:
    environment = Register()
    observation = await environment.reset(TASK)
    calls = (
        call("c1", "divide", {"number": 2}),
        call("c2", "add", "{"),
        call("c3", "add", "[" * 100_000),
        call("c4", "add", "[3]"),
        call("c5", "add", {"number": "3"}),
        call("c6", "add", {"number": 3}, status="incomplete"),
        {"type": "custom_tool_call", "call_id": "c7", "name": "add", "input": "3"},
        call("c8", "add", {"number": 3}),
    )
    outcome, (_, asked) = await replied(
        response(*calls), response(message("5")), observation=observation, environment=environment
    )
    assert isinstance(outcome, Completed)
    told = {item["call_id"]: item for item in asked.body["input"] if item["type"].endswith("_output")}
    assert list(told) == [made["call_id"] for made in calls]
    for call_id in ("c1", "c2", "c3", "c4", "c5", "c6", "c7"):
        assert told[call_id]["output"].startswith("Error: "), call_id
    assert told["c7"]["type"] == "custom_tool_call_output"
    assert told["c8"]["output"] == "The register now holds 5."


async def test_a_reply_that_neither_asks_nor_says_anything_goes_on() -> None:
    own = (call("s1", "search", {}), output("s1", "found"))
    outcome, asked = await replied(response(*own), response(message("Found.")))
    assert outcome == Completed("Found.", n_calls=0)
    assert asked[1].body["input"][1:] == list(own)


async def test_text_that_no_encoding_has_is_kept() -> None:
    lone = r'"\ud83d"'
    body = f'{{"object": "response", "output": [{json.dumps(call("c1", "x", ""))[:-1]}, "note": {lone}}}]}}'
    outcome, asked = await replied(web.Response(text=body, content_type="application/json"), response(message("Well.")))
    assert outcome == Completed("Well.", n_calls=0)
    assert asked[1].body["input"][1]["note"] == json.loads(lone)


class Remote:
    """An environment that is a service as well, which knows its sessions by a cookie."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url)

    async def reset(self, task: Task) -> Observation:
        await self._http.post("/session")
        return HELLO

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        return (await self._http.post("/add", json=arguments)).text

    async def score(self, answer: str) -> Score:
        return Score({"value": float((await self._http.get("/value")).text)})

    async def close(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def counting_service() -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    """The service of `Remote`: its URL, and the cookies of each request."""
    values: dict[str, int] = {}
    cookies: list[dict[str, str]] = []

    async def session(request: web.Request) -> web.Response:
        name = f"environment-{len(values)}"
        values[name] = 0
        answer = web.Response()
        answer.set_cookie("session", name)
        return answer

    async def add(request: web.Request) -> web.Response:
        cookies.append(dict(request.cookies))
        values[request.cookies["session"]] += (await request.json())["number"]
        return web.Response(text="done")

    async def value(request: web.Request) -> web.Response:
        cookies.append(dict(request.cookies))
        return web.Response(text=str(values[request.cookies["session"]]))

    app = web.Application()
    app.router.add_post("/session", session)
    app.router.add_post("/add", add)
    app.router.add_get("/value", value)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", cookies
    finally:
        await runner.cleanup()


async def test_cookies_of_rollouts_and_of_their_environments_never_meet(tmp_path: Path) -> None:
    """On one host, under one name."""
    sessions: dict[str, list[int]] = {}
    all_have_begun = asyncio.Barrier(4)

    async def script(asked: Asked) -> web.StreamResponse:
        if not asked.cookies:
            name = f"agent-{len(sessions)}"
            sessions[name] = [len(sessions) + 1]
            await all_have_begun.wait()
            begun = response(call("c1", "add", {"number": sessions[name][0]}))
            begun.set_cookie("session", name, path="/")
            return begun
        (number,) = sessions[asked.cookies["session"]]
        if len(asked.body["input"]) < 7:
            return response(call(f"c{len(asked.body['input'])}", "add", {"number": number}))
        return response(message(str(3 * number)))

    async with counting_service() as (url, environment_cookies), agent(script) as served:
        harness = harness_factory("remote-agent")(url=served.url)
        job = make(tmp_path, harness, environment=lambda: Remote(url), tasks=[Task("t")], samples=4, concurrency=4)
        summary = await job.run()
    assert summary.failed == 0
    assert sorted((row.reward, row.answer) for row in summary.rows) == [(3, "3"), (6, "6"), (9, "9"), (12, "12")]
    for asked in served.asked:
        assert all(value.startswith("agent-") for value in asked.cookies.values())
    assert {value for cookies in environment_cookies for value in cookies.values()} == {
        f"environment-{n}" for n in range(4)
    }


# --- failures --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def dead_port() -> AsyncIterator[str]:
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def test_RA_01_a_port_where_nobody_listens_is_tried_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = count_sends(monkeypatch)
    async with dead_port() as url:
        found = await failed(url)
    assert (found.reason, found.retryable, len(tried)) == (AttemptFailure.AGENT_UNREACHABLE, True, 3)


async def test_a_service_that_is_up_at_the_third_attempt_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        tried = count_sends(monkeypatch)
        runner = web.AppRunner(web.Application())

        async def comes_up(asked: httpx.Request) -> None:
            if len(tried) == 3:

                async def reply(request: web.Request) -> web.Response:
                    return response(message("Here."))

                runner.app.router.add_post("/v1/responses", reply)
                await runner.setup()
                await web.SockSite(runner, bound).start()

        tried.before = comes_up
        try:
            outcome = await play(f"http://127.0.0.1:{bound.getsockname()[1]}")
        finally:
            await runner.cleanup()
    assert (outcome, len(tried)) == (Completed("Here.", n_calls=0), 3)


class Sends(list[httpx.Request]):
    async def before(self, request: httpx.Request) -> None:
        """Called before each request, once it is listed."""


def count_sends(monkeypatch: pytest.MonkeyPatch) -> Sends:
    sends, send = Sends(), httpx.AsyncClient.send

    async def counted(client: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        if request.method == "POST":  # the graph is asked with a GET
            sends.append(request)
            await sends.before(request)
        return await send(client, request, **options)

    monkeypatch.setattr(httpx.AsyncClient, "send", counted)
    return sends


HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\n"


@pytest.mark.parametrize(
    "said",
    [[], [b"HTTP/1.1 200 "], [HEAD, b'{"object"'], [HEAD, *[b" "] * 5000]],
    ids=["", "head", "body", "drop-wise"],
)
async def test_RA_01_an_agent_that_is_silent_is_asked_once(said: list[bytes]) -> None:
    async with wire(said, hangs=True) as served:
        began = time.monotonic()
        found = await failed(served.url, call_timeout_s=0.2)
        assert time.monotonic() - began < 30  # the drops take 50
        assert (found.reason, found.retryable) == (AttemptFailure.AGENT_TIMEOUT, True)
        async with asyncio.timeout(10):
            await served.gone.wait()
        assert served.requests == 1


@pytest.mark.parametrize("said", [[], [b"HTTP/1.1 200 "], [HEAD, b'{"object"'], [b"SSH-2.0-OpenSSH\r\n"]])
async def test_RA_02_a_connection_that_breaks_is_not_asked_again(said: list[bytes]) -> None:
    async with wire(said, hangs=False) as served:
        found = await failed(served.url)
        assert (found.reason, found.retryable) == (AttemptFailure.AGENT_CONNECTION_LOST, True)
        assert served.requests == 1


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (503, AttemptFailure.AGENT_UNAVAILABLE, True),
        (500, AttemptFailure.AGENT_UNAVAILABLE, True),
        (429, AttemptFailure.AGENT_UNAVAILABLE, True),
        (404, AttemptFailure.AGENT_REFUSED, True),
        (400, AttemptFailure.AGENT_REFUSED, False),
        (401, AttemptFailure.AGENT_REFUSED, False),
        (204, AttemptFailure.AGENT_REFUSED, False),
    ],
)
async def test_RA_01_an_error_is_not_asked_again(status: int, reason: AttemptFailure, retryable: bool) -> None:
    outcome, asked = await replied(web.Response(status=status, text=None if status == 204 else "w" * 100_000))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable, outcome.ends_job, len(asked)) == (reason, retryable, False, 1)
    assert f"turn 1, POST http://127.0.0.1:{asked[0].headers['host'].split(':')[1]}/v1/responses" in outcome.detail
    assert f"HTTP {status}" in outcome.detail
    assert len(outcome.detail) < 1000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async def elsewhere(asked: Asked) -> web.StreamResponse:
        return response(message("Gotcha."))

    async with agent(elsewhere) as other:
        outcome, _ = await replied(web.Response(status=status, headers={"location": f"{other.url}/v1/responses"}))
        assert isinstance(outcome, Failed)
        assert (outcome.reason, outcome.retryable) == (AttemptFailure.AGENT_REFUSED, False)
        assert f"to {other.url}/v1/responses, which is not followed" in outcome.detail
        assert other.asked == []


def body(text: str | bytes) -> web.Response:
    return web.Response(body=text.encode() if isinstance(text, str) else text, content_type="application/json")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (body("[]"), "the reply"),
        (body("{}"), "object: "),
        (body('{"output": []}'), "object: "),
        (body('{"object": "response"}'), "output: "),
        (body('{"object": "response", "output": {}}'), "output: "),
        (body('{"object": "response", "output": [NaN]}'), "NaN"),
        (body('{"object": "response", "output": [], "top_p": 1e999}'), "too large"),
        (response("hello"), "output.0"),  # type: ignore[arg-type]
        (response({}), "output.0.type"),
        (response({"type": 7}), "output.0.type"),
        (response({"type": "message", "role": "user", "content": []}), "output.0.role"),
        (response({"type": "message", "role": "assistant", "content": "hello"}), "output.0.content"),
        (response({**message(""), "content": [{"type": "output_text", "text": None}]}), "output.0.content.0"),
        (response({"type": "function_call", "name": "add", "arguments": "{}"}), "output.0.call_id"),
        (response({"type": "function_call", "call_id": "c1", "name": "add", "arguments": {}}), "output.0.arguments"),
        (response(call("", "add", {})), "output.0.call_id"),
        (response(call("c1", "add", {}), call("c1", "add", {})), "'c1' is the id of an earlier call"),
        (response(output("c1", "5")), "does not have that call"),
        (response(call("c1", "a", {}), output("c1", "5"), output("c1", "6")), "answered twice"),
        (response(message("x"), status="in_progress"), "status: "),
        (response({"type": "reasoning", "deep": json.loads("[" * 64 + "]" * 64)}), "deeper than 64"),
        (body("[" * 100_000), "deeper than 64"),
    ],
)
async def test_a_reply_of_another_shape_is_terminal(reply: web.Response, said: str) -> None:
    outcome, asked = await replied(reply)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable, len(asked)) == (AttemptFailure.AGENT_MALFORMED_REPLY, False, 1)
    assert said in outcome.detail


@pytest.mark.parametrize("text", ["", "<html>502</html>", b"\xff", '{"object": "response"', "9" * 5000])
async def test_a_reply_that_is_no_json_may_be_another_ones(text: str | bytes) -> None:
    outcome, _ = await replied(body(text))
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (AttemptFailure.AGENT_MALFORMED_REPLY, True)


async def test_a_reply_has_a_size() -> None:
    whole = response(message("x" * 1000))
    assert whole.body is not None
    size = len(whole.body)  # type: ignore[arg-type]
    outcome, _ = await replied(whole, max_reply_bytes=size)
    assert outcome == Completed("x" * 1000, n_calls=0)
    bomb = web.Response(body=gzip.compress(b" " * 10_000_000), headers={"content-encoding": "gzip"})
    for reply, said in ((response(message("x" * 1001)), f"more than {size} bytes"), (bomb, "encoded")):
        outcome, _ = await replied(reply, max_reply_bytes=size if reply is not bomb else 1 << 20)
        assert isinstance(outcome, Failed)
        assert (outcome.reason, outcome.retryable) == (AttemptFailure.AGENT_MALFORMED_REPLY, False)
        assert said in outcome.detail


async def test_the_limit_of_turns_is_an_end_and_its_calls_are_not_carried_out() -> None:
    environment = Register()
    observation = await environment.reset(TASK)
    outcome, asked = await replied(
        response(call("c1", "add", {"number": 3})),
        response(message("Going on."), call("c2", "multiply", {"number": 4})),
        observation=observation,
        environment=environment,
        max_turns=2,
    )
    assert (outcome, len(asked)) == (Completed("", n_calls=0), 2)
    assert await environment.call_tool("add", {"number": 0}) == "The register now holds 5."


async def test_a_call_is_carried_out_once_in_an_attempt() -> None:
    """A service that asks for it again, as if it had not seen the output, is told so."""
    environment = Register()
    observation = await environment.reset(TASK)
    again = response(call("c1", "add", {"number": 3}))
    outcome, _ = await replied(
        response(call("c1", "add", {"number": 3})), again, observation=observation, environment=environment
    )
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (AttemptFailure.AGENT_MALFORMED_REPLY, False)
    assert outcome.detail.startswith("turn 2")
    assert await environment.call_tool("add", {"number": 0}) == "The register now holds 5."


async def test_what_the_service_says_of_its_own_end() -> None:
    for reply in (response(error={"code": "x", "message": "I broke."}, status="failed"), response(status="cancelled")):
        outcome, _ = await replied(reply)
        assert isinstance(outcome, Failed)
        assert (outcome.reason, outcome.retryable) == (AttemptFailure.AGENT_FAILED, True)
        assert re.search("I broke|status cancelled", outcome.detail)
    outcome, _ = await replied(response())
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.retryable) == (AttemptFailure.NO_ANSWER, True)
    for said in ({"status": "incomplete"}, {"incomplete_details": {"reason": "max_output_tokens"}}):
        cut = response(message("So far"), call("c1", "add", "{"), **said)
        assert (await replied(cut))[0] == Completed("So far", n_calls=0)


TOO_LONG: Final = "This model's maximum context length is 64 tokens"


@pytest.mark.parametrize(
    "refusal",
    [
        web.json_response({"error": {"message": "no", "code": "context_length_exceeded"}}, status=400),
        web.json_response({"type": "error", "error": {"message": "prompt is too long: 70 > 63"}}, status=400),
        response(error={"code": "context_length_exceeded", "message": "no"}, status="failed"),
        response(error={"code": "x", "message": TOO_LONG}, status="failed"),
    ],
    ids=["openai", "anthropic", "code", "words"],
)
async def test_an_agent_that_hands_on_that_its_conversation_is_too_long_is_truncated(refusal: web.Response) -> None:
    environment = Register()
    observation = await environment.reset(TASK)
    asks = response(message("So far."), call("c1", "add", {"number": 3}))
    outcome, asked = await replied(asks, refusal, observation=observation, environment=environment)
    assert isinstance(outcome, Completed)
    assert (outcome.truncated, outcome.n_calls, len(asked)) == (True, 0, 2)


async def test_other_refusals_are_failures_whatever_a_500_says() -> None:
    for status, code in ((400, "no_such_thing"), (500, "context_length_exceeded")):
        outcome, _ = await replied(web.json_response({"error": {"code": code}}, status=status))
        assert isinstance(outcome, Failed)


async def test_the_last_reply_is_the_response_of_the_row() -> None:
    last = response(message("20"), id="resp_own", metadata={"k": "v"})
    replies = iter((response(call("c1", "add", {"number": 3})), last))

    async def script(asked: Asked) -> web.StreamResponse:
        return next(replies)

    environment = Register()
    observation = await environment.reset(TASK)
    async with agent(script) as served:
        outcome = await played(served.url, observation=observation, environment=environment)
    assert isinstance(outcome, Completed)
    assert outcome.response == json.loads(last.text or "")
    assert outcome.output == "merged"


async def test_an_environment_that_breaks_is_no_failure_of_the_agent() -> None:
    class Broken(Register):
        async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
            raise RuntimeError("the tool broke")

    with pytest.raises(RuntimeError, match="the tool broke"):
        await replied(response(call("c1", "add", {})), environment=Broken())


async def test_RA_02_each_attempt_asks_once_and_the_rollout_has_one_row(tmp_path: Path) -> None:
    async with wire([HEAD], hangs=False) as served:
        job = make(tmp_path, harness_factory("remote-agent")(url=served.url), samples=1, max_attempts=2)
        summary = await job.run()
    assert served.requests == 2 * len(summary.rows)
    assert {(row.status, row.error, row.reward, row.attempt) for row in summary.rows} == {
        ("failed", "agent_connection_lost", None, 2)
    }
    assert summary.failures == {"agent_connection_lost": 2 * len(summary.rows)}


async def test_RA_01_a_job_ends_with_rows_that_say_why_and_terminal_ones_are_not_tried_again(tmp_path: Path) -> None:
    async def nonsense(asked: Asked) -> web.StreamResponse:
        return body('{"object": "list"}')

    async with dead_port() as dead, wire([], hangs=True) as silent, agent(nonsense) as odd:
        rows = {}
        for name, url in (("dead", dead), ("silent", silent.url), ("odd", odd.url)):
            limit_s = 0.1 if name == "silent" else 30.0  # an answer may take its time
            harness = harness_factory("remote-agent")(url=url, call_timeout_s=limit_s)
            summary = await make(tmp_path / name, harness, samples=1, max_attempts=3).run()
            rows[name] = {(row.status, row.error, row.reward, row.attempt) for row in summary.rows}
            (first, *_) = (tmp_path / name / "failures.jsonl").read_text().splitlines()
            assert json.loads(first)["attempt"] == 1
    assert rows == {
        "dead": {("failed", "agent_unreachable", None, 3)},
        "silent": {("failed", "agent_timeout", None, 3)},
        "odd": {("failed", "agent_malformed_reply", None, 1)},
    }


async def test_a_rollout_that_is_out_of_time_lets_go_of_its_agent(tmp_path: Path) -> None:
    async with wire([], hangs=True) as served:
        harness = harness_factory("remote-agent")(url=served.url)
        job = make(tmp_path, harness, tasks=[Task("t", TASK.data)], samples=1, max_attempts=1, rollout_timeout_s=0.2)
        summary = await job.run()
        async with asyncio.timeout(10):
            await served.gone.wait()
    assert [row.error for row in summary.rows] == ["rollout_timeout"]
    assert (served.requests, summary.left_running) == (1, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "agent:8080"}, "must be a URL such as"),
        ({"url": "ftp://agent"}, "must be a URL such as"),
        ({"url": "http://"}, "must be a URL such as"),
        ({"url": "http://agent:port"}, "is no URL"),
        ({"url": "http://agent/?key=1"}, "must be a URL such as"),
        ({"url": "http://me:pw@agent"}, "must have no user and password"),
        ({"url": "me:pw@agent"}, "must have no user and password"),
        ({"url": "http://agent/v1"}, "/v1/responses is added to it"),
        ({"url": "http://agent/v1/responses/"}, "/v1/responses is added to it"),
        ({"url": "http://agent", "graph_url": "http://graph:8000/v1"}, "scheme, host and port alone"),
        ({"url": "http://agent", "max_turns": 0}, "max_turns must be more than 0"),
        ({"url": "http://agent", "call_timeout_s": float("nan")}, "call_timeout_s must be more than 0"),
        ({"url": "http://agent", "secret_file": "/nowhere/token"}, "cannot be read"),
        ({"url": "http://agent", "secret_file": "/dev/null"}, "must hold one line"),
        ({}, "needs the option url"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        harness_factory("remote-agent")(**options)
    assert "pw" not in str(caught.value)
