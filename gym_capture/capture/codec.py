"""A record as bytes: what producers ship and stores keep.

Invariant: `decode_entry(encode_entry(record))` has every field of `record`, bit for bit, whatever text a model wrote
into it; a whole entry stays whole, a suffix a suffix. Bytes that are damaged, or that a newer version wrote, raise -
they never decode to part of a record.

Flow: the producer encodes the suffix of an entry once (`encode_suffix`) -> a store reads only what `peek_entry` needs
and keeps the bytes as they are -> `snapshot_codec` ships a rollout of them.

Layout, all integers little-endian:

    offset  size  content
    0       4     magic "GCEN"
    4       2     codec version
    6       2     zero
    8       4     H, bytes of the header
    12      4     C, bytes of the content
    16      8     created_at, float64
    24      16    payload digest: the first half of SHA-256 over all the rest. Not over created_at, so that a call
                  that is recorded again is the same record
    40      H     header: a JSON object, padded with spaces so that the arrays are aligned to 8 bytes
    40+H    C     content: the output items, a JSON array, padded likewise
    40+H+C        the arrays that the header's "arrays" lists as [name, dtype, shape], each padded to 8 bytes

The header has the fields of `record_fields`, and in a suffix `prompt_offset`: how many prompt ids stand before its
`prompt_token_ids`, which are all of its parent's cumulative ids.

Text is written as UTF-8 that lets lone surrogates pass: a model can generate half an emoji, a client can send one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gym_capture.capture.codec_json import dump_json, load_json, load_object, to_text
from gym_capture.capture.record_fields import FIELDS, Kind, RecordField, of_kinds, parts, reader
from gym_capture.capture.records import (
    CallIntent,
    CallRecord,
    Continues,
    EntrySuffix,
    IdArray,
    Parent,
    RecordProblem,
    Root,
    TokenEntry,
    Unresolved,
    WeightSpan,
)
from gym_capture.capture.suffixes import StoredRecord, prompt_part, suffix_part
from gym_capture.errors import InvalidRolloutIdError, RecordError, SchemaVersionError
from gym_capture.reasons import ProblemReason
from gym_capture.rollout_counts import CallCounts

CODEC_VERSION: Final = 1

_MAGIC: Final = b"GCEN"
SIZES: Final = struct.Struct("<4sHHII")
_PREFIX: Final = struct.Struct("<4sHHIId16s")
_CREATED_AT: Final = struct.Struct("<d")
_DIGEST_BYTES: Final = 16
_ALIGNMENT: Final = 8
_LIMIT_BYTES: Final = 1 << 30

_PLAIN_KINDS: Final = "biuf"
"""numpy's kinds for booleans, integers and floats: what raw bytes plus a dtype describe completely."""
_DTYPES: Final[Mapping[Kind, str]] = {Kind.PROMPT: "<i4", Kind.IDS: "<i4", Kind.LOG_PROBS: "<f4"}
"""Of tensors: their own."""
_OTHER_ARRAYS: Final = of_kinds(Kind.IDS, Kind.LOG_PROBS, Kind.TENSOR)
_ARRAYS: Final = tuple((field.name, _DTYPES.get(field.kind)) for field in (*of_kinds(Kind.PROMPT), *_OTHER_ARRAYS))
_ARRAY_NAMES: Final = frozenset(name for name, _ in _ARRAYS)
_read_other_arrays: Final = reader(_OTHER_ARRAYS)

_OFFSET: Final = "prompt_offset"
_STRUCTURED: Final = (Kind.PARENT, Kind.SPANS, Kind.OBJECT, Kind.NAMES)
"""Come after the scalars; then keys and their rules, which came to be last."""
_ELSEWHERE: Final = (Kind.PROMPT, Kind.IDS, Kind.LOG_PROBS, Kind.TENSOR, Kind.ITEMS, Kind.TIME)


def _header_place(field: RecordField) -> int:
    return 2 if field.kind is Kind.RULES_BY_KEY else int(field.kind in _STRUCTURED)


_HEADER: Final = tuple(sorted((field for field in FIELDS if field.kind not in _ELSEWHERE), key=_header_place))
_ALWAYS: Final = tuple(field for field in _HEADER if field.is_always_written)
_OFTEN: Final = tuple(field for field in _HEADER if not field.is_always_written)
_ALWAYS_NAMES: Final = tuple(field.name for field in _ALWAYS)
_read_always: Final = reader(_ALWAYS)
_read_often: Final = reader(_OFTEN)
# Closed: a field of another name comes from a newer version.
_HEADER_NAMES: Final = frozenset((*(field.name for field in _HEADER), _OFFSET, "arrays"))
_INTENT_KEYS: Final = ("request_key", "asked_key", "answer_key")
"""Left out when empty; intents from before there were any have none."""
_INTENT_FIELDS: Final = frozenset(("v", "rollout_id", "model_call_id", "created_at", "request_digest", *_INTENT_KEYS))


