"""Keys that are equal exactly when two requests hold the same conversation up to an assistant turn.

Invariant: a turn's key is a function of the tools offered and of every item up to and including that turn, and two
keys are equal only if those are equal under the equivalences below (SHA-256, cut to 128 bits). Nothing here raises on
what a model wrote or a client sent.

What does not count, because clients change it while they echo a conversation:

- ids of tool calls. Which call a tool result answers counts by position instead: in the latest turn that has a call
  with the result's id, the first such call that is not answered yet. A result that answers no open call is told apart
  by its id, as nothing else says what it answers;
- reasoning of an assistant turn, and whitespace around its text. A turn with nothing in it still is a turn;
- the spelling of tool arguments (`canonical_arguments`), and the order of the keys of a tool's schema;
- the volatile part of a system text, by named rules (`NormalizationRule`); a rule that fired is reported.

Everything else counts to the character: roles, system, user and tool result text, tool definitions and their order.

Flow: `Fingerprinter.fingerprint(conversation)` gives one key for each assistant turn of a request, which lineage looks
up -> the call generates -> `Fingerprint.key_with(turn)` is the key that the call's record owns from then on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from gym_capture.conversation import (
    AssistantTurn,
    Conversation,
    Item,
    Message,
    Tool,
    ToolCall,
    ToolResult,
    merge_assistant_turns,
    nests_too_deep,
)
from gym_capture.errors import ConfigError
from gym_capture.reasons import RequestRule

_DOMAIN: Final = b"gym-capture/conversation/1\0"
_STATE_BYTES: Final = 16


# --- volatile headers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NormalizationRule:
    """Names a part of system text that a harness rewrites from request to request without meaning anything by it.

    `pattern` is a regular expression with a group named `volatile`. Only what that group matches is left out of the
    comparison; the text around it counts, and so does that something stood there. Raises `ConfigError` if the pattern
    does not compile or has no such group.

    A rule does not change what the policy sees. When a call continues a parent whose header had another value, its
    prompt starts with the parent's ids, old header included, and that prompt is what is recorded: exact, though not
    what the client's latest header would have rendered to.
    """

    name: str
    pattern: str
    roles: tuple[str, ...] = ("system", "developer")
    """The roles of the messages that the rule looks at."""
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            regex = re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"normalization rule {self.name!r}: the pattern does not compile: {error}") from None
        if "volatile" not in regex.groupindex:
            raise ConfigError(f"normalization rule {self.name!r}: the pattern needs a group (?P<volatile>...)")
        object.__setattr__(self, "_regex", regex)

    def spans(self, message: Message) -> Iterator[tuple[int, int]]:
        """Where the volatile parts of a message's text start and end, in order."""
        if message.role in self.roles:
            for match in self._regex.finditer(message.text):
                start, end = match.span("volatile")
                if start < end:
                    yield start, end


BILLING_HEADER: Final = NormalizationRule(
    RequestRule.BILLING_HEADER,
    # `key=value;` pairs and no further, should a client run its next block on into the same line.
    r"\Ax-anthropic-billing-header:(?P<volatile>(?:[ \t]*[\w.-]+=[^;\s]*;?)+|[^\n]*)",
)
"""Claude Code's first system block: version and nonce of the request."""

CURRENT_DATE: Final = NormalizationRule(
    RequestRule.CURRENT_DATE,
    # Starting with a literal lets the engine skip through a long system text; looking back costs only where it hits.
    r" date(?<=Today['’]s date|Current date)(?::| is)[ \t]*(?P<volatile>"
    r"\d{4}-\d{2}-\d{2}"
    r"|\d{1,2}/\d{1,2}/\d{4}"
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,2},? \d{4})",
)
"""A line such as `Today's date: 2026-11-29`: a rollout that runs past midnight goes on with the date it began with."""

DEFAULT_RULES: Final = (BILLING_HEADER, CURRENT_DATE)


