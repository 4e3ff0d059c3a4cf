"""Which turns of a chat template can be continued from their exact ids: a dry run of the splice, shape by shape.

Invariant: a cell says what was checked on ids, not what the template looks like. `exact`: the spliced prompt is the
parent's ids, and equals the template's own rendering of the whole conversation id for id. `holds`: it starts with
the parent's ids and goes on with the template's own words, but the template writes that turn's history in another way
than the model sampled it (it strips thinking, say), so there is nothing to be equal to. `hole`: the splice gave up.

Flow: a shape is an assistant turn, and what comes after it -> its generated ids are what the template itself writes
for it, up to and with its stop token -> `splice` the request that follows -> compare with `full_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool, ToolCall, ToolResult
from gym_capture.reasons import AuditReason, NotSplicedReason
from gym_capture.splice.splicer import NotSpliced, full_prompt, splice
from gym_capture.splice.template import ChatTemplate, TemplateError, split_controls

Verdict: TypeAlias = Literal["exact", "holds", "hole", "refused"]


@dataclass(frozen=True, slots=True)
class Cell:
    """The verdict on one shape under one template."""

    verdict: Verdict
    """`refused`: the template does not render such a turn at all."""
    detail: str = ""
    """Of a hole: the splice's named reason. Of a refusal: what the template said."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An assistant turn as a client echoes it, how its generation ended, and what comes next."""

    name: str
    turn: AssistantTurn
    next: tuple[Item, ...]
    ending: Literal["stop", "cut"] = "stop"
    """stop: the model sampled its stop token. cut: it did not get to."""
    unsaid: str = ""
    """Text that the model sampled after the turn's and the client never saw: a stop string."""


_TOOLS: Final = (
    Tool(
        "get_weather",
        "Looks up the weather of a city.",
        '{"properties":{"city":{"description":"Name of the city.","type":"string"},'
        '"days":{"description":"How far ahead.","type":"integer"}},"required":["city"],"type":"object"}',
    ),
    Tool("list_files", "Lists the files of a folder.", '{"properties":{"path":{"type":"string"}},"type":"object"}'),
)
_CALLS: Final = (
    ToolCall("call00001", "get_weather", '{"city": "Bergen", "days": 2}'),
    ToolCall("call00002", "list_files", '{"path": "/tmp/notes"}'),
)
_RESULTS: Final = (
    ToolResult("call00001", '{"sky": "rain", "degrees": 9}'),
    ToolResult("call00002", "forecast.txt\n\nplan.md\n"),
)
_ASK: Final = Message("user", "  Thanks! What should I pack, then?\n")
_TEXT: Final = "Rain is likely.\n\nTake a coat: it is 9 °C."
_REASONING: Final = "The user wants the weather.\nI should be brief."

SHAPES: Final = (
    Shape("text", AssistantTurn(_TEXT), (_ASK,)),
    Shape("tool call", AssistantTurn(tool_calls=_CALLS[:1]), _RESULTS[:1]),
    Shape("text + tool call", AssistantTurn("Let me look.", _CALLS[:1]), _RESULTS[:1]),
    Shape("parallel calls", AssistantTurn(tool_calls=_CALLS), _RESULTS),
    Shape("reasoning + text", AssistantTurn(_TEXT, reasoning=_REASONING), (_ASK,)),
    Shape("reasoning + call", AssistantTurn(tool_calls=_CALLS[:1], reasoning=_REASONING), _RESULTS[:1]),
    Shape("length cut", AssistantTurn(_TEXT + " And an umbr"), (_ASK,), "cut"),
    Shape("stop string", AssistantTurn(_TEXT), (_ASK,), "cut", "\nObservation:"),
    Shape("call, length cut", AssistantTurn(tool_calls=_CALLS[:1]), _RESULTS[:1], "cut"),
    Shape("empty", AssistantTurn(), (_ASK,)),
)


_SYSTEM: Final = Message("system", "You are a careful assistant.")
_DEVELOPER: Final = Message("developer", "Answer in metric units.")
_LATE: Final = Message("system", "The user has gone on a walk.")
_TALK: Final = (Message("user", "How is the weather in Bergen?"), AssistantTurn(_TEXT), _ASK)
_PARALLEL: Final = (_TALK[0], AssistantTurn(tool_calls=_CALLS))

MESSAGES: Final[Mapping[str, tuple[Item, ...]]] = {
    "system first": (_SYSTEM, *_TALK),
    "developer first": (_DEVELOPER, *_TALK),
    "several first": (_SYSTEM, _LATE, *_TALK),
    "system later": (_SYSTEM, *_TALK[:2], _LATE, _ASK),
    "developer later": (_SYSTEM, *_TALK[:2], _DEVELOPER, _ASK),
    "results as they came": (*_PARALLEL, *_RESULTS[::-1]),
}
"""Conversations with a message that not every template has a place for."""


