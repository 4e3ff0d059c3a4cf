"""The seam to a model's chat template and tokenizer, and how text that is not the template's own stays text.

Invariant: only the template writes control tokens. Whatever a user, a tool, a system prompt or an echoed turn spells
like one is tokenized as plain text, while a conversation that spells none is tokenized in one piece, exactly as
rendered.

Flow: `protect` swaps every special token spelled in the conversation for a stand-in -> `ChatTemplate.render` ->
`encode_rendered` tokenizes the result; spans with stand-ins are cut out at the template's own control tokens, where
a tokenizer cuts anyway, and tokenized as plain text with the spelling put back.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gym_capture.conversation import AssistantTurn, Conversation, Item, Tool, ToolCall
from gym_capture.errors import InvalidRequestError
from gym_capture.records import IdArray


class TemplateError(InvalidRequestError):
    """The chat template refuses this conversation; the message is the template's own where it gives one."""


class ChatTemplate(Protocol):
    """A chat template on a tokenizer: conversations to text, text to ids."""

    @property
    def special_tokens(self) -> frozenset[str]:
        """The control tokens: each is one id that ordinary text never becomes."""
        ...

    @property
    def stop_tokens(self) -> frozenset[str]:
        """Those of `special_tokens` that end a generation, whichever of them the template itself writes."""
        ...

    def render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        """The conversation as the template writes it. Raises `TemplateError` when the template refuses it."""
        ...

    def encode(self, text: str) -> IdArray:
        """int32. Special tokens in `text` become control tokens; none are added."""
        ...

    def encode_plain(self, text: str) -> IdArray:
        """int32. Special tokens in `text` stay the characters that they are spelled with."""
        ...

    def decode(self, ids: IdArray) -> str:
        """The text of `ids`, control tokens spelled out."""
        ...


@dataclass(frozen=True, slots=True)
class Protected:
    """A conversation in which stand-ins stand for the special tokens that its texts spell."""

    conversation: Conversation
    nonce: str
    """Begins every stand-in; drawn anew each time, so that no text can spell one."""
    spellings: tuple[str, ...]
    """What stand-in 0, 1, ... stand for."""

    def restore(self, text: str) -> str:
        """`text` with the spellings put back."""
        if self.nonce not in text:
            return text
        return re.sub(f"{self.nonce}T(\\d+)Z", lambda match: self.spellings[int(match[1])], text)


def new_nonce() -> str:
    """A word of ASCII letters and digits that no text contains: templates trim, quote and escape around it unharmed."""
    return f"Q{secrets.token_hex(8)}"


def protect(template: ChatTemplate, conversation: Conversation) -> Protected:
    """Swaps every special token that the conversation's texts spell, in JSON strings too, for a stand-in."""
    nonce = new_nonce()
    pattern = control_pattern(template.special_tokens)
    numbers: dict[str, int] = {}

    def stand_in(match: re.Match[str]) -> str:
        return f"{nonce}T{numbers.setdefault(match[0], len(numbers))}Z"

    def text(value: str) -> str:
        return pattern.sub(stand_in, value)

    def json_text(value: str) -> str:
        if "\\" not in value:
            return text(value)
        # An escaped spelling ("\u003c|eos|>") shows only once the template has the parsed value.
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return text(value)  # a template will not have it parsed, either
        try:
            swapped = _map_strings(parsed, text)
            return value if swapped == parsed else json.dumps(swapped, ensure_ascii=False)
        except RecursionError:
            raise TemplateError("a tool's schema or a call's arguments are nested too deep", param="tools") from None

    def item(value: Item) -> Item:
        if not isinstance(value, AssistantTurn):
            return value._replace(text=text(value.text))
        calls = tuple(ToolCall(call.id, text(call.name), json_text(call.arguments)) for call in value.tool_calls)
        return AssistantTurn(text=text(value.text), tool_calls=calls, reasoning=text(value.reasoning))

    protected = Conversation(
        items=tuple(map(item, conversation.items)),
        tools=tuple(
            Tool(text(tool.name), text(tool.description), json_text(tool.parameters_json), tool.strict)
            for tool in conversation.tools
        ),
    )
    return Protected(protected, nonce, tuple(numbers))


def encode_rendered(template: ChatTemplate, text: str, protected: Protected) -> IdArray:
    """int32 ids of `text`, a rendering (or a part of one) of `protected.conversation`."""
    if protected.nonce not in text:
        return template.encode(text)
    parts: list[IdArray] = []
    pending = ""
    for piece in split_controls(template.special_tokens, text):
        if protected.nonce in piece:
            if pending:
                parts.append(template.encode(pending))
                pending = ""
            parts.append(template.encode_plain(protected.restore(piece)))
        else:
            pending += piece
    if pending:
        parts.append(template.encode(pending))
    ids: IdArray = np.concatenate(parts)
    return ids


def split_controls(special_tokens: frozenset[str], text: str) -> list[str]:
    """`text` in pieces: each special token is one, and so is each run of text between them."""
    return [piece for piece in control_pattern(special_tokens).split(text) if piece]


@functools.lru_cache(maxsize=64)
def control_pattern(special_tokens: frozenset[str]) -> re.Pattern[str]:
    """Matches any of the special tokens, the longest where several begin; one group, so that `split` keeps them."""
    longest_first = sorted(special_tokens, key=lambda token: (-len(token), token))
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(element, change) for element in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(element, change) for key, element in value.items()}
    return value
