"""The facts of one rollout: a pure state machine, shared by every store of this package.

Invariant: the state is a set of facts of one epoch, and facts are only ever added. So applying the same events in
any order, any number of times, gives the same state - which is what lets a log be replayed, compacted and merged
without an order to defend. The version is the number of facts. Starting a new epoch forgets all facts of the last.

Flow: an operation (`operations`) is *decided* (`decide`; nothing changes) -> the store makes the decided event durable
-> `apply` adds it -> `freeze` reads. A store therefore never shows what it could still lose, and a failed write needs
no undo.

Epochs. A store gives each attempt at a rollout an epoch from a counter that never repeats in that store. Every
write carries the epoch it was begun under. `Drop`, `Clear` and `Close` retire an epoch: its writers get
`RetiredRolloutError`, also when the store has long forgotten the rollout, because no later attempt gets that number
again. A rollout that was dropped or closed refuses new calls too - its agent may still be running - until `Clear` opens
it again. So does one that was handed on, whose epoch goes on: its facts stay, and its writers are refused by a fact.

A `Commit` whose intent is unknown but whose epoch is current is accepted. The record is complete by itself, and the
intent may be lost (an earlier process died before it was acknowledged) or never made (an importer).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gym_capture.capture.facts import (
    Abandoned,
    Begun,
    Committed,
    Completed,
    DeliveryKnown,
    Event,
    Fact,
    HandedOn,
    MarkedIncomplete,
    ProblemFound,
    Registered,
    Replayed,
    Retired,
    WentOn,
)
from gym_capture.capture.lost_calls import lost_calls
from gym_capture.capture.operations import (
    Abandon,
    Begin,
    Clear,
    Close,
    Commit,
    Complete,
    Drop,
    GoOn,
    HandOn,
    MarkDelivery,
    MarkIncomplete,
    Operation,
    Register,
    Replay,
)
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import CallRecord, RecordProblem, Snapshot, delivered_by
from gym_capture.errors import (
    CompletedRolloutError,
    ConflictingCallError,
    ConflictingRegistrationError,
    GymCaptureError,
    ReplayedCallError,
    RetiredRolloutError,
    StaleSnapshotError,
    UnknownRolloutError,
)
from gym_capture.reasons import CaptureMark, ProblemReason, join_reason
from gym_capture.rollout_counts import CallCounts, RolloutCounts

_ALWAYS_HASHED: Final = ("committed", "begun", "abandoned", "marked", "problem", "delivered", "undelivered")
"""Kinds of facts, in the order in which snapshot ids hash them. One not listed counts only where there are any."""
_NONE: Final[Mapping[Any, bytes]] = MappingProxyType({})


class Decision(NamedTuple):
    """The fact that an operation adds, if any. An error is raised after the event, if there is one, is durable."""

    event: Event | None = None
    error: GymCaptureError | None = None
    epoch: int = 0
    """The epoch of the rollout's writes once the event is durable; 0: nothing is known of it."""


class Retirement(NamedTuple):
    """How a rollout would be retired now."""

    next_epoch: int
    now: float
    """Unix seconds."""
    keeps_records: bool


class RolloutStatus(NamedTuple):
    """A rollout as it stands, without its records."""

    snapshot: Snapshot
    """Without entries."""
    counts: RolloutCounts


class Frozen(NamedTuple):
    """A rollout at one version, beside its entries."""

    snapshot: Snapshot
    """Without entries."""
    delivery: Mapping[str, bool]
    """Whether the reply of a call was delivered whole, of those calls of which that is known."""


