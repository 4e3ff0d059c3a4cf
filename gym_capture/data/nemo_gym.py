"""Token records that NeMo Gym wrote, read as snapshots.

Invariant: a record that is read says exactly what its line says, under our names. A line that cannot be read, or that
contradicts itself, its digest or its file, becomes a `RecordProblem` of that rollout - never an exception, never a
repaired record, and never another rollout's concern.

Flow: `read_directory` finds the rollouts -> for each, `read_rollout` parses the lines of `<rollout>.tokens.jsonl`
(schema versions 1 to 5) -> works out where deltas begin, whatever order the lines are in -> makes the entries ->
checks their digests -> adds what the files beside it say of lost calls: `.tokens.incomplete` (ids of calls that were
not recorded), `.tokens.intents` (ids of calls that were about to run, `-<id>` once they were called off) and
`.tokens.state.json`. `.tokens.lock` holds nothing.

Their digest begins with the number of ids, so it cannot be carried on from call to call: checking costs each call's
whole length, which is the one thing here that is not linear in the ids stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_capture.errors import InvalidRolloutIdError, RecordError, StoreError
from gym_capture.records import (
    Continues,
    IdArray,
    LogProbArray,
    LostCall,
    Parent,
    RecordProblem,
    Root,
    Snapshot,
    TokenEntry,
    Unresolved,
    WeightSpan,
    as_ids,
    check_rollout_id,
)

NEWEST_SCHEMA_VERSION: Final = 5

_RECORDS: Final = ".tokens.jsonl"
_INCOMPLETE: Final = ".tokens.incomplete"
_INTENTS: Final = ".tokens.intents"
_STATE: Final = ".tokens.state.json"
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
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError as error:
        raise StoreError(f"cannot read the directory of captures {path}: {error.strerror}") from None
    suffixes = (_RECORDS, _INCOMPLETE, _INTENTS)
    return sorted({name.removesuffix(suffix) for suffix in suffixes for name in names if name.endswith(suffix)} - {""})


def read_rollout(path: Path, rollout_id: str) -> Snapshot:
    """The snapshot of one rollout; empty if the directory holds nothing of it. Raises `StoreError` on I/O errors."""
    try:
        return _read_rollout(path, rollout_id)
    except OSError as error:
        raise StoreError(f"cannot read captures: {error}", rollout_id=rollout_id) from None


def gym_digest(ids: IdArray) -> str:
    """NeMo Gym's digest of cumulative ids: SHA-256 over a tag, one byte 1, the count, and each id as 64 bits."""
    state = hashlib.sha256(b"nemo-gym-tokens")
    if ids.size:
        state.update(struct.pack(">BQ", 1, ids.size))
        state.update(ids.astype(">u8").data)
    return state.hexdigest()


def _read_rollout(path: Path, rollout_id: str) -> Snapshot:
    content = hashlib.sha256()
    problems: list[RecordProblem] = []
    try:
        check_rollout_id(rollout_id)
    except InvalidRolloutIdError as error:
        problems.append(_problem("invalid_rollout_id", None, "rollout_id", str(error)))
    records: list[_Record] = []
    for line in _lines(path / f"{rollout_id}{_RECORDS}"):
        content.update(line)
        parsed = _parse(line)
        if isinstance(parsed, RecordProblem):
            problems.append(parsed)
        elif parsed is not None:
            records.append(parsed)

    lengths = _Lengths([record for record in records if record.rollout_id == rollout_id])
    entries: list[TokenEntry] = []
    digests: list[str | None] = []
    for record in records:
        made = _entry(record, lengths)
        if isinstance(made, RecordProblem):
            problems.append(made)
        else:
            entries.append(made)
            digests.append(record.digest)
            problems += _contradictions(record, made)
    problems += _digest_problems(rollout_id, entries, digests)

    state, state_problems = _state(path / f"{rollout_id}{_STATE}")
    problems += state_problems
    called = {record.model_call_id for record in records} | {problem.call_id for problem in problems}
    incomplete = _incomplete(path, rollout_id, called, marked=state.incomplete)
    content.update("\n".join(incomplete).encode())
    return Snapshot(
        rollout_id=os.fsencode(rollout_id).decode(errors="replace"),  # a file may be called anything
        snapshot_id=state.snapshot_id or content.hexdigest(),
        version=state.version,
        entries=tuple(entries),
        incomplete=incomplete,
        problems=tuple(problems),
        lost_calls=tuple(
            LostCall(model_call_id=lost.model_call_id, retries=lost.retries, answers=lost.answers)
            for lost in state.lost_calls
        ),
    )


