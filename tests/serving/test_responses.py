"""Responses through the gateway, with the real SDK: what a client gets, and what is on record of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from gym_capture.calls import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from gym_capture.capture.records import Continues, Root
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import Script, Scripter, Step, in_order, saying
from gym_capture.errors import EngineDeadError
from tests.serving.replica import Replica

STOP = "<|im_end|>"
QUESTION: dict[str, Any] = {"role": "user", "content": "How warm is it in Rome?"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "ask", "parameters": {"type": "object"}, "strict": False}],
}
TOOLS = [WEATHER, AGENTS, {"type": "web_search"}]
ASKS = Script(
    steps=[
        Step(token_ids=[11], events=[ReasoningDelta("Let me")]),
        Step(token_ids=[12, 13], events=[ReasoningDelta(" see."), TextDelta("\n")]),
        Step(token_ids=[14], events=[TextDelta("Asking.")]),
        Step(token_ids=[15], events=[TextDelta("\n"), ToolCallStart(0, "call_0", "weather")]),
        Step(token_ids=[16, 17], events=[ToolCallDelta(0, '{"city": '), ToolCallDelta(0, '"Rome"}')]),
        Step(token_ids=[18], events=[ToolCallStart(1, "call_1", "agents__ask"), ToolCallDelta(1, "{}")]),
    ],
    cached_tokens=1,
)


def client_of(replica: Replica, *, rollout_id: str | None = "r1") -> AsyncOpenAI:
    prefix = "" if rollout_id is None else f"/ng-rollout/{rollout_id}"
    return AsyncOpenAI(base_url=f"http://gateway{prefix}/v1", api_key="unused", max_retries=0, http_client=replica.http)


def always(script: Script) -> Scripter:
    return lambda _: script


async def respond(client: AsyncOpenAI, how: str, **fields: Any) -> Response:
    """The response, as clients get it in three ways."""
    fields = {"model": "policy", **fields}
    if how == "whole":
        whole: Response = await client.responses.create(**fields)
        return whole
    if how == "helper":
        async with client.responses.stream(**fields) as stream:
            return await stream.get_final_response()
    events = [event async for event in await client.responses.create(**fields, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    final: Response = last.response
    return final


@pytest.mark.parametrize("how", ["whole", "events", "helper"])
async def test_a_response_is_the_generation_and_its_record_has_its_id(template: HfChatTemplate, how: str) -> None:
    replica = Replica(template, always(saying(template, "27 degrees.", stop_token=STOP)))
    response = await respond(
        client_of(replica), how, model="gpt-any", input="How warm?", instructions="Be brief.", max_output_tokens=50
    )
    assert (response.output_text, response.status, response.model) == ("27 degrees.", "completed", "gpt-any")
    (entry,) = await replica.state.entries()
    assert response.id == entry.model_call_id
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert response.usage.input_tokens == entry.prompt_token_ids.size
    assert response.usage.output_tokens == entry.generation_token_ids.size
    assert (entry.parent, entry.request.max_tokens, entry.request.requested_model) == (Root(), 50, "gpt-any")
    assert template.decode(entry.prompt_token_ids).index("Be brief.") < template.decode(entry.prompt_token_ids).index(
        "How warm?"
    )


@pytest.mark.parametrize("how", ["whole", "events", "helper"])
async def test_an_agent_that_echoes_items_continues_from_the_very_ids(template: HfChatTemplate, how: str) -> None:
    replica = Replica(template, in_order([ASKS, saying(template, "27.", stop_token=STOP)]))
    client = client_of(replica)
    fields: dict[str, Any] = {"tools": TOOLS, "include": ["reasoning.encrypted_content"], "store": False}
    first = await respond(client, how, input=[QUESTION], **fields)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    asked = [item for item in first.output if item.type == "function_call"]
    assert [(call.namespace, call.name, call.arguments) for call in asked] == [
        (None, "weather", '{"city": "Rome"}'),
        ("agents", "ask", "{}"),
    ]
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 1
    echo = [item.to_dict() for item in first.output]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "27"} for call in asked]
    second = await respond(client, how, input=[QUESTION, *echo, *results], **fields)
    assert second.output_text == "27."
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)
    assert two.prefix.supplied
    np.testing.assert_array_equal(two.prompt_token_ids[: one.cum_len], one.cumulative_ids())
    offered = [tool.name for tool in replica.engine.calls[0].request.conversation.tools]
    assert offered == ["weather", "agents__ask"]


async def test_what_codex_sends_continues_turn_by_turn(template: HfChatTemplate) -> None:
    """The shape of its requests: developer messages, tools of three types, items with ids and without status."""

    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "id": "msg_x", "role": role, "content": [{"type": "input_text", "text": text}]}

    body = {
        "model": "policy",
        "input": [message("developer", "You are a coding agent."), message("user", "<cwd>/w</cwd>"), QUESTION],
        "tools": [{**WEATHER, "description": "d"}, AGENTS, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"turn_id": "t"},
    }

    async def play(replica: Replica, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Items in the order of their done events, which is all that Codex reads between created and completed."""
        response: httpx.Response = await replica.http.post("/ng-rollout/r1/v1/responses", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
        return [event["item"] for event in events if event["type"] == "response.output_item.done"]

    replica = Replica(template, in_order([ASKS, ASKS, saying(template, "Done.", stop_token=STOP)]))
    past = list(body["input"])  # type: ignore[call-overload]
    for _ in range(2):
        items = await play(replica, {**body, "input": past})
        past += [{key: value for key, value in item.items() if key != "status"} for item in items]
        past += [
            {"type": "function_call_output", "id": "fco_x", "call_id": item["call_id"], "output": "Exit code 0\n"}
            for item in items
            if item["type"] == "function_call"
        ]
    await play(replica, {**body, "input": past})
    one, two, three = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)
    assert three.parent == Continues(two.model_call_id, two.cum_len)


