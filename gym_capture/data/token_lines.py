"""One line of a token file as a record: its scalars checked, its ids and log probabilities as arrays.

Invariant: a line is JSON in the strict sense - no NaN, no half characters, no key twice in one object - and a number is
what the line spells: `true`, `"-0.5"` and `1.0` are no ids, `true` and `"-0.5"` no log probabilities. The fast way
accepts nothing that `read_strictly` refuses, and what it accepts it reads the same; all else it leaves to that.

Flow: nearly all of a line is digits. So the three arrays are cut out -> what is left is small and goes through the
parsers and the model -> each array, if it is spelled in digits and commas, is parsed by itself. A prompt that starts
with the very text of an earlier call's prompt and generation starts with their ids: those digits are compared, not
parsed, so that a conversation's text is parsed once, however often it is repeated.
"""

from __future__ import annotations

import array
import json
import math
import re
from collections import deque
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import jiter
import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_capture.records import IdArray, LogProbArray, RecordProblem

NEWEST_SCHEMA_VERSION: Final = 5

_PROMPT: Final = "prompt_token_ids"
_GENERATION: Final = "generation_token_ids"
_LOG_PROBS: Final = "generation_log_probs"

# Stand in a line for the arrays that are cut out of it.
_MARKERS: Final = {_PROMPT: -4611686018427388137, _GENERATION: -4611686018427388247, _LOG_PROBS: -4611686018427388333}
_ARRAY_BEGINS: Final = re.compile(rb'"(prompt_token_ids|generation_(?:token_ids|log_probs))"[ \t]*:[ \t]*\[')
_OF_IDS: Final = b"0123456789, "
_OF_LOG_PROBS: Final = b"0123456789+-.eE, "
_REMEMBERED: Final = 4

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Header(BaseModel):
    """What a line says beside its three arrays. Unknown fields are left out.

    A field that a version does not have is as good as null.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    schema_version: int = Field(default=1, ge=1)
    rollout_id: str
    model_call_id: str
    model: str | None = None
    requested_model: str | None = None
    has_tools: bool | None = None
    output_items: list[dict[str, Any]] | None = None
    token_item_index: _Int64 | None = None
    created_at: float | None = None
    parent_call_id: str | None = None
    parent_resolution: Literal["root", "resolved", "unresolved"] | None = None
    parent_resolution_reason: str | None = None
    cum_len: _Int64 | None = None
    digest: str | None = None
    prompt_is_delta: bool | None = None
    prefix_requested: bool | None = None
    prefix_supplied: bool | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delivered: bool | None = None
    max_tokens: _Int64 | None = None
    sampling: dict[str, Any] | None = None
    weight_versions: list[Any] | None = None
    routed_experts: list[Any] | None = None
    sampling_mask: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A line that could be read. Whether its parts agree with each other is not yet known."""

    header: Header
    prompt_token_ids: IdArray
    generation_token_ids: IdArray
    generation_log_probs: LogProbArray

    @property
    def stored_len(self) -> int:
        return int(self.prompt_token_ids.size + self.generation_token_ids.size)


class LineReader:
    """Reads the lines of one file, in their order; any order is right, that of the calls is fast."""

    def __init__(self) -> None:
        self._prompts = _Prompts()

    def read(self, line: bytes) -> Record | RecordProblem | None:
        """A record, why there is none, or nothing for a blank line."""
        record = self._read_fast(line)
        return read_strictly(line) if record is None else record

    def _read_fast(self, line: bytes) -> Record | None:
        """None: not a line as writers write it, for whatever reason."""
        spans: dict[str, tuple[int, int]] = {}
        pieces: list[bytes] = []
        begin = 0
        while len(spans) < len(_MARKERS):
            found = _ARRAY_BEGINS.search(line, begin)
            if found is None:
                return None
            name = found[1].decode()
            end = line.find(b"]", found.end())
            if end < 0 or name in spans:
                return None
            spans[name] = (found.end(), end)
            pieces += (line[begin : found.end() - 1], b"%d" % _MARKERS[name])
            begin = end + 1
        pieces.append(line[begin:])
        rest = b"".join(pieces)
        try:
            found_fields = strict_json(rest)
            # Each marker stands for a field of the record itself, not for text in a string or a field further inside.
            if not isinstance(found_fields, dict) or not all(
                found_fields.get(name) == marker and rest.count(b"%d" % marker) == 1
                for name, marker in _MARKERS.items()
            ):
                return None
            header = _header(found_fields)
            prompt = self._prompts.read(line, *spans[_PROMPT], remember=not header.prompt_is_delta)
            generation_text = line[slice(*spans[_GENERATION])]
            generation = _ids_of(generation_text)
            log_probs = _log_probs_of(line[slice(*spans[_LOG_PROBS])])
        except (ValueError, TypeError, OverflowError):  # what parsers, numpy and the model raise
            return None
        self._prompts.goes_on(generation_text, generation)
        return Record(header, prompt, generation, log_probs)


