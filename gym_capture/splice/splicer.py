"""Prefix supply: a prompt that starts with the parent's exact ids, followed by only what is new.

Invariant: a `Spliced` prompt starts with the parent's cumulative ids, and what follows them is what the template
itself writes after that assistant turn in this very request. Where that cannot be shown the answer is `NotSpliced`
with a named reason, and the caller renders the whole conversation.

Flow: render the request with marks, one at the end of what the parent generated, one in every other text -> what
follows the first mark is the turn's close and the tail; the other marks show that nothing old was written after the
turn and nothing new before it -> see how much of the close the parent's ids already have -> the rest must be how the
rendering without marks ends -> tokenize that rest alone, and append it.

Nothing counts end-of-turn ids, compares old text, or tokenizes history. Cost: two renderings, and the tokens of the
tail. A turn that was cut short costs two renderings more. A whole conversation costs two as well: the second, with
marks, shows that the template wrote every message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gym_capture.capture.records import IdArray
from gym_capture.conversation import AssistantTurn, Conversation, Item, Message, Tool
from gym_capture.reasons import NotSplicedReason
from gym_capture.splice.template import ChatTemplate, Protected, TemplateError, encode_rendered, protect, split_controls

_SPACE: Final = re.compile(r"\s")
_TURN: Final = -1
"""The number of the mark at the end of the parent's turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Spliced:
    """A prompt that starts with the parent's cumulative ids."""

    ids: IdArray
    """int32."""
    added_close: int
    """How many of the ids after the parent's close its turn: it was cut short, and did not say them itself."""


@dataclass(frozen=True, slots=True)
class NotSpliced:
    """Why the parent's ids cannot be continued."""

    reason: NotSplicedReason
    detail: str = ""
    """For a person: what the template said, or which item."""


def full_prompt(template: ChatTemplate, conversation: Conversation) -> IdArray:
    """int32 ids of the whole conversation and the generation prompt.

    Raises `TemplateError` if the template refuses the conversation, or leaves out a message or a tool result: an agent
    that relies on what the policy never saw would be trained on it.
    """
    protected = protect(template, conversation)
    text = template.render(protected.conversation, add_generation_prompt=True)
    lost = _lost_item(template, protected, text)
    if lost is not None:
        item = protected.conversation.items[lost]
        what = f"such a {item.role} message" if isinstance(item, Message) else "tool results"
        raise TemplateError(
            f"this model's chat template does not write {what}: number {lost + 1} of the conversation would be lost",
            param="messages",
        )
    return encode_rendered(template, text, protected)


def splice(
    template: ChatTemplate, conversation: Conversation, *, turn: int, parent_ids: IdArray
) -> Spliced | NotSpliced:
    """The prompt for `conversation` that continues `parent_ids`, a call's prompt and generated ids.

    `turn`: which assistant turn of the conversation, from 0, that call generated.
    """
    protected = protect(template, conversation)
    parent = _parent_turn(protected.conversation, turn)
    result = _continue(template, protected, parent, parent_ids)
    if isinstance(result, Spliced) or not parent.item.tool_calls:
        return result
    if result.reason == NotSplicedReason.TURN_LOST:
        # A template that knows no tool calls leaves them out. What follows the turn is the same.
        return _continue(template, protected, parent._replace(mark_call=False), parent_ids)
    if result.reason == NotSplicedReason.OLD_ITEM_MOVED:
        # Some write a turn's text behind the results of its calls. The parent's ids have it where it was said.
        return _continue(template, protected, parent._replace(item=parent.item._replace(text="")), parent_ids)
    return result


