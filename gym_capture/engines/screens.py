"""Filters between a generation and vLLM's parsers, which look for markup everywhere: mere text looks like text to them.

Invariant: parsers see every token, with markup changed nowhere but where it is none: inside the JSON strings of a tool
call, whose end is known, and in thinking, before it has ended. There the characters that begin or end markup are
replaced by stand-ins, which no text has, and in what the parser makes of it they are put back.

Flow: a piece -> `ThoughtScreen` -> `JsonScreen` -> vLLM's parser -> `restore`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from gym_capture.engines.steps import NO_CHARACTER, Piece

_MARKUP: Final = "<[]{};`"
"""Characters that formats of tool calls are made of. None has a meaning in a JSON string."""
_STAND_INS: Final = "".join(chr(0xFDD0 + n) for n in range(len(_MARKUP)))
"""Noncharacters: they are for use inside a program, and no text has them."""
_TO_STAND_INS: Final = str.maketrans(_MARKUP, _STAND_INS)
_FOREIGN: Final = str.maketrans(dict.fromkeys(_STAND_INS, NO_CHARACTER))
_STAND_IN: Final = re.compile(f"[{_STAND_INS}]")
_STAND_IN_OF_JSON: Final = re.compile(rf"\\\\|[{_STAND_INS}]|\\ufdd([0-{len(_MARKUP) - 1}])")
"""A backslash that is itself escaped begins no escape."""
_PART_OF_ESCAPE: Final = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u(?:f(?:dd?)?)?)?)\Z")
_WORDS: Final = re.compile(r"\w+|\W")
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_SPACE: Final = re.compile(r"\s*")
_COLON: Final = re.compile(r"\s*:\s*")
_COMMA: Final = re.compile(r"\s*,?")
_ARGUMENTS: Final = ("arguments", "parameters")
_BETWEEN_VALUES: Final = re.compile(r"[\s,:\w.+-]")
_TAIL: Final = 64
"""Characters before a bracket that tell whether a call's JSON begins there."""


def restore(text: str) -> str:
    """`text` with the characters that were replaced put back."""
    return _STAND_IN.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    return _MARKUP[_STAND_INS.index(match[0])]


def _spelled_in_json(match: re.Match[str]) -> str:
    if match[1]:
        return _MARKUP[int(match[1])]
    return match[0] if match[0].startswith("\\") else _spelled(match)


