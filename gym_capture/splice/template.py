"""The seam to a model's chat template and tokenizer, and how text that is not the template's own stays text.

Invariant: only the template writes control tokens. Whatever a user, a tool, a system prompt or an echoed turn spells
like one is tokenized as plain text, while a conversation that spells none is tokenized in one piece, exactly as
rendered.

Flow: `protect` swaps every special token spelled in the conversation for a stand-in, and a call id that spells one for
a digest -> `ChatTemplate.render` -> `encode_rendered` tokenizes the result; spans with stand-ins are cut out at the
template's own control tokens, where a tokenizer cuts anyway, and tokenized as plain text with the spelling put back.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from gym_capture.capture.records import IdArray
from gym_capture.conversation import (
    AssistantTurn,
    Conversation,
    Item,
    Message,
    Tool,
    ToolCall,
    ToolResult,
    json_without_surrogates,
    nests_too_deep,
)
from gym_capture.errors import InvalidRequestError

__all__ = ["Adapted", "ChatTemplate", "Protected", "TemplateError"]

_MAX_REMEMBERED: Final = 100
"""Names and keys recur from call to call; those that are longer are looked through each time, and take no memory."""

_JSON_KEY: Final = re.compile(r'"([^"\\]*)"\s*:')


class TemplateError(InvalidRequestError):
    """The chat template refuses this conversation; the message is the template's own where it gives one."""


class Adapted(NamedTuple):
    """A conversation as a template takes it."""

    conversation: Conversation
    """As lineage compares it: conversations that the template cannot tell apart are the same here."""
    rules: tuple[str, ...] = ()
    """Names of the rules by which it is written otherwise than it was sent; recorded with the call."""


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

    def adapt(self, conversation: Conversation) -> Adapted:
        """How this template takes a conversation. Adapting it again changes nothing, and `render` does so by itself."""
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
    """The spellings that stand-ins 0, 1, ... stand for."""

    def restore(self, text: str) -> str:
        """`text` with the spellings put back."""
        return _restore(text, self.nonce, self.spellings)


def new_nonce() -> str:
    """A word of capitals and digits that no text contains: templates trim, quote, escape and capitalize around it."""
    return f"Q{secrets.token_hex(8).upper()}"


def protect(template: ChatTemplate, conversation: Conversation) -> Protected:
    """Swaps every special token that the conversation's texts spell, in JSON strings too, for a stand-in.

    Raises `TemplateError` for a tool whose schema nests deeper than `MAX_JSON_DEPTH`.
    """
    nonce = new_nonce()
    controls = template.special_tokens
    pattern = control_pattern(controls)
    numbers: dict[str, int] = {}

    def stand_in(spelling: str) -> str:
        return f"{nonce}T{numbers.setdefault(spelling, len(numbers))}Z"

    def text(value: str) -> str:
        return pattern.sub(lambda match: stand_in(match[0]), value)

    def label(value: str) -> str:
        if not _spells_control(controls, value):
            return value
        return stand_in(_restore(value, nonce, tuple(numbers)))  # a key may have a stand-in in it already

    def call_id(value: str) -> str:
        # Not a stand-in: a template that shortens ids would make another one of it each time.
        return digest_id(value) if _spells_control(controls, value) else value

    def has_tag(value: str) -> bool:
        return any(_spells_control(controls, key) for key in _JSON_KEY.findall(value))

    def json_text(value: str) -> str:
        # Spellings first, since one with a quote in it can make JSON of what was none.
        value = text(value)
        if nests_too_deep(value) or not ("\\" in value or has_tag(value)):
            return value
        # An escaped spelling ("\u003c|eos|>") shows only once the template has the parsed value.
        try:
            parsed = json_without_surrogates(json.loads(value))
        except ValueError:
            return value  # a template will not have it parsed, either
        swapped = _map_strings(parsed, text, label)
        return value if swapped == parsed else json.dumps(swapped, ensure_ascii=False)

    def item(value: Item) -> Item:
        match value:
            case AssistantTurn(said, calls, reasoning):
                protected = (ToolCall(call_id(call.id), label(call.name), json_text(call.arguments)) for call in calls)
                return AssistantTurn(text(said), tuple(protected), text(reasoning))
            case ToolResult(of, said):
                return ToolResult(call_id(of), text(said))
            case Message(role, said):
                return Message(role, text(said))

    def tool(value: Tool) -> Tool:
        if nests_too_deep(value.parameters_json):
            raise TemplateError(f"the parameters of tool {value.name!r} are nested too deep", param="tools")
        return Tool(label(value.name), text(value.description), json_text(value.parameters_json), value.strict)

    items, tools = tuple(map(item, conversation.items)), tuple(map(tool, conversation.tools))
    return Protected(Conversation(items, tools), nonce, tuple(numbers))


def digest_id(call_id: str) -> str:
    """Nine letters and digits that stand for an id, the same ones each time."""
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


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


def _restore(text: str, nonce: str, spellings: Sequence[str]) -> str:
    return re.sub(f"{nonce}T(\\d+)Z", lambda match: spellings[int(match[1])], text) if nonce in text else text


def _spells_control(special_tokens: frozenset[str], label: str) -> bool:
    """Whether a name or a key spells a special token, on its own or as a tag: templates write some keys as `<key>`."""
    tags = f"<{label}></{label}>"
    if len(label) <= _MAX_REMEMBERED:
        return _has_control(special_tokens, tags)
    return control_pattern(special_tokens).search(tags) is not None


@functools.lru_cache(maxsize=4096)
def _has_control(special_tokens: frozenset[str], text: str) -> bool:
    return control_pattern(special_tokens).search(text) is not None


def _map_strings(value: Any, text: Callable[[str], str], key: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return [_map_strings(element, text, key) for element in value]
    if isinstance(value, dict):
        return {key(name): _map_strings(element, text, key) for name, element in value.items()}
    return value
