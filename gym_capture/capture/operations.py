"""Everything that can be said of a rollout, as values: a store's one method, `RecordStore.write`, takes any of them.

Invariant: each is idempotent for equal content, so it may be repeated when nobody knows whether it arrived. What is
said of a call carries the epoch that beginning it gave; `Drop`, `Clear` and `Close` end an epoch, and who still writes
under it is refused. `HandOn` ends it for writers, but keeps what they wrote.

Flow: a call in flight says something through its sink, a consumer drops what it has read -> an operation -> `check` ->
`rollout_state` decides which fact it adds, or why it is refused -> the fact becomes durable.

Another thing to say is a type here, with its fact in `rollout_state`, and that fact's record in `stores.log_records`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Final, TypeAlias, get_args

from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import CallIntent, CallRecord
from gym_capture.capture.suffixes import StoredRecord
from gym_capture.errors import RecordError
from gym_capture.rollout_ids import check_rollout_id

__all__ = [
    "Abandon",
    "Begin",
    "Clear",
    "Close",
    "Commit",
    "Complete",
    "Drop",
    "GoOn",
    "HandOn",
    "MarkDelivery",
    "MarkIncomplete",
    "Operation",
    "Register",
    "Replay",
    "check",
]


@dataclass(frozen=True, slots=True)
class Begin:
    """A call is about to generate. The first of a rollout gives it its epoch.

    Refused with `RetiredRolloutError` if the rollout was dropped or closed and not cleared since: its agent may still
    be running.
    """

    intent: CallIntent

    @property
    def rollout_id(self) -> str:
        return self.intent.rollout_id

    @property
    def call_id(self) -> str:
        return self.intent.model_call_id


@dataclass(frozen=True, slots=True)
class Commit:
    """A call has a record, which closes its intent.

    Other content for a recorded call is refused with `ConflictingCallError`: the first record stays, and the rollout is
    masked.
    """

    entry: StoredRecord
    """Whole, or a suffix."""
    epoch: int = field(kw_only=True)
    encoded: bytes | None = field(default=None, kw_only=True, repr=False)
    """The bytes that `entry` was decoded from, if it came so: it need not be encoded again (`codec.encode_suffix`)."""

    @property
    def rollout_id(self) -> str:
        return self.entry.rollout_id

    @property
    def call_id(self) -> str:
        return self.entry.model_call_id


@dataclass(frozen=True, slots=True)
class Abandon:
    """A call generated nothing and was refused to its client (e.g. too long): it gets no record."""

    rollout_id: str
    call_id: str
    epoch: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class MarkIncomplete:
    """The capture of the rollout is not complete."""

    call_id: ClassVar[None] = None
    """It is said of the rollout as a whole."""
    rollout_id: str
    reason: str
    """A name, then optionally `:detail` (`reasons.join_reason`)."""
    epoch: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class MarkDelivery:
    """The end of a call's reply was handed to its client's connection, or it is certain that it was not.

    `TokenEntry.delivered` says so in snapshots from now on. If both is said of a call, it was not delivered; silence
    proves nothing.
    """

    rollout_id: str
    call_id: str
    delivered: bool = field(kw_only=True)
    epoch: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Drop:
    """Exactly this snapshot was consumed: it is retired, and leaves a tombstone. Of nothing, it is nothing.

    Refused with `StaleSnapshotError` if the rollout has changed since.
    """

    rollout_id: str
    snapshot_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Whatever an earlier attempt left is forgotten, and the rollout takes calls again."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Register:
    """There is such a rollout, whoever plays it, and whether or not a call of it has begun. It gives it its epoch.

    Refused with `ConflictingRegistrationError` if something else was registered for it, with `RetiredRolloutError` as
    `Begin` is.
    """

    call_id: ClassVar[None] = None
    rollout_id: str
    registration: Registration


@dataclass(frozen=True, slots=True)
class Complete:
    """The rollout is over, with this outcome: no call of it begins any more. Those under way end as ever.

    The first outcome stands: another one is refused with `CompletedRolloutError`. Of a rollout that is unknown with
    `UnknownRolloutError`, of one that was dropped with `RetiredRolloutError`.
    """

    call_id: ClassVar[None] = None
    rollout_id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Close:
    """The attempt is superseded: what is recorded of it is forgotten, and it takes no more calls, until it is cleared.

    It leaves a tombstone, also where nothing was recorded yet: an agent that begins late is refused all the same.
    """

    call_id: ClassVar[None] = None
    """It is said of the rollout as a whole."""
    rollout_id: str


@dataclass(frozen=True, slots=True)
class HandOn:
    """The attempt was cut, and another goes on from its records: it takes no more calls, and nothing else is said of
    its calls, but what is recorded stays until it is closed, cleared or dropped. It is masked from now on.

    Of an attempt of which nothing is recorded it is `Close`: there is nothing to hand on. One that was closed or
    dropped stays as it is.
    """

    call_id: ClassVar[None] = None
    """It is said of the rollout as a whole."""
    rollout_id: str


@dataclass(frozen=True, slots=True)
class GoOn:
    """The attempt goes on from the records of `source`, an earlier attempt: its calls that are equal to recorded ones
    are answered from these. It gives it its epoch. There may be several sources.

    Refused with `RetiredRolloutError` as `Begin` is.
    """

    call_id: ClassVar[None] = None
    rollout_id: str
    source: str
    """Rollout id of the earlier attempt."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A call is about to be answered from the record `recorded` of an earlier attempt, which no other call of this
    rollout then is.

    Refused with `ReplayedCallError` if another one is already.
    """

    rollout_id: str
    call_id: str
    recorded: str
    """Id of the call of the earlier attempt."""
    epoch: int = field(kw_only=True)


Operation: TypeAlias = (
    Begin
    | Commit
    | Abandon
    | MarkIncomplete
    | MarkDelivery
    | Drop
    | Clear
    | Close
    | Register
    | Complete
    | HandOn
    | GoOn
    | Replay
)


def check(operation: Operation) -> None:
    """Raises `RecordError`, naming the field, or `InvalidRolloutIdError`.

    What has a wrong type would be an error to whoever reads it, long after its writer has gone, or to writers that
    share its batch.
    """
    checks = _CHECKS.get(type(operation))
    if checks is None:
        raise RecordError(f"not an operation: {operation!r}", field="operation")
    for name, check_field in checks:
        check_field(name, getattr(operation, name))
    check_rollout_id(operation.rollout_id)


def check_text(name: str, value: object) -> None:
    """Raises `RecordError` for what is no string."""
    if not isinstance(value, str):
        raise RecordError(f"{name} must be a string: got {value!r}", field=name)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{name} must be a number: got {value!r}", field=name)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RecordError(f"{name} must be true or false: got {value!r}", field=name)


def _epoch(name: str, value: object) -> None:
    # Exactly: 1.0 and True equal an epoch, but the log has no place for them.
    if type(value) is not int:
        raise RecordError(f"epoch must be the number that beginning a call gave: got {value!r}", field=name)


def _entry(name: str, value: object) -> None:
    if not isinstance(value, CallRecord):
        raise RecordError(f"{name} must be a record: got {type(value).__name__}", field=name)


def _encoded(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bytes):
        raise RecordError(f"{name} must be bytes: got {type(value).__name__}", field=name)


def _intent(name: str, value: object) -> None:
    if not isinstance(value, CallIntent):
        raise RecordError(f"{name} must be a call's intent: got {type(value).__name__}", field=name)
    for field_name, check_field in _INTENT_CHECKS:
        check_field(field_name, getattr(value, field_name))


def _registration(name: str, value: object) -> None:
    if not isinstance(value, Registration):
        raise RecordError(f"{name} must be a Registration: got {type(value).__name__}", field=name)


def _outcome(name: str, value: object) -> None:
    if not isinstance(value, Outcome):
        raise RecordError(f"{name} must be an Outcome: got {type(value).__name__}", field=name)


_Check: TypeAlias = Callable[[str, object], None]
_BY_NAME: Final[Mapping[str, _Check]] = {
    **dict.fromkeys(("rollout_id", "call_id", "reason", "snapshot_id", "source", "recorded"), check_text),
    "version": _number,
    "epoch": _epoch,
    "delivered": _flag,
    "entry": _entry,
    "encoded": _encoded,
    "intent": _intent,
    "registration": _registration,
    "outcome": _outcome,
}
"""A field of one name has the same type in every operation."""
_INTENT_CHECKS: Final = tuple(
    (each.name, _number if each.name == "created_at" else check_text) for each in fields(CallIntent)
)
_CHECKS: Final[Mapping[type, tuple[tuple[str, _Check], ...]]] = {
    kind: tuple((each.name, _BY_NAME[each.name]) for each in fields(kind)) for kind in get_args(Operation)
}