# --- lines ---------------------------------------------------------------------------------------------------------


class _Record(BaseModel):
    """A line, its scalars checked. Arrays are checked where they become arrays; unknown fields are left out.

    A field that a version does not have is as good as null.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    schema_version: int = Field(default=1, ge=1)
    rollout_id: str
    model_call_id: str
    model: str | None = None
    requested_model: str | None = None
    has_tools: bool | None = None
    prompt_token_ids: list[Any]
    generation_token_ids: list[Any]
    generation_log_probs: list[Any]
    output_items: list[dict[str, Any]] | None = None
    token_item_index: int | None = None
    created_at: float | None = None
    parent_call_id: str | None = None
    parent_resolution: Literal["root", "resolved", "unresolved"] | None = None
    parent_resolution_reason: str | None = None
    cum_len: int | None = None
    digest: str | None = None
    prompt_is_delta: bool | None = None
    prefix_requested: bool | None = None
    prefix_supplied: bool | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delivered: bool | None = None
    max_tokens: int | None = None
    sampling: dict[str, Any] | None = None
    weight_versions: list[Any] | None = None
    routed_experts: list[Any] | None = None
    sampling_mask: list[Any] | None = None
    turn_key: str | None = None

    @property
    def stored_len(self) -> int:
        return len(self.prompt_token_ids) + len(self.generation_token_ids)


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file that may not be there, each with the newline that ended it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from file


def _parse(line: bytes) -> _Record | RecordProblem | None:
    """A record, why there is none, or nothing for a blank line."""
    if not line.strip():
        return None
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _unparsed(line, str(error))
    if not isinstance(found, dict):
        return _problem("malformed_record", None, None, f"must be an object: got {type(found).__name__}")
    named = found.get("model_call_id")
    call_id = named if isinstance(named, str) else None
    version = found.get("schema_version")
    if isinstance(version, int) and version > NEWEST_SCHEMA_VERSION:
        detail = f"written by schema version {version}, this reads up to {NEWEST_SCHEMA_VERSION}: upgrade gym-capture"
        return _problem("newer_schema_version", call_id, "schema_version", detail)
    if version is None:
        found.pop("schema_version", None)
    try:
        return _Record.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return _problem("malformed_record", call_id, str(first["loc"][0]) if first["loc"] else None, first["msg"])


def _unparsed(line: bytes, detail: str) -> RecordProblem:
    """A line that is not JSON. One that a lenient parser takes - it has NaN in it - still shows which call it is."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        # A writer that died in the middle of a line never ended it; only the last line can be like that.
        return _problem("malformed_record" if line.endswith(b"\n") else "truncated_record", None, None, detail)
    if not isinstance(found, dict):
        return _problem("malformed_record", None, None, detail)
    named, log_probs = found.get("model_call_id"), found.get("generation_log_probs")
    nan = isinstance(log_probs, list) and any(isinstance(value, float) and value != value for value in log_probs)
    call_id = named if isinstance(named, str) and named.isascii() else None
    return _problem("malformed_record", call_id, "generation_log_probs" if nan else None, detail)


# --- entries -------------------------------------------------------------------------------------------------------


class _Lengths:
    """How many cumulative ids each call has, worked out from the arrays: a delta's begins where its parent's end."""

    def __init__(self, records: Sequence[_Record]) -> None:
        self._records: dict[str, _Record] = {}
        for record in records:
            self._records.setdefault(record.model_call_id, record)
        self._known: dict[str, int | None] = {}

    def of(self, call_id: str) -> int | None:
        """None: the call is not there, or the deltas that lead to it never begin."""
        path: list[_Record] = []
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
            current = record.parent_call_id if record.prompt_is_delta else None
        for record in reversed(path):
            length = None if length is None else length + record.stored_len
            self._known[record.model_call_id] = length
        return self._known.get(call_id)


