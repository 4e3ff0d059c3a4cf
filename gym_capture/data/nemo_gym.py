"""Token records that NeMo Gym wrote, read as snapshots.

Invariant: a record that is read says exactly what its line says, under our names. A line that cannot be read, or that
contradicts itself, its digest or its file, and a file that cannot be read, become a `RecordProblem` of that rollout -
never an exception, never a repaired record, and never another rollout's concern.

Flow: `read_directory` finds the rollouts -> for each, `read_rollout` reads the lines of `<rollout>.tokens.jsonl`
(`token_lines`, schema versions 1 to 5) -> works out where deltas begin, whatever order the lines are in -> makes the
records -> checks their digests -> makes them whole (`suffixes`) -> adds what the files beside it say of lost calls:
`.tokens.incomplete` (ids of calls that were not recorded), `.tokens.intents` (ids of calls that were about to run,
`-<id>` once they were called off) and `.tokens.state.json`. `.tokens.lock` holds nothing.

Their digest begins with the number of ids, so it cannot be carried on from call to call: checking hashes each call's
whole length, which is the one thing here that is not linear in the ids stored.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from gym_capture.capture.record_fields import FIELDS, Kind, parts
from gym_capture.capture.records import (
    Continues,
    EntrySuffix,
    IdArray,
    LostCall,
    Parent,
    RecordProblem,
    Root,
    Snapshot,
    TokenEntry,
    Unresolved,
    WeightSpan,
    id_bytes,
)
from gym_capture.capture.suffixes import StoredRecord, complete, prompt_part
from gym_capture.data.token_lines import NEWEST_SCHEMA_VERSION, Header, LineReader, Record, problem, strict_json
from gym_capture.errors import InvalidRolloutIdError, RecordError, StoreError
from gym_capture.reasons import CaptureMark, ProblemReason, UnresolvedReason, join_reason
from gym_capture.regular_files import read_regular
from gym_capture.rollout_ids import check_rollout_id

__all__ = [
    "NEWEST_SCHEMA_VERSION",
    "gym_digest",
    "read_directory",
    "read_rollout",
    "rollout_ids",
    "rollout_sizes",
    "shown_id",
]

RECORDS_SUFFIX: Final = ".tokens.jsonl"
_INCOMPLETE: Final = ".tokens.incomplete"
_INTENTS: Final = ".tokens.intents"
_STATE: Final = ".tokens.state.json"
_HALVES: Final = re.compile("[\ud800-\udfff]")
_DIGEST_TAG: Final = b"nemo-gym-tokens"
_DIGESTED: Final = np.dtype(">u8")
_ID_BYTES: Final = 4
_TOKEN_FIELDS: Final = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"})


def read_directory(path: Path) -> Iterator[Snapshot]:
    """A snapshot of each rollout in a directory of captures, by rollout id, one at a time.

    Rollouts whose records were consumed, of which only the state is left, are not among them. Raises `StoreError` if
    the directory cannot be read.
    """
    for rollout_id in rollout_ids(path):
        yield read_rollout(path, rollout_id)


def rollout_ids(path: Path) -> list[str]:
    """The rollouts that a directory of captures holds something of, sorted."""
    return list(rollout_sizes(path))


def rollout_sizes(path: Path) -> dict[str, int]:
    """The rollouts that a directory of captures holds something of, sorted, and the bytes of their records."""
    sizes: dict[str, int] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                suffix = next(
                    (each for each in (RECORDS_SUFFIX, _INCOMPLETE, _INTENTS) if entry.name.endswith(each)), None
                )
                if suffix is None or entry.name == suffix:
                    continue
                rollout_id = entry.name.removesuffix(suffix)
                size = _size(entry) if suffix == RECORDS_SUFFIX else 0
                sizes[rollout_id] = sizes.get(rollout_id, 0) + size
    except OSError as error:
        raise StoreError(f"cannot read the directory of captures {path}: {error.strerror}") from None
    return dict(sorted(sizes.items()))


def compressed_files(path: Path) -> list[str]:
    """Names of files with records that are not read, because they are compressed, sorted. Raises `StoreError`."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.name.endswith(f"{RECORDS_SUFFIX}.gz"))
    except OSError as error:
        raise StoreError(f"cannot read the directory of captures {path}: {error.strerror}") from None


