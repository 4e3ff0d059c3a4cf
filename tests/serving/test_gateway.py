"""One replica's HTTP side: what clients get, and what is on record by the time they have it.

The gateway and the call service are the real ones, over a scripted engine with a real tokenizer and template, and a
real store and lineage index.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from gym_capture.build.builder import build
from gym_capture.calls import ToolCallDelta, ToolCallStart
from gym_capture.capture.operations import Clear, Close, Drop, Operation
from gym_capture.capture.records import Continues, Root, Unresolved, WeightSpan, digest_ids
from gym_capture.conversation import Conversation, Message
from gym_capture.dialects import fields
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import Script, Step, in_order, saying
from gym_capture.errors import EngineDeadError, EngineError, EngineOverloadedError, StoreUnavailableError
from gym_capture.splice.splicer import full_prompt
from tests.serving.replica import (
    PLAIN,
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

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def oddly(template: HfChatTemplate, *pieces: str) -> Script:
    """The pieces as one reply, in ids that the tokenizer would never choose for it."""
    ids = np.concatenate([template.encode_plain(piece) for piece in pieces])
    text = "".join(pieces)
    assert template.decode(ids) == text
    assert template.encode_plain(text).tolist() != ids.tolist()
    return Script(steps=[Step(token_ids=ids.tolist(), text=text), Step(token_ids=template.encode(STOP).tolist())])


# --- what is recorded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("capture_segment", ["", "/training-token-capture"])
async def test_the_record_is_what_the_engine_reported(
    template: HfChatTemplate, stream: bool, capture_segment: str
) -> None:
    script = Script(steps=PLAIN.steps, stop_reason="7", weight_versions=(WeightSpan(0, 1, "a"), WeightSpan(1, 3, "b")))
    replica = Replica(template, always(script))
    path = f"/ng-rollout/r1{capture_segment}/v1/chat/completions"
    body = chat_body(USER, model="claude-haiku", stream=stream, temperature=0.5, max_tokens=9)
    response = await replica.http.post(path, json=body)
    assert response.status_code == 200
    (call,) = replica.engine.calls
    (entry,) = await replica.state.entries()
    assert call.call_id == entry.model_call_id
    assert call.max_tokens == 9
    prompt = full_prompt(template, Conversation((Message("user", "hi"),)))
    np.testing.assert_array_equal(call.prompt_ids, prompt)
    np.testing.assert_array_equal(entry.prompt_token_ids, prompt)
    assert entry.generation_token_ids.tolist() == [5, 6, 7]
    assert entry.generation_log_probs.tolist() == [-0.25, -1.0, -2.0]
    assert entry.parent == Root()
    assert (entry.policy.model, entry.request.requested_model, entry.request.has_tools) == (
        "policy",
        "claude-haiku",
        False,
    )
    assert (entry.reply.finish_reason, entry.reply.stop_reason, entry.request.max_tokens) == ("stop", "7", 9)
    assert entry.policy.weight_versions == script.weight_versions
    assert entry.request.sampling == {"temperature": 0.5, "max_tokens": 9}
    assert entry.digest == digest_ids(prompt, entry.generation_token_ids)
    assert entry.reply.output_items[0]["content"][0]["text"] == "He"
    snapshot = await replica.state.snapshot()
    assert (snapshot.incomplete, snapshot.problems) == ((), ())
    if stream:
        assert streamed_text(response) == "He"
        assert {event["model"] for event in events(response)} == {"claude-haiku"}
    else:
        reply = response.json()
        assert reply["choices"][0]["message"]["content"] == "He"
        assert reply["model"] == "claude-haiku"
        assert reply["usage"]["total_tokens"] == prompt.size + 3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_starts_with_the_ids_of_the_one_before(template: HfChatTemplate, stream: bool) -> None:
    odd = oddly(template, "H", "el", "lo")
    replica = Replica(template, in_order([odd, saying(template, "Bye", stop_token=STOP)]))
    await replica.chat(USER, stream=stream)
    await replica.chat(USER, {"role": "assistant", "content": "Hello"}, USER, stream=stream)
    one, two = await replica.state.entries()
    cumulative = one.cumulative_ids()
    assert two.parent == Continues(one.model_call_id, cumulative.size)
    assert (two.prefix.requested, two.prefix.supplied) == (True, True)
    np.testing.assert_array_equal(replica.engine.calls[1].prompt_ids, two.prompt_token_ids)
    np.testing.assert_array_equal(two.prompt_token_ids[: cumulative.size], cumulative)
    assert (one.prefix.requested, one.prefix.supplied) == (False, False)


async def test_without_prefix_supply_the_template_renders_and_the_record_says_so(template: HfChatTemplate) -> None:
    odd = oddly(template, "H", "el", "lo")
    replica = Replica(template, in_order([odd, PLAIN]), prefix_supply=False)
    await replica.chat(USER)
    await replica.chat(USER, {"role": "assistant", "content": "Hello"}, USER)
    _, two = await replica.state.entries()
    assert two.parent == Unresolved("prefix_supply_off")
    assert (two.prefix.requested, two.prefix.supplied) == (True, False)


async def test_an_engine_that_changes_the_prompt_is_not_taken_for_a_continuation(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one", "two"))
    await replica.chat(USER)
    generate = replica.engine.generate

    def other_prompt(**fields: Any) -> Any:
        return generate(**{**fields, "prompt_ids": fields["prompt_ids"][3:]})

    replica.engine.generate = other_prompt  # type: ignore[method-assign]
    await replica.chat(USER, {"role": "assistant", "content": "one"}, USER)
    _, two = await replica.state.entries()
    assert two.parent == Unresolved("prefix_not_kept_by_engine")
    assert not two.prefix.supplied


ASKED: dict[str, Any] = {
    "temperature": 0.1,
    "top_p": 0.2,
    "top_k": 3,
    "min_p": 0.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.7,
    "min_tokens": 8,
    "logit_bias": {"5": 9.0},
    "seed": 3,
    "stop": "x",
}
ASKED_AS_READ = {**ASKED, "stop": ["x"]}


def test_what_a_client_may_ask_is_pinned_or_left_on_purpose() -> None:
    assert set(fields.SAMPLING) == set(ASKED) == {*fields.NEUTRAL, "seed", "stop"}


async def test_the_sampling_pin_is_forced_and_recorded(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN), sampling_pin={"temperature": 0.5})
    await replica.chat(USER, **ASKED)
    # Nothing that shapes the distribution is left to the client; which sample it gets, and where it ends, is.
    pinned = {**fields.NEUTRAL, "temperature": 0.5, "seed": 3, "stop": ["x"]}
    assert replica.engine.calls[0].request.sampling == pinned
    (entry,) = await replica.state.entries()
    assert pinned.items() <= entry.request.sampling.items()


@pytest.mark.parametrize(
    ("pin", "left"),
    [
        ({}, set(ASKED)),
        ({"top_p": None}, {"top_p", "seed", "stop"}),
        ({"top_k": 0, "logit_bias": None, "seed": 7}, {"logit_bias", "stop"}),
    ],
)
async def test_a_pin_says_what_it_leaves_to_the_client(
    template: HfChatTemplate, pin: dict[str, Any], left: set[str]
) -> None:
    replica = Replica(template, always(PLAIN), sampling_pin=pin)
    await replica.chat(USER, **ASKED)
    forced = {**fields.NEUTRAL, **pin} if pin else {}
    assert replica.engine.calls[0].request.sampling == {**forced, **{name: ASKED_AS_READ[name] for name in left}}


@pytest.mark.parametrize("stream", [False, True])
async def test_capture_off_gives_a_client_the_same_bytes(template: HfChatTemplate, stream: bool) -> None:
    answers = []
    for capture in (True, False):
        replica = Replica(template, says(template, "The sky is blue."), capture=capture)
        response = await replica.chat(USER, stream=stream, stream_options={"include_usage": True})
        data = events(response) if stream else [response.json()]
        own = {replica.engine.calls[0].call_id}
        assert {event.pop("id") for event in data} == own
        assert len({event.pop("created") for event in data}) == 1
        answers.append((response.status_code, response.headers["content-type"], data))
        assert len(await replica.state.entries()) == int(capture)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": None, "top_logprobs": None},
        {"logprobs": False},
        {"logprobs": True, "top_logprobs": None},
        {"logprobs": True, "top_logprobs": 5},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_CP_03_log_probs_are_recorded_whatever_the_client_wants_to_see(
    template: HfChatTemplate, wish: dict[str, Any], stream: bool
) -> None:
    replica = Replica(template, always(PLAIN))
    response = await replica.chat(USER, stream=stream, **wish)
    (entry,) = await replica.state.entries()
    assert entry.generation_log_probs.tolist() == [-0.25, -1.0, -2.0]
    if stream:
        shown = [p for e in events(response) if (p := e["choices"][0]["logprobs"]) is not None]
    else:
        shown = [p for p in (response.json()["choices"][0]["logprobs"],) if p is not None]
    values = [token["logprob"] for part in shown for token in part["content"]]
    assert values == ([-0.25, -1.0, -2.0] if wish.get("logprobs") else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_CP_05_without_prompt_ids_nothing_is_stored_and_the_agent_is_served(
    template: HfChatTemplate, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(template, always(Script(steps=PLAIN.steps, reports_prompt=False)))
    response = await replica.chat(USER, stream=stream)
    assert response.status_code == 200
    call_id = response.headers["request-id"]
    snapshot = await replica.state.snapshot()
    assert snapshot.entries == ()
    # The intent without a record stands beside the mark that says what became of it; the log has the reason.
    assert snapshot.incomplete == (f"capture_failed:{call_id}", f"dangling_intent:{call_id}")
    (said,) = (record.message for record in caplog.records if record.levelname == "ERROR")
    assert "missing_prompt_ids" in said
    assert call_id in said


async def test_a_limit_that_nobody_asked_for_is_not_recorded_as_asked_for(template: HfChatTemplate) -> None:
    """A call into a nearly full context has room for one more id: that does not make it a probe."""

    replica = Replica(template, always(PLAIN))
    await replica.chat(USER)
    await replica.chat(USER, max_tokens=1)
    entries = await replica.state.entries()
    assert [entry.request.asked_max_tokens for entry in entries] == [None, 1]
    assert [entry.request.sampling.get("max_tokens") for entry in entries] == [None, 1]


def has_numbers(value: object) -> bool:
    """Whether there is a list of numbers anywhere in it."""
    if isinstance(value, dict):
        return any(map(has_numbers, value.values()))
    return isinstance(value, list) and any(isinstance(each, int | float) or has_numbers(each) for each in value)


async def test_CP_07_no_ids_reach_a_client(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "secret", "secret"))
    streamed = await replica.chat(USER, stream=True)
    whole = await replica.chat(USER)
    for text in (streamed.text, whole.text):
        assert "token_ids" not in text
        assert "log_probs" not in text
    assert not any(map(has_numbers, [*events(streamed), whole.json()])), "under whatever name"
    headers = {"content-type", "content-length", "request-id", "cache-control", "x-accel-buffering"}
    assert {*streamed.headers, *whole.headers} <= headers
    assert len(await replica.state.entries()) == 2


async def test_SE_03_the_prompt_is_the_rendering_of_the_messages(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    forged = {"required_prefix_token_ids": [9, 9, 9], "prompt_token_ids": [1]}
    await replica.chat(USER, **forged, extra_body=forged)
    expected = full_prompt(template, Conversation((Message("user", "hi"),)))
    np.testing.assert_array_equal(replica.engine.calls[0].prompt_ids, expected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("finish_reason", "said"), [("length", "length"), ("stop", "tool_calls")])
async def test_CH_07_a_turn_cut_in_a_tool_call_says_length(
    template: HfChatTemplate, stream: bool, finish_reason: str, said: str
) -> None:
    call = (ToolCallStart(0, "c1", "get_weather"), ToolCallDelta(0, '{"city": "Pa'))
    steps = [
        Step(token_ids=list(range(1, 7)), events=call[:1]),
        Step(token_ids=list(range(7, 13)), events=call[1:]),
    ]
    replica = Replica(template, always(Script(steps=steps, finish_reason=finish_reason)))
    response = await replica.chat(USER, tools=[WEATHER], max_tokens=12, stream=stream)
    last = events(response)[-1] if stream else response.json()
    assert last["choices"][0]["finish_reason"] == said
    (entry,) = await replica.state.entries()
    assert entry.reply.finish_reason == finish_reason
    assert entry.generation_token_ids.size == 12
    assert entry.request.has_tools
    (item,) = entry.reply.output_items
    assert (item["type"], item["arguments"]) == ("function_call", '{"city": "Pa')


# --- order: the record first, then the end of the reply ----------------------------------------------------------


async def test_CP_09_a_stream_ends_only_once_the_record_is_there(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one", "two"))
    replica.state.gate.clear()
    async with (
        listening(replica.app) as client,
        client.stream("POST", chat_path("r1"), json=chat_body(USER, stream=True)) as response,
    ):
        stream = frames(response)
        seen = [await anext(stream)]
        await replica.state.put_begins.wait()
        rest = asyncio.ensure_future(_rest(stream))
        # The text streams while the record waits; what ends the reply does not.
        assert await replica.state.entries() == ()
        ended, _ = await asyncio.wait([rest], timeout=0.3)  # an end that does not wait needs less to get here
        assert not ended
        replica.state.gate.set()
        seen += await rest
        assert seen[-1] == "[DONE]"
        assert len(await replica.state.entries()) == 1
        ends = [json.loads(data)["choices"][0]["finish_reason"] for data in seen[:-1]]
        assert ends[-1] == "stop"
        assert set(ends[:-1]) == {None}
        # At once: the parent is there.
        echo = chat_body(USER, {"role": "assistant", "content": "one"}, USER)
        assert (await client.post(chat_path("r1"), json=echo)).status_code == 200
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)


async def _rest(stream: Any) -> list[str]:
    return [data async for data in stream]


async def test_CP_09_a_whole_reply_waits_for_its_record_too(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.gate.clear()
    reply = asyncio.ensure_future(replica.chat(USER))
    await replica.state.put_begins.wait()
    ended, _ = await asyncio.wait([reply], timeout=0.3)
    assert not ended
    replica.state.gate.set()
    assert (await reply).status_code == 200
    assert len(await replica.state.entries()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_CP_09_a_record_that_cannot_be_written_masks_the_rollout_and_serves_the_reply(
    template: HfChatTemplate, stream: bool
) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.put_fails = StoreUnavailableError("disk full")
    response = await replica.chat(USER, stream=stream)
    assert response.status_code == 200
    assert (streamed_text(response) if stream else response.json()["choices"][0]["message"]["content"]) == "one"
    snapshot = await replica.state.snapshot()
    assert snapshot.entries == ()
    call_id = replica.engine.calls[0].call_id
    assert f"capture_failed:{call_id}" in snapshot.incomplete


async def test_a_rollout_that_cannot_even_be_marked_stays_incomplete_by_its_open_intent(
    template: HfChatTemplate,
) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.put_fails = replica.state.mark_fails = StoreUnavailableError("gone")
    assert (await replica.chat(USER)).status_code == 200
    snapshot = await replica.state.snapshot()
    assert snapshot.incomplete == (f"dangling_intent:{replica.engine.calls[0].call_id}",)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_cannot_be_registered_costs_nothing_and_may_be_repeated(
    template: HfChatTemplate, stream: bool
) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.begin_fails = StoreUnavailableError("restarting")
    response = await replica.chat(USER, stream=stream)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    assert replica.engine.calls == []
    replica.state.begin_fails = None
    assert (await replica.chat(USER, stream=stream)).status_code == 200


async def test_a_rollout_that_was_consumed_refuses_late_calls(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one"))
    await replica.chat(USER)
    snapshot = await replica.state.snapshot()
    await replica.state.store.write(Drop("r1", snapshot.snapshot_id, snapshot.version))
    late = await replica.chat(USER)
    assert late.status_code == 409
    assert len(replica.engine.calls) == 1


async def test_a_rollout_that_was_closed_refuses_calls_although_nothing_was_recorded(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "one"))
    await replica.state.store.write(Close("r1"))
    late = await replica.chat(USER)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    assert replica.engine.calls == []
    assert (await replica.chat(USER, rollout_id="r2")).status_code == 200


@pytest.mark.parametrize("over", [Close("r1"), Clear("r1")], ids=["closed", "cleared"])
@pytest.mark.parametrize("stream", [False, True])
async def test_RJ_02_a_call_that_is_under_way_when_its_attempt_is_over_is_refused_its_end(
    template: HfChatTemplate, stream: bool, over: Operation
) -> None:
    replica = Replica(template, says(template, "one"))
    replica.state.gate.clear()
    call = asyncio.ensure_future(replica.chat(USER, stream=stream))
    await replica.state.put_begins.wait()
    await replica.state.store.write(over)
    replica.state.gate.set()
    reply = await call
    if stream:
        assert "[DONE]" not in reply.text
        *_, last = [json.loads(frame.removeprefix("data: ")) for frame in reply.text.split("\n\n") if frame]
        assert last["error"]["code"] == "conflict"
    else:
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "conflict")
    assert (await replica.state.snapshot()).version == 0


async def test_a_client_that_leaves_a_closed_attempt_leaves_nothing(
    template: HfChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(template, always(Script(steps=[Step(token_ids=[5], text="He")], hangs=True)))
    async with (
        listening(replica.app) as client,
        client.stream("POST", chat_path("r1"), json=chat_body(USER, stream=True)) as response,
    ):
        await anext(frames(response))
        await replica.state.store.write(Close("r1"))
    await until(lambda: bool(replica.engine.aborted))
    await replica.calls.end(EngineOverloadedError("over"))
    assert (await replica.state.snapshot()).version == 0
    assert "never retrieved" not in caplog.text


# --- the engine fails --------------------------------------------------------------------------------------------


ENDINGS = {
    "chat/completions": ({"messages": [USER]}, 'data: {"error":', "[DONE]"),
    "completions": ({"prompt": "hi"}, 'data: {"error":', "[DONE]"),
    "messages": ({"messages": [USER], "max_tokens": 9}, "event: error\n", "message_stop"),
    "responses": ({"input": "hi"}, "event: response.failed\n", "response.completed"),
}
"""By route: a body, how what ends a broken stream begins, and what would end a whole one."""


@pytest.mark.parametrize("raises", [EngineError("out of memory"), None], ids=["an error", "nothing more"])
@pytest.mark.parametrize("route", ENDINGS)
async def test_ST_08_a_stream_that_ends_early_is_no_reply_and_nothing_to_train_on(
    template: HfChatTemplate, route: str, raises: Exception | None
) -> None:
    broken = Script(steps=[Step(token_ids=[5], text="par")], raises=raises, finish_reason=None)
    replica = Replica(template, always(broken))
    body, begins, never = ENDINGS[route]
    path = f"/ng-rollout/r1/v1/{route}"
    response = await replica.http.post(path, json={"model": "policy", "stream": True, **body})
    *_, last = [frame for frame in response.text.split("\n\n") if frame]
    assert "par" in response.text
    assert last.startswith(begins)
    assert ("out of memory" if raises else "the engine stopped without saying why") in last
    assert never not in response.text
    snapshot = await replica.state.snapshot()
    (entry,) = snapshot.entries
    assert (entry.reply.finish_reason, entry.generation_token_ids.tolist()) == ("abort", [5])
    assert snapshot.incomplete == ()
    assert not any(chain.loss_mask.any() for chain in build(snapshot).trajectories)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (EngineError("broken"), 500, None),
        (EngineDeadError("gone"), 503, "5"),
        (EngineOverloadedError("full", retry_after_s=2.6), 503, "3"),
        (RuntimeError("a secret of the server"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_text_has_its_own_status(
    template: HfChatTemplate, error: Exception, status: int, retry: str | None, stream: bool
) -> None:
    replica = Replica(template, always(Script(steps=[], raises=error)))
    response = await replica.chat(USER, stream=stream)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert "secret" not in response.text
    snapshot = await replica.state.snapshot()
    assert (snapshot.entries, snapshot.incomplete) == ((), ())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("finish_reason", "status"), [(None, 500), ("abort", 503), ("error", 500)])
async def test_a_generation_that_does_not_finish_is_no_reply(
    template: HfChatTemplate, stream: bool, finish_reason: str | None, status: int
) -> None:
    replica = Replica(template, always(Script(steps=PLAIN.steps, finish_reason=finish_reason)))
    response = await replica.chat(USER, stream=stream)
    assert "[DONE]" not in response.text
    assert '"error"' in response.text
    assert response.status_code == (200 if stream else status)
    (entry,) = await replica.state.entries()
    assert entry.reply.finish_reason == "abort"


async def test_health_is_the_engines_and_the_states(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    well = await replica.http.get("/healthz")
    assert (well.status_code, well.json()) == (200, {"status": "ok", "engine": "ok", "state": "ok"})
    replica.state.begin_fails = StoreUnavailableError("the state actor does not answer")
    ill = await replica.http.get("/healthz")
    assert ill.status_code == 503
    assert ill.json() == {"status": "failing", "engine": "ok", "state": "the state actor does not answer"}
    assert (await replica.http.get("/stats")).status_code == 503
    replica.state.begin_fails = None
    replica.engine.is_dead = True
    ill = await replica.http.get("/healthz")
    assert (ill.status_code, ill.json()["engine"]) == (503, "the scripted engine is dead")
    await replica.service.close()
    assert replica.engine.is_closed


async def test_stats_say_how_many_eligible_calls_got_their_prefix(template: HfChatTemplate) -> None:
    stats = (await Replica(template, always(PLAIN)).http.get("/stats")).json()
    assert (stats["capture"], stats["prefix_supplied_ratio"]) == (True, 0.75)
    assert stats["resolutions"] == {"root": 2}
    off = Replica(template, always(PLAIN), capture=False)
    assert (await off.http.get("/stats")).json() == {"capture": False}


async def test_records_are_read_over_http_too(template: HfChatTemplate) -> None:
    replica = Replica(template, always(PLAIN))
    path = "/ng-rollout/r1/token-records"
    assert (await replica.http.get(path)).status_code == 404
    await replica.chat(USER)
    (entry,) = await replica.state.entries()
    read = (await replica.http.get(path)).json()
    assert read["rollout"]["rollout_id"] == "r1"
    (call,) = read["calls"]
    assert call["prompt_token_ids"] == entry.prompt_token_ids.tolist()
    assert call["generation_token_ids"] == [5, 6, 7]
    assert call["generation_log_probs"] == [-0.25, -1.0, -2.0]
