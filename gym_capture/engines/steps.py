"""An engine's steps, of several tokens each, cut into single tokens.

Invariant: where the cuts are depends on ids and text alone, not on how the engine grouped its steps; and the pieces put
together are what was fed, ids and text both.

vLLM's parsers of tool calls are written for one token at a time, and many misread several at once. But an engine that
is busy, that speculates, or whose reply is not streamed brings several at once.

Flow: `StepSplitter.feed` what came -> pieces, each as soon as all of its text is there -> `rest` at the end ->
a parser makes events of them -> `merged` makes those few again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from gym_capture.calls import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta

NO_CHARACTER: Final = "\ufffd"
"""Decoders write it for bytes that are no character, or not yet."""


_PROSE: Final = re.compile(r"[\w .,;:!?'-]+")


class Piece(NamedTuple):
    """Ids that belong together, and their text."""

    token_ids: list[int]
    text: str

    @property
    def is_prose(self) -> bool:
        """No model's markup consists of these characters alone, or begins in the middle of them."""
        return _PROSE.fullmatch(self.text) is not None


def joined(pieces: Sequence[Piece]) -> Piece:
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return Piece(ids, "".join(piece.text for piece in pieces))


class StepSplitter:
    """One generation, cut at its tokens."""

    def __init__(self, decode_next: Callable[[int], str]) -> None:
        """`decode_next`: the text that the next id adds; empty while it ends inside a character.

        It says how long a token's text is. What the text is, the engine says: where the two disagree, as at a stop
        string that the engine leaves out, no text is lost or made up, and only a cut may be elsewhere.
        """
        self._decode_next = decode_next
        self._waiting: deque[tuple[int, int]] = deque()
        """Ids whose text is not all there, and its length: engines hold back what may become a stop string."""
        self._text = ""
        """Text that no piece has yet."""

    def feed(self, token_ids: Iterable[int], text: str) -> list[Piece]:
        """The pieces that are complete now."""
        self._waiting.extend((token_id, len(self._decode_next(token_id))) for token_id in token_ids)
        self._text += text
        pieces, start = [], 0
        while self._waiting and start + self._waiting[0][1] <= len(self._text):
            token_id, length = self._waiting.popleft()
            pieces.append(Piece([token_id], self._text[start : start + length]))
            start += length
        self._text = self._text[start:]
        return pieces

    def rest(self) -> list[Piece]:
        """The pieces that are left at the end of the generation, whatever text there is for them."""
        pieces, start = [], 0
        for token_id, length in self._waiting:
            pieces.append(Piece([token_id], self._text[start : start + length]))
            start += length
        if start < len(self._text):
            pieces.append(Piece([], self._text[start:]))
        self._waiting.clear()
        self._text = ""
        return pieces


def merged(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    """The same events with neighbours of one kind made one: clients are sent a message for each."""
    out: list[ReplyEvent] = []
    for event in events:
        match out[-1] if out else None, event:
            case TextDelta(before), TextDelta(text):
                out[-1] = TextDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                out[-1] = ReasoningDelta(before + text)
            case ToolCallDelta(position, before), ToolCallDelta(same, text) if position == same:
                out[-1] = ToolCallDelta(position, before + text)
            case _:
                out.append(event)
    return out


class PromptEcho:
    """Takes the prompt off a generation's text, for engines that repeat one which ends inside a character."""

    def __init__(self, prompt: str) -> None:
        """`prompt`: how the engine's tokenizer decodes it; empty if it is not repeated."""
        self._prompt = prompt
        self._held = ""

    def strip(self, text: str, *, is_last: bool) -> str:
        """The part of `text` that was generated, and what was held back before; empty while that cannot be told."""
        if not self._prompt:
            return text
        self._held += text
        if len(self._held) < len(self._prompt) and not is_last:
            return ""
        held, prompt = self._held, self._prompt
        self._held = self._prompt = ""
        # Its last character may have been completed by what was generated.
        for repeated in (prompt, prompt.rstrip(NO_CHARACTER)):
            if held.startswith(repeated):
                return held[len(repeated) :]
        return held