class EntryKey(NamedTuple):
    """The part of an encoded entry that a store needs."""

    rollout_id: str
    call_id: str
    payload_digest: bytes
    """Equal for equal content, `created_at` aside: tells a retried put from a conflicting one."""
    counts: CallCounts


# --- entries -----------------------------------------------------------------------------------------------------


def encode_entry(record: StoredRecord) -> bytes:
    """The bytes of a record. Raises `RecordError`, naming the field, on content that is not JSON-shaped."""
    return _encode(record, *prompt_part(record))


def encode_suffix(record: StoredRecord) -> bytes:
    """The bytes of `suffix_of(record)`, which is not made for it. What stores keep."""
    return _encode(record, *suffix_part(record))


def _encode(record: StoredRecord, prompt_offset: int, prompt_ids: IdArray) -> bytes:
    arrays: list[list[object]] = []
    blobs: list[bytes] = []
    for (name, dtype), array in zip(_ARRAYS, (prompt_ids, *_read_other_arrays(record)), strict=True):
        if array is None:
            continue
        if dtype is None:
            if array.dtype.kind not in _PLAIN_KINDS:
                raise _error(record, name, f"must be booleans, integers or floats: got dtype {array.dtype}")
            dtype = array.dtype.newbyteorder("<").str
        arrays.append([name, dtype, array.shape])
        blobs.append(padded(array.astype(dtype, copy=False).tobytes(), b"\0"))

    header: dict[str, object] = dict(zip(_ALWAYS_NAMES, _read_always(record), strict=True))
    if prompt_offset:
        header[_OFFSET] = prompt_offset
    for (name, to_json), value in zip(_WRITERS, _read_often(record), strict=True):
        # At its default it is left out: None where that is a value, else false or empty.
        if to_json is None:
            if value is not None:
                header[name] = value
        elif value:
            header[name] = to_json(value)
    header["arrays"] = arrays

    items = [dict(item) for item in record.reply.output_items]
    header_bytes = padded(_header_bytes(record, header), b" ")
    content_bytes = padded(_json_bytes(record, "output_items", items), b" ")
    body = b"".join((header_bytes, content_bytes, *blobs))
    if len(body) >= _LIMIT_BYTES:
        raise _error(record, "routed_experts", f"makes a record of {len(body)} bytes; the limit is 1 GiB")
    sizes = SIZES.pack(_MAGIC, CODEC_VERSION, 0, len(header_bytes), len(content_bytes))
    return b"".join((sizes, _CREATED_AT.pack(record.created_at), _payload_digest(sizes, body), body))


def peek_entry(data: bytes) -> EntryKey:
    """Which call the bytes are of, without decoding the rest. Raises `RecordError` if that cannot be read."""
    header_len, _, _, digest = _read_prefix(data)
    header = load_object(data[_PREFIX.size : _PREFIX.size + header_len], "header")
    rollout_id, call_id = header.get("rollout_id"), header.get("model_call_id")
    if not isinstance(rollout_id, str) or not isinstance(call_id, str):
        raise RecordError("the header of an encoded entry must name its rollout and its call", field="header")
    return EntryKey(rollout_id, call_id, digest, _peek_counts(header))


def peek_time(data: bytes) -> float:
    """When the record was made, in Unix seconds. Raises as `peek_entry`."""
    return _read_prefix(data)[2]


def _peek_counts(header: Mapping[str, Any]) -> CallCounts:
    try:
        (generated,) = (shape[0] for name, _, shape in header["arrays"] if name == "generation_token_ids")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordError("the header of an encoded entry must list its arrays", field="header") from error
    return CallCounts(generated, header.get("prefix_requested", False), header.get("prefix_supplied", False))


def payload_digest(encoded_entry: bytes) -> bytes:
    """Equal for equal content, `created_at` aside: tells a retried put from a conflicting one."""
    return encoded_entry[_PREFIX.size - _DIGEST_BYTES : _PREFIX.size]


