"""How many calls a replica works on, how many wait, who is refused - and that clients make nothing of it."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import Script, Step
from gym_capture.errors import EngineOverloadedError
from gym_capture.serving.admission import Admission, Place
from tests.serving.replica import PLAIN, USER, Replica, always, chat_body, chat_path, listening, until

PATHS = ("chat/completions", "completions", "responses", "messages")
HANGING = Script(steps=[Step(token_ids=[5], text="He")], hangs=True)


def body(path: str, **fields: Any) -> dict[str, Any]:
    said = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}.get(path, {"messages": [USER]})
    return {"model": "policy", "max_tokens": 16, **said, **fields}


async def test_places_are_granted_in_order_and_come_back() -> None:
    admission = Admission(running=2, waiting=2)
    places = [admission.ask() for _ in range(4)]

    def granted() -> list[bool]:
        return [place.granted.done() for place in places]

    assert granted() == [True, True, False, False]
    with pytest.raises(EngineOverloadedError, match="2 calls run here and 2 wait"):
        admission.ask()
    places[2].release()  # gone before its turn
    places.append(admission.ask())
    places[0].release()
    places[0].release()  # once more is nothing
    assert granted() == [True, True, False, True, False]
    admission.limit(running=3, waiting=0)
    assert granted() == [True, True, False, True, True]
    with pytest.raises(EngineOverloadedError):
        admission.ask()
    admission.limit(running=1, waiting=0)  # who runs already stays
    places[1].release()
    places[3].release()
    with pytest.raises(EngineOverloadedError):
        admission.ask()
    places[4].release()
    assert admission.ask().granted.done()


async def test_who_is_refused_is_told_when_those_that_wait_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gym_capture.serving.admission.time.monotonic", lambda: now)
    admission = Admission(running=2, waiting=5)

    def refused() -> float:
        with pytest.raises(EngineOverloadedError) as caught:
            admission.ask()
        return caught.value.retry_after_s

    places: list[Place] = [admission.ask() for _ in range(7)]
    assert refused() == 3  # 5 wait, the sixth would be in the third pair; a call takes a second, to begin with
    for _ in range(60):
        now += 10
        places.pop(0).release()
        places.append(admission.ask())
    assert 50 <= refused() <= 60  # each had its place for 20 s
    for _ in range(60):
        now += 1000
        places.pop(0).release()
        places.append(admission.ask())
    assert refused() == 60  # clients' libraries ignore more


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_refusal_is_in_the_callers_dialect_and_leaves_nothing(template: HfChatTemplate, stream: bool) -> None:
    replica = Replica(template, always(HANGING), running_calls=2, waiting_calls=1)
    async with listening(replica.app) as client:
        asking = [
            asyncio.ensure_future(client.post(chat_path(f"in-{n}"), json=chat_body(USER, stream=True)))
            for n in range(3)
        ]
        await until(lambda: len(replica.engine.calls) == 2)
        for path in PATHS:
            response = await client.post(f"/ng-rollout/out/v1/{path}", json=body(path, stream=stream))
            assert response.headers["retry-after"] == "1"
            assert response.headers["content-type"] == "application/json"
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (529 if path == "messages" else 503, "overloaded_error")
            assert "2 calls run here and 1 wait" in error["message"]
        # What needs no engine is answered all the same.
        for probe in ("/healthz", "/stats", "/v1/models"):
            assert (await client.get(probe)).status_code == 200
        assert len(replica.engine.calls) == 2
        assert sorted(await replica.state.store.rollout_ids()) == ["in-0", "in-1"]
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await until(lambda: len(replica.engine.aborted) == 2)
    # The one that waited went away before its turn: it never began.
    assert len(replica.engine.calls) == 2


async def test_a_repetition_joins_the_call_that_runs_and_takes_no_place(template: HfChatTemplate) -> None:
    go_on = asyncio.Event()
    replica = Replica(template, always(PLAIN), running_calls=1, waiting_calls=0)
    replica.state.gate = go_on
    first = asyncio.ensure_future(replica.chat(USER))
    await replica.state.put_begins.wait()
    again = replica.http.post(chat_path("r1"), json=chat_body(USER), headers={"x-stainless-retry-count": "1"})
    second = asyncio.ensure_future(again)
    await asyncio.sleep(0)
    other = await replica.chat(USER, rollout_id="r2")
    assert other.status_code == 503
    go_on.set()
    assert (await first).json() == (await second).json()
    assert (await replica.chat(USER, rollout_id="r2")).status_code == 200


class CountsRefusals:
    """Between a server and its application."""

    def __init__(self, app: ASGIApp, refusals: list[int]) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != 200:
                self._refusals.append(message["status"])
            await send(message)

        await self._app(scope, receive, noted)


async def test_the_sdks_ask_again_and_all_get_their_reply(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN), running_calls=2, waiting_calls=4)
    refusals: list[int] = []
    replica.app.add_middleware(CountsRefusals, refusals=refusals)
    replica.state.gate.clear()
    async with listening(replica.app) as client:
        url = f"{str(client.base_url).rstrip('/')}/ng-rollout"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=20) as of_openai,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=20) as of_anthropic,
        ):

            async def ask(number: int) -> None:
                if number % 2:
                    chat = of_openai.with_options(base_url=f"{url}/r{number}/v1").chat
                    await chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
                else:
                    messages = of_anthropic.with_options(base_url=f"{url}/r{number}").messages
                    await messages.create(model="policy", max_tokens=16, messages=[{"role": "user", "content": "hi"}])

            asking = [asyncio.ensure_future(ask(number)) for number in range(50)]
            await until(lambda: len(refusals) >= 44)
            assert set(refusals) == {503, 529}
            replica.state.gate.set()
            await asyncio.gather(*asking)
    assert len(replica.engine.calls) == 50
    for number in range(50):
        snapshot = await replica.state.snapshot(f"r{number}")
        assert [entry.reply.finish_reason for entry in snapshot.entries] == ["stop"]
        assert snapshot.incomplete == ()


@pytest.mark.parametrize("path", PATHS)
async def test_calls_that_are_ended_get_an_error_of_their_api_and_are_on_record(
    template: HfChatTemplate, path: str
) -> None:
    replica = Replica(template, always(HANGING), running_calls=2, waiting_calls=1)
    async with listening(replica.app) as client:
        where = f"/ng-rollout/{{}}/v1/{path}"
        whole = asyncio.ensure_future(client.post(where.format("whole"), json=body(path)))
        async with client.stream("POST", where.format("streamed"), json=body(path, stream=True)) as streamed:
            lines = streamed.aiter_lines()
            while "He" not in await anext(lines):
                pass
            await until(lambda: len(replica.engine.calls) == 2)
            waiting = asyncio.ensure_future(client.post(where.format("waiting"), json=body(path, stream=True)))
            await until(lambda: replica.calls._admission._waiting)  # type: ignore[arg-type, return-value]
            ended = await replica.calls.end(EngineOverloadedError("ask again", retry_after_s=1))
            rest = [line async for line in lines]
        assert ended == 3
        datas = [line.removeprefix("data: ") for line in rest if line.startswith("data: ")]
        assert any("ask again" in data for data in datas)
        assert not any("[DONE]" in data or "message_stop" in data or "completed" in data for data in datas)
        for refused in (await whole, await waiting, await client.post(where.format("new"), json=body(path))):
            assert refused.status_code == (529 if path == "messages" else 503)
            assert refused.json()["error"]["message"] == "ask again"
            assert refused.headers["retry-after"] == "1"
    for rollout_id in ("streamed", "whole"):
        snapshot = await replica.state.snapshot(rollout_id)
        assert [entry.reply.finish_reason for entry in snapshot.entries] == ["abort"]
        assert snapshot.incomplete == ()
    assert sorted(await replica.state.store.rollout_ids()) == ["streamed", "whole"]


async def test_a_call_whose_record_is_being_written_is_left_to_finish(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    replica.state.gate.clear()
    asking = asyncio.ensure_future(replica.chat(USER))
    await replica.state.put_begins.wait()
    assert await replica.calls.end(EngineOverloadedError("ask again")) == 0
    replica.state.gate.set()
    assert (await asking).status_code == 200
    (entry,) = await replica.state.entries()
    assert entry.reply.finish_reason == "stop"