def _entry(record: _Record, lengths: _Lengths) -> TokenEntry | RecordProblem:
    offset = 0
    try:
        parent = _parent(record)
        if isinstance(parent, Continues):
            parent_len = lengths.of(parent.call_id)
            if record.prompt_is_delta:
                offset = (parent_len or 0) if record.cum_len is None else record.cum_len - record.stored_len
                if offset <= 0:
                    raise _error(record, "cum_len", "a delta has to say, or its parent has to show, where it begins")
                parent_len = offset
            parent = Continues(parent.call_id, parent_len or 0)
        elif record.prompt_is_delta:
            raise _error(record, "prompt_is_delta", "a delta needs a parent to be a delta of")
        items, carrier = _output_items(record)
        return TokenEntry(
            rollout_id=record.rollout_id,
            model_call_id=record.model_call_id,
            model=record.model or "",
            requested_model=record.requested_model or "",
            has_tools=bool(record.has_tools),
            prompt_token_ids=_ids(record, "prompt_token_ids", record.prompt_token_ids),
            prompt_offset=offset,
            generation_token_ids=_ids(record, "generation_token_ids", record.generation_token_ids),
            generation_log_probs=_floats(record, "generation_log_probs", record.generation_log_probs),
            parent=parent,
            output_items=items,
            token_item_index=carrier,
            turn_key=record.turn_key,
            finish_reason=record.finish_reason,
            stop_reason=None if record.stop_reason is None else str(record.stop_reason),
            delivered=record.delivered,
            prefix_requested=bool(record.prefix_requested),
            prefix_supplied=bool(record.prefix_supplied),
            weight_versions=_weight_versions(record),
            sampling=record.sampling or {},
            max_tokens=record.max_tokens,
            routed_experts=_rows(record, "routed_experts", record.routed_experts),
            sampling_mask=_rows(record, "sampling_mask", record.sampling_mask),
            created_at=record.created_at or 0.0,
        )
    except RecordError as error:
        return _problem("malformed_record", record.model_call_id, error.field, error.message)
    except InvalidRolloutIdError as error:
        return _problem("malformed_record", record.model_call_id, "rollout_id", error.message)


def _parent(record: _Record) -> Parent | None:
    """The recorded decision, without its length. Versions 1 and 2 know parents but no decisions."""
    decision, named = record.parent_resolution, record.parent_call_id
    if decision == "resolved" and not named:
        raise _error(record, "parent_call_id", "is missing, but the parent is resolved")
    if decision in ("root", "unresolved") and named:
        raise _error(record, "parent_call_id", f"must be null where the parent is {decision}: got {named!r}")
    if named:
        return Continues(named, 0)
    if decision == "root":
        return Root()
    if decision == "unresolved":
        return Unresolved(record.parent_resolution_reason or "not_said")
    return None


def _output_items(record: _Record) -> tuple[tuple[Mapping[str, Any], ...], int | None]:
    """The items without the token arrays that old writers left on them, and which of them carries the generation."""
    items = record.output_items or []
    carrier = record.token_item_index
    if carrier is None:
        carriers = [index for index, item in enumerate(items) if item.get("generation_token_ids") is not None]
        carrier = carriers[-1] if carriers else None
    elif not 0 <= carrier < len(items):
        raise _error(record, "token_item_index", f"is outside of the {len(items)} output items: got {carrier}")
    return tuple({key: item[key] for key in item if key not in _TOKEN_FIELDS} for item in items), carrier


def _weight_versions(record: _Record) -> tuple[WeightSpan, ...]:
    spans: list[WeightSpan] = []
    for span in record.weight_versions or ():
        match span:
            case {"start": int(start), "end": int(end), "version": str() | int() as version} | [
                int(start),
                int(end),
                str() | int() as version,
            ]:
                spans.append(WeightSpan(start, end, str(version)))
            case _:
                raise _error(record, "weight_versions", f"must be spans of start, end and version: got {span!r}")
    return tuple(spans)


def _ids(record: _Record, field: str, value: list[Any]) -> IdArray:
    try:
        return as_ids(np.array(value))
    except (ValueError, OverflowError) as error:
        raise _error(record, field, str(error)) from None