def decode_entry(data: bytes) -> StoredRecord:
    """The record; its arrays are views of `data`. With `payload_digest` of the same bytes, all that a store asks.

    Raises `SchemaVersionError` if a newer version wrote it, `RecordError` if it is damaged or not well-formed.
    """
    header_len, content_len, created_at, digest = _read_prefix(data)
    body = memoryview(data)[_PREFIX.size :]
    if _payload_digest(data[: SIZES.size], body) != digest:
        raise RecordError("the digest of an encoded entry does not match its bytes: it was damaged", field="payload")
    header = load_object(bytes(body[:header_len]), "header")
    refuse_unknown(header.keys() - _HEADER_NAMES, what="an encoded entry")
    items = load_json(bytes(body[header_len : header_len + content_len]), "output_items")
    try:
        arrays = _read_arrays(data, header.pop("arrays"), offset=_PREFIX.size + header_len + content_len)
        prompt, prompt_offset = arrays.pop("prompt_token_ids"), header.pop(_OFFSET, 0)
        header.setdefault("parent")
        for name, from_json in _READERS.items():
            if name in header:
                header[name] = from_json(header[name])
        header.update(arrays, output_items=tuple(items), created_at=created_at)
        made = parts(header)
        if not prompt_offset:
            return TokenEntry(prompt_token_ids=prompt, **made)
        _check_offset(prompt_offset, made)
        return EntrySuffix(new_prompt_ids=prompt, **made)
    except (KeyError, TypeError, ValueError, OverflowError, InvalidRolloutIdError) as error:
        raise RecordError(f"an encoded entry is not well-formed: {error!r}", field="header") from error


def _check_offset(offset: int, made: Mapping[str, Any]) -> None:
    """Raises `RecordError` if a suffix does not begin where its parent ends."""
    parent = made["parent"]
    if not isinstance(parent, Continues):
        detail = "a suffix needs a parent to be a suffix of"
    elif offset != parent.cum_len:
        detail = f"must be the parent's cum_len: got {offset}, expected {parent.cum_len}"
    else:
        return
    rollout_id, call_id = made.get("rollout_id"), made.get("model_call_id")
    raise RecordError(f"{_OFFSET} {detail}", field=_OFFSET, rollout_id=rollout_id, call_id=call_id)


def _payload_digest(sizes: bytes, body: bytes | memoryview) -> bytes:
    hasher = hashlib.sha256(sizes)
    hasher.update(body)
    return hasher.digest()[:_DIGEST_BYTES]


def _read_prefix(data: bytes) -> tuple[int, int, float, bytes]:
    """Lengths of header and content, `created_at`, payload digest."""
    if len(data) < _PREFIX.size or data[:4] != _MAGIC:
        raise RecordError("these bytes are not an encoded entry", field="magic")
    _, version, _, header_len, content_len, created_at, digest = _PREFIX.unpack_from(data)
    check_version(version, what="an encoded entry")
    if _PREFIX.size + header_len + content_len > len(data):
        raise RecordError(
            f"an encoded entry is cut short: got {len(data)} bytes, "
            f"expected >= {_PREFIX.size + header_len + content_len}",
            field="header",
        )
    return header_len, content_len, created_at, digest


def _read_arrays(data: bytes, specs: list[list[Any]], *, offset: int) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype_name, shape in specs:
        dtype = _plain_dtype(dtype_name)
        if name not in _ARRAY_NAMES:
            refuse_unknown({name}, what="an encoded entry")
        count = 1
        for size in shape:
            count *= size
        array = np.frombuffer(data, dtype=dtype, count=count, offset=offset)
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
        offset += count * dtype.itemsize
        offset += -offset % _ALIGNMENT
    if offset != len(data):
        raise ValueError(f"arrays end at byte {offset}, expected {len(data)}")
    return arrays


@lru_cache(maxsize=64)
def _plain_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _PLAIN_KINDS:
        raise ValueError(f"an array has dtype {name}")
    return dtype


def _parent_to_json(parent: Parent) -> list[object]:
    match parent:
        case Root():
            return ["root"]
        case Continues(call_id, cum_len):
            return ["continues", call_id, cum_len]
        case Unresolved(reason):
            return ["unresolved", reason]


def _parent_from_json(value: list[Any] | None) -> Parent | None:
    match value:
        case None:
            return None
        case ["root"]:
            return Root()
        case ["continues", str(call_id), int(cum_len)]:
            return Continues(call_id, cum_len)
        case ["unresolved", str(reason)]:
            return Unresolved(reason)
        case _:
            raise ValueError(f"parent must be root, continues or unresolved: got {value!r}")


