"""What vLLM is asked to sample under: a grammar goes through a schema's properties in the order of the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer
from vllm.parser import ParserManager
from xgrammar.testing import _is_grammar_accept_string as accepts

from gym_capture.calls import ModelRequest
from gym_capture.dialects.anthropic import MessagesDialect
from gym_capture.dialects.chat import ChatDialect
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.engines.vllm import chat_request
from gym_capture.models import tiny_dir

REASON_FIRST = {
    "type": "object",
    "properties": {"z_reason": {"type": "string"}, "a_answer": {"type": "boolean"}},
    "required": ["z_reason", "a_answer"],
    "additionalProperties": False,
}
REASON = '{"z_reason":"because","a_answer":true}'
ANSWER = '{"a_answer":true,"z_reason":"because"}'
SAID = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()


def parsed(dialect: Any, **fields: Any) -> ModelRequest:
    body = {"model": "m", "max_tokens": 9, "messages": SAID, "input": SAID, **fields}
    request: ModelRequest = dialect.parse(json.dumps(body).encode())
    return request


SCHEMA = {"name": "out", "schema": REASON_FIRST, "strict": True}
FUNCTION = {"name": "out", "parameters": REASON_FIRST, "strict": True}
FORMATS = {
    "chat": lambda: parsed(CHAT, response_format={"type": "json_schema", "json_schema": SCHEMA}),
    "responses": lambda: parsed(RESPONSES, text={"format": {"type": "json_schema", **SCHEMA}}),
    "messages": lambda: parsed(MESSAGES, output_config={"format": {"type": "json_schema", "schema": REASON_FIRST}}),
}
CALLS = {
    "chat": lambda: parsed(CHAT, tools=[{"type": "function", "function": FUNCTION}], tool_choice="required"),
    "responses": lambda: parsed(RESPONSES, tools=[{"type": "function", **FUNCTION}], tool_choice="required"),
    "messages": lambda: parsed(
        MESSAGES,
        tools=[{"name": "out", "input_schema": REASON_FIRST, "strict": True}],
        tool_choice={"type": "any"},
    ),
}


@pytest.mark.parametrize("dialect", FORMATS)
def test_an_output_format_asks_for_properties_in_the_order_of_the_client(dialect: str) -> None:
    constraint = chat_request(FORMATS[dialect]()).to_sampling_params(99, {}).structured_outputs
    assert constraint is not None
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(constraint.json))
    assert accepts(grammar, REASON)
    assert not accepts(grammar, ANSWER)


@pytest.mark.parametrize("dialect", CALLS)
def test_a_strict_call_asks_for_properties_in_the_order_of_the_client(dialect: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir())
    parser_cls = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True, tokenizer=tokenizer)
    assert parser_cls is not None
    chat = chat_request(CALLS[dialect]())
    constraint = parser_cls(tokenizer, chat.tools).adjust_request(chat).to_sampling_params(99, {}).structured_outputs
    assert constraint is not None
    grammar = xgrammar.Grammar.from_structural_tag(constraint.structural_tag)
    call = '<tool_call>\n{"name": "out", "arguments": %s}\n</tool_call>'
    assert accepts(grammar, call % REASON)
    assert not accepts(grammar, call % ANSWER)
