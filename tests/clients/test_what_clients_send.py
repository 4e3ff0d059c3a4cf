"""What the CLIs send, as recorded from them: it is parsed, and every request continues the one before it.

The recordings keep every field, type and block of four requests each; long texts stand in our own words, and of long
lists of tools a few are left.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from gym_capture.calls import ModelRequest
from gym_capture.conversation import AssistantTurn, Message, ToolCall, ToolResult
from gym_capture.dialects.anthropic import MessagesDialect
from gym_capture.dialects.base import Dialect
from gym_capture.dialects.responses import ResponsesDialect
from gym_capture.lineage.fingerprint import Fingerprinter

FIXTURES = Path(__file__).parent / "fixtures"

RECORDINGS: dict[str, tuple[Dialect, str]] = {
    "claude_code.json": (MessagesDialect(), "messages"),
    "claude_code_default_prompt.json": (MessagesDialect(), "messages"),
    "codex.json": (ResponsesDialect(), "input"),
}


def requests(recording: str) -> list[ModelRequest]:
    """The requests of a recording, parsed."""
    dialect, history = RECORDINGS[recording]
    recorded: dict[str, Any] = json.loads((FIXTURES / recording).read_text(encoding="utf-8"))
    return [dialect.parse(json.dumps({**recorded["body"], history: items}).encode()) for items in recorded[history]]


def said(tool: str, argument: str, limit: str) -> list[AssistantTurn]:
    """The turns that the clients were told and echo, spelled as a model may spell them."""
    return [
        AssistantTurn(
            "I begin with one, caf\u00e9.\n\n",
            (ToolCall("a", tool, f'{{"{limit}": 10000.0,"{argument}" : "echo one | tee one.txt"}}'),),
        ),
        AssistantTurn(
            "",
            (
                ToolCall("b", tool, f'{{ "{argument}":"echo \'  two  \' \\u003e two.txt"}}'),
                ToolCall("c", tool, f'{{"{argument}":"cat no-such-file"}}'),
            ),
        ),
        AssistantTurn(
            "That file is missing.\n", (ToolCall("d", tool, f'{{"{argument}":"echo three > three.txt; cat *.txt"}}'),)
        ),
    ]


SAID = {
    "claude_code.json": said("Bash", "command", "timeout"),
    "claude_code_default_prompt.json": said("Bash", "command", "timeout"),
    "codex.json": said("exec_command", "cmd", "yield_time_ms"),
}


@pytest.mark.parametrize("recording", RECORDINGS)
def test_every_request_continues_the_one_before(recording: str) -> None:
    fingerprinter = Fingerprinter()
    fingerprints = [fingerprinter.fingerprint(request.conversation) for request in requests(recording)]
    assert [len(fingerprint.turn_keys) for fingerprint in fingerprints] == [0, 1, 2, 3]
    for (before, after), turn in zip(itertools.pairwise(fingerprints), SAID[recording], strict=True):
        assert before.key_with(turn) == after.turn_keys[-1]


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_request_adds_items_and_changes_none(recording: str) -> None:
    conversations = [request.conversation for request in requests(recording)]
    for before, after in itertools.pairwise(conversations):
        assert after.items[: len(before.items)] == before.items
        assert after.tools == before.tools


@pytest.mark.parametrize("recording", RECORDINGS)
def test_results_follow_their_turn(recording: str) -> None:
    last = requests(recording)[-1]
    first_turn = next(n for n, item in enumerate(last.conversation.items) if isinstance(item, AssistantTurn))
    shape = [type(item) for item in last.conversation.items[first_turn:]]
    assert shape == [AssistantTurn, ToolResult, AssistantTurn, ToolResult, ToolResult, AssistantTurn, ToolResult]
    assert last.stream
    assert last.tool_choice == "auto"


def test_claude_code_asks_for_more_than_any_small_context() -> None:
    first = requests("claude_code.json")[0]
    assert (first.requested_model, first.max_tokens) == ("claude-opus-4-8", 64_000)
    assert [tool.name for tool in first.conversation.tools] == ["Bash"]


def test_claude_codes_billing_line_is_not_told_to_the_policy() -> None:
    items = requests("claude_code.json")[0].conversation.items
    assert isinstance(items[0], Message)
    assert items[0].role == "system"
    assert "You are terse." in items[0].text
    assert "billing" not in items[0].text


def test_claude_codes_system_message_stays_behind_the_users() -> None:
    items = requests("claude_code_default_prompt.json")[0].conversation.items
    assert [item.role for item in items if isinstance(item, Message)] == ["system", "user", "system"]


def test_codex_offers_functions_of_a_namespace_and_none_that_only_its_maker_runs() -> None:
    first = requests("codex.json")[0]
    names = [tool.name for tool in first.conversation.tools]
    assert names[:2] == ["exec_command", "write_stdin"]
    assert [name for name in names if "close_agent" in name]
    assert not [name for name in names if "web_search" in name]
    roles = [item.role for item in first.conversation.items if isinstance(item, Message)]
    assert roles == ["developer", "developer", "user", "user"]
