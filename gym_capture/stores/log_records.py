"""Facts of a rollout as records of the log, and back."""

from __future__ import annotations

import json
from typing import Any, Final

from gym_capture.capture.codec import decode_intent, peek_entry
from gym_capture.capture.facts import (
    Abandoned,
    Begun,
    Committed,
    Completed,
    DeliveryKnown,
    Event,
    HandedOn,
    MarkedIncomplete,
    ProblemFound,
    Registered,
    Replayed,
    Retired,
    WentOn,
)
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import RecordProblem
from gym_capture.errors import CorruptLogError, RecordError
from gym_capture.stores.frames import Draft, Frame, RecordType, pack_key

_to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def draft_of(rollout_id: str, event: Event, encoded: bytes) -> Draft:
    """The record of an event. `encoded` is the intent or the entry of one that has it, else not used."""
    match event:
        case Begun(epoch, intent):
            return Draft(RecordType.BEGUN, epoch, pack_key(rollout_id, intent.model_call_id), encoded)
        case Committed(epoch, call_id):
            return Draft(RecordType.COMMITTED, epoch, pack_key(rollout_id, call_id), encoded)
        case Abandoned(epoch, call_id):
            return Draft(RecordType.ABANDONED, epoch, pack_key(rollout_id, call_id), b"")
        case MarkedIncomplete(epoch, reason):
            return Draft(RecordType.INCOMPLETE, epoch, pack_key(rollout_id), reason.encode("utf-8", "surrogatepass"))
        case ProblemFound(epoch, problem):
            payload = _pack([problem.reason, problem.call_id, problem.field, problem.detail])
            return Draft(RecordType.PROBLEM, epoch, pack_key(rollout_id, problem.call_id or ""), payload)
        case DeliveryKnown(epoch, call_id, delivered):
            return Draft(RecordType.DELIVERY, epoch, pack_key(rollout_id, call_id), _pack([delivered]))
        case Registered(epoch, text):
            return Draft(RecordType.REGISTERED, epoch, pack_key(rollout_id), text.encode("utf-8", "surrogatepass"))
        case Completed(epoch, text):
            return Draft(RecordType.COMPLETED, epoch, pack_key(rollout_id), text.encode("utf-8", "surrogatepass"))
        case HandedOn(epoch):
            return Draft(RecordType.HANDED_ON, epoch, pack_key(rollout_id), b"")
        case WentOn(epoch, source):
            return Draft(RecordType.WENT_ON, epoch, pack_key(rollout_id), _pack([source]))
        case Replayed(epoch, recorded, call_id):
            return Draft(RecordType.REPLAYED, epoch, pack_key(rollout_id, call_id), _pack([recorded]))
        case Retired(epoch, consumed_epoch, snapshot_id, version, retired_at, keeps_records, closed):
            # Versions before rollouts could be closed read five: they refuse a log with a closed one, and no other.
            closing: list[object] = [True] if closed else []
            payload = _pack([consumed_epoch, snapshot_id, version, retired_at, keeps_records, *closing])
            return Draft(RecordType.RETIRED, epoch, pack_key(rollout_id), payload)


def event_of(frame: Frame) -> Event:
    """The event of a record. Raises `CorruptLogError` on a whole record that says nothing this version reads."""
    try:
        match frame.type:
            case RecordType.BEGUN:
                return Begun(frame.epoch, decode_intent(frame.payload))
            case RecordType.COMMITTED:
                key = peek_entry(frame.payload)
                return Committed(frame.epoch, frame.call_id, key.payload_digest, key.counts)
            case RecordType.ABANDONED:
                return Abandoned(frame.epoch, frame.call_id)
            case RecordType.INCOMPLETE:
                return MarkedIncomplete(frame.epoch, frame.payload.decode("utf-8", "surrogatepass"))
            case RecordType.PROBLEM:
                reason, call_id, field, detail = _unpack(frame.payload)
                return ProblemFound(
                    frame.epoch, RecordProblem(reason=reason, call_id=call_id, field=field, detail=detail)
                )
            case RecordType.DELIVERY:
                (delivered,) = _unpack(frame.payload)
                return DeliveryKnown(frame.epoch, frame.call_id, bool(delivered))
            case RecordType.REGISTERED:
                text = frame.payload.decode("utf-8", "surrogatepass")
                return Registered(frame.epoch, Registration.from_text(text).as_text())
            case RecordType.COMPLETED:
                text = frame.payload.decode("utf-8", "surrogatepass")
                return Completed(frame.epoch, Outcome.from_text(text).as_text())
            case RecordType.HANDED_ON:
                return HandedOn(frame.epoch)
            case RecordType.WENT_ON:
                (source,) = _unpack(frame.payload)
                return WentOn(frame.epoch, source)
            case RecordType.REPLAYED:
                (recorded,) = _unpack(frame.payload)
                return Replayed(frame.epoch, recorded, frame.call_id)
            case RecordType.RETIRED:
                return Retired(frame.epoch, *_unpack(frame.payload))
    except (RecordError, ValueError, TypeError) as error:
        raise CorruptLogError(
            f"a {frame.type.name} record of the log cannot be read although it is whole: {error}",
            rollout_id=frame.rollout_id,
            call_id=frame.call_id or None,
        ) from error


def _pack(values: list[object]) -> bytes:
    return _to_json(values).encode("utf-8", "surrogatepass")


def _unpack(payload: bytes) -> list[Any]:
    values: list[Any] = json.loads(payload.decode("utf-8", "surrogatepass"))
    return values
