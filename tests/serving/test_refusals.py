"""One replica's HTTP side: what is refused, what is limited, and what does not mix.

The gateway and the call service are the real ones, over a scripted engine with a real tokenizer and template, and a
real store and lineage index.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gym_capture.calls import TextDelta
from gym_capture.capture.records import Continues, Root
from gym_capture.conversation import Message
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step, saying
from tests.serving.replica import PLAIN, STOP, USER, Replica, always, chat_body, chat_path, listening, says


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[1]", None),
        (b'{"model": "policy"}', "messages"),
        (b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "n": 2}', "n"),
    ],
)
async def test_a_bad_body_is_named_and_leaves_nothing(template: HfChatTemplate, body: bytes, param: str | None) -> None:
    replica = Replica(template, always(PLAIN))
    response = await replica.http.post(chat_path("r1"), content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert await replica.state.store.rollout_ids() == []
    assert replica.engine.calls == []


async def test_what_a_browser_sends_for_a_page_of_elsewhere_does_nothing(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    sent = chat_body({"role": "user", "content": "hi"})
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        response = await replica.http.post(chat_path("r1"), json=sent, headers={"sec-fetch-site": site})
        assert response.status_code == status
        look = await replica.http.get("/healthz", headers={"sec-fetch-site": site})
        assert look.status_code == 200
    assert len(replica.engine.calls) == 2


async def test_a_prompt_that_is_too_long_leaves_no_record_and_no_open_intent(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64)
    for stream in (False, True):
        response = await replica.chat({"role": "user", "content": "word " * 100}, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    snapshot = await replica.state.snapshot()
    assert (snapshot.entries, snapshot.incomplete) == ((), ())
    assert replica.engine.calls == []


async def test_a_prompt_that_is_far_too_long_is_not_even_rendered(
    template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64, longest_token=10)
    assert (await replica.chat({"role": "user", "content": " " * 1280})).status_code == 200
    monkeypatch.setattr(template, "render", None)  # a call of it would be a 500
    response = await replica.chat({"role": "user", "content": " " * 1281})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "at least 65 tokens" in response.json()["error"]["message"]
    counted = await replica.http.post(
        "/ng-rollout/r1/v1/messages/count_tokens",
        json={"model": "policy", "messages": [{"role": "user", "content": " " * 1281}]},
    )
    assert counted.status_code == 400
    assert counted.json()["error"]["message"] == "prompt is too long: at least 65 tokens > 63 maximum"
    assert len((await replica.state.snapshot()).entries) == 1


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def _called(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": list(calls)}]
    return [*said, *({"role": "tool", "tool_call_id": "c1", "content": "y"} for _ in calls)]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": _called(_call('{"a": "' + "x" * 1280 + '"}'))},
        {"messages": _called(*[_call("{}")] * 40)},
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 1280}}},
            ],
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "x" * 1280, "parameters": {}}}],
        },
    ],
    ids=["arguments", "calls", "schema", "description"],
)
async def test_tools_and_their_calls_are_bounded_like_text(
    template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64, longest_token=10)
    monkeypatch.setattr(template, "render", None)  # a call of it would be a 500
    response = await replica.http.post("/ng-rollout/r1/v1/chat/completions", json={"model": "policy", **body})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 65}, "at least 65 tokens"),
        ({"model": "m" * 257}, "model has more than 256"),
        ({"logit_bias": {str(n): 1 for n in range(50_001)}}, "logit_bias has more than 50,000"),
    ],
)
async def test_what_would_hold_up_everybody_else_is_refused_early(
    template: HfChatTemplate, body: dict[str, Any], named: str
) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64)
    response = await replica.http.post(chat_path("r1"), json={**chat_body(USER), **body})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    assert await replica.state.store.rollout_ids() == []


@pytest.mark.parametrize(
    ("content", "headers", "named"),
    [
        (b"\x1f\x8b", {"content-encoding": "gzip"}, "content-encoding 'gzip'"),
        (json.dumps(chat_body(USER)).encode("utf-16"), {}, "not valid JSON"),
        (b'{"model": "policy", "messages": [], "temperature": NaN}', {}, "not valid JSON"),
    ],
    ids=["gzip", "UTF-16", "NaN"],
)
async def test_bodies_that_are_no_json_in_utf_8_are_refused(
    template: HfChatTemplate, content: bytes, headers: dict[str, str], named: str
) -> None:
    replica = Replica(template, always(PLAIN))
    response = await replica.http.post(chat_path("r1"), content=content, headers=headers)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


async def test_another_method_is_told_which_one_there_is(template: HfChatTemplate) -> None:
    response = await Replica(template, always(PLAIN)).http.get(chat_path("r1"))
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_generation_is_limited_to_the_room_behind_the_prompt(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN), max_model_len=64)
    await replica.chat(USER, max_tokens=1000)
    (call,) = replica.engine.calls
    assert call.max_tokens == 64 - call.prompt_ids.size
    (entry,) = await replica.state.entries()
    assert entry.request.max_tokens == 1000


async def test_without_a_rollout_the_model_must_exist_and_nothing_is_recorded(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    unknown = await replica.chat(USER, rollout_id=None, model="gpt-9")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert (await replica.chat(USER, rollout_id=None)).status_code == 200
    assert await replica.state.store.rollout_ids() == []
    listed = (await replica.http.get("/ng-rollout/r1/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("policy", 4096)]


@pytest.mark.parametrize(
    ("rollout_id", "served"),
    [
        ("..%2F..%2Fetc", False),
        ("../r2", False),
        ("a%00b", False),
        ("%2Fetc%2Fpasswd", False),
        ("", False),
        ("a" * 300, False),
        ("r1%2Fv1%2Fresponses", False),
        ("%2e%2e", False),
        ("A_b-1.2", True),
    ],
)
async def test_SE_01_rollout_ids_are_checked_before_they_name_anything(
    template: HfChatTemplate, rollout_id: str, served: bool
) -> None:
    replica = Replica(template, always(PLAIN))
    async with listening(replica.app) as client:
        response = await client.post(chat_path(rollout_id), json=chat_body(USER))
    if served:
        assert response.status_code == 200
        assert await replica.state.store.rollout_ids() == [rollout_id]
    else:
        assert 400 <= response.status_code < 500
        assert response.json()["error"]["message"]
        assert await replica.state.store.rollout_ids() == []
        assert replica.engine.calls == []


async def test_SE_05_strange_headers_are_refused_or_never_repeated(
    template: HfChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        replica = Replica(template, says(template, "one two three", "one"))
        huge = "a" * 2**20
        async with listening(replica.app) as client:
            for headers in ({"x-request-id": huge}, {"x-request-id": "caf\xe9".encode("latin-1")}):
                response = await client.post(
                    chat_path("r1"), json=chat_body(USER, stream=True), headers=httpx_headers(headers)
                )
                if response.status_code == 200:
                    assert len(response.content) < 10_000
                    assert "aaaa" not in response.text
                    assert "aaaa" not in str(response.headers)
                else:
                    assert 400 <= response.status_code < 500
            # Line ends, which a client library would not send.
            for value in (b"one\ntwo", b"one\rtwo", b"one\r\n two"):
                reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
                body = json.dumps(chat_body(USER)).encode()
                path = chat_path("r2").encode()
                head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d" % (path, len(body))
                writer.write(b"%b\r\nx-request-id: %b\r\n\r\n%b" % (head, value, body))
                answer = await reader.read()  # to the end: the connection is closed
                writer.close()
                assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))
                assert b"two" not in answer

    with caplog.at_level(logging.DEBUG, logger="gym_capture"):
        await run()
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)
    assert not any(set("\r\n") & set(record.getMessage()) for record in caplog.records)


def httpx_headers(headers: dict[str, Any]) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode("latin-1") for name, value in headers.items()
    }


async def test_SF_05_client_made_request_ids_do_not_name_calls(template: HfChatTemplate) -> None:
    def echo(call: EngineCall) -> Script:
        (message,) = call.request.conversation.items
        assert isinstance(message, Message)
        return Script(steps=[Step(token_ids=[5], events=[TextDelta(f"to {message.text}")])])

    replica = Replica(template, echo)

    async def ask(text: str) -> dict[str, Any]:
        body = chat_body({"role": "user", "content": text}, request_id="same", id="same")
        response = await replica.http.post(chat_path("r1"), json=body, headers={"x-request-id": "same"})
        assert response.status_code == 200
        reply: dict[str, Any] = response.json()
        return reply

    a, b = await asyncio.gather(ask("A"), ask("B"))
    assert [reply["choices"][0]["message"]["content"] for reply in (a, b)] == ["to A", "to B"]
    assert len({a["id"], b["id"], "same"}) == 3
    assert {entry.model_call_id for entry in await replica.state.entries()} == {a["id"], b["id"]}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/ng-rollout/r1/v1/other", 404), ("GET", "/v1/chat/completions", 405)],
)
async def test_routes_that_do_not_exist_are_errors_of_the_api(
    template: HfChatTemplate, method: str, path: str, status: int
) -> None:
    replica = Replica(template, always(PLAIN))
    response = await replica.http.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


async def test_rollouts_at_the_same_time_do_not_mix(template: HfChatTemplate) -> None:
    def echo(call: EngineCall) -> Script:
        last = call.request.conversation.items[-1]
        assert isinstance(last, Message)
        return saying(template, f"echo {last.text}", stop_token=STOP)

    replica = Replica(template, echo)

    async def attempt(rollout_id: str) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{rollout_id} {turn}"})
            response = await replica.chat(*messages, rollout_id=rollout_id)
            content = response.json()["choices"][0]["message"]["content"]
            assert content == f"echo {rollout_id} {turn}"
            messages.append({"role": "assistant", "content": content})

    names = [f"r{number}" for number in range(16)]
    await asyncio.gather(*(attempt(name) for name in names))
    assert sorted(await replica.state.store.rollout_ids()) == sorted(names)
    for name in names:
        one, two, three = await replica.state.entries(name)
        assert [entry.parent for entry in (one, two, three)] == [
            Root(),
            Continues(one.model_call_id, one.cum_len),
            Continues(two.model_call_id, two.cum_len),
        ]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("headers", ["content-length: 1000", "transfer-encoding: chunked"])
async def test_a_body_that_stops_arriving_is_refused_in_time_and_holds_no_place(
    template: HfChatTemplate, path: str, headers: str
) -> None:
    replica = Replica(template, always(PLAIN), body_timeout_s=0.2, running_calls=1, waiting_calls=0)
    async with listening(replica.app) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(f"POST /ng-rollout/r1/v1/{path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode())
        await writer.drain()
        assert (await client.post(chat_path("r2"), json=chat_body(USER))).status_code == 200
        async with asyncio.timeout(20):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end: the connection is closed
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    kind = {"messages": "timeout_error"}.get(path, "invalid_request_error")
    assert json.loads(body)["error"]["type"] == kind
    assert "not here whole after 0.2 s" in json.loads(body)["error"]["message"]
    assert await replica.state.store.rollout_ids() == ["r2"]
