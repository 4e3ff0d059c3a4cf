"""What happens between a call and those who wait for it: silence, clients that go away, clients that ask again."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gym_capture.build.builder import build
from gym_capture.capture.records import CallIntent
from gym_capture.capture.sinks import BegunCall
from gym_capture.engines.base import Generation
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step, in_order, saying
from gym_capture.errors import EngineError, StoreUnavailableError
from gym_capture.serving import gateway
from gym_capture.serving.config import GraphArgs
from tests.serving.replica import (
    STOP,
    USER,
    Replica,
    always,
    chat_body,
    chat_path,
    events,
    frames,
    listening,
    says,
    streamed_text,
    until,
)

AGAIN = {"x-stainless-retry-count": "1"}


def hanging(*texts: str) -> Script:
    return Script(steps=[Step(token_ids=[5], text=text) for text in texts], hangs=True)


async def ask(
    client: httpx.AsyncClient, *, again: bool = False, stream: bool = False, rollout_id: str | None = "r1"
) -> httpx.Response:
    headers = AGAIN if again else {}
    return await client.post(chat_path(rollout_id), json=chat_body(USER, stream=stream), headers=headers)


async def ask_and_go_away_during_the_put(replica: Replica, client: httpx.AsyncClient, *, stream: bool) -> None:
    replica.state.gate.clear()
    asking = asyncio.ensure_future(ask(client, stream=stream))
    await replica.state.put_begins.wait()
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.sleep(0.2)  # the server sees that the client has gone
    replica.state.gate.set()


def text_of(response: httpx.Response, *, stream: bool) -> str:
    assert response.status_code == 200
    if stream:
        return streamed_text(response)
    content = response.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def id_of(response: httpx.Response, *, stream: bool) -> str:
    (call_id,) = {event["id"] for event in (events(response) if stream else [response.json()])}
    assert isinstance(call_id, str)
    return call_id


# --- the client goes away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n_steps", [0, 2], ids=["before the first text", "in the middle"])
async def test_a_client_that_goes_away_frees_the_engine(template: HfChatTemplate, stream: bool, n_steps: int) -> None:
    stuck = Script(steps=[Step(token_ids=[5], text="He"), Step(token_ids=[6], text="llo")][:n_steps], hangs=True)
    replica = Replica(template, lambda _: stuck)
    async with listening(replica.app) as client:
        if stream and n_steps:
            async with client.stream("POST", chat_path("r1"), json=chat_body(USER, stream=True)) as response:
                stream_ = frames(response)
                text = ""
                while text != "Hello":
                    text += json.loads(await anext(stream_))["choices"][0]["delta"]["content"]
        else:
            asking = asyncio.ensure_future(client.post(chat_path("r1"), json=chat_body(USER, stream=stream)))
            await until(lambda: len(replica.engine.calls) == 1)
            await asyncio.sleep(0.05)  # so that the generation is under way; if it is not, the outcome is the same
            asking.cancel()
        await until(lambda: replica.engine.aborted == [replica.engine.calls[0].call_id])
        await _settled(replica)
    snapshot = await replica.state.snapshot()
    assert snapshot.incomplete == ()
    (entry,) = snapshot.entries
    assert (entry.reply.finish_reason, entry.delivered) == ("abort", None)
    assert entry.generation_token_ids.tolist() == [5, 6][:n_steps]
    assert entry.prompt_token_ids.tolist() == replica.engine.calls[0].prompt_ids.tolist()


@pytest.mark.parametrize("deaf_to", [2, 1_000], ids=["late", "deaf"])
async def test_an_engine_that_does_not_hear_is_asked_again_and_then_cut_off(
    template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch, deaf_to: int
) -> None:
    """An engine knows nothing of a call that is only on its way to it."""

    replica = Replica(template, lambda _: hanging("He"))
    generate, asked = replica.engine.generate, 0

    def generate_deaf(**request: Any) -> Generation:
        generation = generate(**request)

        async def abort() -> None:
            nonlocal asked
            asked += 1
            if asked > deaf_to:
                await generation.abort()

        return replace(generation, abort=abort)

    monkeypatch.setattr(replica.engine, "generate", generate_deaf)
    async with listening(replica.app) as client:
        asking = asyncio.ensure_future(ask(client))
        await until(lambda: len(replica.engine.calls) == 1)
        asking.cancel()
        await until(lambda: len(replica.engine.aborted) == 1)
        await _settled(replica)
    entries = await replica.state.entries()
    assert [entry.reply.finish_reason for entry in entries] == (["abort"] if deaf_to == 2 else [])
    assert asked > 2


async def test_a_client_that_goes_away_before_the_engine_has_its_call_leaves_nothing(
    template: HfChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(template, lambda _: hanging())
    begin, begins, may_begin = replica.state.begin, asyncio.Event(), asyncio.Event()

    async def slow(intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str]) -> BegunCall:
        begun = await begin(intent, turn_keys, asked_keys)
        begins.set()
        await may_begin.wait()
        return begun

    monkeypatch.setattr(replica.state, "begin", slow)
    async with listening(replica.app) as client:
        asking = asyncio.ensure_future(ask(client))
        await begins.wait()
        assert (await replica.state.snapshot()).incomplete
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(0.05)  # lets the server see it; if it has not, the call ends as aborted
        may_begin.set()
        await _settled(replica)
    assert all(entry.reply.finish_reason == "abort" for entry in await replica.state.entries())


async def _settled(replica: Replica) -> None:
    """Until no intent is open."""
    async with asyncio.timeout(60):
        while True:
            if not (await replica.state.snapshot()).incomplete:
                return
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_during_the_put_leaves_the_record_of_the_whole_reply(
    template: HfChatTemplate, stream: bool
) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.gate.clear()
    async with listening(replica.app) as client:
        asking = asyncio.ensure_future(client.post(chat_path("r1"), json=chat_body(USER, stream=stream)))
        await replica.state.put_begins.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(0.05)  # lets the server see it; if it has not, the outcome is the same
        replica.state.gate.set()
        await _settled(replica)
    snapshot = await replica.state.snapshot()
    (entry,) = snapshot.entries
    assert (entry.reply.finish_reason, snapshot.incomplete, snapshot.problems) == ("stop", (), ())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_of_two_replies_to_one_request_the_one_that_was_delivered_counts(
    template: HfChatTemplate, stream: bool
) -> None:
    replica = Replica(template, says(template, "one", "two"))
    async with listening(replica.app) as client:
        await ask_and_go_away_during_the_put(replica, client, stream=stream)
        await until(lambda: len(replica.state.deliveries) == 1)
        # Its first request is over, so what the client asks again is another call.
        assert text_of(await ask(client, again=True, stream=stream), stream=stream) == "two"
        await until(lambda: len(replica.state.deliveries) == 2)
    one, two = await replica.state.entries()
    assert replica.state.deliveries == [(one.model_call_id, False), (two.model_call_id, True)]
    built = build(await replica.state.snapshot())
    assert (built.masked, built.mask_reasons) == (False, ())
    assert [trajectory.call_ids for trajectory in built.trajectories] == [(two.model_call_id,)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_first_reply_that_was_delivered_needs_no_word(template: HfChatTemplate, stream: bool) -> None:
    replica = Replica(template, says(template, "one"))
    async with listening(replica.app) as client:
        await ask(client, stream=stream)
    assert replica.state.deliveries == []


async def test_a_mark_that_cannot_be_written_breaks_nothing(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one", "two"))
    replica.state.mark_fails = StoreUnavailableError("disk full")
    async with listening(replica.app) as client:
        await ask_and_go_away_during_the_put(replica, client, stream=False)
        assert text_of(await ask(client), stream=False) == "two"
    assert [entry.delivered for entry in await replica.state.entries()] == [None, True]


# --- clients that ask again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_repetition_joins_the_call_that_is_under_way(template: HfChatTemplate, stream: bool) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.gate.clear()
    first = asyncio.ensure_future(ask(replica.http, stream=stream))
    await replica.state.put_begins.wait()
    second = asyncio.ensure_future(ask(replica.http, again=True, stream=stream))
    await asyncio.sleep(0.05)
    replica.state.gate.set()
    answers = await asyncio.gather(first, second)
    assert [text_of(answer, stream=stream) for answer in answers] == ["one", "one"]
    (entry,) = await replica.state.entries()
    assert {id_of(answer, stream=stream) for answer in answers} == {entry.model_call_id}
    assert len(replica.engine.calls) == 1


async def test_a_call_outlives_the_request_that_began_it_if_its_repetition_listens(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.gate.clear()
    async with listening(replica.app) as client:
        first = asyncio.ensure_future(ask(client, stream=True))
        await replica.state.put_begins.wait()
        second = asyncio.ensure_future(ask(client, again=True, stream=True))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.1)
        replica.state.gate.set()
        assert text_of(await second, stream=True) == "one"
    assert len(await replica.state.entries()) == 1
    assert (replica.state.deliveries, replica.engine.aborted) == ([], [])


@pytest.mark.parametrize(
    ("again", "rollout_id", "content"),
    [(False, "r1", "hi"), (True, "r2", "hi"), (True, "r1", "ho"), (True, None, "hi")],
    ids=["not said to be one", "another rollout", "another body", "no rollout"],
)
async def test_what_is_no_repetition_is_a_call_of_its_own(
    template: HfChatTemplate, again: bool, rollout_id: str | None, content: str
) -> None:
    replica = Replica(template, lambda _: hanging())
    first = asyncio.ensure_future(ask(replica.http, rollout_id=None if rollout_id is None else "r1"))
    await until(lambda: len(replica.engine.calls) == 1)
    body = chat_body({"role": "user", "content": content}, stream=False)
    headers = AGAIN if again else {}
    second = asyncio.ensure_future(replica.http.post(chat_path(rollout_id), json=body, headers=headers))
    await until(lambda: len(replica.engine.calls) == 2)
    for request in (first, second):
        request.cancel()
    await asyncio.wait([first, second])


async def test_of_two_samples_of_one_prompt_a_repetition_joins_neither(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: hanging())
    samples = [asyncio.ensure_future(ask(replica.http)) for _ in range(2)]
    await until(lambda: len(replica.engine.calls) == 2)
    samples[0].cancel()
    await until(lambda: len(replica.engine.aborted) == 1)
    again = asyncio.ensure_future(ask(replica.http, again=True))
    await until(lambda: len(replica.engine.calls) == 3)
    for request in (again, samples[1]):
        request.cancel()
    await asyncio.wait([again, *samples])


async def test_a_reply_cut_off_while_its_reader_is_slow_was_not_delivered(template: HfChatTemplate) -> None:
    """The server waits for room in the connection when it breaks: what it sends from then on goes nowhere, silently."""

    long = Script(steps=[Step(token_ids=[5], text="x" * 20_000) for _ in range(600)])
    replica = Replica(template, always(long), max_model_len=100_000)
    body = json.dumps(chat_body(USER, stream=True)).encode()
    head = f"POST {chat_path('r1')} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with listening(replica.app) as client:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", client.base_url.port))
        slow.sendall(head + body)
        await _recorded(replica)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing breaks it off
        slow.close()
        await until(lambda: len(replica.state.deliveries) == 1)
    (entry,) = await replica.state.entries()
    assert entry.delivered is False


async def _recorded(replica: Replica) -> None:
    async with asyncio.timeout(60):
        while True:
            if await replica.state.entries():
                return
            await asyncio.sleep(0.05)


async def test_a_repetition_of_a_call_that_failed_is_a_new_one(template: HfChatTemplate) -> None:
    broken = Script(steps=[], raises=EngineError("out of memory"))
    replica = Replica(template, in_order([broken, saying(template, "two", stop_token=STOP)]))
    assert (await ask(replica.http)).status_code == 500
    assert text_of(await ask(replica.http, again=True), stream=False) == "two"


@pytest.mark.parametrize("count", ["0", "00", "x", "-1", "\u0661", "", "9" * 5000])
async def test_a_count_that_is_none_says_nothing(template: HfChatTemplate, count: str) -> None:
    replica = Replica(template, says(template, "one"))
    headers = {b"x-stainless-retry-count": count.encode()}
    response = await replica.http.post(chat_path("r1"), json=chat_body(USER), headers=headers)
    assert text_of(response, stream=False) == "one"


# --- silence -----------------------------------------------------------------------------------------------------


async def test_ST_11_a_stream_says_early_that_it_lives_and_goes_on_saying_so(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: hanging("He"), keep_alive_s=0.05)
    async with (
        listening(replica.app) as client,
        client.stream("POST", chat_path("r1"), json=chat_body(USER, stream=True)) as response,
    ):
        lines = response.aiter_lines()
        seen = [await anext(lines) for _ in range(8)]
        comments = [line for line in seen if line.startswith(":")]
        texts = [json.loads(line.removeprefix("data: ")) for line in seen if line.startswith("data: ")]
        assert len(comments) >= 2
        assert [text["choices"][0]["delta"].get("content") for text in texts] == ["", "He"]


async def test_ST_11_the_first_byte_does_not_wait_for_the_first_token(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: hanging())
    async with (
        listening(replica.app) as client,
        asyncio.timeout(30),
        client.stream("POST", chat_path("r1"), json=chat_body(USER, stream=True)) as response,
    ):
        assert response.status_code == 200
        first = await anext(response.aiter_lines())
        assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_ST_11_no_client_waits_long_for_a_sign_of_life() -> None:
    assert gateway._FIRST_BYTE_S < 2
    assert inspect.signature(gateway.build_gateway).parameters["keep_alive_s"].default <= 15
    assert GraphArgs.model_fields["keep_alive_s"].default <= 15


async def test_SF_01_many_clients_that_leave_free_the_engine(template: HfChatTemplate) -> None:
    replica = Replica(template, lambda _: hanging("He"))

    async def leave_after_the_first_text(client: httpx.AsyncClient, number: int) -> None:
        path = chat_path(f"r{number}")
        async with client.stream("POST", path, json=chat_body(USER, stream=True)) as response:
            await anext(frames(response))

    async with listening(replica.app) as client, asyncio.timeout(60):
        await asyncio.gather(*(leave_after_the_first_text(client, number) for number in range(200)))
        await until(lambda: len(replica.engine.aborted) == 200)
    for number in range(200):
        (entry,) = await replica.state.entries(f"r{number}")
        assert entry.reply.finish_reason == "abort"


# --- at the same time --------------------------------------------------------------------------------------------


async def test_64_clients_at_the_same_time_get_their_own_answers(template: HfChatTemplate) -> None:
    def echo(call: EngineCall) -> Script:
        last: Any = call.request.conversation.items[-1]
        return saying(template, f"to {last.text}", stop_token=STOP)

    replica = Replica(template, echo)

    async def talk(client: httpx.AsyncClient, number: int) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{number}.{turn}"})
            body = chat_body(*messages, stream=number % 2 == 0)
            response = await client.post(chat_path(f"r{number}"), json=body)
            text = text_of(response, stream=number % 2 == 0)
            assert text == f"to {number}.{turn}"
            messages.append({"role": "assistant", "content": text})

    async with listening(replica.app) as client, asyncio.timeout(120):
        await asyncio.gather(*(talk(client, number) for number in range(64)))
    for number in range(64):
        one, two, three = await replica.state.entries(f"r{number}")
        assert (two.prefix.supplied, three.prefix.supplied) == (True, True)
        assert three.prompt_token_ids[: two.cum_len].tolist() == two.cumulative_ids().tolist()
        assert two.prompt_token_ids[: one.cum_len].tolist() == one.cumulative_ids().tolist()