@pytest.mark.parametrize("kept", [0, 1])
async def test_an_echo_is_the_sample_that_the_agent_kept_and_not_its_sibling(
    template: HfChatTemplate, kept: int
) -> None:
    """One sample is the bare text that a custom tool takes, the other has the arguments that it should have."""
    custom = {"type": "custom", "name": "patch"}
    samples = [
        Script(steps=[Step(token_ids=[id, 2], events=[ToolCallStart(0, "c", "patch"), ToolCallDelta(0, arguments)])])
        for id, arguments in ((100, "abc"), (101, '{"input":"abc"}'))
    ]

    replica = Replica(template, in_order([*samples, saying(template, "Done.", stop_token=STOP)]))
    client = client_of(replica)
    replies = [await respond(client, "whole", input=[QUESTION], tools=[custom]) for _ in samples]
    echo = [item.to_dict() for item in replies[kept].output]
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    await respond(client, "whole", input=[QUESTION, *echo, result], tools=[custom])
    *sampled, last = await replica.state.entries()
    parent = sampled[kept]
    assert last.parent == Continues(replies[kept].id, parent.cum_len)
    np.testing.assert_array_equal(last.prompt_token_ids[: parent.cum_len], parent.cumulative_ids())


@pytest.mark.parametrize("how", ["whole", "events", "helper"])
async def test_calls_whose_arguments_come_in_turns_are_told_one_after_the_other(
    template: HfChatTemplate, how: str
) -> None:
    script = Script(
        steps=[
            Step(token_ids=[11], events=[ToolCallStart(0, "c0", "weather"), ToolCallDelta(0, '{"city":')]),
            Step(token_ids=[12], events=[ToolCallStart(1, "c1", "agents__ask"), ToolCallDelta(1, '{"q":')]),
            Step(token_ids=[13], events=[ToolCallDelta(0, '"Rome"}'), TextDelta("Asking."), ToolCallDelta(1, "1}")]),
        ]
    )

    replica = Replica(template, in_order([script, saying(template, "Done.", stop_token=STOP)]))
    client = client_of(replica)
    first = await respond(client, how, input=[QUESTION], tools=TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city":"Rome"}'), ("ask", '{"q":1}')]
    assert first.output_text == "Asking."
    echo = [item.to_dict() for item in first.output]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    await respond(client, how, input=[QUESTION, *echo, *results], tools=TOOLS)
    one, two = await replica.state.entries()
    assert two.parent == Continues(one.model_call_id, one.cum_len)


async def test_the_helper_tells_text_and_arguments_as_they_come(template: HfChatTemplate) -> None:
    replica = Replica(template, always(ASKS))
    async with client_of(replica).responses.stream(model="policy", input="q", tools=TOOLS) as stream:
        told = [
            (event.delta, event.snapshot)
            async for event in stream
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta")
        ]
    assert told == [
        ("\nAsking.", "\nAsking."),
        ("\n", "\nAsking.\n"),
        ('{"city": ', '{"city": '),
        ('"Rome"}', '{"city": "Rome"}'),
        ("{}", "{}"),
    ]


async def test_structured_output_is_parsed_by_the_sdk(template: HfChatTemplate) -> None:
    class Place(BaseModel):
        city: str

    replica = Replica(template, always(saying(template, '{"city": "Rome"}', stop_token=STOP)))
    response = await client_of(replica).responses.parse(model="policy", input="q", text_format=Place)
    assert response.output_parsed == Place(city="Rome")
    form = replica.engine.calls[0].request.response_format
    assert form is not None
    assert (form["type"], form["json_schema"]["name"], form["json_schema"]["strict"]) == (
        "json_schema",
        "Place",
        True,
    )
    assert form["json_schema"]["schema"]["properties"]["city"]["type"] == "string"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_those_of_the_record(template: HfChatTemplate, stream: bool) -> None:
    script = Script(steps=[Step(token_ids=[5], log_probs=[-0.25], text="He"), Step(token_ids=[6, 7], text="")])
    replica = Replica(template, always(script))
    fields = {"input": "q", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = await respond(client_of(replica), "events" if stream else "whole", **fields)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.logprob for entry in part.logprobs] == [-0.25, -0.5, -0.5]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [1, 1, 1]


async def test_RS_09_no_tools_to_choose_from_are_none_on_record(template: HfChatTemplate) -> None:
    replica = Replica(template, always(saying(template, "a", stop_token=STOP)))
    response = await client_of(replica).responses.create(model="policy", input="q", tools=[], tool_choice="auto")
    assert response.output_text == "a"
    (entry,) = await replica.state.entries()
    assert not entry.request.has_tools


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_was_cut_off_is_incomplete(template: HfChatTemplate, stream: bool) -> None:
    replica = Replica(template, always(Script(steps=[Step(token_ids=[5], text="He")], finish_reason="length")))
    created = await client_of(replica).responses.create(model="policy", input="q", stream=stream)
    if stream:
        *_, last = [event async for event in created]
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = created
    assert (response.status, response.output_text) == ("incomplete", "He")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (entry,) = await replica.state.entries()
    assert entry.reply.finish_reason == "length"


async def test_ST_08_an_engine_that_dies_in_mid_stream_ends_it_in_response_failed(template: HfChatTemplate) -> None:
    script = Script(steps=[Step(token_ids=[5], text="par")], raises=EngineDeadError("gone"))
    replica = Replica(template, always(script))
    events: list[ResponseStreamEvent] = [
        event async for event in await client_of(replica).responses.create(model="policy", input="q", stream=True)
    ]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert not any(event.type == "response.completed" for event in events)
    for entry in await replica.state.entries():
        assert entry.reply.finish_reason not in ("stop", "length", "tool_calls")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": "long " * 5000}, "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_those_of_the_sdk_and_name_the_parameter(
    template: HfChatTemplate, fields: dict[str, Any], param: str, stream: bool
) -> None:
    replica = Replica(template, always(ASKS))
    with pytest.raises(BadRequestError) as caught:
        await client_of(replica).responses.create(**{"model": "policy", "input": "q", **fields, "stream": stream})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert replica.engine.calls == []


async def test_a_model_that_is_not_served_is_not_found_where_nothing_is_tracked(template: HfChatTemplate) -> None:
    replica = Replica(template, always(ASKS))
    client = client_of(replica, rollout_id=None)
    with pytest.raises(NotFoundError) as caught:
        await client.responses.create(model="gpt-9", input="q")
    assert caught.value.code == "model_not_found"
    response = await client.responses.create(model="policy", input="q", tools=[WEATHER])
    assert response.status == "completed"
