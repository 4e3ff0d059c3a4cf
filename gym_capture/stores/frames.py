"""Framing of the log: how records stand in a segment, and how they are found again in a damaged one.

Invariant: a frame is read back only if two checksums say that it is whole. Checksums start from a number drawn for
each segment, so bytes of another segment, or bytes inside a record that look like a frame, are never taken for one.

Flow: `pack_frame` -> a segment -> `scan_segment` yields frames and, where they cannot be read, `Damage`.

Segment, all integers little-endian: the header twice, then frames without gaps.

    header, 32 bytes                        frame
    0   8  magic "GYMCLOG\\n"                0     4  marker F5 47 43 46
    8   2  format version                   4     1  record type
    10  2  zero                             5     1  1 if the frame starts a batch, else 0
    12  4  checksum seed                    6     2  K, bytes of the key
    16  8  epoch floor                      8     4  P, bytes of the payload
    24  4  zero                             12    8  epoch
    28  4  CRC-32 of bytes 0..27            20    4  CRC-32, from the seed, of bytes 0..19 and the key
                                            24    K  key: rollout id, NUL, call id (or nothing)
                                            24+K  P  payload
                                                  4  CRC-32 of the payload, from the CRC at 20

A batch is what one write and one sync made durable together, and it is written only after the batch before it is
durable. Hence damage that a frame starting a batch follows is damage to acknowledged records; damage that none
follows, in the last segment, is a batch that was never acknowledged.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from gym_capture.errors import CorruptLogError, RecordError

FORMAT_VERSION: Final = 1

_MAGIC: Final = b"GYMCLOG\n"
_SEGMENT_HEADER: Final = struct.Struct("<8sHHIQI")
_CRC: Final = struct.Struct("<I")
SEGMENT_HEADER_BYTES: Final = 2 * (_SEGMENT_HEADER.size + _CRC.size)

_MARKER: Final = b"\xf5GCF"
"""0xF5 stands in no UTF-8 text, so a resynchronizing reader rarely stops inside a record."""
_FRAME_HEADER: Final = struct.Struct("<4sBBHIQ")
_HEAD: Final = struct.Struct(_FRAME_HEADER.format + "I")
"""With its checksum."""
_HEAD_BYTES: Final = _HEAD.size
_MAX_KEY_BYTES: Final = 0xFFFF


class RecordType(enum.IntEnum):
    """The kind of a frame's payload. A type is never given another meaning."""

    BEGUN = 1
    COMMITTED = 2
    ABANDONED = 3
    INCOMPLETE = 4
    PROBLEM = 5
    RETIRED = 6
    DELIVERY = 7
    REGISTERED = 9
    COMPLETED = 10
    HANDED_ON = 11
    WENT_ON = 12
    REPLAYED = 13


_RECORD_TYPES: Final = {int(each): each for each in RecordType}


class SegmentHeader(NamedTuple):
    """How to read a segment."""

    seed: int
    """Where its checksums start from."""
    epoch_floor: int
    """Every epoch that a record in an earlier segment carries is smaller."""


class Draft(NamedTuple):
    """A record on its way into a segment."""

    type: RecordType
    epoch: int
    key: bytes
    payload: bytes