# --- fingerprints ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The keys of one request. It holds on to the conversation, so keep at most the latest of each rollout."""

    turn_keys: tuple[str, ...]
    """For each assistant turn of the request, the key of everything up to and including it."""
    asked_keys: tuple[str, ...]
    """For each assistant turn of the request, the key of everything before it."""
    normalized: tuple[str, ...]
    """Names of the rules that fired, in the order of the rules."""
    _rules: tuple[NormalizationRule, ...] = field(repr=False)
    _conversation: Conversation = field(repr=False)
    _types: tuple[type[Item], ...] = field(repr=False)
    """Of the items; a named tuple of one type equals one of another type that has the same fields."""
    _states: tuple[bytes, ...] = field(repr=False)
    """The chain: the state after the tools, then after each item. Equal states mean equal history."""
    _fired: tuple[tuple[int, tuple[str, ...]], ...] = field(repr=False)
    """(item, names of the rules that fired on it), for items where one did."""
    _calls: _OpenCalls = field(repr=False)
    """After the last item."""

    @property
    def tools_key(self) -> str:
        """The key of the tools."""
        return self._states[0].hex()

    @property
    def asked_key(self) -> str:
        """The key of everything before the turn that this request asks for."""
        items = self._conversation.items
        return self._states[-2 if items and isinstance(items[-1], AssistantTurn) else -1].hex()

    @property
    def request_key(self) -> str:
        """The key of the whole conversation. Empty if it ends in an assistant turn, which the generated one goes on."""
        items = self._conversation.items
        return "" if items and isinstance(items[-1], AssistantTurn) else self.asked_key

    @property
    def latest_answer(self) -> tuple[str, str] | None:
        """The key of the conversation before the latest assistant turn, and the one through it; None: there is none."""
        return (self.asked_keys[-1], self.turn_keys[-1]) if self.turn_keys else None

    def key_with(self, turn: AssistantTurn) -> str:
        """The key of the request's conversation continued by the generated `turn`.

        A request that ends in an assistant turn has that turn continued, as clients echo the two as one.
        """
        items = self._conversation.items
        if items and isinstance(last := items[-1], AssistantTurn):
            (whole,) = merge_assistant_turns((last, turn))
            assert isinstance(whole, AssistantTurn)
            return _after_turn(self._states[-2], whole).hex()
        return _after_turn(self._states[-1], turn).hex()


class Fingerprinter:
    """Fingerprints conversations under a fixed set of rules. Raises `ConfigError` if two rules share a name."""

    def __init__(self, rules: tuple[NormalizationRule, ...] = DEFAULT_RULES) -> None:
        names = [rule.name for rule in rules]
        if len(set(names)) != len(names):
            raise ConfigError(f"normalization rules need names of their own: got {names}")
        self._rules = rules

    def fingerprint(self, conversation: Conversation, previous: Fingerprint | None = None) -> Fingerprint:
        """`previous`, of any earlier request, only saves time: what the two have in common is not hashed again."""
        items, tools = conversation
        types: tuple[type[Item], ...] = tuple(map(type, items))
        start = 0
        states: list[bytes]
        if previous is None or previous._rules != self._rules or previous._conversation.tools != tools:
            states, keys, asked, fired, calls = [_after_tools(tools)], [], [], [], _OpenCalls()
        else:
            start = self._common(items, types, previous)
            states = list(previous._states[: start + 1])
            n_turns = types[:start].count(AssistantTurn)
            keys, asked = list(previous.turn_keys[:n_turns]), list(previous.asked_keys[:n_turns])
            fired = [(index, names) for index, names in previous._fired if index < start]
            if start == len(previous._conversation.items):
                calls = previous._calls.copy()
            else:
                calls = _OpenCalls.after(items[:start])

        for index in range(start, len(items)):
            item = items[index]
            if isinstance(item, AssistantTurn):
                calls.ask(item.tool_calls)
                asked.append(states[-1].hex())
                states.append(_after_turn(states[-1], item))
                keys.append(states[-1].hex())
            elif isinstance(item, ToolResult):
                states.append(_step(states[-1], b"R", calls.answer(item.call_id), item.text))
            else:
                state, names = self._after_message(states[-1], item)
                states.append(state)
                if names:
                    fired.append((index, names))

        every_name = {name for _, names in fired for name in names}
        return Fingerprint(
            turn_keys=tuple(keys),
            asked_keys=tuple(asked),
            normalized=tuple(rule.name for rule in self._rules if rule.name in every_name),
            _rules=self._rules,
            _conversation=conversation,
            _types=types,
            _states=tuple(states),
            _fired=tuple(fired),
            _calls=calls,
        )

    def _common(self, items: tuple[Item, ...], types: tuple[type[Item], ...], previous: Fingerprint) -> int:
        """How many leading items are the same as in `previous`, whose tools are the same.

        A message may differ in its volatile part, so that a header that changes with every request does not cost
        hashing the whole history again.
        """
        old_items, old_types = previous._conversation.items, previous._types
        end = min(len(items), len(old_items))
        if items[:end] == old_items[:end] and types[:end] == old_types[:end]:
            return end
        for index in range(end):
            item = items[index]
            if types[index] is not old_types[index]:
                return index
            if item != old_items[index]:
                if not isinstance(item, Message):
                    return index
                state, _ = self._after_message(previous._states[index], item)
                if state != previous._states[index + 1]:
                    return index
        return end

    def _after_message(self, state: bytes, message: Message) -> tuple[bytes, tuple[str, ...]]:
        """The chain's state after a message, and the names of the rules that fired on it."""
        found = sorted(
            (start, order, end, rule.name)
            for order, rule in enumerate(self._rules)
            for start, end in rule.spans(message)
        )
        pieces = [message.role]
        names: dict[str, None] = {}
        done = 0
        for start, _, end, name in found:
            if start >= done:
                pieces += (message.text[done:start], name)
                names[name] = None
                done = end
        pieces.append(message.text[done:])
        return _step(state, b"M", *pieces), tuple(names)


