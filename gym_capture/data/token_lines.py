"""One line of a token file as a record: its scalars checked, its ids and log probabilities as arrays.

Invariant: a line is JSON in the strict sense - no NaN, no half characters, no key twice in one object - and a number is
what the line spells: `true`, `"-0.5"` and `1.0` are no ids, `true` and `"-0.5"` no log probabilities. The fast way
accepts nothing that `read_strictly` refuses, and what it accepts it reads the same; all else it leaves to that.

Flow: nearly all of a file is digits. So the three arrays are cut out of a line -> what is left is small and goes
through the parsers and the model -> each array, if it is spelled in digits and commas, is parsed by itself. A prompt
that starts with the very text of an earlier call's prompt and generation starts with their ids: those digits are
compared, not parsed, and the ids are shared, so that a conversation is parsed and held once, however often it is
repeated.
"""

from __future__ import annotations

import array
import hashlib
import json
import math
import re
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import jiter
import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from gym_capture.capture.record_fields import FIELDS, Kind
from gym_capture.capture.records import IdArray, LogProbArray, RecordProblem
from gym_capture.reasons import ProblemReason

NEWEST_SCHEMA_VERSION: Final = 5

_PROMPT: Final = "prompt_token_ids"
_GENERATION: Final = "generation_token_ids"
_LOG_PROBS: Final = "generation_log_probs"

