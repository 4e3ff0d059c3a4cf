"""A frozen rollout as bytes: what state actors answer, and stores that keep records encoded ship without decoding them.

Invariant: `decode_snapshot(encode_snapshot(snapshot))` has every field of `snapshot`, its entries whole. A record that
is not well-formed is a problem of the snapshot; bytes that are damaged as a whole, or of a newer version, raise.

Flow: `join_snapshot` puts a header before encoded records -> the bytes travel -> `decode_snapshot` makes the entries
whole, `decode_stored` leaves the records as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from gym_capture.capture.codec import (
    CODEC_VERSION,
    SIZES,
    check_version,
    decode_or_problem,
    encode_entry,
    padded,
    refuse_unknown,
)
from gym_capture.capture.codec_json import load_object, to_text
from gym_capture.capture.outcomes import SAID, said_in, said_texts
from gym_capture.capture.records import LostCall, RecordProblem, Snapshot, delivered_by
from gym_capture.capture.suffixes import StoredRecord, StoredRollout, complete, stored_form
from gym_capture.errors import RecordError

__all__ = ["decode_snapshot", "decode_stored", "encode_snapshot", "join_snapshot", "with_delivery"]

_SNAPSHOT_MAGIC: Final = b"GCES"
_SNAPSHOT_FIELDS: Final = {"rollout_id", "snapshot_id", "version", "incomplete", "problems", "delivery", "entry_sizes"}


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of a frozen rollout: header, encoded records without what their parents hold. Raises `RecordError`."""
    return join_snapshot(snapshot, [encode_entry(record) for record in stored_form(snapshot)])


def join_snapshot(
    snapshot: Snapshot, encoded_records: Sequence[bytes], delivery: Mapping[str, bool] = MappingProxyType({})
) -> bytes:
    """The bytes of `snapshot` with the records that are given encoded instead of its own.

    For a store that keeps records encoded: it ships a rollout without decoding it. `delivery` is what became known of
    calls after their records were encoded (`with_delivery`).
    """
    header = padded(
        to_text(
            {
                "rollout_id": snapshot.rollout_id,
                "snapshot_id": snapshot.snapshot_id,
                "version": snapshot.version,
                "incomplete": snapshot.incomplete,
                "problems": [[p.reason, p.call_id, p.field, p.detail] for p in snapshot.problems],
                "delivery": dict(delivery),
                "lost_calls": [[lost.model_call_id, lost.retries, lost.answers] for lost in snapshot.lost_calls],
                "entry_sizes": [len(record) for record in encoded_records],
                **said_texts(snapshot.registration, snapshot.outcome),
                **({"went_on": snapshot.went_on} if snapshot.went_on else {}),
            }
        ).encode("utf-8", "surrogatepass"),
        b" ",
    )
    prefix = SIZES.pack(_SNAPSHOT_MAGIC, CODEC_VERSION, 0, len(header), 0)
    return b"".join((prefix, header, *encoded_records))


def decode_snapshot(data: bytes) -> Snapshot:
    """The snapshot, its entries whole. A record that is not well-formed becomes a `malformed_record` problem of it.

    Raises `SchemaVersionError` if a newer version wrote it, `RecordError` if it is damaged as a whole.
    """
    snapshot, records = _read_snapshot(data)
    entries, orphans = complete(records)
    return replace(snapshot, entries=entries, orphans=orphans)


def decode_stored(data: bytes) -> StoredRollout:
    """As `decode_snapshot`, the records as they are stored: where many calls branch off, whole ones take more room."""
    snapshot, records = _read_snapshot(data)
    return StoredRollout(records, snapshot.incomplete, snapshot.went_on)


def _read_snapshot(data: bytes) -> tuple[Snapshot, tuple[StoredRecord, ...]]:
    """The snapshot without its records, and these."""
    if len(data) < SIZES.size or data[:4] != _SNAPSHOT_MAGIC:
        raise RecordError("these bytes are not an encoded snapshot", field="magic")
    _, version, _, header_len, _ = SIZES.unpack_from(data)
    check_version(version, what="an encoded snapshot")
    offset = SIZES.size + header_len
    header = load_object(data[SIZES.size : offset], "header")
    refuse_unknown(header.keys() - _SNAPSHOT_FIELDS - {"lost_calls", "went_on", *SAID}, what="an encoded snapshot")
    if not header.keys() >= _SNAPSHOT_FIELDS or offset + sum(header["entry_sizes"]) != len(data):
        raise RecordError("an encoded snapshot is cut short or damaged", field="header")
    problems = [RecordProblem(reason=r, call_id=c, field=f, detail=d) for r, c, f, d in header["problems"]]
    records: list[StoredRecord] = []
    for size in header["entry_sizes"]:
        record = decode_or_problem(data[offset : offset + size])
        if isinstance(record, RecordProblem):
            problems.append(record)
        else:
            records.append(record)
        offset += size
    registration, outcome = said_in(header)
    snapshot = Snapshot(
        rollout_id=header["rollout_id"],
        snapshot_id=header["snapshot_id"],
        version=header["version"],
        entries=(),
        incomplete=tuple(header["incomplete"]),
        problems=tuple(problems),
        lost_calls=tuple(
            LostCall(model_call_id=c, retries=tuple(r), answers=tuple(a)) for c, r, a in header.get("lost_calls", ())
        ),
        registration=registration,
        outcome=outcome,
        went_on=tuple(header.get("went_on", ())),
    )
    return snapshot, with_delivery(records, header["delivery"])


def with_delivery(records: Iterable[StoredRecord], delivery: Mapping[str, bool]) -> tuple[StoredRecord, ...]:
    """The records, those named in `delivery` with what became known of their replies after they were recorded."""
    return tuple(
        replace(record, delivered=delivered_by((record.delivered, delivery[record.model_call_id])))
        if record.model_call_id in delivery
        else record
        for record in records
    )