def _lost_item(template: ChatTemplate, protected: Protected, text: str) -> int | None:
    """The first message or tool result of which `text`, the conversation's rendering, has nothing.

    Proven with marks, as a short text stands in others, too. Assistant turns are left to the template, which may strip
    what was thought or said in them.
    """
    nonce, items = protected.nonce, protected.conversation.items
    sent = [n for n, item in enumerate(items) if _markable(item) and not isinstance(item, AssistantTurn)]
    marked = list(items)
    for n in sent:
        marked[n] = items[n]._replace(text=_with_mark_inside(items[n].text, f"{nonce}M{n}Z", nonce))
    try:
        proof = template.render(protected.conversation._replace(items=tuple(marked)), add_generation_prompt=True)
    except TemplateError:
        return next((n for n in sent if items[n].text.strip() not in text), None)
    return next((n for n in sent if f"{nonce}M{n}Z" not in proof), None)


class _ParentTurn(NamedTuple):
    """The turn that the parent generated."""

    at: int
    """Its position among the conversation's items."""
    item: AssistantTurn
    mark_call: bool
    """Whether the last thing it has is a tool call, and marked as such."""


def _parent_turn(conversation: Conversation, turn: int) -> _ParentTurn:
    turns = [(n, item) for n, item in enumerate(conversation.items) if isinstance(item, AssistantTurn)]
    at, item = turns[turn]
    return _ParentTurn(at, item, mark_call=bool(item.tool_calls))


def _continue(
    template: ChatTemplate, protected: Protected, parent: _ParentTurn, parent_ids: IdArray
) -> Spliced | NotSpliced:
    request = Conversation(
        _with_item(protected.conversation.items, parent.at, parent.item), protected.conversation.tools
    )
    marked = _Marked(template, request, parent, nonce=protected.nonce)
    try:
        after = marked.after_turn(len(request.items), add_generation_prompt=True)
        if isinstance(after, NotSpliced):
            return after
        plain = template.render(request, add_generation_prompt=True)
    except TemplateError as error:
        return NotSpliced(NotSplicedReason.TEMPLATE_REFUSES, str(error))
    offsets = _tail_offsets(marked, after.head, parent_ids)
    if offsets is None:
        return NotSpliced(
            NotSplicedReason.CLOSE_UNKNOWN, f"the parent's ids end with {template.decode(parent_ids[-8:])!r}"
        )
    tail = (after.head + after.rest)[offsets.start :]
    if not plain.endswith(tail):
        return NotSpliced(NotSplicedReason.TAIL_DIFFERS)
    tail_ids = _encode_after(parent_ids, tail, template, protected)
    close_ids = _encode_after(parent_ids, tail[: offsets.end_of_close - offsets.start], template, protected)
    return Spliced(np.concatenate((parent_ids, tail_ids), dtype=np.int32), added_close=close_ids.size)


# --- what the template writes after the turn ---------------------------------------------------------------------


class _After(NamedTuple):
    """The text of a rendering after the parent's turn, in two parts."""

    head: str
    """As far as the middle of the first new text: the close of the turn, and what opens the next."""
    rest: str


