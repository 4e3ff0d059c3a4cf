"""vLLM's own parsers over what an engine generates, in whatever steps it came; without an engine."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.parser import ParserManager
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from gym_capture.calls import (
    ModelRequest,
    NamedToolChoice,
    ReplyEvent,
    TextDelta,
    ToolCallDelta,
    ToolChoice,
    TurnBuilder,
)
from gym_capture.capture.records import as_ids
from gym_capture.conversation import AssistantTurn, Conversation, Message, Tool
from gym_capture.engines.base import GenerationChunk
from gym_capture.engines.steps import StepSplitter
from gym_capture.engines.vllm import chat_request
from gym_capture.engines.vllm_parsing import Parsers, VllmParser, text_of_next
from gym_capture.models import tiny_dir

TOOLS = (
    Tool("f", "", '{"type":"object","properties":{"a":{"type":"integer"}}}'),
    Tool("get_weather", "", '{"type":"object","properties":{"city":{"type":"string"}}}'),
    Tool("now", "", '{"type":"object","properties":{}}'),
)
CALLS = [("f", {"a": 1}), ("get_weather", {"city": 'Zürich } " 😀'})]
F, WEATHER = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in CALLS)
XML = """<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>
<tool_call>
<function=get_weather>
<parameter=city>
Zürich } " 😀
</parameter>
</function>
</tool_call>"""


class Format(NamedTuple):
    """How a family of models writes calls, with what else its tokenizer knows."""

    tool_parser: str
    reasoning_parser: str | None
    added_tokens: tuple[str, ...]
    text: str


FORMATS = {
    "hermes": Format(
        "hermes",
        None,
        ("<tool_call>", "</tool_call>"),
        f"Sure 😀.<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>",
    ),
    "hermes with reasoning": Format(
        "hermes",
        "deepseek_r1",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        f"Why { {} } <b not?</think>Sure<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>",
    ),
    "qwen3": Format(
        "qwen3_coder",
        "qwen3",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        f"Why {{}} <b not?\n</think>\n\nSure {XML}",
    ),
    "llama3": Format(
        "llama3_json", None, ("<|python_tag|>",), f"{F}; {WEATHER}".replace('"arguments"', '"parameters"')
    ),
    "deepseek": Format(
        "deepseek_v31",
        None,
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        "Sure<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"
            for name, arguments in CALLS
        )
        + "<｜tool▁calls▁end｜>",
    ),
    "olmo": Format("olmo3", None, (), "<function_calls>f(a=1)\nget_weather(city='Zürich } \" 😀')</function_calls>"),
}
PROMPT_IDS = [1, 2, 3]
CHOICES: list[ToolChoice] = ["auto", "required", NamedToolChoice("get_weather")]


@cache
def plain_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_dir())


@cache
def tokenizer(added_tokens: tuple[str, ...]) -> Any:
    made = copy.deepcopy(plain_tokenizer())
    made.add_tokens(list(added_tokens))
    return get_cached_tokenizer(made)  # as the engine has it


@cache
def parser_class(tool_parser: str, reasoning_parser: str | None, added_tokens: tuple[str, ...]) -> Any:
    return ParserManager.get_parser(
        tool_parser_name=tool_parser,
        reasoning_parser_name=reasoning_parser,
        enable_auto_tools=True,
        tokenizer=tokenizer(added_tokens),
    )


@cache
def ids_of(form: Format, text: str) -> list[int]:
    ids: list[int] = tokenizer(form.added_tokens)(text, add_special_tokens=False)["input_ids"]
    return ids


def read(
    form: Format,
    ids: Sequence[int],
    ends: Sequence[int] = (),
    *,
    tool_choice: ToolChoice = "auto",
    stop: str | None = None,
    finish_reason: str = "stop",
) -> list[list[ReplyEvent]]:
    """The events of each step, if the engine's steps end at `ends`; their text comes from vLLM's detokenizer."""
    known = tokenizer(form.added_tokens)
    request = ModelRequest(
        requested_model="m",
        conversation=Conversation((Message("user", "hi"),), TOOLS),
        tool_choice=tool_choice,
        sampling={} if stop is None else {"stop": [stop]},
    )
    chat = chat_request(request)
    parser = parser_class(form.tool_parser, form.reasoning_parser, form.added_tokens)(
        known, chat.tools, model_config=None, chat_template_kwargs={}
    )
    chat = parser.adjust_request(chat)
    params = chat.to_sampling_params(1_000, {})
    splitter = StepSplitter(text_of_next(known, PROMPT_IDS, params))
    names = Parsers(form.tool_parser, form.reasoning_parser)
    reader = VllmParser(parser, names, chat, PROMPT_IDS, splitter, known)
    detokenizer = engine_detokenizer(known, params)
    steps: list[list[ReplyEvent]] = []
    start = 0
    for end in [*ends, len(ids)]:
        stopped = detokenizer.update(list(ids[start:end]), False)
        is_last = end == len(ids) or stopped is not None
        new_ids = as_ids(np.array(detokenizer.output_token_ids[start:], np.int32))  # none behind a stop string
        chunk = GenerationChunk(
            token_ids=new_ids,
            log_probs=np.zeros(new_ids.size, np.float32),
            text=detokenizer.get_next_output_text(is_last, True),
            finish_reason=finish_reason if is_last else None,
        )
        steps.append(list(reader.feed(chunk)))
        start = end
        if is_last:
            break
    return steps


def engine_detokenizer(known: Any, params: SamplingParams) -> IncrementalDetokenizer:
    return IncrementalDetokenizer.from_new_request(
        known, EngineCoreRequest("r", PROMPT_IDS, None, params, None, 0.0, None, None, None)
    )


def turn(steps: Sequence[Sequence[ReplyEvent]]) -> AssistantTurn:
    """What a client has in the end; ids of calls are random, so they are left out."""
    builder = TurnBuilder()
    for event in (event for step in steps for event in step):
        builder.add(event)
    made = builder.turn()
    return made._replace(tool_calls=tuple(call._replace(id="") for call in made.tool_calls))


def calls(made: AssistantTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in made.tool_calls]


def step_ends(ids: Sequence[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, len(ids)), unique=True, max_size=8).map(
        lambda ends: sorted(end for end in ends if end < len(ids))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_whole_replies_have_the_calls_that_the_model_wrote(name: str) -> None:
    form = FORMATS[name]
    made = turn(read(form, ids_of(form, form.text)))
    assert calls(made) == CALLS
    reasoning, _, text = form.text.rpartition("</think>")
    assert made.reasoning.strip() == reasoning.strip()
    in_front, *_ = re.split(r"[<{]", text)
    assert made.text.strip() == in_front.strip()


def test_ST_02_text_is_text_and_nothing_of_a_call_where_calls_may_come() -> None:
    """vLLM's messages have an empty list of calls beside their text."""
    form = FORMATS["hermes"]
    ids = ids_of(form, "Hi there")
    for ends in ((), range(1, len(ids))):
        steps = read(form, ids, ends)
        assert all(isinstance(event, TextDelta) for step in steps for event in step)
        assert turn(steps) == AssistantTurn("Hi there")


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(data=st.data())
def test_ST_10_any_grouping_of_steps_gives_the_same_turn(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    ids = ids_of(form, form.text)
    ids = ids[: data.draw(st.integers(1, len(ids)), label="cut by length")]
    choice = data.draw(st.sampled_from(["auto", "none", "required", NamedToolChoice("f")]), label="tool choice")
    stop = data.draw(st.sampled_from([None, "</zzz", '"city', "Zü"]), label="stop string")
    whole = turn(read(form, ids, tool_choice=choice, stop=stop))
    grouped = read(form, ids, data.draw(step_ends(ids), label="ends of steps"), tool_choice=choice, stop=stop)
    assert turn(grouped) == whole
    assert turn(read(form, ids, range(1, len(ids)), tool_choice=choice, stop=stop)) == whole


@pytest.mark.parametrize("grouping", [[1, 1, 1, 1], [2, 2], [1, 3], [4]])
def test_ST_10_the_closing_brace_of_a_call_is_not_lost(grouping: list[int]) -> None:
    form = FORMATS["hermes"]
    parts = ["<tool_call>", '{"name": "f", "arguments": {"a": 1}', "}", "</tool_call>"]
    lengths = [len(ids_of(form, part)) for part in parts]
    ids = [token_id for part in parts for token_id in ids_of(form, part)]
    ends, n = [], 0
    for size in grouping:
        n += size
        ends.append(sum(lengths[:n]))
    made = turn(read(form, ids, ends[:-1]))
    assert (made.text, calls(made)) == ("", [("f", {"a": 1})])


ARGUMENTS = '{"city": "Zürich"}'
CALL = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'


@pytest.mark.parametrize(
    ("name", "tool_choice", "text"),
    [
        *(("hermes", choice, f"<tool_call>{CALL}".replace("parameters", "arguments")) for choice in CHOICES),
        *(("llama3", choice, CALL) for choice in CHOICES),
        # Where vLLM knows no grammar of the format itself, it forces JSON: an array of calls, or the arguments alone.
        ("olmo", "auto", "<function_calls>get_weather(city='Zürich')"),
        ("olmo", "required", f"[{CALL}]"),
        ("olmo", NamedToolChoice("get_weather"), ARGUMENTS),
    ],
    ids=str,
)
def test_a_call_cut_by_length_is_a_call_streamed_and_whole(name: str, tool_choice: ToolChoice, text: str) -> None:
    form = FORMATS[name]
    ids = ids_of(form, text[: text.index("rich")])
    whole = read(form, ids, tool_choice=tool_choice, finish_reason="length")
    streamed = read(form, ids, range(1, len(ids)), tool_choice=tool_choice, finish_reason="length")
    assert turn(whole) == turn(streamed)
    ((_, name_of_call, arguments),) = turn(whole).tool_calls
    assert (turn(whole).text, name_of_call) == ("", "get_weather")
    assert ARGUMENTS.startswith(arguments)
    assert arguments


def test_ST_01_control_tokens_that_a_parser_swallows_leave_only_the_text() -> None:
    form = FORMATS["hermes"]
    ids = ids_of(form, form.text)
    steps = read(form, ids, range(1, len(ids)))
    assert [] in steps  # parsers have nothing to say of some tokens; what is recorded comes from the engine's chunks
    assert calls(turn(steps)) == CALLS


def test_streaming_has_text_and_arguments_as_they_come() -> None:
    form = FORMATS["hermes"]
    ids = ids_of(form, form.text)
    steps = read(form, ids, range(1, len(ids)))
    assert sum(any(isinstance(event, TextDelta) for event in step) for step in steps) > 2
    assert sum(any(isinstance(event, ToolCallDelta) for event in step) for step in steps) > 5
    (whole,) = read(form, ids)
    assert len(whole) == 5  # a text, and a start and the arguments of each call: not an event for every token


def test_ST_06_a_character_split_over_tokens_is_whole_in_the_delta_that_has_it() -> None:
    form = FORMATS["hermes"]
    ids = ids_of(form, " 😀!")
    assert len(ids) == 3
    steps = read(form, ids, [1, 2])
    texts = ["".join(event.text for event in step if isinstance(event, TextDelta)) for step in steps]
    assert texts == ["", " 😀", "!"]
    # Cut inside the character: no text of it, and no broken one.
    assert turn(read(form, ids[:1])).text == ""