# Stand in a line for the arrays that are cut out of it: numbers that begin alike, so that all are counted at once.
_MARKED: Final = {
    _PROMPT: -4611686018427388137,
    _GENERATION: -4611686018427388247,
    _LOG_PROBS: -4611686018427388333,
}
_MARKERS: Final = {name.encode(): b"%d" % marker for name, marker in _MARKED.items()}
_MARKERS_BEGIN: Final = b"-4611686018427388"
_ARRAY_BEGINS: Final = re.compile(rb'"(prompt_token_ids|generation_(?:token_ids|log_probs))"[ \t]*:[ \t]*\[')
_WITHIN_ITSELF: Final = re.compile(r"(?<=at )line 1 (?=column)|(?<=: )line 1 (?=column)")
"""Parsers count lines, too, and each line is a text of its own to them: theirs would be taken for that of the file."""
_OF_IDS: Final = b"0123456789, "
_OF_LOG_PROBS: Final = b"0123456789+-.eE, "
_CONVERSATIONS: Final = 4
"""That are compared with a prompt: retries and sub-agents go on from others than the last call."""

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Header(BaseModel):
    """The fields of a line beside its three arrays. Unknown fields are left out.

    Here are the fields that NeMo Gym has another form, or another meaning, for than our records; the others are those
    of `record_fields`, and stand in `values`. A field that a version does not have is as good as null.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    schema_version: int = Field(default=1, ge=1)
    rollout_id: str
    model_call_id: str
    parent_call_id: str | None = None
    parent_resolution: Literal["root", "resolved", "unresolved"] | None = None
    parent_resolution_reason: str | None = None
    prompt_is_delta: bool | None = None
    cum_len: _Int64 | None = None
    digest: str | None = None
    stop_reason: str | int | None = None
    turn_key: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """All fields, by their names."""
        return vars(self)


_TYPES: Final[Mapping[Kind, Any]] = {
    Kind.TEXT: str,
    Kind.OPTIONAL_TEXT: str,
    Kind.FLAG: bool,
    Kind.OPTIONAL_FLAG: bool,
    Kind.OPTIONAL_COUNT: _Int64,
    Kind.TIME: float,
    Kind.OBJECT: dict[str, Any],
    Kind.ITEMS: list[dict[str, Any]],
    Kind.NAMES: list[str],
    Kind.RULES_BY_KEY: dict[str, str],
    Kind.SPANS: list[Any],
    Kind.TENSOR: list[Any],
}
_Line = create_model(
    "_Line",
    __base__=Header,
    **{  # type: ignore[call-overload]  # which fields these are is not known to a type checker
        field.name: (_TYPES[field.kind] | None, None)
        for field in FIELDS
        if field.in_nemo_gym and field.kind in _TYPES and field.name not in Header.model_fields
    },
)
_HEADERS: Final = TypeAdapter(_Line)  # takes two thirds of the time of `_Line.model_validate`


@dataclass(frozen=True, slots=True)
class Record:
    """A line that could be read. Whether its parts agree with each other is not yet known."""

    header: Header
    prompt_token_ids: IdArray
    generation_token_ids: IdArray
    generation_log_probs: LogProbArray

    @property
    def stored_len(self) -> int:
        return self.prompt_token_ids.size + self.generation_token_ids.size


class LineReader:
    """Reads lines of one text, in their order; any order is right, that of the calls is fast."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._content = hashlib.sha256()
        self._latest: deque[_Conversation] = deque(maxlen=_CONVERSATIONS)
        self._count = 0

    def read(self, begin: int, end: int) -> Record | RecordProblem | None:
        """The record of the line `[begin, end)` of the text, why there is none, or nothing for a blank line."""
        record = self._read_fast(begin, end)
        if record is not None:
            return record
        line = self._text[begin:end]
        self._note(line)
        return read_strictly(line)

    def content(self) -> str:
        """A digest of all lines so far. What only repeats an earlier text counts as where that stands."""
        return self._content.hexdigest()

    def _read_fast(self, begin: int, end: int) -> Record | None:
        """None: not a line as writers write it, for whatever reason."""
        text = self._text
        spans: dict[bytes, tuple[int, int]] = {}
        pieces: list[bytes] = []
        known: _Conversation | None = None
        for _ in _MARKERS:
            found = _ARRAY_BEGINS.search(text, begin, end)
            if found is None:
                return None
            first, name, skip = found.end(), found[1], 0
            if name == b"prompt_token_ids":
                known = self._known(first, end)
                skip = 0 if known is None else known.size
            last = text.find(b"]", first + skip, end)
            if last < 0 or name in spans:
                return None
            spans[name] = (first + skip, last)
            pieces += (text[begin : first - 1], _MARKERS[name])
            begin = last + 1
        pieces.append(text[begin:end])
        rest = b"".join(pieces)
        prompt_text = text[slice(*spans[b"prompt_token_ids"])]
        generation_text = text[slice(*spans[b"generation_token_ids"])]
        log_probs_text = text[slice(*spans[b"generation_log_probs"])]
        try:
            fields = strict_json(rest)
            if not _stand_for_fields(rest, fields):
                return None
            header = _header(fields)
            own_text = prompt_text if known is None else _after_comma(prompt_text)
            prompt, generation, log_probs = _arrays_of(own_text, generation_text, log_probs_text)
        except (ValueError, OverflowError, struct.error):  # what the parsers, the model and arrays raise
            return None
        before = b"" if known is None else b"%d" % known.number
        self._note(rest, before, prompt_text, generation_text, log_probs_text)
        # Nothing to share. Without ids in the prompt the text would begin with the comma before the generation.
        if known is None and (header.prompt_is_delta or not generation.size or not prompt.size):
            return Record(header, prompt, generation, log_probs)
        conversation = _Conversation.begun(self._count) if known is None else known.branch(self._count)
        self._count += 1
        whole = conversation.append(prompt_text, prompt)
        if generation.size:
            # As a prompt that continues the call has it, if that is written like this one.
            comma = b", " if b" " in generation_text or b" " in prompt_text else b","
            conversation.append(comma + generation_text, generation)
            self._latest.append(conversation)
        return Record(header, whole, generation, log_probs)

    def _known(self, begin: int, end: int) -> _Conversation | None:
        """The latest conversation that an array continues which begins here."""
        for known in reversed(self._latest):
            after = begin + known.size
            if known.starts(self._text, begin, end) and self._text[after : after + 1] in (b",", b"]"):
                return known
        return None

    def _note(self, *parts: bytes) -> None:
        lengths = b"%d," * len(parts) % tuple(map(len, parts))
        self._content.update(b"".join((lengths, b":", *parts)))


