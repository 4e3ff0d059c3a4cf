"""The loads of the serving benchmarks, against a replica with a scripted engine: what is measured is what is meant."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import multi_turn, serving, weights
from benchmarks.serving_pair import alternate, quantile
from gym_capture.calls import ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues, Root
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step, saying
from gym_capture.models import tiny_dir
from tests.serving.replica import Replica, listening

STOP = "<|im_end|>"


@pytest.fixture(scope="module")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


# --- rounds and quantiles ----------------------------------------------------------------------------------------


def test_rounds_alternate_and_the_first_is_not_kept() -> None:
    played: list[str] = []

    def side(name: str) -> int:
        played.append(name)
        return len(played)

    kept = alternate({name: lambda name=name: side(name) for name in "abc"}, rounds=2)
    assert "".join(played) == "abc" + "bca" + "cab"
    assert kept == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_a_warm_up_of_its_own_takes_the_place_of_the_first_round() -> None:
    played: list[str] = []
    sides = {name: lambda name=name: played.append(name) for name in "ab"}
    alternate(sides, rounds=2, warm_ups={name: lambda name=name: played.append(name.upper()) for name in "ab"})
    assert "".join(played) == "AB" + "ba" + "ab"


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


# --- one call a client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
async def test_every_request_is_answered_whole_and_no_two_are_alike(
    template: HfChatTemplate, tracked: bool, stream: bool
) -> None:
    script = saying(template, "a reply of some words", stop_token=STOP)
    tokens = len(script.steps)
    replica = Replica(template, lambda _: script)
    async with listening(replica.app) as client:
        server = str(client.base_url).rstrip("/")
        result = await serving.load(server, tracked=tracked, stream=stream, requests=5, tokens=tokens)
    assert result.tokens_per_s > 0
    assert len(result.first_text_s) == (5 if stream else 0)
    assert all(wait > 0 for wait in result.first_text_s)
    asked = [call.request.conversation.items[0].text for call in replica.engine.calls]
    assert len({text.split()[0] for text in asked}) == 5
    assert len(await replica.state.store.rollout_ids()) == (5 if tracked else 0)


@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_a_reply_that_is_cut_off_or_too_short_ends_the_benchmark(
    template: HfChatTemplate, finish_reason: str | None
) -> None:
    async def run() -> None:
        script = Script(steps=[Step(token_ids=[5], text="He")], finish_reason=finish_reason)
        async with listening(Replica(template, lambda _: script).app) as client:
            await serving.load(str(client.base_url).rstrip("/"), tracked=True, stream=True, requests=1, tokens=2)

    with pytest.raises(SystemExit, match=r"without \[DONE\]" if finish_reason is None else "1 tokens instead of 2"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"content": None}, False),
        ({"reasoning_content": "hm"}, False),
        ({"content": " "}, True),
        ({"content": '"content":""'}, True),
    ],
)
def test_text_is_content_that_is_not_empty(delta: dict[str, str], expected: bool) -> None:
    line = b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()
    assert serving.has_text(line) is expected


def test_an_event_without_choices_has_no_text() -> None:
    assert not serving.has_text(b'data: {"choices":[],"usage":{"completion_tokens":3}}')


def test_the_summary_tells_throughput_and_first_text_apart() -> None:
    def rounds(tokens_per_s: float, *waits: float) -> list[serving.Round]:
        return [serving.Round(tokens_per_s, waits), serving.Round(tokens_per_s, waits)]

    whole = {"vllm": rounds(100), "capture on": rounds(96), "capture off": rounds(100)}
    streamed = {
        "vllm": rounds(100, 0.1, 0.1, 0.2),
        "capture on": rounds(90, 0.11, 0.11, 0.3),
        "capture off": rounds(100, 0.1, 0.1, 0.1),
    }
    real = serving.summary("smollm2", whole, streamed)
    assert [row["graph_over_vllm"] for row in real[:2]] == [0.96, 0.9]
    assert (real[2]["p50_graph_over_vllm"], real[2]["p99_graph_over_vllm"]) == (1.1, 1.5)
    assert real[2]["requests"] == 6
    assert [row["graph_over_vllm_by_round"] for row in real[:2]] == [[0.96, 0.96], [0.9, 0.9]]
    assert real[2]["p50_s_by_round"]["capture on"] == [0.11, 0.11]
    assert [row["ok"] for row in real] == [True, False, False]
    assert all(row["ok"] for row in serving.summary("tiny", whole, streamed))


# --- conversations -----------------------------------------------------------------------------------------------


def calls_a_tool(call: EngineCall) -> Script:
    """A call of a tool in ids of its own, with half of the prompt from the cache."""
    events = (ToolCallStart(0, f"call_{call.call_id}", "write_log"), ToolCallDelta(0, '{"entry":"a storm"}'))
    return Script(steps=[Step(token_ids=[5, 6, 7], events=events)], cached_tokens=call.prompt_ids.size // 2)


async def test_a_conversation_is_one_chain_and_its_hits_are_counted(template: HfChatTemplate) -> None:
    replica = Replica(template, calls_a_tool)
    async with listening(replica.app) as client:
        server = str(client.base_url).rstrip("/")
        result = await multi_turn.load(server, tracked=True, rollouts=3, turns=4)
    rollout_ids = await replica.state.store.rollout_ids()
    assert len(rollout_ids) == 3
    for rollout_id in rollout_ids:
        root, *later = await replica.state.entries(rollout_id)
        assert root.parent == Root()
        assert len(later) == 3
        assert all(isinstance(entry.parent, Continues) for entry in later)
    assert [len(calls) for calls in result.rollouts] == [4, 4, 4]
    sizes = sorted(call.prompt_ids.size for call in replica.engine.calls)
    assert sorted(call.prompt_tokens for call in result.calls()) == sizes
    assert sorted(call.cached_tokens for call in result.calls()) == [size // 2 for size in sizes]
    assert {call.generated_tokens for call in result.calls()} == {3}


@pytest.mark.parametrize("tool_calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_after_a_call_that_was_cut_off_the_user_asks_again(tool_calls: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": '<tool_call>{"na', "refusal": None, **tool_calls}
    echoed, asked = multi_turn.continued(message, turn=0)
    assert echoed == {"role": "assistant", "content": '<tool_call>{"na'}
    assert asked["role"] == "user"


def test_the_assistant_is_echoed_as_it_came_less_what_it_left_out() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": "search_log", "arguments": '{"query": "x"}'}}
        for name in ("a", "b")
    ]
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    echoed, *results = multi_turn.continued(message, turn=1)
    assert echoed == {"role": "assistant", "tool_calls": calls}
    assert [result["tool_call_id"] for result in results] == ["a", "b"]


def test_the_summary_of_rounds() -> None:
    def played(wall_s: float, cached: int) -> multi_turn.Round:
        first = multi_turn.Call(0.1, prompt_tokens=100, cached_tokens=0, generated_tokens=20, has_tool_call=True)
        second = multi_turn.Call(0.3, prompt_tokens=180, cached_tokens=cached, generated_tokens=20, has_tool_call=True)
        return multi_turn.Round(wall_s, [[first, second]])

    done = {"vllm": [played(2.0, 60), played(3.0, 60)], "graph": [played(2.0, 120), played(2.0, 120)]}
    row = multi_turn.summary("smollm2", done)
    assert row["ok"]
    assert row["vllm_over_graph"] == 1.25
    assert row["vllm_over_graph_by_round"] == [1.0, 1.5]
    assert row["cached_of_prompt"] == {"vllm": 0.214, "graph": 0.429}
    assert row["cached_of_history"] == {"vllm": 0.5, "graph": 1.0}
    assert not multi_turn.summary("smollm2", {"vllm": done["graph"], "graph": done["vllm"]})["ok"]


# --- new weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_an_update_that_calls_do_not_run_through_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    calls_ended = threading.Event()
    read = 0

    def monotonic() -> float:
        """Read as the calls begin, and again as they have ended."""
        nonlocal read
        read += 1
        if read == 2:
            calls_ended.set()
        return float(read)

    def update() -> None:
        assert not is_late or calls_ended.wait(60)

    async def stream(*_: object) -> int:
        pushes = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "push"]
        if pushes and not is_late:
            await asyncio.wait(pushes)
        return 1

    monkeypatch.setattr(weights, "EVERY_S", 0.0)
    monkeypatch.setattr(weights, "stream", stream)
    monkeypatch.setattr(weights, "time", SimpleNamespace(monotonic=monotonic))
    work = weights.Load(calls=1, tokens=1).seconds("the graph", update)
    if is_late:
        with pytest.raises(SystemExit, match=r"all calls of the graph ended after 1\.0 s, before the update did"):
            asyncio.run(work)
    else:
        assert asyncio.run(work) == 1.0