class _OpenCalls:
    """The tool calls that no result has answered yet, by id: their ordinals among all calls of the conversation."""

    __slots__ = ("_asked", "_open")

    def __init__(self, asked: int = 0, unanswered: Mapping[str, deque[int]] = MappingProxyType({})) -> None:
        self._asked = asked
        self._open = {call_id: ordinals.copy() for call_id, ordinals in unanswered.items()}

    @classmethod
    def after(cls, items: Iterable[Item]) -> _OpenCalls:
        calls = cls()
        for item in items:
            if isinstance(item, AssistantTurn):
                calls.ask(item.tool_calls)
            elif isinstance(item, ToolResult):
                calls.answer(item.call_id)
        return calls

    def copy(self) -> _OpenCalls:
        return _OpenCalls(self._asked, self._open)

    def ask(self, calls: tuple[ToolCall, ...]) -> None:
        turn: dict[str, deque[int]] = {}
        for ordinal, call in enumerate(calls, start=self._asked):
            turn.setdefault(call.id, deque()).append(ordinal)
        self._open.update(turn)
        self._asked += len(calls)

    def answer(self, call_id: str) -> str:
        """A name of the call that a result answers: `#` and its ordinal, or `?` and the id if no open call has it."""
        ordinals = self._open.get(call_id)
        if ordinals is None:
            return f"?{call_id}"
        ordinal = ordinals.popleft()
        if not ordinals:
            del self._open[call_id]
        return f"#{ordinal}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OpenCalls) and (self._asked, self._open) == (other._asked, other._open)

    __hash__ = None  # type: ignore[assignment]


# --- the chain ---------------------------------------------------------------------------------------------------


def _after_tools(tools: tuple[Tool, ...]) -> bytes:
    texts = (
        (tool.name, tool.description, _canonical_schema(tool.parameters_json), "strict" if tool.strict else "")
        for tool in tools
    )
    return _step(_DOMAIN, b"T", *(text for four in texts for text in four))


def _after_turn(state: bytes, turn: AssistantTurn) -> bytes:
    calls = (text for call in turn.tool_calls for text in (call.name, canonical_arguments(call.arguments)))
    return _step(state, b"A", turn.text.strip(), *calls)


def _step(state: bytes, tag: bytes, *texts: str) -> bytes:
    """The next state of the chain. Lengths are hashed before texts, so that no two sequences of texts collide."""
    hasher = hashlib.sha256(state + tag)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.digest()[:_STATE_BYTES]


# --- tool arguments ----------------------------------------------------------------------------------------------


def canonical_arguments(arguments: str) -> str:
    """Equal for argument texts that mean the same, and only for those. Only ever compared; never sent anywhere.

    JSON is compared by value: keys in any order, the last of duplicate keys wins, any spacing and escaping between
    strings, numbers as IEEE doubles (JavaScript clients round to them). Booleans, numbers and strings stay apart.
    No arguments, `null` and `{}` are the same. Text that is not JSON (`NaN` is not) or that nests deeper than templates
    read is compared as it is, and never equals JSON.
    """
    if not arguments.strip():
        return _NO_ARGUMENTS
    if nests_too_deep(arguments):  # where a parser gives up depends on who calls it; this does not
        return "text:" + arguments
    try:
        value = _DECODER.decode(arguments)
        return _NO_ARGUMENTS if value is None or value == {} else "json:" + _ENCODER.encode(value)
    except ValueError:
        return "text:" + arguments


def _canonical_schema(schema: str) -> str:
    """Equal for JSON texts that differ in the order of keys alone. Only ever compared; never sent anywhere."""
    if nests_too_deep(schema):
        return schema
    try:
        return json.dumps(json.loads(schema), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return schema


def _number(text: str) -> float:
    return float(text) + 0.0  # adding zero makes -0.0 the same as 0.0


def _not_json(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


_NO_ARGUMENTS: Final = "none"
_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=_not_json)
_ENCODER: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), check_circular=False)