class Frame(NamedTuple):
    """A record that was read back."""

    type: RecordType
    epoch: int
    rollout_id: str
    call_id: str
    payload: bytes
    offset: int
    size: int
    starts_batch: bool


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `[start, end)` of a segment that cannot be read."""

    start: int
    end: int
    type: RecordType | None = None
    """With `epoch` and `rollout_id`: of the record that stood there, where its head is still readable."""
    epoch: int | None = None
    rollout_id: str | None = None
    call_id: str | None = None


class _Head(NamedTuple):
    type: int
    starts_batch: int
    epoch: int
    key: bytes
    payload_start: int
    end: int
    crc: int


# --- writing -----------------------------------------------------------------------------------------------------


def pack_segment_header(header: SegmentHeader) -> bytes:
    packed = _SEGMENT_HEADER.pack(_MAGIC, FORMAT_VERSION, 0, header.seed, header.epoch_floor, 0)
    return (packed + _CRC.pack(zlib.crc32(packed))) * 2


def pack_key(rollout_id: str, call_id: str = "") -> bytes:
    return f"{rollout_id}\0{call_id}".encode("utf-8", "surrogatepass")


def check_key(rollout_id: str, call_id: str) -> None:
    """Raises `RecordError` if the ids do not fit into a frame; no producer of this package makes such."""
    size = len(pack_key(rollout_id, call_id))
    if size > _MAX_KEY_BYTES:
        raise RecordError(
            f"model_call_id is too long for the log: got {size} bytes with its rollout id, "
            f"expected <= {_MAX_KEY_BYTES}",
            field="model_call_id",
            rollout_id=rollout_id,
        )


def frame_size(draft: Draft) -> int:
    return _HEAD_BYTES + len(draft.key) + len(draft.payload) + _CRC.size


def pack_frame(draft: Draft, *, seed: int, starts_batch: bool) -> bytes:
    head = _FRAME_HEADER.pack(_MARKER, draft.type, starts_batch, len(draft.key), len(draft.payload), draft.epoch)
    crc = zlib.crc32(draft.key, zlib.crc32(head, seed))
    tail = _CRC.pack(zlib.crc32(draft.payload, crc))
    return b"".join((head, _CRC.pack(crc), draft.key, draft.payload, tail))


# --- reading -----------------------------------------------------------------------------------------------------


def read_segment_header(data: bytes) -> SegmentHeader | None:
    """The header; None if neither copy is whole. Raises `CorruptLogError` if a newer version wrote the segment."""
    size = SEGMENT_HEADER_BYTES // 2
    for packed in (data[:size], data[size : 2 * size]):
        if len(packed) < size or packed[:8] != _MAGIC or zlib.crc32(packed[:-4]) != _CRC.unpack(packed[-4:])[0]:
            continue
        _, version, _, seed, epoch_floor, _ = _SEGMENT_HEADER.unpack(packed[:-4])
        if version != FORMAT_VERSION:
            raise CorruptLogError(
                f"a log segment has format version {version}, this gym-capture reads {FORMAT_VERSION}: "
                "open it with the version that wrote it, or a newer one"
            )
        return SegmentHeader(seed, epoch_floor)
    return None


def scan_segment(
    data: bytes, header: SegmentHeader, *, payloads: bool = True, begin: int = SEGMENT_HEADER_BYTES
) -> Iterator[Frame | Damage]:
    """All frames of a segment in order, and what lies between them and cannot be read.

    Behind damage it goes on at the next readable frame. Without `payloads` those of frames are checked and left out.
    `begin`: where in `data` the first frame stands, as of the end of a segment without its beginning.
    """
    offset = begin
    while offset < len(data):
        head = _read_head(data, offset, header.seed)
        if head is not None and head.end <= len(data):
            yield _read_body(data, offset, head, payloads=payloads)
            offset = head.end
            continue
        end = len(data) if head is not None else _next_head(data, offset + 1, header.seed)
        yield _damage(offset, end, head)
        offset = end


def read_frame(data: bytes, seed: int) -> Frame | Damage:
    """The one frame that `data` is meant to be."""
    head = _read_head(data, 0, seed)
    if head is None or head.end != len(data):
        return Damage(0, len(data))
    return _read_body(data, 0, head, payloads=True)


def _read_head(data: bytes, offset: int, seed: int) -> _Head | None:
    if offset + _HEAD_BYTES > len(data):
        return None
    marker, type_, starts_batch, key_len, payload_len, epoch, expected = _HEAD.unpack_from(data, offset)
    if marker != _MARKER:
        return None
    key_start = offset + _HEAD_BYTES
    payload_start = key_start + key_len
    key = data[key_start:payload_start]
    crc = zlib.crc32(key, zlib.crc32(data[offset : offset + _FRAME_HEADER.size], seed))
    if crc != expected:
        return None
    return _Head(type_, starts_batch, epoch, key, payload_start, payload_start + payload_len + _CRC.size, crc)


def _read_body(data: bytes, offset: int, head: _Head, *, payloads: bool) -> Frame | Damage:
    payload = memoryview(data)[head.payload_start : head.end - _CRC.size]
    if zlib.crc32(payload, head.crc) != _CRC.unpack_from(data, head.end - _CRC.size)[0]:
        return _damage(offset, head.end, head)
    rollout_id, call_id = _ids(head.key)
    return Frame(
        _record_type(head.type),
        head.epoch,
        rollout_id,
        call_id,
        bytes(payload) if payloads else b"",
        offset,
        head.end - offset,
        bool(head.starts_batch),
    )


def _damage(start: int, end: int, head: _Head | None) -> Damage:
    if head is None:
        return Damage(start, end)
    rollout_id, call_id = _ids(head.key)
    return Damage(start, end, _record_type(head.type), head.epoch, rollout_id, call_id)


def _next_head(data: bytes, offset: int, seed: int) -> int:
    """Where the next readable frame head stands; the end of the data if there is none."""
    while (offset := data.find(_MARKER, offset)) != -1:
        if _read_head(data, offset, seed) is not None:
            return offset
        offset += 1
    return len(data)


def _ids(key: bytes) -> tuple[str, str]:
    rollout_id, _, call_id = key.decode("utf-8", "surrogatepass").partition("\0")
    return rollout_id, call_id


def _record_type(value: int) -> RecordType:
    try:
        return _RECORD_TYPES[value]
    except KeyError:
        raise CorruptLogError(
            f"the log holds a record of type {value}, which this gym-capture does not know: "
            "open it with the version that wrote it, or a newer one"
        ) from None
