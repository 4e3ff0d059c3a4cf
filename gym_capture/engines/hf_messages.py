"""The messages that a Hugging Face chat template is given, for a conversation that may not be what it expects.

Invariant: what becomes of a message depends on the messages that stand next to it, back to the assistant's turn before
it and no further on than the one after it. So what was written of a conversation is written the same when it goes on,
and a template that has no place for a message still gets its text, by a rule that has a name.

Flow: `Habits`, found out once for a template by probes (`hf_template`) -> `place` gives every message a role and a
position that the template writes, with the names of the rules that took it (`reasons.TemplateRule` says what each
does) -> `to_messages`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from gym_capture.conversation import (
    AssistantTurn,
    Item,
    Message,
    ToolCall,
    ToolResult,
    json_without_surrogates,
    nests_too_deep,
)
from gym_capture.reasons import TemplateRule
from gym_capture.splice.template import digest_id

HfMessage: TypeAlias = dict[str, Any]
FirstSystem: TypeAlias = Literal["own", "in_user"]
LateSystem: TypeAlias = Literal["own", "as_user", "in_user"]

_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The form in which a template takes its messages."""

    content_parts: bool = False
    """Contents are lists of parts, not strings."""
    first_system: FirstSystem = "own"
    """Where the system message that begins a conversation is written."""
    first_developer: bool = False
    """A developer message that begins a conversation is written as such."""
    several_first: bool = True
    """Several system messages may begin a conversation; else they are joined."""
    late_system: LateSystem = "own"
    """Where a system message later on is written."""
    late_developer: bool = False
    """A developer message later on is written as such."""
    result_ids: bool = True
    """Results say which call they answer; else only their order does."""
    short_call_ids: bool = False
    """Tool-call ids must be nine letters or digits."""
    text_arguments: bool = False
    """A call's arguments are JSON text, not an object."""
    thinking: bool = False
    """Reasoning is read from `thinking` alone - and not beside both text and calls."""


# --- places -------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """A conversation's items as the template can write them."""

    items: tuple[Item, ...]
    rules: tuple[str, ...]
    """The rules that fired, each once."""


def place(items: Sequence[Item], habits: Habits) -> Placed:
    """Gives every system and developer message the role and the position that the template has for it."""
    fired: dict[str, None] = {}
    n_first = next((n for n, item in enumerate(items) if not isinstance(item, Message) or item.role == "user"), None)
    first = [item for item in items[:n_first] if isinstance(item, Message)]
    rest = [] if n_first is None else list(items[n_first:])
    placed: list[Item] = [*_place_first(first, habits, fired)]
    if placed and habits.first_system == "in_user":
        fired[TemplateRule.SYSTEM_IN_USER] = None
        follows = [rest.pop(0)] if rest and isinstance(rest[0], Message) else []
        placed, rest = [], [_joined("user", [*placed, *follows]), *rest]
    run: list[Message] = []
    for item in rest:
        if isinstance(item, Message):
            run.append(item)
        else:
            placed += [*_place_late(run, habits, fired), item]
            run = []
    placed += _place_late(run, habits, fired)
    return Placed(tuple(placed), tuple(fired))


def _place_first(messages: Sequence[Message], habits: Habits, fired: dict[str, None]) -> Sequence[Message]:
    """The system and developer messages that a conversation begins with."""
    as_system = not habits.first_developer and any(message.role == "developer" for message in messages)
    if as_system:
        fired[TemplateRule.DEVELOPER_AS_SYSTEM] = None
    if len(messages) > 1 and (as_system or not habits.several_first or habits.first_system == "in_user"):
        fired[TemplateRule.SYSTEM_JOINED] = None
        return [_joined("system", messages)]
    return [message._replace(role="system") for message in messages] if as_system else messages


