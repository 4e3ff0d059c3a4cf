"""What a store knows of one rollout: a pure state machine, shared by every store of this package.

Invariant: the state is a set of facts of one epoch, and facts are only ever added. So applying the same events in
any order, any number of times, gives the same state - which is what lets a log be replayed, compacted and merged
without an order to defend. The version is the number of facts. Starting a new epoch forgets all facts of the last.

Flow: an operation asks the state to *decide* (`begin`, `put`, ...; nothing changes) -> the store makes the decided
event durable -> `apply` adds it -> `freeze` reads. A store therefore never shows what it could still lose, and a
failed write needs no undo.

Epochs. A store gives each attempt at a rollout an epoch from a counter that never repeats in that store. Every
write carries the epoch it was begun under. `drop` and `clear` retire an epoch: its writers get
`RetiredRolloutError`, also when the store has long forgotten the rollout, because no later attempt gets that number
again. A dropped rollout refuses new calls too - its agent may still be running - until `clear` opens it for the
next attempt.

A `put` whose intent is unknown but whose epoch is current is accepted. The record is complete by itself, and the
intent may be lost (an earlier process died before it was acknowledged) or never made (an importer).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from gym_capture.errors import ConflictingCallError, RetiredRolloutError, StaleSnapshotError, StoreError
from gym_capture.reasons import CaptureMark, ProblemReason, join_reason
from gym_capture.records import CallIntent, LostCall, RecordProblem, delivered_by

# --- events: what a decision adds, and what a log keeps ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """A call is about to generate."""

    epoch: int
    intent: CallIntent


@dataclass(frozen=True, slots=True)
class Committed:
    """A call has a record. The record itself is kept by the store, beside the state."""

    epoch: int
    call_id: str
    payload_digest: bytes


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A call was refused before it generated."""

    epoch: int
    call_id: str