def _size(entry: os.DirEntry[str]) -> int:
    """0 for what is not there any more, or leads nowhere."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def read_rollout(path: Path, rollout_id: str) -> Snapshot:
    """The snapshot of one rollout; empty if the directory holds nothing of it."""
    problems: list[RecordProblem] = []
    try:
        check_rollout_id(rollout_id)
    except InvalidRolloutIdError as error:
        problems.append(problem(ProblemReason.INVALID_ROLLOUT_ID, None, "rollout_id", str(error)))
    base = os.path.join(path, rollout_id)  # not a Path: to make one takes as long as to open a file
    text = _content(f"{base}{RECORDS_SUFFIX}", problems) or b""
    reader = LineReader(text)
    records: list[Record] = []
    for number, (begin, end) in enumerate(_lines(text), start=1):
        parsed = reader.read(begin, end)
        if isinstance(parsed, RecordProblem):
            problems.append(replace(parsed, detail=f"line {number} of {rollout_id}{RECORDS_SUFFIX}: {parsed.detail}"))
        elif parsed is not None:
            records.append(parsed)

    lengths = _Lengths([record for record in records if record.header.rollout_id == rollout_id])
    made_records: list[StoredRecord] = []
    digests: list[str | None] = []
    for record in records:
        made = _entry(record, lengths)
        if isinstance(made, RecordProblem):
            problems.append(made)
        else:
            made_records.append(made)
            digests.append(record.header.digest)
            problems += _contradictions(record.header, made)
    problems += _digest_problems(rollout_id, made_records, digests)
    entries, orphans = complete(made_records)

    state = _state(f"{base}{_STATE}", problems)
    incomplete = _incomplete(base, problems, marked=state.incomplete)
    called = {record.header.model_call_id for record in records} | {each.call_id for each in problems}
    intents = _intents(base, problems)
    incomplete += [join_reason(CaptureMark.DANGLING_INTENT, each) for each in intents if each not in called]
    content = hashlib.sha256("\n".join([reader.content(), *incomplete]).encode())
    return Snapshot(
        rollout_id=shown_id(rollout_id),
        snapshot_id=state.snapshot_id or content.hexdigest(),
        version=state.version,
        entries=entries,
        orphans=orphans,
        incomplete=tuple(dict.fromkeys(incomplete)),
        problems=tuple(problems),
        lost_calls=tuple(
            LostCall(model_call_id=lost.model_call_id, retries=lost.retries, answers=lost.answers)
            for lost in state.lost_calls
        ),
    )


def shown_id(rollout_id: str) -> str:
    """A file may be called anything, and a group by halves of characters; what it is called by here can be written as
    text."""
    return _HALVES.sub("\ufffd", rollout_id)


def gym_digest(ids: IdArray) -> str:
    """NeMo Gym's digest of cumulative ids: SHA-256 over a tag, one byte 1, the count, and each id as 64 bits."""
    return _digest_of(ids.astype(_DIGESTED))


def _digest_of(ids: npt.NDArray[np.uint64]) -> str:
    if not ids.size:
        return hashlib.sha256(_DIGEST_TAG).hexdigest()
    state = hashlib.sha256(_DIGEST_TAG + struct.pack(">BQ", 1, ids.size))
    state.update(ids.data)
    return state.hexdigest()


# --- entries -------------------------------------------------------------------------------------------------------