def read_strictly(line: bytes) -> Record | RecordProblem | None:
    """A record, why there is none, or nothing for a blank line: what `LineReader` gives for any line."""
    if not line.strip():
        return None
    try:
        found = strict_json(line)
    except ValueError as error:
        return _not_json(line, _WITHIN_ITSELF.sub("", str(error)))
    if not isinstance(found, dict):
        return problem(ProblemReason.MALFORMED_RECORD, None, None, f"must be an object: got {type(found).__name__}")
    named = found.get("model_call_id")
    call_id = named if isinstance(named, str) else None
    version = found.get("schema_version")
    if type(version) is int and version > NEWEST_SCHEMA_VERSION:
        detail = f"written by schema version {version}, this reads up to {NEWEST_SCHEMA_VERSION}: upgrade gym-capture"
        return problem(ProblemReason.NEWER_SCHEMA_VERSION, call_id, "schema_version", detail)
    field: str | None = None
    try:
        header = _header(found)
        field = _PROMPT
        prompt = _ids(found.get(field))
        field = _GENERATION
        generation = _ids(found.get(field))
        field = _LOG_PROBS
        log_probs = _log_probs(found.get(field))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        return problem(ProblemReason.MALFORMED_RECORD, call_id, field, first["msg"])
    except ValueError as error:
        return problem(ProblemReason.MALFORMED_RECORD, call_id, field, f"{field} {error}")
    return Record(header, prompt, generation, log_probs)


def strict_json(text: bytes) -> Any:
    """Raises `ValueError` for what is not JSON, for a key that stands twice and for numbers beyond float64."""
    # One parser refuses infinities and takes repeated keys, the other takes the former and refuses the latter; this
    # one also keeps integers of any size.
    orjson.loads(text)
    return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)


def problem(reason: ProblemReason, call_id: str | None, field: str | None, detail: str) -> RecordProblem:
    return RecordProblem(reason=reason, call_id=call_id or None, field=field, detail=detail)


def _header(found: dict[str, Any]) -> Header:
    if found.get("schema_version") is None:
        found.pop("schema_version", None)
    header: Header = _HEADERS.validate_python(found)
    if header.schema_version > NEWEST_SCHEMA_VERSION:
        raise ValueError("written by a newer version")
    return header


# --- arrays as text ------------------------------------------------------------------------------------------------


class _Conversation:
    """Ids, and the text that spells them. Those that go on from one another share both, as long as they only grow."""

    def __init__(self, number: int, shared: _Shared, size: int, count: int) -> None:
        self.number = number
        self.size = size
        """Of the text."""
        self._count = count
        self._shared = shared

    @classmethod
    def begun(cls, number: int) -> _Conversation:
        return cls(number, _Shared(), 0, 0)

    def starts(self, text: bytes, begin: int, end: int) -> bool:
        """Whether `text[begin:end]` starts with the text of this one."""
        known = self._shared.text
        if len(known) == self.size:
            return text.startswith(known, begin, end)
        with memoryview(known) as view, view[: self.size] as part:
            return text.startswith(part, begin, end)

    def branch(self, number: int) -> _Conversation:
        """One that begins like this one, and can go on from there."""
        shared = self._shared
        if len(shared.text) != self.size:  # another has gone on from here
            shared = _Shared()
            shared.text += self._shared.text[: self.size]
            shared.ids = self._shared.ids[: self._count]  # has no room: the first append takes a copy
        return _Conversation(number, shared, self.size, self._count)

    def append(self, text: bytes, ids: IdArray) -> IdArray:
        """Goes on with `text`, which spells `ids` after whatever parts them from those before. All ids so far."""
        shared, begin = self._shared, self._count
        self._count += ids.size
        self.size += len(text)
        shared.text += text
        if self._count > shared.ids.size:
            grown: IdArray = np.empty(2 * self._count, dtype=np.int32)
            grown[:begin] = shared.ids[:begin]
            shared.ids = grown
        shared.ids[begin : self._count] = ids
        known = shared.ids[: self._count]
        known.flags.writeable = False
        return known