def _spans_from_json(value: Iterable[Any]) -> tuple[WeightSpan, ...]:
    return tuple(WeightSpan(start, end, version) for start, end, version in value)


_TO_JSON: Final[Mapping[Kind, Callable[[Any], object]]] = {
    Kind.TEXT: str,
    Kind.FLAG: bool,
    Kind.PARENT: _parent_to_json,
    Kind.SPANS: lambda spans: [[span.start, span.end, span.version] for span in spans],
    Kind.OBJECT: dict,
    Kind.NAMES: tuple,
    Kind.RULES_BY_KEY: dict,
}
"""How values are written of which None, false and empty are not; of others None alone is not, and they are JSON."""
_FROM_JSON: Final[Mapping[Kind, Callable[[Any], object]]] = {
    Kind.PARENT: _parent_from_json,
    Kind.SPANS: _spans_from_json,
    Kind.NAMES: tuple,
    Kind.RULES_BY_KEY: dict,
}
_WRITERS: Final = tuple((field.name, _TO_JSON.get(field.kind)) for field in _OFTEN)
_READERS: Final = {field.name: _FROM_JSON[field.kind] for field in _HEADER if field.kind in _FROM_JSON}


def decode_or_problem(data: bytes, *, call_id: str | None = None) -> StoredRecord | RecordProblem:
    """The record, or the problem `malformed_record` that masks its rollout. Only a newer version raises."""
    try:
        return decode_entry(data)
    except SchemaVersionError:
        raise
    except RecordError as error:
        known, malformed = call_id or error.call_id, ProblemReason.MALFORMED_RECORD
        return RecordProblem(reason=malformed, call_id=known, field=error.field, detail=error.message)


# --- intents -----------------------------------------------------------------------------------------------------


def encode_intent(intent: CallIntent) -> bytes:
    """The bytes of an intent: one JSON object."""
    keys = {"request_key": intent.request_key, "asked_key": intent.asked_key, "answer_key": intent.answer_key}
    return to_text(
        {
            "v": CODEC_VERSION,
            "rollout_id": intent.rollout_id,
            "model_call_id": intent.model_call_id,
            "created_at": intent.created_at,
            "request_digest": intent.request_digest,
            **{name: key for name, key in keys.items() if key},
        }
    ).encode("utf-8", "surrogatepass")


def decode_intent(data: bytes) -> CallIntent:
    """The intent. Raises `SchemaVersionError` if a newer version wrote it, `RecordError` if it is damaged."""
    fields = load_object(data, "intent")
    check_version(fields.get("v"), what="an encoded intent")
    refuse_unknown(fields.keys() - _INTENT_FIELDS, what="an encoded intent")
    try:
        return CallIntent(
            rollout_id=fields["rollout_id"],
            model_call_id=fields["model_call_id"],
            created_at=fields["created_at"],
            request_digest=fields["request_digest"],
            **{name: fields[name] for name in _INTENT_KEYS if name in fields},
        )
    except KeyError as error:
        raise RecordError(f"an encoded intent lacks {error}", field=str(error.args[0])) from None


# --- JSON --------------------------------------------------------------------------------------------------------


def _header_bytes(record: CallRecord, header: dict[str, object]) -> bytes:
    try:
        return dump_json(header)
    except (TypeError, ValueError, RecursionError):
        for name, value in header.items():
            _json_bytes(record, name, value)
        raise


def _json_bytes(record: CallRecord, field: str, value: object) -> bytes:
    try:
        return dump_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(record, field, f"must be JSON: {error}") from error


def padded(data: bytes, fill: bytes) -> bytes:
    missing = -len(data) % _ALIGNMENT
    return data + fill * missing if missing else data


def check_version(version: object, *, what: str) -> None:
    if version != CODEC_VERSION:
        raise SchemaVersionError(
            f"{what} has codec version {version}, this gym-capture reads {CODEC_VERSION}: "
            "upgrade the side that reads it to the version that wrote it",
            field="version",
        )


def refuse_unknown(names: set[str], *, what: str) -> None:
    if names:
        raise SchemaVersionError(
            f"{what} has fields that this gym-capture does not know: {', '.join(sorted(names))}. A newer version "
            "wrote it: upgrade the side that reads it",
            field=min(names),
        )


def _error(record: CallRecord, field: str, message: str) -> RecordError:
    return RecordError(f"{field} {message}", field=field, rollout_id=record.rollout_id, call_id=record.model_call_id)