class _Lengths:
    """How many cumulative ids each call has, worked out from the arrays: a delta's begins where its parent's end."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records: dict[str, Record] = {}
        for record in records:
            self._records.setdefault(record.header.model_call_id, record)
        self._known: dict[str, int | None] = {}

    def of(self, call_id: str) -> int | None:
        """None: the call is not there, or the deltas that lead to it never begin."""
        path: list[Record] = []
        seen: set[str] = set()
        length: int | None = 0
        current: str | None = call_id
        while current is not None:
            record = self._records.get(current)
            if record is None or current in seen:
                length = None
                break
            if current in self._known:
                length = self._known[current]
                break
            seen.add(current)
            path.append(record)
            current = record.header.parent_call_id if record.header.prompt_is_delta else None
        for record in reversed(path):
            length = None if length is None else length + record.stored_len
            self._known[record.header.model_call_id] = length
        return self._known.get(call_id)


def _entry(record: Record, lengths: _Lengths) -> StoredRecord | RecordProblem:
    header = record.header
    try:
        parent = _parent(header)
        if isinstance(parent, Continues):
            parent_len = lengths.of(parent.call_id)
            if header.prompt_is_delta:
                parent_len = (parent_len or 0) if header.cum_len is None else header.cum_len - record.stored_len
                if parent_len <= 0:
                    raise _error(header, "cum_len", "a delta has to say, or its parent has to show, where it begins")
            parent = Continues(parent.call_id, parent_len or 0)
        elif header.prompt_is_delta:
            raise _error(header, "prompt_is_delta", "a delta needs a parent to be a delta of")
        said = header.values
        values = {name: read(header, name, said[name]) for name, read in _READERS.items() if said[name] is not None}
        values["output_items"], values["token_item_index"] = _output_items(
            header, said["output_items"] or [], said["token_item_index"]
        )
        made = parts(
            {
                **values,
                "generation_token_ids": record.generation_token_ids,
                "generation_log_probs": record.generation_log_probs,
                "parent": parent,
                "turn_key": header.turn_key,
            }
        )
        if header.prompt_is_delta:
            return EntrySuffix(new_prompt_ids=record.prompt_token_ids, **made)
        return TokenEntry(prompt_token_ids=record.prompt_token_ids, **made)
    except RecordError as error:
        return problem(ProblemReason.MALFORMED_RECORD, header.model_call_id, error.field, error.message)
    except InvalidRolloutIdError as error:
        return problem(ProblemReason.MALFORMED_RECORD, header.model_call_id, "rollout_id", error.message)


def _parent(header: Header) -> Parent | None:
    """The recorded decision, without its length. Versions 1 and 2 know parents but no decisions."""
    decision, named = header.parent_resolution, header.parent_call_id
    if decision == "resolved" and not named:
        raise _error(header, "parent_call_id", "is missing, but the parent is resolved")
    if decision in ("root", "unresolved") and named:
        raise _error(header, "parent_call_id", f"must be null where the parent is {decision}: got {named!r}")
    if named:
        return Continues(named, 0)
    if decision == "root":
        return Root()
    if decision == "unresolved":
        return Unresolved(header.parent_resolution_reason or UnresolvedReason.NOT_SAID)
    return None


def _output_items(
    header: Header, items: Sequence[Mapping[str, Any]], carrier: int | None
) -> tuple[tuple[Mapping[str, Any], ...], int | None]:
    """The items without the token arrays that old writers left on them, and which of them carries the generation."""
    if carrier is None:
        carriers = [index for index, item in enumerate(items) if item.get("generation_token_ids") is not None]
        carrier = carriers[-1] if carriers else None
    elif not 0 <= carrier < len(items):
        raise _error(header, "token_item_index", f"is outside of the {len(items)} output items: got {carrier}")
    kept = [
        item if _TOKEN_FIELDS.isdisjoint(item) else {key: item[key] for key in item if key not in _TOKEN_FIELDS}
        for item in items
    ]
    return tuple(kept), carrier


def _spans(header: Header, field: str, value: Sequence[Any]) -> tuple[WeightSpan, ...]:
    spans: list[WeightSpan] = []
    for span in value:
        match span:
            case {"start": start, "end": end, "version": version} | [start, end, version]:
                pass
            case _:
                raise _error(header, field, f"must be spans of start, end and version: got {span!r}")
        # Types as they are: in patterns, and to `isinstance`, true is an integer.
        if not (type(start) is type(end) is int and type(version) in (str, int)):
            raise _error(header, field, f"must be integers, and a version: got {span!r}")
        spans.append(WeightSpan(start, end, str(version)))
    return tuple(spans)


def _rows(header: Header, field: str, value: list[Any]) -> npt.NDArray[Any]:
    try:
        rows: npt.NDArray[Any] = np.array(value)
    except ValueError as error:
        raise _error(header, field, str(error)) from None
    if rows.dtype.kind not in "iub":
        raise _error(header, field, f"must be integers: got dtype {rows.dtype}")
    if rows.dtype.kind != "b" and _has_bool(value):
        raise _error(header, field, "must be integers: got a truth value among them")
    return rows


def _as_it_is(_: Header, __: str, value: Any) -> Any:
    return value


def _as_text(_: Header, __: str, value: object) -> str:
    return str(value)


_FROM_LINES: Final[Mapping[Kind, Callable[[Header, str, Any], Any]]] = {
    Kind.TEXT: _as_it_is,
    Kind.OPTIONAL_TEXT: _as_text,  # a stop reason may be the id of a token
    Kind.FLAG: _as_it_is,
    Kind.OPTIONAL_FLAG: _as_it_is,
    Kind.OPTIONAL_COUNT: _as_it_is,
    Kind.TIME: _as_it_is,
    Kind.OBJECT: _as_it_is,
    Kind.NAMES: lambda _, __, value: tuple(value),
    Kind.RULES_BY_KEY: _as_it_is,
    Kind.SPANS: _spans,
    Kind.TENSOR: _rows,
}
"""The field that a value of a line becomes. Ids, parents and output items are read together with other fields."""
_READERS: Final = {
    field.name: _FROM_LINES[field.kind] for field in FIELDS if field.in_nemo_gym and field.kind in _FROM_LINES
}


def _has_bool(values: list[Any]) -> bool:
    """Whether a nest of lists, which numpy takes for numbers, has truth values in it."""
    types = set(map(type, values))
    return bool in types or (list in types and any(map(_has_bool, values)))


# --- what contradicts a record -------------------------------------------------------------------------------------


def _contradictions(header: Header, entry: StoredRecord) -> list[RecordProblem]:
    if header.cum_len is None or header.cum_len == entry.cum_len:
        return []
    detail = f"must be the length of prompt and generation: got {header.cum_len}, expected {entry.cum_len}"
    return [problem(ProblemReason.MALFORMED_RECORD, header.model_call_id, "cum_len", detail)]


def _digest_problems(
    rollout_id: str, entries: Sequence[StoredRecord], digests: Sequence[str | None]
) -> list[RecordProblem]:
    """The calls whose digest is not that of their cumulative ids, where these are known.

    The ids of the path to a call stand in one buffer, every delta right behind its parent, and whole prompts over what
    they repeat, so that each id is converted once. Deltas that never begin are not reached: the builder says why.
    """
    first: dict[str, int] = {}
    for position, entry in enumerate(entries):
        if entry.rollout_id == rollout_id:
            first.setdefault(entry.model_call_id, position)
    deltas: dict[int, list[int]] = {}
    for position, entry in enumerate(entries):
        if isinstance(entry, EntrySuffix) and entry.parent.call_id in first:
            parent = first[entry.parent.call_id]
            if entries[parent].cum_len == entry.parent.cum_len:
                deltas.setdefault(parent, []).append(position)
    order: list[int] = []
    pending = [position for position, entry in enumerate(entries) if isinstance(entry, TokenEntry)][::-1]
    while pending:
        order.append(pending.pop())
        pending += deltas.get(order[-1], ())
    wrong: list[int] = []
    # Of those that are reached: how long a delta says that the path before it is, nobody has shown.
    longest = max((entries[position].cum_len for position in order), default=0)
    path, path_bytes, there = np.empty(longest, dtype=_DIGESTED), bytearray(_ID_BYTES * longest), 0
    path_ids = np.frombuffer(path_bytes, dtype=np.int32)
    for position in order:
        entry, digest = entries[position], digests[position]
        begin, prompt = prompt_part(entry)
        prompt_len, cum_len, generation = entry.prompt_len, entry.cum_len, entry.generation_token_ids
        # Where the prompt begins with what is there, or ends within it, that is not written again.
        known = there if not begin and path_bytes.startswith(id_bytes(prompt)[: _ID_BYTES * there]) else 0
        for buffer in (path, path_ids):
            buffer[begin + known : prompt_len] = prompt[known:]
            buffer[prompt_len:cum_len] = generation
        there = cum_len
        if digest is not None and _digest_of(path[:cum_len]) != digest:
            wrong.append(position)
    return [
        problem(
            ProblemReason.DIGEST_MISMATCH,
            entries[position].model_call_id,
            "digest",
            f"must be the digest of the call's {entries[position].cum_len} cumulative ids: got {digests[position]!r}",
        )
        for position in sorted(wrong)
    ]


# --- the files beside the records ----------------------------------------------------------------------------------


class _LostCall(BaseModel):
    """`records.LostCall`: only gym-capture writes it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_call_id: str
    retries: tuple[str, ...]
    answers: tuple[str, ...]


