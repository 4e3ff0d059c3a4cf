"""A model call in one form, whatever API it came in by: what was asked, what is streamed back, what came of it.

Invariant: what is here has no token ids of a prompt or a generation: clients never see them, and they never come from
clients. (A `logit_bias` names ids of the vocabulary.)

Flow: a dialect parses a body into a `ModelRequest` -> the graph generates -> `ReplyEvent`s stream to the dialect's
encoder -> a `ModelReply` ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from gym_capture.conversation import AssistantTurn, Conversation, ToolCall, without_surrogates

__all__ = [
    "ModelReply",
    "ModelRequest",
    "NamedToolChoice",
    "ReasoningDelta",
    "ReplyEvent",
    "TextDelta",
    "TokenLogProb",
    "ToolCallDelta",
    "ToolCallStart",
    "ToolChoice",
    "TurnBuilder",
    "Usage",
    "sendable",
]


class NamedToolChoice(NamedTuple):
    """The model must call this one function."""

    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A client's request, dialect-neutral."""

    requested_model: str
    conversation: Conversation
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the client set, by their vLLM names, validated; a pin may override them."""
    max_tokens: int | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    response_format: Mapping[str, Any] | None = None
    """OpenAI's `response_format`: a JSON schema or `json_object`."""
    top_logprobs: int | None = None
    """How many alternatives the client wants to see for each token; None: it asked for no log probabilities."""
    stream: bool = False
    include_usage: bool = False
    raw_prompt: str | None = None
    """Text to continue as it is, without a chat template; the conversation is empty then."""
    left_out: tuple[str, ...] = ()
    """Names of tools that the client offered and the policy is not shown: only a vendor's servers could run them."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body that the dialect's reply repeats. Nobody else reads them."""


# --- what streams back ------------------------------------------------------------------------------------------


class TextDelta(NamedTuple):
    text: str


class ReasoningDelta(NamedTuple):
    text: str


class ToolCallStart(NamedTuple):
    """The tool call at `position` in the turn begins."""

    position: int
    id: str
    name: str


class ToolCallDelta(NamedTuple):
    """More of the argument text of the tool call at `position`."""

    position: int
    arguments: str


ReplyEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta


def sendable(event: ReplyEvent) -> ReplyEvent:
    """The event with text that can be sent, recorded and echoed. Parsers that read JSON can make halves of emojis."""
    match event:
        case TextDelta(text) | ReasoningDelta(text):
            return event._replace(text=without_surrogates(text))
        case ToolCallStart(_, id, name):
            return event._replace(id=without_surrogates(id), name=without_surrogates(name))
        case ToolCallDelta(_, arguments):
            return event._replace(arguments=without_surrogates(arguments))


class TokenLogProb(NamedTuple):
    """One generated token as a client sees it that asks for log probabilities."""

    token: str
    log_prob: float
    top: tuple[tuple[str, float], ...] = ()


class Usage(NamedTuple):
    """Counts in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of `completion_tokens` that are thinking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """How a call ended, as the client sees it."""

    turn: AssistantTurn
    finish_reason: str
    """stop | length | tool_calls"""
    stop_reason: str | None = None
    usage: Usage
    log_probs: tuple[TokenLogProb, ...] | None = None


class TurnBuilder:
    """Assembles the assistant's turn from what was streamed: the turn that the client will echo."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, event: ReplyEvent) -> None:
        """Raises `ValueError` if a tool call's arguments arrive before its start, or a start out of order."""
        match event:
            case TextDelta(text):
                self._text.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallStart(position, id, name):
                if position != len(self._calls):
                    raise ValueError(f"tool call {position} starts after {len(self._calls)} calls")
                self._calls.append((id, name, []))
            case ToolCallDelta(position, arguments):
                if position >= len(self._calls):
                    raise ValueError(f"arguments of tool call {position}, which has not started")
                self._calls[position][2].append(arguments)

    def turn(self) -> AssistantTurn:
        return AssistantTurn(
            text="".join(self._text),
            tool_calls=tuple(ToolCall(id, name, "".join(parts)) for id, name, parts in self._calls),
            reasoning="".join(self._reasoning),
        )