@dataclass(frozen=True, slots=True)
class MarkedIncomplete:
    """The capture of the rollout lacks something."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProblemFound:
    """Something masks the rollout."""

    epoch: int
    problem: RecordProblem


@dataclass(frozen=True, slots=True)
class DeliveryKnown:
    """The end of a call's reply was handed to its client's connection, or it is certain that it was not.

    Learned after the call is recorded; of most calls, never.
    """

    epoch: int
    call_id: str
    delivered: bool


@dataclass(frozen=True, slots=True)
class Retired:
    """Everything before `epoch` is gone."""

    epoch: int
    consumed_epoch: int | None
    """The epoch that was consumed as `snapshot_id` at `version`; None: the rollout was cleared."""
    snapshot_id: str
    version: int
    retired_at: float
    """Unix seconds."""
    keeps_records: bool
    """The consumed records stay readable where the store keeps files."""

    @property
    def refuses_calls(self) -> bool:
        return self.consumed_epoch is not None


Event: TypeAlias = Begun | Committed | Abandoned | MarkedIncomplete | ProblemFound | DeliveryKnown | Retired


class Decision(NamedTuple):
    """What an operation comes to. An error is raised after the event, if there is one, is durable."""

    event: Event | None = None
    error: StoreError | None = None


_NOTHING: Final = Decision()


class FrozenFacts(NamedTuple):
    """A rollout at one version, without its entries."""

    snapshot_id: str
    version: int
    incomplete: tuple[str, ...]
    problems: tuple[RecordProblem, ...]
    delivery: Mapping[str, bool]
    """Whether the reply of a call was delivered whole, of those calls of which that is known."""
    lost_calls: tuple[LostCall, ...]


# --- the state ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RolloutState:
    """The facts of the current epoch of one rollout."""

    rollout_id: str
    epoch: int
    """Writes that carry another epoch are refused."""
    begun: dict[str, bytes] = field(default_factory=dict)
    """What each call is for (`_purpose`)."""
    committed: dict[str, bytes] = field(default_factory=dict)
    """Payload digest of each recorded call."""
    abandoned: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    problems: set[RecordProblem] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    undelivered: set[str] = field(default_factory=set)
    retired: Retired | None = None
    """How the epoch before this one ended, if this store still knows."""

    @property
    def version(self) -> int:
        """Number of facts; 0 for a rollout of which nothing is recorded."""
        return sum(map(len, self._facts()))

    @property
    def is_live(self) -> bool:
        return any(self._facts())

    # deciding: nothing changes

    def begin(self, intent: CallIntent) -> Decision:
        if self.retired is not None and self.retired.refuses_calls:
            return self._refused(intent.model_call_id)
        if intent.model_call_id in self.begun:
            return _NOTHING
        return Decision(Begun(self.epoch, intent))

    def put(self, call_id: str, payload_digest: bytes, *, epoch: int) -> Decision:
        if epoch != self.epoch:
            return self._refused(call_id)
        known = self.committed.get(call_id)
        if known is None:
            return Decision(Committed(epoch, call_id, payload_digest))
        if known == payload_digest:
            return _NOTHING
        problem = RecordProblem(
            reason=ProblemReason.CONFLICTING_CALL_ID,
            call_id=call_id,
            field=None,
            detail="the call was recorded twice with different content; the first record stays",
        )
        error = ConflictingCallError(
            "this call is already recorded with other content; the first record stays and the rollout is masked",
            rollout_id=self.rollout_id,
            call_id=call_id,
        )
        return Decision(self._problem(problem).event, error)

    def abandon(self, call_id: str, *, epoch: int) -> Decision:
        if epoch != self.epoch:
            return self._refused(call_id)
        return _NOTHING if call_id in self.abandoned else Decision(Abandoned(epoch, call_id))

    def mark_incomplete(self, reason: str, *, epoch: int) -> Decision:
        if epoch != self.epoch:
            return self._refused(None)
        return _NOTHING if reason in self.incomplete else Decision(MarkedIncomplete(epoch, reason))

    def mark_delivery(self, call_id: str, delivered: bool, *, epoch: int) -> Decision:
        if epoch != self.epoch:
            return self._refused(call_id)
        known = self.delivered if delivered else self.undelivered
        return _NOTHING if call_id in known else Decision(DeliveryKnown(epoch, call_id, delivered))

    def drop(self, snapshot_id: str, version: int, *, next_epoch: int, now: float, keep: bool) -> Decision:
        """Retires the snapshot if it is the current one; nothing if it is the one retired last."""
        if version == self.version and snapshot_id == self.snapshot_id():
            if not self.is_live:
                return _NOTHING
            return Decision(Retired(next_epoch, self.epoch, snapshot_id, version, now, keep))
        if self.retired is not None and (self.retired.snapshot_id, self.retired.version) == (snapshot_id, version):
            return _NOTHING
        return Decision(
            error=StaleSnapshotError(
                f"snapshot {snapshot_id} at version {version} is not current (version {self.version} is): "
                "freeze again, and drop what you consumed",
                rollout_id=self.rollout_id,
            )
        )

    def clear(self, *, next_epoch: int, now: float) -> Decision:
        closed = self.retired is not None and self.retired.refuses_calls
        return (
            Decision(Retired(next_epoch, None, "", 0, now, keeps_records=False)) if self.is_live or closed else _NOTHING
        )

    # applying

    def knows(self, event: Event) -> bool:
        """Whether applying the event would change nothing: it is a fact already, or of an earlier epoch."""
        if event.epoch != self.epoch:
            return event.epoch < self.epoch
        match event:
            case Begun(_, intent):
                return intent.model_call_id in self.begun
            case Committed(_, call_id, _):
                return call_id in self.committed
            case Abandoned(_, call_id):
                return call_id in self.abandoned
            case MarkedIncomplete(_, reason):
                return reason in self.incomplete
            case ProblemFound(_, problem):
                return problem in self.problems
            case DeliveryKnown(_, call_id, delivered):
                return call_id in (self.delivered if delivered else self.undelivered)
            case Retired():
                return self.retired is not None

    def apply(self, event: Event) -> None:
        """Adds a fact. Those of earlier epochs are ignored."""
        if event.epoch > self.epoch:
            self._start_epoch(event.epoch)
        if self.knows(event):
            return
        match event:
            case Begun(_, intent):
                self.begun[intent.model_call_id] = _purpose(intent)
            case Committed(_, call_id, payload_digest):
                self.committed[call_id] = payload_digest
            case Abandoned(_, call_id):
                self.abandoned.add(call_id)
            case MarkedIncomplete(_, reason):
                self.incomplete.add(reason)
            case ProblemFound(_, problem):
                self.problems.add(problem)
            case DeliveryKnown(_, call_id, delivered):
                (self.delivered if delivered else self.undelivered).add(call_id)
            case Retired():
                self.retired = event

    # reading

    def freeze(self) -> FrozenFacts:
        """The current facts. A call that was begun and neither recorded nor abandoned makes them incomplete."""
        dangling = self.begun - self.committed.keys() - self.abandoned
        return FrozenFacts(
            snapshot_id=self.snapshot_id(),
            version=self.version,
            incomplete=(
                *sorted(self.incomplete),
                *(join_reason(CaptureMark.DANGLING_INTENT, c) for c in sorted(dangling)),
            ),
            problems=tuple(sorted(self.problems, key=lambda p: (p.reason, p.call_id or "", p.detail))),
            delivery=self._delivery(),
            lost_calls=self._lost_calls(dangling),
        )

    def _lost_calls(self, dangling: Set[str]) -> tuple[LostCall, ...]:
        """What is known of calls that were begun and then lost.

        Nothing, unless it is known of every call what it was for: any could be the one that goes on from a lost reply.
        """
        if not dangling or not all(self.begun.values()) or not self.committed.keys() <= self.begun.keys():
            return ()
        purposes = {call_id: _Purpose.unpack(packed) for call_id, packed in self.begun.items()}
        same_body: dict[tuple[bytes, bytes], list[str]] = {}
        answering: dict[bytes, list[str]] = {}
        for call_id, purpose in purposes.items():
            same_body.setdefault((purpose.body, purpose.request), []).append(call_id)
            answering.setdefault(purpose.asked, []).append(call_id)
        lost: list[LostCall] = []
        for call_id in sorted(dangling):
            mine = purposes[call_id]
            if mine.request != _NO_KEY:
                retries = {other for other in same_body[mine.body, mine.request] if other != call_id}
                after = answering.get(mine.request, ())
                answers = {purposes[other].answer.hex() for other in after if other != call_id}
                lost.append(
                    LostCall(model_call_id=call_id, retries=tuple(sorted(retries)), answers=tuple(sorted(answers)))
                )
        return tuple(lost)

    def _delivery(self) -> dict[str, bool]:
        said = [(call_id, True) for call_id in self.delivered] + [(call_id, False) for call_id in self.undelivered]
        together: dict[str, bool] = {}
        for call_id, delivered in sorted(said):
            together[call_id] = bool(delivered_by((together.get(call_id), delivered)))
        return together

    def snapshot_id(self) -> str:
        """The same facts of the same epoch give the same id, whenever and wherever it is asked for."""
        if not self.is_live:
            return empty_snapshot_id(self.rollout_id)
        hasher = hashlib.blake2b(digest_size=16)
        _feed(hasher, self.rollout_id, str(self.epoch))
        _feed(hasher, *(f"{call}={digest.hex()}" for call, digest in sorted(self.committed.items())))
        _feed(hasher, *sorted(self.begun))
        _feed(hasher, *sorted(self.abandoned))
        _feed(hasher, *sorted(self.incomplete))
        _feed(hasher, *sorted(repr(problem) for problem in self.problems))
        _feed(hasher, *sorted(self.delivered))
        _feed(hasher, *sorted(self.undelivered))
        return hasher.hexdigest()

    def _problem(self, problem: RecordProblem) -> Decision:
        return _NOTHING if problem in self.problems else Decision(ProblemFound(self.epoch, problem))

    def _refused(self, call_id: str | None) -> Decision:
        return Decision(error=retired_error(self.rollout_id, call_id))

    def _start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.retired = None
        for facts in self._facts():
            facts.clear()

    def _facts(self) -> tuple[set[str] | dict[str, bytes] | set[RecordProblem], ...]:
        return (
            *(self.begun, self.committed, self.abandoned, self.incomplete),
            *(self.problems, self.delivered, self.undelivered),
        )


_KEY_BYTES: Final = 16
_NO_KEY: Final = bytes(_KEY_BYTES)


class _Purpose(NamedTuple):
    """What a call is for, in fewer bytes than its intent has: it is in memory for every call of every live rollout."""

    body: bytes
    request: bytes
    asked: bytes
    answer: bytes

    @classmethod
    def unpack(cls, packed: bytes) -> _Purpose:
        return cls(*(packed[start : start + _KEY_BYTES] for start in range(0, len(packed), _KEY_BYTES)))


def _purpose(intent: CallIntent) -> bytes:
    """Packed; empty if it is not known, as of intents that were written before it was."""
    if not intent.request_key and not intent.answer_key:
        return b""
    try:
        keys = [bytes.fromhex(key) or _NO_KEY for key in (intent.request_key, intent.asked_key, intent.answer_key)]
    except ValueError:
        return b""
    if any(len(key) != _KEY_BYTES for key in keys):
        return b""
    body = hashlib.blake2b(intent.request_digest.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
    return b"".join((body, *keys))


def retired_error(rollout_id: str, call_id: str | None) -> RetiredRolloutError:
    """For a write whose epoch is not the rollout's current one."""
    return RetiredRolloutError(
        "this call belongs to an attempt that was dropped or cleared, or that this store never saw begin: "
        "clear the rollout before it is dispatched again",
        rollout_id=rollout_id,
        call_id=call_id,
    )


def empty_snapshot_id(rollout_id: str) -> str:
    """The snapshot id of a rollout of which nothing is recorded."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher, rollout_id, "0")
    return hasher.hexdigest()


def _feed(hasher: hashlib.blake2b, *parts: str) -> None:
    """Adds a list of strings so that no two different lists add the same bytes."""
    for part in (str(len(parts)), *parts):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