class _State(BaseModel):
    """The writer's words on the whole rollout; all of them may be missing."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    snapshot_id: str = ""
    version: int = 0
    incomplete: bool = False
    lost_calls: list[_LostCall] = []


_NO_STATE: Final = _State()


def _state(path: str, problems: list[RecordProblem]) -> _State:
    try:
        return _State.model_validate(strict_json(read_regular(path)))
    except FileNotFoundError:
        return _NO_STATE
    except OSError as error:
        problems.append(_unreadable(path, error))
    except ValueError as error:  # what the parsers and the model raise
        problems.append(problem(ProblemReason.CORRUPT_STATE, None, None, f"{os.path.basename(path)}: {error}"))
    return _NO_STATE


def _incomplete(base: str, problems: list[RecordProblem], *, marked: bool) -> list[str]:
    lost = _text_lines(f"{base}{_INCOMPLETE}", problems)
    reasons = [join_reason(CaptureMark.CAPTURE_FAILED, call_id) for call_id in lost or () if call_id]
    if (marked or lost is not None) and not reasons:
        reasons.append(CaptureMark.CAPTURE_FAILED)
    return reasons


def _intents(base: str, problems: list[RecordProblem]) -> dict[str, None]:
    """The calls that were about to run and were not called off, in their order."""
    pending: dict[str, None] = {}
    for call_id in _text_lines(f"{base}{_INTENTS}", problems) or ():
        if call_id.startswith("-"):
            pending.pop(call_id[1:], None)
        elif call_id:
            pending[call_id] = None
    return pending


def _text_lines(path: str, problems: list[RecordProblem]) -> list[str] | None:
    text = _content(path, problems)
    return None if text is None else [line.decode(errors="replace").strip() for line in text.split(b"\n")]


def _lines(text: bytes) -> Iterator[tuple[int, int]]:
    """Where the lines are, each with the newline that ended it."""
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", begin) + 1 or len(text)
        yield begin, end
        begin = end


def _content(path: str, problems: list[RecordProblem]) -> bytes | None:
    """The contents of a file, nothing if it cannot be read; None: it is not there."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(_unreadable(path, error))
        return b""


def _unreadable(path: str, error: OSError) -> RecordProblem:
    return problem(ProblemReason.UNREADABLE, None, None, f"{os.path.basename(path)}: {error.strerror or error}")


def _error(header: Header, field: str, message: str) -> RecordError:
    return RecordError(f"{field} {message}", field=field, call_id=header.model_call_id)