def read_strictly(line: bytes) -> Record | RecordProblem | None:
    """A record, why there is none, or nothing for a blank line: what `LineReader` gives for any line."""
    if not line.strip():
        return None
    try:
        found = strict_json(line)
    except ValueError as error:
        return _not_json(line, str(error))
    if not isinstance(found, dict):
        return problem("malformed_record", None, None, f"must be an object: got {type(found).__name__}")
    named = found.get("model_call_id")
    call_id = named if isinstance(named, str) else None
    version = found.get("schema_version")
    if type(version) is int and version > NEWEST_SCHEMA_VERSION:
        detail = f"written by schema version {version}, this reads up to {NEWEST_SCHEMA_VERSION}: upgrade gym-capture"
        return problem("newer_schema_version", call_id, "schema_version", detail)
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
        return problem("malformed_record", call_id, field, first["msg"])
    except ValueError as error:
        return problem("malformed_record", call_id, field, f"{field} {error}")
    return Record(header, prompt, generation, log_probs)


def strict_json(text: bytes) -> Any:
    """Raises `ValueError` for what is not JSON, for a key that stands twice and for numbers beyond float64."""
    # One parser refuses infinities and takes repeated keys, the other takes the former and refuses the latter; this
    # one also keeps integers of any size.
    orjson.loads(text)
    return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)


def problem(reason: str, call_id: str | None, field: str | None, detail: str) -> RecordProblem:
    return RecordProblem(reason=reason, call_id=call_id or None, field=field, detail=detail)


def _header(found: dict[str, Any]) -> Header:
    if found.get("schema_version") is None:
        found.pop("schema_version", None)
    header = Header.model_validate(found)
    if header.schema_version > NEWEST_SCHEMA_VERSION:
        raise ValueError("written by a newer version")
    return header


# --- arrays as text ------------------------------------------------------------------------------------------------


class _Prompts:
    """Whole prompts of one file; of the latest calls it keeps what a prompt that continues them begins with."""

    def __init__(self) -> None:
        self._latest: deque[tuple[bytes, IdArray]] = deque(maxlen=_REMEMBERED)
        """Text and ids of a call's prompt and generation. Retries and sub-agents go on from others than the last."""
        self._pending: tuple[bytes, IdArray] | None = None

    def read(self, line: bytes, begin: int, end: int, *, remember: bool) -> IdArray:
        """The ids of `line[begin:end]`. Raises as `_ids_of`."""
        known = max(
            (each for each in self._latest if line.startswith(each[0], begin, end)),
            key=lambda each: len(each[0]),
            default=None,
        )
        ids = None if known is None else _continued(*known, line[begin + len(known[0]) : end])
        if ids is None:
            ids = _ids_of(line[begin:end])
        self._pending = (line[begin:end], ids) if remember and ids.size else None
        return ids

    def goes_on(self, text: bytes, generation: IdArray) -> None:
        """`text` is what was generated from the prompt that was read last."""
        if self._pending is not None and generation.size:
            prompt_text, prompt = self._pending
            comma = b", " if b", " in text or b", " in prompt_text[:32] else b","
            self._latest.append((comma.join((prompt_text, text)), np.concatenate((prompt, generation))))


def _continued(known_text: bytes, known: IdArray, text: bytes) -> IdArray | None:
    """The ids of an array that begins with a known one and goes on with `text`; None: it does not."""
    if not text:
        return known
    if text[:1] != b"," or not text[1:].strip():
        return None  # a longer number; or a comma that nothing follows
    return np.concatenate((known, _ids_of(text[1:])))


def _ids_of(text: bytes) -> IdArray:
    """The inside of an array of ids. Raises `ValueError`, `TypeError` or `OverflowError` if it is anything else."""
    if text.translate(None, _OF_IDS):
        raise ValueError("not ids")
    return np.frombuffer(array.array("i", orjson.loads(b"[%b]" % text)), dtype=np.int32)


def _log_probs_of(text: bytes) -> LogProbArray:
    """The inside of an array of numbers. Raises as `_ids_of`."""
    if text.translate(None, _OF_LOG_PROBS):
        raise ValueError("not numbers")
    return _as_float32(orjson.loads(b"[%b]" % text))


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
    with np.errstate(over="ignore"):  # what overflows is not finite, which the entry refuses
        return np.array(values, dtype=np.float64).astype(np.float32)


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
            return problem("malformed_record", None, None, detail)
        wrong = [name for name in found if name in found.repeated or _is_wrong(found[name])]
    except (ValueError, RecursionError):
        # A writer that died in the middle of a line never ended it; only the last line can be like that.
        return problem("malformed_record" if line.endswith(b"\n") else "truncated_record", None, None, detail)
    named = found.get("model_call_id")
    known = isinstance(named, str) and named.isascii() and "model_call_id" not in wrong
    return problem("malformed_record", named if known else None, wrong[0] if wrong else None, detail)


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