def _place_late(run: Sequence[Message], habits: Habits, fired: dict[str, None]) -> Sequence[Message]:
    """Messages of the user, and among them those of the system that do not begin the conversation."""
    placed: list[Message] = []
    waiting: list[Message] = []
    for message in run:
        if message.role == "developer" and not habits.late_developer:
            fired[TemplateRule.DEVELOPER_AS_SYSTEM] = None
            message = message._replace(role="system")
        if message.role == "system" and habits.late_system == "as_user":
            fired[TemplateRule.LATE_SYSTEM_AS_USER] = None
            message = message._replace(role="user")
        if message.role == "system" and habits.late_system == "in_user":
            fired[TemplateRule.LATE_SYSTEM_IN_USER] = None
            waiting.append(message)
        else:
            placed.append(_joined("user", [*waiting, message]) if waiting else message)
            waiting = []
    if waiting:
        before = [placed.pop()] if placed else []
        placed.append(_joined("user", [*before, *waiting]))
    return placed


def _joined(role: str, items: Sequence[Item]) -> Message:
    return Message(role, "\n\n".join(item.text for item in items if item.text))


def in_call_order(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items, with the results that follow a turn in the order of the turn's calls.

    Only where they are one result for each call, each named by its id: whatever else a client sends keeps its order,
    since nothing says which call it answers.
    """
    ordered = list(items)
    for at, item in enumerate(items):
        if isinstance(item, AssistantTurn) and len(item.tool_calls) > 1:
            ids = [call.id for call in item.tool_calls]
            # One more than there are calls, to see a result that is too many.
            run = list(takewhile(lambda after: isinstance(after, ToolResult), items[at + 1 : at + 2 + len(ids)]))
            results = {result.call_id: result for result in run if isinstance(result, ToolResult)}
            if all(ids) and len(run) == len(ids) == len(results) and results.keys() == set(ids):
                ordered[at + 1 : at + 1 + len(ids)] = [results[call_id] for call_id in ids]
    return tuple(ordered)


# --- messages -----------------------------------------------------------------------------------------------------


def to_messages(items: Sequence[Item], habits: Habits) -> list[HfMessage]:
    """The messages of items that have their places."""
    names = {call.id: call.name for item in items if isinstance(item, AssistantTurn) for call in item.tool_calls}
    content: Callable[[str], Any] = _as_parts if habits.content_parts else str
    call_id: Callable[[str], str] = _short_id if habits.short_call_ids else str
    messages: list[HfMessage] = []
    for item in items:
        match item:
            case Message(role, text):
                messages.append({"role": role, "content": content(text)})
            case AssistantTurn(text, calls, reasoning):
                message: HfMessage = {"role": "assistant", "content": content(text)}
                if reasoning:
                    # Templates of this and that time read this and that name.
                    message |= {"reasoning": reasoning, "reasoning_content": reasoning}
                    if habits.thinking and not (text and calls):
                        message["thinking"] = reasoning
                if calls:
                    message["tool_calls"] = [_call(call, call_id(call.id), habits) for call in calls]
                messages.append(message)
            case ToolResult(of, text):
                # Always a string: templates that take parts elsewhere do not take them here.
                result: HfMessage = {"role": "tool", "tool_call_id": call_id(of), "content": text}
                if of in names:
                    result["name"] = names[of]
                messages.append(result)
    return messages


def _call(call: ToolCall, call_id: str, habits: Habits) -> dict[str, Any]:
    value = _arguments(call.arguments)
    arguments = json.dumps(value, ensure_ascii=False) if habits.text_arguments else value
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as templates want them: an object. Text that is none becomes an empty one, as vLLM does it, and so does
    what nests deeper than templates can write.

    The policy's own words are not lost by that: they are in the parent's ids, which a splice supplies as they are.
    """
    if nests_too_deep(text):
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    # Half an emoji may be spelled in a text that has none.
    return cast(dict[str, Any], json_without_surrogates(value)) if "\\u" in text else value


def _short_id(call_id: str) -> str:
    """The id itself if nine letters or digits, else nine that it determines."""
    return call_id if _SHORT_ID.fullmatch(call_id) else digest_id(call_id)