def _floats(record: _Record, field: str, value: list[Any]) -> LogProbArray:
    try:
        with np.errstate(over="ignore"):  # what overflows is not finite, which the entry refuses
            return np.array(value, dtype=np.float64).astype(np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise _error(record, field, str(error)) from None


def _rows(record: _Record, field: str, value: list[Any] | None) -> npt.NDArray[Any] | None:
    if value is None:
        return None
    try:
        rows = np.array(value)
    except ValueError as error:
        raise _error(record, field, str(error)) from None
    if rows.dtype.kind not in "iub":
        raise _error(record, field, f"must be integers: got dtype {rows.dtype}")
    return rows


# --- what contradicts a record -------------------------------------------------------------------------------------


def _contradictions(record: _Record, entry: TokenEntry) -> list[RecordProblem]:
    if record.cum_len is None or record.cum_len == entry.cum_len:
        return []
    detail = f"must be the length of prompt and generation: got {record.cum_len}, expected {entry.cum_len}"
    return [_problem("malformed_record", record.model_call_id, "cum_len", detail)]


def _digest_problems(
    rollout_id: str, entries: Sequence[TokenEntry], digests: Sequence[str | None]
) -> list[RecordProblem]:
    """The calls whose digest is not that of their cumulative ids, where these are known."""
    first = {entry.model_call_id: entry for entry in reversed(entries) if entry.rollout_id == rollout_id}
    problems: list[RecordProblem] = []
    for entry, digest in zip(entries, digests, strict=True):
        if digest is not None:
            ids = _cumulative_ids(entry, first)
            if ids is not None and gym_digest(ids) != digest:
                detail = f"must be the digest of the call's {ids.size} cumulative ids: got {digest!r}"
                problems.append(_problem("digest_mismatch", entry.model_call_id, "digest", detail))
    return problems


def _cumulative_ids(entry: TokenEntry, entries: Mapping[str, TokenEntry]) -> IdArray | None:
    """None if the deltas that lead to the call never begin: the builder says why."""
    pieces = [entry.generation_token_ids, entry.prompt_token_ids]
    steps = 0
    while isinstance(entry.parent, Continues) and entry.is_delta:
        parent = entries.get(entry.parent.call_id)
        if parent is None or parent.cum_len != entry.prompt_offset or steps > len(entries):
            return None
        entry = parent
        steps += 1
        pieces += (entry.generation_token_ids, entry.prompt_token_ids)
    return np.concatenate(pieces[::-1])


# --- the files beside the records ----------------------------------------------------------------------------------


class _LostCall(BaseModel):
    """`records.LostCall`: only gym-capture writes it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_call_id: str
    retries: tuple[str, ...]
    answers: tuple[str, ...]


class _State(BaseModel):
    """What the writer says of the whole rollout; all of it may be missing."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    snapshot_id: str = ""
    version: int = 0
    incomplete: bool = False
    lost_calls: list[_LostCall] = []


def _state(path: Path) -> tuple[_State, list[RecordProblem]]:
    if not path.exists():
        return _State(), []
    try:
        return _State.model_validate(orjson.loads(path.read_bytes())), []
    except ValueError as error:  # what the parser and the model raise
        return _State(), [_problem("corrupt_state", None, None, f"{path.name}: {error}")]


def _incomplete(path: Path, rollout_id: str, called: set[str | None], *, marked: bool) -> tuple[str, ...]:
    reasons: list[str] = []
    marker = path / f"{rollout_id}{_INCOMPLETE}"
    lost = [_text(line) for line in _lines(marker)]
    reasons += [f"capture_failed:{call_id}" for call_id in lost if call_id]
    if (marked or marker.exists()) and not reasons:
        reasons.append("capture_failed")
    pending: dict[str, None] = {}
    for line in _lines(path / f"{rollout_id}{_INTENTS}"):
        call_id = _text(line)
        if call_id.startswith("-"):
            pending.pop(call_id[1:], None)
        elif call_id:
            pending[call_id] = None
    reasons += [f"dangling_intent:{call_id}" for call_id in pending if call_id not in called]
    return tuple(dict.fromkeys(reasons))


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()


def _problem(reason: str, call_id: str | None, field: str | None, detail: str) -> RecordProblem:
    return RecordProblem(reason=reason, call_id=call_id or None, field=field, detail=detail)


def _error(record: _Record, field: str, message: str) -> RecordError:
    return RecordError(f"{field} {message}", field=field, call_id=record.model_call_id)