def audit_messages(template: ChatTemplate) -> dict[str, tuple[str, ...] | None]:
    """By the names of `MESSAGES`, the rules by which the template writes it all; None: it does not."""
    found: dict[str, tuple[str, ...] | None] = {}
    for name, items in MESSAGES.items():
        adapted = template.adapt(Conversation(items, _TOOLS if _PARALLEL[1] in items else ()))
        try:
            full_prompt(template, adapted.conversation)
            found[name] = adapted.rules
        except TemplateError:
            found[name] = None
    return found


def audit(template: ChatTemplate) -> dict[str, Cell]:
    """Every shape's cell, by the shape's name."""
    return {shape.name: _audit_shape(template, shape) for shape in SHAPES}


def sampled(template: ChatTemplate, shape: Shape, opening: Conversation) -> str:
    """The text that a model samples for the shape: the template's after its generation prompt, up to the stop token.

    A template that closes no turns leaves that to what opens the next one, and its models stop with that token.
    Raises `TemplateError` if the template refuses the shape.
    """
    items = (*opening.items, shape.turn)
    opened = template.render(opening, add_generation_prompt=True)
    said = template.render(opening._replace(items=items), add_generation_prompt=False)
    whole = template.render(opening._replace(items=(*items, *shape.next)), add_generation_prompt=True)
    written = split_controls(template.special_tokens, said[_n_common(template.special_tokens, opened, said) :])
    stop = next((n for n, piece in enumerate(written) if piece in template.stop_tokens), len(written))
    body = "".join(written[:stop])
    # A model says these whether or not the template writes them when it sees them again.
    if shape.turn.text not in body:
        body = shape.turn.text + body
    if shape.turn.reasoning not in body:
        body = f"<think>\n{shape.turn.reasoning}\n</think>\n\n{body}"
    if shape.ending != "stop":
        return body + shape.unsaid
    if stop < len(written):
        return body + written[stop]
    following = split_controls(template.special_tokens, whole[len(said) :] if whole.startswith(said) else "")[:1]
    return body + "".join(piece for piece in following if piece in template.special_tokens)


def _audit_shape(template: ChatTemplate, shape: Shape) -> Cell:
    opening = _opening(template)
    request = opening._replace(items=(*opening.items, shape.turn, *shape.next))
    try:
        generated = sampled(template, shape, opening)
        whole = template.render(request, add_generation_prompt=True)
    except TemplateError as error:
        return Cell("refused", error.message)
    if any(call.name not in generated for call in shape.turn.tool_calls):
        return Cell("refused", "does not write tool calls")

    parent_ids = np.concatenate((full_prompt(template, opening), template.encode(generated)), dtype=np.int32)
    spliced = splice(template, request, turn=0, parent_ids=parent_ids)
    if isinstance(spliced, NotSpliced):
        lost = spliced.reason == NotSplicedReason.NEW_ITEM_LOST and any(
            item.text.strip() not in whole for item in shape.next
        )
        return Cell("refused", "does not write tool results") if lost else Cell("hole", spliced.reason)
    if not np.array_equal(spliced.ids[: parent_ids.size], parent_ids):
        return Cell("hole", AuditReason.PREFIX_LOST)
    as_sampled = shape.turn._replace(text=shape.turn.text + shape.unsaid)
    history = (*opening.items, as_sampled, *shape.next)
    if np.array_equal(spliced.ids, full_prompt(template, opening._replace(items=history))):
        return Cell("exact")
    # Where the template writes the turn's history just as it was sampled, nothing but equality will do.
    opened = template.render(opening, add_generation_prompt=True)
    return Cell("hole", AuditReason.NOT_EQUAL) if whole.startswith(opened + generated) else Cell("holds")


def _opening(template: ChatTemplate) -> Conversation:
    """A conversation as an agent begins it, with as much of it as this template takes."""
    ask = Message("user", "How is the weather in Bergen?")
    system = Message("system", "You are a careful assistant.")
    least = Conversation((ask,))
    for opening in (Conversation((system, ask), _TOOLS), Conversation((ask,), _TOOLS), Conversation((system, ask))):
        try:
            full_prompt(template, opening)
        except TemplateError:
            continue
        return opening
    return least


def _n_common(special_tokens: frozenset[str], left: str, right: str) -> int:
    """How many characters two texts begin with in common, special tokens in full or not at all."""
    length = 0
    for ours, theirs in zip(split_controls(special_tokens, left), split_controls(special_tokens, right), strict=False):
        if ours == theirs:
            length += len(ours)
            continue
        if ours not in special_tokens and theirs not in special_tokens:
            length += next(n for n in range(len(ours) + 1) if not theirs.startswith(ours[: n + 1]) or n == len(ours))
        break
    return length
