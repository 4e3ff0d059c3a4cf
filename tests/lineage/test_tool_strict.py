"""A tool's `strict` reaches the engine, and is part of what a conversation is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gym_capture.conversation import AssistantTurn, Conversation, Message, Tool
from gym_capture.dialects.chat import ChatDialect
from gym_capture.errors import InvalidRequestError
from gym_capture.lineage.fingerprint import Fingerprinter


def parsed_tool(function: dict[str, Any]) -> Tool:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", **function}}],
    }
    (tool,) = ChatDialect().parse(json.dumps(body).encode()).conversation.tools
    return tool


@pytest.mark.parametrize(
    ("function", "strict"),
    [({}, False), ({"strict": None}, False), ({"strict": False}, False), ({"strict": True}, True)],
)
def test_strict_is_handed_on_only_if_the_client_asked_for_it(function: dict[str, Any], strict: bool) -> None:
    tool = parsed_tool(function)
    assert tool.strict is strict
    assert tool.as_openai()["function"].get("strict") == (True if strict else None)


def test_strict_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\.0\.function\.strict must be a boolean"):
        parsed_tool({"strict": "yes"})


def test_a_conversation_with_a_tool_made_strict_is_another_one() -> None:
    items = (Message("user", "hi"), AssistantTurn("hello"))
    fingerprinter = Fingerprinter()
    keys = {
        fingerprinter.fingerprint(Conversation(items, (Tool("f", "", "{}", strict),)), None).turn_keys
        for strict in (False, True)
    }
    assert len(keys) == 2