class _Marked:
    """The request with marks in it: `_TURN` where the parent's turn ends, n >= 0 in item n, and below -1 in tools."""

    def __init__(self, template: ChatTemplate, request: Conversation, parent: _ParentTurn, *, nonce: str) -> None:
        self.template = template
        self.parent = parent
        self._nonce = nonce
        items = [item._replace(text=self._mark_text(item, n)) for n, item in enumerate(request.items)]
        tools = [self._mark_tool(tool, -2 - n) for n, tool in enumerate(request.tools)]
        self._conversation = Conversation(_with_item(items, parent.at, self._mark_end()), tuple(tools))

    def after_turn(self, n_items: int, *, add_generation_prompt: bool) -> _After | NotSpliced:
        """The template's text after the turn, where the conversation is its first `n_items` items."""
        conversation = self._conversation._replace(items=self._conversation.items[:n_items])
        text = self.template.render(conversation, add_generation_prompt=add_generation_prompt)
        marks: dict[int, list[re.Match[str]]] = {}
        for match in re.finditer(f"{self._nonce}M(-?\\d+)Z", text):
            marks.setdefault(int(match[1]), []).append(match)
        ends = marks.pop(_TURN, [])
        if len(ends) != 1:
            return NotSpliced(NotSplicedReason.TURN_REPEATED if ends else NotSplicedReason.TURN_LOST)
        start, at = ends[0].end(), self.parent.at
        for n, found in marks.items():
            if n <= at and found[-1].start() > start:
                return NotSpliced(NotSplicedReason.OLD_ITEM_MOVED, f"item {n}" if n >= 0 else "tools")
            if n > at and found[0].start() < start:
                return NotSpliced(NotSplicedReason.NEW_ITEM_MOVED, f"item {n}")
        for n, item in enumerate(conversation.items[at + 1 :], at + 1):
            if n not in marks and _markable(item) and not isinstance(item, AssistantTurn):
                return NotSpliced(NotSplicedReason.NEW_ITEM_LOST, f"item {n}")
        new = [found[0].start() for n, found in marks.items() if n > at]
        middle = min(new, default=len(text))
        return _After(text[start:middle], re.sub(f"{self._nonce}M-?\\d+Z", "", text[middle:]))

    def _mark(self, number: int) -> str:
        return f"{self._nonce}M{number}Z"

    def _mark_end(self) -> AssistantTurn:
        """The turn keeps its shape. The arguments of its calls are not needed: they stand before the mark."""
        at, turn, mark_call = self.parent
        end, inside = self._mark(_TURN), self._mark(at)
        if mark_call:
            *others, last = turn.tool_calls
            ended = last._replace(arguments=f'{{"value":"{end}"}}')
            return turn._replace(text=self._mark_text(turn, at), tool_calls=(*others, ended))
        calls = tuple(call._replace(arguments=f'{{"value":"{inside}"}}') for call in turn.tool_calls)
        return turn._replace(text=turn.text + end, tool_calls=calls)

    def _mark_text(self, item: Item, number: int) -> str:
        """The mark goes to the middle, since templates look at how texts begin and end, and trim them there.

        In an assistant's text it goes to the end, since templates cut thinking off its beginning. What the assistant
        says later needs no mark: templates may leave it out.
        """
        text = item.text
        if not _markable(item) or (isinstance(item, AssistantTurn) and number > self.parent.at):
            return text
        if not isinstance(item, AssistantTurn):
            return _with_mark_inside(text, self._mark(number), self._nonce)
        end = len(text.rstrip())
        return text[:end] + self._mark(number) + text[end:]

    def _mark_tool(self, tool: Tool, number: int) -> Tool:
        return tool._replace(description=tool.description + self._mark(number))


def _with_mark_inside(text: str, mark: str, nonce: str) -> str:
    end = len(text.rstrip())
    middle = (end + len(text[:end]) - len(text[:end].lstrip())) // 2
    space = _SPACE.search(text, middle, end)
    if space is not None:
        end = space.start()
    elif nonce not in text:  # else it would fall into a stand-in
        end = middle
    return text[:end] + mark + text[end:]


