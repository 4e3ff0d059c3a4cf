"""Bodies made to break a parser end in an error that names the parameter."""

from __future__ import annotations

import pytest

from gym_capture.dialects.anthropic import MessagesDialect
from gym_capture.dialects.base import Dialect
from gym_capture.dialects.chat import ChatDialect
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.engines.hf_messages import _arguments
from gym_capture.errors import InvalidRequestError

MESSAGES = '"messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k", "seed", "max_tokens"])
def test_a_number_beyond_all_ranges_is_named(field: str) -> None:
    body = f'{{"model":"m",{MESSAGES},"{field}":1{"0" * 400}}}'
    with pytest.raises(InvalidRequestError) as caught:
        ChatDialect().parse(body.encode())
    assert caught.value.param == field


def parsed_or_refused(body: str) -> str:
    """What became of it; anything else raises."""
    try:
        ChatDialect().parse(body.encode())
    except InvalidRequestError:
        return "refused"
    return "parsed"


@pytest.mark.parametrize(("depth", "may_be"), [(100, {"parsed"}), (995, {"parsed", "refused"}), (20_000, {"refused"})])
def test_tools_nested_deep_are_taken_or_refused(depth: int, may_be: set[str]) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"model":"m",{MESSAGES},"tools":[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]}}'
    assert parsed_or_refused(body) in may_be


@pytest.mark.parametrize(("depth", "may_be"), [(300, {"parsed"}), (900, {"parsed", "refused"}), (20_000, {"refused"})])
def test_arguments_sent_as_an_object_are_taken_or_refused(depth: int, may_be: set[str]) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    call = f'{{"id":"c","type":"function","function":{{"name":"f","arguments":{nested}}}}}'
    body = f'{{"model":"m","messages":[{{"role":"assistant","tool_calls":[{call}]}}]}}'
    assert parsed_or_refused(body) in may_be


@pytest.mark.parametrize("depth", [3, 988, 1_000])
@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatDialect(), '{"model":"m","messages":[{"role":"user","content":[{"type":X,"text":"t"}]}]}'),
        (ChatDialect(), '{"model":"m",MESSAGES,"tools":[{"type":X,"function":{"name":"f"}}]}'),
        (ResponsesDialect(), '{"model":"m","input":[{"type":X}]}'),
        (ResponsesDialect(), '{"model":"m","input":[{"role":"user","content":[{"type":X,"text":"t"}]}]}'),
        (ResponsesDialect(), '{"model":"m","input":"hi","text":{"format":{"type":X}}}'),
        (ResponsesDialect(), '{"model":"m","input":"hi","tool_choice":{"type":X}}'),
        (MessagesDialect(), '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":X}]}]}'),
        (MessagesDialect(), '{"model":"m","max_tokens":1,MESSAGES,"tool_choice":{"type":X}}'),
    ],
)
def test_a_type_that_is_nested_deep_is_refused(dialect: Dialect, body: str, depth: int) -> None:
    with pytest.raises(InvalidRequestError):
        dialect.parse(body.replace("MESSAGES", MESSAGES).replace("X", "[" * depth + "]" * depth).encode())


def test_arguments_nested_too_deep_for_a_template_become_an_empty_object() -> None:
    assert _arguments("[" * 100_000 + "]" * 100_000) == {}
    assert _arguments('{"a":' * 100_000 + "1" + "}" * 100_000) == {}
