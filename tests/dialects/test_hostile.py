"""Bodies made to break a parser end in an error that names the parameter."""

from __future__ import annotations

import pytest

from gym_capture.dialects.chat import ChatDialect
from gym_capture.engines.hf_template import _arguments
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


def test_arguments_nested_too_deep_for_a_template_become_an_empty_object() -> None:
    assert _arguments("[" * 100_000 + "]" * 100_000) == {}
    assert _arguments('{"a":' * 100_000 + "1" + "}" * 100_000) == {}