def _with_item(items: Sequence[Item], at: int, item: Item) -> tuple[Item, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _markable(item: Item) -> bool:
    return bool(item.text) and not item.text.isspace()


# --- how much of the close the parent's ids already have ---------------------------------------------------------


class _TailOffsets(NamedTuple):
    """Offsets into what follows the turn's mark."""

    start: int
    """Where the tail begins: everything before it is already in the parent's ids."""
    end_of_close: int
    """Where the close of the turn ends; `start` if nothing of it is missing."""


def _tail_offsets(marked: _Marked, head: str, parent_ids: IdArray) -> _TailOffsets | None:
    template = marked.template
    pieces = split_controls(template.special_tokens, head)
    last = template.decode(parent_ids[-1:])
    if last in template.special_tokens:
        end = _end_of_first(last, pieces, stops=template.stop_tokens)
        if end is not None:
            return _TailOffsets(end, end)
        if last in template.stop_tokens:
            close = _close(marked, pieces)
            return None if close is None else _TailOffsets(close.end_of_close, close.end_of_close)
    close = _close(marked, pieces)
    text = pieces[0] if pieces and pieces[0] not in template.special_tokens else ""
    written = _trailing_text(template, parent_ids, len(text))
    start = _overlap(written, text, is_closing=marked.parent.mark_call and len(pieces) > 1)
    if start == 0 and marked.parent.mark_call:
        # Nothing tells how the model itself closed its call: whatever it wrote stands, and only the turn is closed.
        if close is None:
            return None
        start = close.start
    return _TailOffsets(start, start if close is None else max(start, close.end_of_close))


def _end_of_first(token: str, pieces: list[str], *, stops: frozenset[str]) -> int | None:
    """Where the first `token` among `pieces` ends; None if it has none, or only behind another kind of stop."""
    end = 0
    for piece in pieces:
        end += len(piece)
        if piece == token:
            return end
        if piece in stops and token not in stops:
            return None
    return None


def _trailing_text(template: ChatTemplate, ids: IdArray, length: int) -> str:
    """The plain text that `ids` end with: at least `length` characters of it, or as far as the last control token."""
    text = template.decode(ids[-max(length, 1) :])
    pieces = split_controls(template.special_tokens, text)
    return pieces[-1] if pieces and pieces[-1] not in template.special_tokens else ""


def _overlap(written: str, text: str, *, is_closing: bool) -> int:
    """How many characters of `text`, which follows the turn's mark, are already there: what `written` ends with.

    `is_closing`: all of it closes the turn, so its last word shows that it was written in full, if perhaps with other
    whitespace.
    """
    words = text.split()
    if is_closing and words and written.rstrip().endswith(words[-1]):
        return len(text)
    quote = text.startswith('"')  # of the mark, which stands for a JSON string; a number has none
    for end in range(len(text), quote, -1):
        if written.endswith(text[quote:end]) and not text[quote:end].isspace():
            return end
    return 0


def _close(marked: _Marked, pieces: list[str]) -> _TailOffsets | None:
    """Where the template's own close of the turn begins and ends in `pieces`; None if it cannot be told.

    Found by rendering the turn as the last one: what stands where that has its stop token, and also stands there
    when a generation prompt follows, belongs to the turn and not to what comes next.
    """
    template = marked.template
    try:
        last = marked.after_turn(marked.parent.at + 1, add_generation_prompt=False)
        prompted = marked.after_turn(marked.parent.at + 1, add_generation_prompt=True)
    except TemplateError:
        return None
    if isinstance(last, NotSpliced) or isinstance(prompted, NotSpliced):
        return None
    closing = split_controls(template.special_tokens, last.head)
    stop = next((n for n, piece in enumerate(closing) if piece in template.stop_tokens), None)
    if stop is None:
        common = _common_length(pieces, closing)
        return _TailOffsets(common, common)
    opening = split_controls(template.special_tokens, prompted.head)[: stop + 1]
    if pieces[:stop] != closing[:stop] or pieces[: stop + 1] != opening or opening[-1] not in template.special_tokens:
        return None
    start = sum(map(len, pieces[:stop]))
    return _TailOffsets(start, start + len(pieces[stop]))


def _common_length(left: list[str], right: list[str]) -> int:
    """How many characters two texts in pieces begin with in common, control tokens in full or not at all."""
    length = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            shorter = min(ours, theirs, key=len)
            return length + (len(shorter) if max(ours, theirs, key=len).startswith(shorter) else 0)
        length += len(ours)
    return length


def _encode_after(parent_ids: IdArray, text: str, template: ChatTemplate, protected: Protected) -> IdArray:
    """The ids of `text` where it follows `parent_ids`.

    A control token there is tokenized along: some swallow the whitespace after them, and a text's first word can be
    tokenized unlike its others.
    """
    if not text:
        return np.zeros(0, dtype=np.int32)
    last = template.decode(parent_ids[-1:])
    if last not in template.special_tokens:
        return encode_rendered(template, text, protected)
    return encode_rendered(template, last + text, protected)[1:]
