"""What is on record of sampling, and what forced calls are sampled under."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.parser import ParserManager
from vllm.sampling_params import StructuredOutputsParams

from gym_capture.calls import ModelRequest, NamedToolChoice, ToolChoice
from gym_capture.conversation import Conversation, Message, Tool
from gym_capture.dialects import fields
from gym_capture.engines.vllm import chat_request, constrained
from gym_capture.engines.vllm_sampling import ALWAYS, AS_A_FACT, IF_SET, NOT_RECORDED, recorded_sampling
from gym_capture.models import tiny_dir

# --- what is on record of sampling -------------------------------------------------------------------------------


def test_every_parameter_of_vllm_is_recorded_or_left_out_on_purpose() -> None:
    decided = [*ALWAYS, *IF_SET, *AS_A_FACT, *NOT_RECORDED]
    assert sorted(decided) == sorted(SamplingParams.__struct_fields__)


def test_whatever_a_client_may_ask_is_on_record() -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.4,
        "seed": 5,
        "min_tokens": 6,
        "stop": ["x"],
        "logit_bias": {"5": -100.0, "6": 1.5},
    }
    assert set(asked) == set(fields.SAMPLING)
    request = ModelRequest(requested_model="m", conversation=Conversation(()), sampling=asked)
    params = chat_request(request).to_sampling_params(9, {})
    assert recorded_sampling(params) == {**asked, "max_tokens": 9}


def test_what_a_model_s_own_defaults_say_is_on_record_and_what_does_nothing_is_not() -> None:
    request = ModelRequest(requested_model="m", conversation=Conversation(()), sampling=fields.whole_pin({"top_k": 0}))
    defaults = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "stop_token_ids": [7]}
    pinned = {name: value for name, value in fields.NEUTRAL.items() if name != "logit_bias"}
    # What it stops at is no part of a pin.
    found = recorded_sampling(chat_request(request).to_sampling_params(9, defaults))
    assert found == {**pinned, "max_tokens": 9, "stop_token_ids": [7]}
    params = SamplingParams(
        ignore_eos=True,
        allowed_token_ids=[1, 2],
        bad_words=["no"],
        thinking_token_budget=3,
        extra_args={"mine": 1},
        structured_outputs=StructuredOutputsParams(json="{}"),
    )
    set_by_others = {name: value for name, value in recorded_sampling(params).items() if name not in ALWAYS}
    assert set_by_others == {
        "ignore_eos": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "thinking_token_budget": 3,
        "extra_args": {"mine": 1},
        "structured_outputs": True,
    }


# --- forced calls ------------------------------------------------------------------------------------------------


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_dir())


@cache
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer()))


def grammar(tool_parser: str, tool: Tool, choice: ToolChoice) -> Any:
    """What a call of `tool` is sampled under."""
    made = ParserManager.get_parser(
        tool_parser_name=tool_parser, reasoning_parser_name=None, enable_auto_tools=True, tokenizer=tokenizer()
    )
    assert made is not None
    conversation = Conversation((Message("user", "hi"),), (tool,))
    request = ModelRequest(requested_model="m", conversation=conversation, tool_choice=choice)
    chat = chat_request(request)
    parser = made(tokenizer(), chat.tools, model_config=None, chat_template_kwargs={})
    constraint = constrained(parser.adjust_request(chat), request).structured_outputs
    assert constraint is not None
    if constraint.structural_tag is not None:
        return compiler().compile_structural_tag(constraint.structural_tag)
    schema = constraint.json
    return compiler().compile_json_schema(schema if isinstance(schema, str) else json.dumps(schema))


WRITTEN = {
    ("hermes", "required"): '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    ("hermes", "named"): '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    ("granite", "required"): '[{"name": "f", "parameters": %s}]',
    ("granite", "named"): "%s",
}
"""A forced call as models of a family write it: with a grammar of vLLM's for the format, and as mere JSON."""


@pytest.mark.parametrize("schema", ['{"description":"x"}', "{}", '{"type":"string"}', '{"type":"object"}'])
@pytest.mark.parametrize(("tool_parser", "how"), WRITTEN)
def test_arguments_of_a_forced_call_are_an_object(tool_parser: str, how: str, schema: str) -> None:
    choice: ToolChoice = NamedToolChoice("f") if how == "named" else "required"
    compiled = grammar(tool_parser, Tool("f", "", schema), choice)
    for arguments, is_taken in (("{}", True), ('"a"', False), ("1", False), ("[1]", False), ("null", False)):
        text = WRITTEN[tool_parser, how] % arguments
        assert xgrammar.GrammarMatcher(compiled).accept_string(text) is is_taken, arguments


def test_arguments_of_a_strict_tool_keep_to_its_schema() -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
    compiled = grammar("hermes", Tool("f", "", schema, strict=True), "required")
    for arguments, is_taken in (('{"a": 1}', True), ('{"b": 1}', False), ('{"a": "x"}', False)):
        text = WRITTEN["hermes", "required"] % arguments
        assert xgrammar.GrammarMatcher(compiled).accept_string(text) is is_taken
