"""Thinking is read alike in the first turn and in every later one, by whichever of vLLM's parsers."""

from __future__ import annotations

import asyncio
import copy
import json
from functools import cache
from typing import Any, NamedTuple

import httpx
import pytest
from transformers import AutoTokenizer
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.hf import get_cached_tokenizer

from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.models import tiny_dir
from gym_capture.serving.call_service import CallService
from tests.engines.doctored import DoctoredLlm, engine_over
from tests.serving.replica import LocalState, gateway_over


class Thinking(NamedTuple):
    """How a family of models writes thoughts."""

    start: str = "<think>\n"
    end: str = "\n</think>\n\n"
    opens_in_prompt: bool = True
    """Its parser knows thinking that the generation prompt opens."""
    closes_in_prompt: bool = True
    opens_itself: bool = True


THINK = Thinking()
FORMATS = {
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v4",
            "deepseek_v41",
            "ernie45",
            "glm45",
            "glm47",
            "holo2",
            "hy_v4",
            "kimi_k2",
            "ling3",
            "mimo",
            "minicpmv",
            "minimax_m2",
            "nemotron_v3",
            "qwen3",
            "step3p5",
        ),
        THINK,
    ),
    "step3": Thinking(opens_itself=False),
    "olmo3": Thinking(closes_in_prompt=False),  # it looks for the end in three ids, which are one here
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "minimax_m3": Thinking("<mm:think>", "</mm:think>", opens_in_prompt=False),
    "k2_horizon": Thinking("<ifm|think>", "</ifm|think>"),
    "mistral": Thinking("[THINK]", "[/THINK]", opens_in_prompt=False),
    "granite": Thinking(
        "Here is my thought process:", "Here is my response:", opens_in_prompt=False, closes_in_prompt=False
    ),
    "hunyuan_a13b": Thinking("<think>\n", "\n</think>\n<answer>\n", opens_in_prompt=False, closes_in_prompt=False),
    "plamo3": Thinking("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "granite_thinking_parser": Thinking("<think>", "</think>"),
}
NOT_HERE = {
    "cohere_command3": "needs a package of its own",
    "cohere_command4": "needs a package of its own",
    "deepseek_v3": "does not think unless the template is told to",
    "gemma4": "does not think unless the template is told to",
    "hy_v3": "does not think unless the template is told to",
    "poolside_v1": "does not think unless the template is told to",
    "hf": "needs a tokenizer that describes its replies",
    "inkling": "channels instead of thoughts",
    "kimi_k3": "channels instead of thoughts",
    "muse_glimmer": "channels instead of thoughts",
    "openai_gptoss": "channels instead of thoughts",
    "minimax_m2_append_think": "leaves thoughts in the text",
}
"""Parsers without an entry above, and why."""
TOKENS = sorted(
    {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|im_end|>"}
    | {
        part.strip()
        for form in FORMATS.values()
        for part in form[:2]
        if part.strip()[:1] in "<[" and "\n<" not in part[1:]
    }
    | {"</think>"}
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}START{{ m.reasoning_content }}END{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPENING{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MENTION = 'I could write <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> but no'
THOUGHTS = ["old thought", "new thought", MENTION, "last thought"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@cache
def plain_tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(tiny_dir())
    made.add_tokens(TOKENS)
    return made


@cache
def tokenizer(form: Thinking, opening: str) -> Any:
    made = copy.deepcopy(plain_tokenizer())
    made.chat_template = (
        TEMPLATE.replace("START", form.start).replace("END{%", form.end + "{%").replace("OPENING", opening)
    )
    return get_cached_tokenizer(made)


class Reading(NamedTuple):
    reasoning: str
    text: str
    calls: list[str]
    reasoning_ended: bool | None
    """What the engine was told."""
    reasoning_tokens: int


def converse(
    parser: str, form: Thinking, opening: str, replies: list[tuple[str, str]], *, supply: bool, stream: bool
) -> tuple[list[Reading], LocalState]:
    """A conversation through the real gateway, call service and adapter. `replies`: what is generated and echoed."""
    known = tokenizer(form, opening)
    llm = DoctoredLlm(known, [])
    state = LocalState()
    service = CallService(
        engine_over(llm, tool_parser="hermes", reasoning_parser=parser),
        state=state,
        fingerprinter=Fingerprinter(),
        prefix_supply=supply,
        sampling_pin={},
        session_cache=4,
    )
    app = gateway_over(service)
    readings = []

    async def run() -> None:
        messages: list[dict[str, Any]] = []
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", trust_env=False) as http:
            for number, (generated, thought) in enumerate(replies):
                llm.ids = known(generated, add_special_tokens=False)["input_ids"]
                messages.append({"role": "user", "content": f"question {number}"})
                body = {"model": "policy", "messages": messages, "tools": [TOOL], "stream": stream}
                body |= {"stream_options": {"include_usage": True}} if stream else {}
                response = await http.post("/ng-rollout/r1/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                readings.append(read(response, llm.asked[-1]["reasoning_ended"], stream=stream))
                messages.append({"role": "assistant", "content": "answer", "reasoning_content": thought})

    asyncio.run(run())
    return readings, state


def read(response: httpx.Response, reasoning_ended: bool | None, *, stream: bool) -> Reading:
    if stream:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        parts = [choice["delta"] for event in events for choice in event["choices"]]
        usage = events[-1]["usage"]
    else:
        parts = [response.json()["choices"][0]["message"]]
        usage = response.json()["usage"]
    return Reading(
        "".join(part.get("reasoning_content") or "" for part in parts).strip(),
        "".join(part.get("content") or "" for part in parts).strip(),
        [name for part in parts for call in part.get("tool_calls") or () if (name := call["function"].get("name"))],
        reasoning_ended,
        usage["completion_tokens_details"]["reasoning_tokens"],
    )


WAYS = pytest.mark.parametrize(("supply", "stream"), [(True, True), (False, False)], ids=["supplied", "rendered"])


@WAYS
@pytest.mark.parametrize("opens", [False, True], ids=["model opens", "prompt opens"])
@pytest.mark.parametrize("parser", FORMATS)
def test_ST_12_every_turn_is_read_like_the_first(parser: str, opens: bool, supply: bool, stream: bool) -> None:
    form = FORMATS[parser]
    if not (form.opens_in_prompt if opens else form.opens_itself):
        return
    start = "" if opens else form.start
    replies = [(f"{start}{thought}{form.end}answer", thought) for thought in THOUGHTS]
    readings, state = converse(parser, form, form.start if opens else "", replies, supply=supply, stream=stream)
    ended = None if parser == "granite" else False
    assert [reading[:4] for reading in readings] == [(thought, "answer", [], ended) for thought in THOUGHTS]
    if supply:
        assert [entry.prefix.supplied for entry in asyncio.run(state.entries())] == [False, True, True, True]
    for reading in readings:
        assert 2 <= reading.reasoning_tokens < 45


@WAYS
@pytest.mark.parametrize("parser", FORMATS)
def test_ST_12_a_turn_without_thinking_has_text_and_calls(parser: str, supply: bool, stream: bool) -> None:
    form = FORMATS[parser]
    if not form.closes_in_prompt:
        return
    replies = [("answer", ""), (CALL, ""), ("answer", "")]
    readings, _ = converse(parser, form, form.start + form.end, replies, supply=supply, stream=stream)
    assert [reading[:3] for reading in readings] == [("", "answer", []), ("", "", ["f"]), ("", "answer", [])]
    assert {reading.reasoning_tokens for reading in readings} == {0}
    assert {reading.reasoning_ended for reading in readings} <= {True, None}


@WAYS
@pytest.mark.parametrize("parser", ["glm45", "qwen3", "nemotron_v3", "step3p5"])
def test_a_call_that_ends_a_thought_for_good_is_a_call(parser: str, supply: bool, stream: bool) -> None:
    form = FORMATS[parser]
    replies = [(f"{form.start}thought{CALL}", "thought")] * 2
    readings, _ = converse(parser, form, "", replies, supply=supply, stream=stream)
    assert [reading[:3] for reading in readings] == [("thought", "", ["f"])] * 2


def test_every_parser_of_thinking_is_tried_or_it_is_said_why_not() -> None:
    assert set(ReasoningParserManager.list_registered()) == set(FORMATS) | set(NOT_HERE)