# --- the state ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RolloutState:
    """The facts of the current epoch of one rollout."""

    rollout_id: str
    epoch: int
    """Writes that carry another epoch are refused."""
    facts: dict[str, dict[Hashable, bytes]] = field(default_factory=dict)
    """By kind and key, the value. A kind is there only if there is a fact of it."""
    retired: Retired | None = None
    """How the epoch before this one ended, if this store still knows."""
    _recorded: RolloutCounts = field(default_factory=RolloutCounts)
    """Of the facts that are `Committed`: kept up as they are added, since it is asked for while a job plays."""

    def of(self, kind: str) -> Mapping[Any, bytes]:
        """The facts of one kind."""
        return self.facts.get(kind, _NONE)

    @property
    def version(self) -> int:
        """Number of facts; 0 for a rollout of which nothing is recorded."""
        return sum(map(len, self.facts.values()))

    @property
    def is_live(self) -> bool:
        return bool(self.facts)

    @property
    def registration(self) -> Registration | None:
        # Decided one after the other, there is never a second; whatever facts there are, it is always the same one.
        return next((Registration.from_text(text) for text in sorted(self.of(Registered.kind))), None)

    @property
    def outcome(self) -> Outcome | None:
        return next((Outcome.from_text(text) for text in sorted(self.of(Completed.kind))), None)

    # deciding: nothing changes

    def decide(self, operation: Operation, payload_digest: bytes, retirement: Retirement) -> Decision:
        """Decides a checked operation. `payload_digest`: of the record of a `Commit`."""
        match operation:
            case Begin() | Register() | Complete() | GoOn() if self._refuses_calls or self._is_handed_on:
                return self._refused(operation.call_id)
            case Begin(intent):
                begun = Begun(self.epoch, intent)
                return (
                    self._is_over(intent.model_call_id) if self.outcome and not self.knows(begun) else self._new(begun)
                )
            case Register(_, registration):
                return self._register(registration)
            case Complete(_, outcome):
                if not self.is_live:
                    error = UnknownRolloutError("nothing is recorded of this rollout", rollout_id=self.rollout_id)
                    return Decision(error=error, epoch=self.epoch)
                if self.outcome not in (None, outcome):
                    return self._is_over(None)
                return self._new(Completed(self.epoch, outcome.as_text()))
            case Drop(_, snapshot_id, version):
                return self._drop(snapshot_id, version, retirement)
            case Clear():
                return self._forget(retirement) if self.is_live or self._refuses_calls else self._nothing()
            case Close():
                return self._nothing() if self._refuses_calls else self._forget(retirement, closed=True)
            case HandOn() if self._refuses_calls:
                return self._nothing()
            case HandOn():
                return self._new(HandedOn(self.epoch)) if self.is_live else self._forget(retirement, closed=True)
            case GoOn(_, source):
                return self._new(WentOn(self.epoch, source))
            case _ if operation.epoch != self.epoch or self._is_handed_on:
                return self._refused(operation.call_id)
            case Commit():
                counts = call_counts(operation.entry)
                return self._commit(Committed(self.epoch, operation.call_id, payload_digest, counts))
            case Abandon(_, call_id):
                return self._new(Abandoned(self.epoch, call_id))
            case MarkIncomplete(_, reason):
                return self._new(MarkedIncomplete(self.epoch, reason))
            case MarkDelivery(_, call_id):
                return self._new(DeliveryKnown(self.epoch, call_id, operation.delivered))
            case Replay(_, call_id, recorded):
                return self._replay(Replayed(self.epoch, recorded, call_id))

    def _replay(self, event: Replayed) -> Decision:
        if self.of(event.kind).get(event.key, event.value) == event.value:
            return self._new(event)
        error = ReplayedCallError(
            f"another call is answered from the record of {event.recorded} already",
            rollout_id=self.rollout_id,
            call_id=event.call_id,
        )
        return Decision(error=error, epoch=self.epoch)

    def _commit(self, event: Committed) -> Decision:
        known = self.of(event.kind).get(event.call_id)
        if known is None or known == event.payload_digest:
            return self._new(event)
        problem = RecordProblem(
            reason=ProblemReason.CONFLICTING_CALL_ID,
            call_id=event.call_id,
            field=None,
            detail="the call was recorded twice with different content; the first record stays",
        )
        error = ConflictingCallError(
            "this call is already recorded with other content; the first record stays and the rollout is masked",
            rollout_id=self.rollout_id,
            call_id=event.call_id,
        )
        return self._new(ProblemFound(self.epoch, problem))._replace(error=error)

    def _register(self, registration: Registration) -> Decision:
        known = self.registration
        if known in (None, registration):
            return self._new(Registered(self.epoch, registration.as_text()))
        error = ConflictingRegistrationError(
            f"this rollout is registered already, with other content: {known}", rollout_id=self.rollout_id
        )
        return Decision(error=error, epoch=self.epoch)

    def _is_over(self, call_id: str | None) -> Decision:
        why = "no call of it begins any more"
        if call_id is None and self.outcome is not None:
            # Not for calls: who calls need not know the reward.
            why = f"its first outcome stands: {self.outcome.as_dict()}"
        error = CompletedRolloutError(f"this rollout is complete: {why}", rollout_id=self.rollout_id, call_id=call_id)
        return Decision(error=error, epoch=self.epoch)

    def _drop(self, snapshot_id: str, version: int, retirement: Retirement) -> Decision:
        """Retires the snapshot if it is the current one; nothing if it is the one retired last."""
        if version == self.version and snapshot_id == self.snapshot_id():
            return self._retired(retirement, self.epoch, snapshot_id, version) if self.is_live else self._nothing()
        if self.retired is not None and (self.retired.snapshot_id, self.retired.version) == (snapshot_id, version):
            return self._nothing()
        error = StaleSnapshotError(
            f"snapshot {snapshot_id} at version {version} is not current (version {self.version} is): "
            "freeze again, and drop what you consumed",
            rollout_id=self.rollout_id,
        )
        return Decision(error=error, epoch=self.epoch)

    @property
    def _refuses_calls(self) -> bool:
        return self.retired is not None and self.retired.refuses_calls

    @property
    def _is_handed_on(self) -> bool:
        return bool(self.of(HandedOn.kind))

    def _forget(self, retirement: Retirement, *, closed: bool = False) -> Decision:
        epoch, now, _ = retirement
        return Decision(Retired(epoch, None, "", 0, now, keeps_records=False, closed=closed), epoch=epoch)

    def _retired(self, retirement: Retirement, consumed_epoch: int, snapshot_id: str, version: int) -> Decision:
        epoch, now, keeps_records = retirement
        return Decision(Retired(epoch, consumed_epoch, snapshot_id, version, now, keeps_records), epoch=epoch)

    def _new(self, event: Fact) -> Decision:
        """Adds the fact, unless it is one already."""
        return Decision(None if self.knows(event) else event, epoch=self.epoch)

    def _nothing(self) -> Decision:
        return Decision(epoch=self.epoch)

    def _refused(self, call_id: str | None) -> Decision:
        return Decision(error=retired_error(self.rollout_id, call_id), epoch=self.epoch)

    # applying

    def knows(self, event: Event) -> bool:
        """Whether applying the event would change nothing: it is a fact already, or of an earlier epoch."""
        if event.epoch != self.epoch:
            return event.epoch < self.epoch
        if isinstance(event, Retired):
            return self.retired is not None
        return event.key in self.of(event.kind)

    def apply(self, event: Event) -> None:
        """Adds a fact. Those of earlier epochs are ignored."""
        if event.epoch > self.epoch:
            self.epoch = event.epoch
            self.retired = None
            self.facts.clear()
            self._recorded = RolloutCounts()
        if self.knows(event):
            return
        if isinstance(event, Retired):
            self.retired = event
        else:
            self.facts.setdefault(event.kind, {})[event.key] = event.value
            if isinstance(event, Committed):
                self._recorded = self._recorded.plus(event.counts)

    # reading

    @property
    def counts(self) -> RolloutCounts:
        """In the same time however many calls there are."""
        flaws = len(self.of(MarkedIncomplete.kind)) + self._is_handed_on + len(self.of(ProblemFound.kind))
        return self._recorded._replace(flaws=flaws)

    def freeze(self) -> Frozen:
        """The current facts. A call that was begun and neither recorded nor abandoned makes them incomplete."""
        dangling = self.of("begun").keys() - self.of("committed").keys() - self.of("abandoned").keys()
        snapshot = Snapshot(
            rollout_id=self.rollout_id,
            snapshot_id=self.snapshot_id(),
            version=self.version,
            entries=(),
            incomplete=(
                *sorted(self.of("marked")),
                *([str(CaptureMark.HANDED_ON)] if self._is_handed_on else ()),
                *(join_reason(CaptureMark.DANGLING_INTENT, c) for c in sorted(dangling)),
            ),
            problems=tuple(sorted(self.of("problem"), key=lambda p: (p.reason, p.call_id or "", p.detail))),
            lost_calls=lost_calls(dangling, self.of("begun"), self.of("committed").keys()),
            registration=self.registration,
            outcome=self.outcome,
            went_on=tuple(sorted(self.of(WentOn.kind))),
        )
        return Frozen(snapshot, self._delivery())

    def _delivery(self) -> dict[str, bool]:
        said = [(call_id, True) for call_id in self.of("delivered")]
        said += [(call_id, False) for call_id in self.of("undelivered")]
        together: dict[str, bool] = {}
        for call_id, delivered in sorted(said):
            together[call_id] = bool(delivered_by((together.get(call_id), delivered)))
        return together

    def snapshot_id(self) -> str:
        """The same facts of the same epoch give the same id, whenever and wherever it is asked for."""
        hasher = hashlib.blake2b(digest_size=16)
        if not self.is_live:
            _feed(hasher, self.rollout_id, "0")
            return hasher.hexdigest()
        _feed(hasher, self.rollout_id, str(self.epoch))
        for kind in _ALWAYS_HASHED:
            _feed(hasher, *self._lines(kind))
        for kind in sorted(self.facts.keys() - set(_ALWAYS_HASHED)):
            _feed(hasher, kind, *self._lines(kind))
        return hasher.hexdigest()

    def _lines(self, kind: str) -> list[str]:
        facts = self.of(kind)
        if kind == Committed.kind:
            return [f"{call_id}={digest.hex()}" for call_id, digest in sorted(facts.items())]
        return sorted(key if isinstance(key, str) else repr(key) for key in facts)


def retired_error(rollout_id: str, call_id: str | None) -> RetiredRolloutError:
    """For a write whose epoch is not the rollout's current one, or whose rollout was handed on."""
    return RetiredRolloutError(
        "this call belongs to an attempt that was dropped, cleared, closed or handed on, or that this store never saw "
        "begin: "
        "a rollout is cleared before it is dispatched again",
        rollout_id=rollout_id,
        call_id=call_id,
    )


def call_counts(record: CallRecord) -> CallCounts:
    """What a record adds to its rollout's counts."""
    return CallCounts(record.generation_token_ids.size, record.prefix.requested, record.prefix.supplied)


def _feed(hasher: hashlib.blake2b, *parts: str) -> None:
    """Adds a list of strings so that no two different lists add the same bytes."""
    for part in (str(len(parts)), *parts):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