class PartRestorer:
    """`restore` for JSON that comes in parts: some parsers write stand-ins as escapes, which may be cut."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        part = _PART_OF_ESCAPE.search(text)
        self._held = "" if part is None else part[1]
        return _STAND_IN_OF_JSON.sub(_spelled_in_json, text[: len(text) - len(self._held)])

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


class ThoughtScreen:
    """Some parsers take a tool call for the end of thinking, also one that the model only thinks of.

    Whether it does shows at the end of the thought, if that comes: then the call was a part of it. Until then what
    begins with the call is held back.
    """

    def __init__(
        self,
        *,
        start: str,
        end: str,
        end_id: int | None,
        before: str,
        is_call: Callable[[Piece], bool],
        plain_id: int,
    ) -> None:
        """`start`, `end`: what is written around a thought. `end_id`: of the token that is `end`, if one is: engines
        may leave it out of the text. `before`: the text of the generation prompt. `is_call`: whether a parser would
        take a piece for a tool call. `plain_id`: of a token that is no markup.
        """
        self._is_thinking = True
        self._start, self._end, self._end_id = start, end, end_id
        self._is_call = is_call
        self._plain_id = plain_id
        self._has_begun = start in before
        self._text = before[-_TAIL:]
        self._held: list[Piece] = []

    def is_thinking(self) -> bool:
        return self._is_thinking

    def feed(self, piece: Piece) -> list[Piece]:
        if not self._is_thinking:
            return [piece]
        self._text = self._text[-_TAIL:] + piece.text
        if self._end in self._text or self._end_id in piece.token_ids:
            self._is_thinking = False
            thought = [Piece([self._plain_id] * len(ids), text.translate(_TO_STAND_INS)) for ids, text in self._held]
            self._held = []
            return [*thought, piece]
        self._has_begun = self._has_begun or self._start in self._text
        if self._held or (self._has_begun and self._is_call(piece)):
            self._held.append(piece)
            return []
        if self._is_call(piece):
            self._is_thinking = False
        return [piece]

    def rest(self) -> list[Piece]:
        """The pieces held at the end of the generation: calls that were meant."""
        held, self._held = self._held, []
        self._is_thinking = self._is_thinking and not held
        return held


class JsonFormat(NamedTuple):
    """How a family of models writes calls in JSON."""

    opens: re.Pattern[str]
    """Ends where the JSON begins, at a bracket."""
    content: Literal["calls", "arguments", "other"] = "calls"
    """calls: an object with name and arguments for each call, alone or in an array. arguments: those of one call."""
    one_line: bool = False
    """Its parser reads no further than to the end of the line. Between values of JSON a line break is but a space."""


class WrittenCall(NamedTuple):
    """A call whose JSON has ended."""

    name: str | None
    """None where the name is not in the JSON."""
    arguments: str
    """As JSON."""


class JsonScreen:
    """Knows where the JSON of a tool call is, and where in it a string is.

    A call that does not begin with its name is put in order, since parsers want to say the name first. What stands
    behind its arguments, such as an id, is left out: parsers take arguments to go on to the end.
    """

    def __init__(self, form: JsonFormat, *, plain_id: int) -> None:
        self._form = form
        self._plain_id = plain_id
        self.calls: list[WrittenCall] = []
        """Those that are over, in order, and in the end one that is not."""
        self._before = ""
        """The last text outside of JSON."""
        self._json: list[str] = []
        """The JSON that is open, so far."""
        self._brackets: list[str] = []
        """Those that are open; none outside of JSON."""
        self._in_string = self._is_escaped = False
        self._string_start = 0
        """Of the last string, where in the JSON."""
        self._held: list[Piece] = []
        """Pieces that wait until it is known whether the call they begin has its name first."""
        self._call: _Call | None = None
        self._swaps: list[tuple[int, int, str]] = []
        """Replacements in the held text, from the last to the first."""

    def feed(self, piece: Piece) -> list[Piece]:
        start = sum(len(held.text) for held in self._held)
        text = ""
        for char in piece.text.translate(_FOREIGN):
            text += self._read(char, start + len(text))
        self._held.append(piece if text == piece.text else Piece([self._plain_id] * len(piece.token_ids), text))
        return [] if self._call is not None and not self._call.is_in_order else self._released()

    def rest(self) -> list[Piece]:
        """The pieces held at the end of the generation. A call that was cut before its name is none; one that lacks its
        last brackets has the arguments that are written, as they stand."""
        if self._call is not None and self._call.is_in_order and self._call.member in _ARGUMENTS:
            self.calls.append(WrittenCall(None, "".join(self._json[self._call.value_start :]).strip()))
        if self._call is not None and self._call.is_misplaced:
            text = "".join(piece.text for piece in self._held)
            self._swaps.insert(0, (self._call.start, len(text), ""))
        return self._released()

    def _released(self) -> list[Piece]:
        held, swaps = self._held, self._swaps
        self._held, self._swaps = [], []
        if not swaps:
            return held
        text = "".join(piece.text for piece in held)
        for start, end, new in swaps:
            text = text[:start] + new + text[end:]
        return [Piece([], word) for word in _WORDS.findall(text)]

    def _read(self, char: str, at: int) -> str:
        """The character that the parser is to see for `char`, which is at position `at` of the held text."""
        if not self._brackets:
            self._read_outside(char, at)
            return char
        self._json.append(char)
        is_left_out = self._call is not None and self._call.is_over
        if self._in_string:
            char = self._read_string(char)
        elif char == '"':
            self._in_string = True
            self._string_start = len(self._json)
        elif char in "{[":
            self._open(char, at)
        elif char in "}]":
            self._close(char, at)
            is_left_out = is_left_out and self._call is not None
        elif self._call is not None and len(self._brackets) == self._call.depth:
            if is_left_out and not _BETWEEN_VALUES.fullmatch(char):
                self._leave()
                self._read_outside(char, at)
                return char
            if char == ":":
                self._call = self._call.with_member(
                    "".join(self._json[self._string_start : -1]).strip('" \n'), len(self._json)
                )
        if is_left_out and self._call is not None:
            return ""
        return " " if self._form.one_line and char in "\r\n" else char

    def _read_outside(self, char: str, at: int) -> None:
        if char in "{[" and self._form.opens.search(self._before):
            self._json = [char]
            self._open(char, at)
        self._before = self._before[-_TAIL:] + char

    def _read_string(self, char: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return char
        elif char < " ":
            self._leave()  # it is no JSON
            return char
        return char.translate(_TO_STAND_INS)

    def _open(self, bracket: str, at: int) -> None:
        self._brackets.append(bracket)
        is_call = self._brackets in (["{"], ["[", "{"])
        if is_call and self._form.content == "calls":
            self._call = _Call(at, len(self._json) - 1, len(self._brackets))

    def _close(self, bracket: str, at: int) -> None:
        if self._brackets.pop() + bracket not in ("{}", "[]"):
            self._leave()
            return
        if self._call is not None and len(self._brackets) < self._call.depth:
            self._end_call(self._call, at)
        elif self._call is not None and len(self._brackets) == self._call.depth:
            is_over = self._call.is_in_order and self._call.member in _ARGUMENTS
            self._call = self._call._replace(is_over=self._call.is_over or is_over)
        if not self._brackets:
            if self._form.content == "arguments":
                self.calls.append(WrittenCall(None, "".join(self._json)))
            self._before = "".join(self._json[-_TAIL:])  # some formats begin with brackets that are no JSON
            self._json = []

    def _end_call(self, call: _Call, at: int) -> None:
        text = "".join(self._json[call.json_start :])
        written = _written_call(text)
        if written is not None:
            self.calls.append(written)
        if call.is_misplaced:
            replaced = _STRING.sub(lambda match: match[0].translate(_TO_STAND_INS), text)
            self._swaps.insert(0, (call.start, at + 1, _name_first(replaced)))
        self._call = None

    def _leave(self) -> None:
        self._brackets, self._json, self._call = [], [], None
        self._in_string = self._is_escaped = False


class _Call(NamedTuple):
    start: int
    """Where it begins in the text that is held."""
    json_start: int
    """Where it begins in its JSON."""
    depth: int
    """How many brackets are open in it, its own included."""
    member: str | None = None
    """The key whose value comes, or came last."""
    value_start: int = 0
    """Where in its JSON that value begins."""
    is_in_order: bool = False
    is_misplaced: bool = False
    """It is known not to begin with its name."""
    is_over: bool = False
    """There is nothing more in it that a parser should see."""

    def with_member(self, key: str, value_start: int) -> _Call:
        if self.member is not None:
            return self._replace(member=key, value_start=value_start)
        return self._replace(member=key, value_start=value_start, is_in_order=key == "name", is_misplaced=key != "name")


def _written_call(call: str) -> WrittenCall | None:
    """None if it is no call."""
    try:
        parsed = json.loads(call)
    except ValueError:
        return None
    if not isinstance(parsed.get("name"), str):
        return None
    value = parsed.get("arguments", parsed.get("parameters"))
    return WrittenCall(parsed["name"], json.dumps({} if value is None else value, ensure_ascii=False))


def _name_first(call: str) -> str:
    """The same object with its name first and its arguments last. What is no JSON stays as it is."""
    members: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    at = 1
    try:
        while call[at:].strip() != "}":
            key, end = decoder.raw_decode(call, _past(_SPACE, call, at))
            start = _past(_COLON, call, end)
            _, at = decoder.raw_decode(call, start)
            members.append((key, call[start:at]))
            at = _past(_COMMA, call, at)
    except ValueError:
        return call
    members.sort(key=lambda member: (member[0] != "name", member[0] in _ARGUMENTS))
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members) + "}"


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where what the pattern matches at `at` ends."""
    match = pattern.match(text, at)
    if match is None:
        raise ValueError("no JSON")
    return match.end()