class _Shared:
    """A growing text and its ids. What was handed out of `ids` is not written to again."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.ids: IdArray = np.empty(0, dtype=np.int32)


def _stand_for_fields(rest: bytes, fields: Any) -> bool:
    """Whether each marker stands for a field of the record itself: not in a string, not for a field further inside."""
    return (
        isinstance(fields, dict)
        and fields.get(_PROMPT) == _MARKED[_PROMPT]
        and fields.get(_GENERATION) == _MARKED[_GENERATION]
        and fields.get(_LOG_PROBS) == _MARKED[_LOG_PROBS]
        and rest.count(_MARKERS_BEGIN) == len(_MARKED)
    )


def _after_comma(text: bytes) -> bytes:
    """The rest of an array, known ids before it: nothing, or a comma and more ids. Raises `ValueError` if it is not."""
    if text and not text[1:].strip():
        raise ValueError("a comma that nothing follows")
    return text[1:]


def _arrays_of(prompt: bytes, generation: bytes, log_probs: bytes) -> tuple[IdArray, IdArray, LogProbArray]:
    """The insides of three arrays. Raises `ValueError`, `OverflowError` or `struct.error` if they are anything else."""
    if prompt.translate(None, _OF_IDS) or generation.translate(None, _OF_IDS):
        raise ValueError("not ids")
    if log_probs.translate(None, _OF_LOG_PROBS):
        raise ValueError("not numbers")
    # No text has a bracket in it, so they are arrays together if each of them is one.
    prompt_ids, generated_ids, numbers = orjson.loads(b"[[%b],[%b],[%b]]" % (prompt, generation, log_probs))
    # To pack takes half the time of an array of the standard library, and a third of one of numpy's.
    return (
        np.frombuffer(struct.pack(f"{len(prompt_ids)}i", *prompt_ids), dtype=np.int32),
        np.frombuffer(struct.pack(f"{len(generated_ids)}i", *generated_ids), dtype=np.int32),
        np.frombuffer(struct.pack(f"{len(numbers)}f", *numbers), dtype=np.float32),
    )


# --- arrays as values ----------------------------------------------------------------------------------------------


def _ids(value: object) -> IdArray:
    values = _list(value)
    for position, each in enumerate(values):
        if type(each) is not int:
            raise ValueError(f"must be integers: got {_shown(each)} at {position}")
        if not 0 <= each < 2**31:
            raise ValueError(f"must be ids in [0, 2**31): got {_shown(each)} at {position}")
    return np.array(values, dtype=np.int32)


def _log_probs(value: object) -> LogProbArray:
    values = _list(value)
    for position, each in enumerate(values):
        if type(each) is not float and type(each) is not int:
            raise ValueError(f"must be numbers: got {_shown(each)} at {position}")
    try:
        return _as_float32(values)
    except OverflowError:
        raise ValueError("must be finite") from None


def _as_float32(values: list[Any]) -> LogProbArray:
    # What is too large becomes infinite, which the entry refuses; numpy would warn of it.
    return np.frombuffer(array.array("f", values), dtype=np.float32)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("is missing" if value is None else f"must be an array: got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# --- lines that are not JSON ---------------------------------------------------------------------------------------


class _Object(dict[str, Any]):
    """An object of JSON that knows which of its keys stood more than once."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        made.repeated = tuple(name for name in made if names.count(name) > 1)
    return made


def _not_json(line: bytes, detail: str) -> RecordProblem:
    """A lenient parser still shows which call and which field it is about: what has NaN in it, or a key twice."""
    try:
        found = json.loads(line, object_pairs_hook=_object)
        if not isinstance(found, _Object):
            return problem(ProblemReason.MALFORMED_RECORD, None, None, detail)
        wrong = [name for name in found if name in found.repeated or _is_wrong(found[name])]
    except (ValueError, RecursionError):
        # A writer that died in the middle of a line never ended it; only the last line can be like that.
        return problem(
            ProblemReason.MALFORMED_RECORD if line.endswith(b"\n") else ProblemReason.TRUNCATED_RECORD,
            None,
            None,
            detail,
        )
    named = found.get("model_call_id")
    known = isinstance(named, str) and named.isascii() and "model_call_id" not in wrong
    return problem(ProblemReason.MALFORMED_RECORD, named if known else None, wrong[0] if wrong else None, detail)


def _is_wrong(value: object) -> bool:
    """Whether some object in `value` has a key twice, or some number is not finite."""
    if isinstance(value, _Object):
        return bool(value.repeated) or any(map(_is_wrong, value.values()))
    if isinstance(value, list):
        return any(map(_is_wrong, value))
    try:
        return isinstance(value, int | float) and not math.isfinite(value)
    except OverflowError:
        return True
