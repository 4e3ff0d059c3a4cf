"""What a log keeps of a rollout: facts of an epoch, and the events that retire one.

All but `Retired` are facts. A fact says which `kind` it is of and has a `key`: two of one kind and key are the same
fact. `value` is what the state keeps of it beside that. What they mean together is in `rollout_state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from gym_capture.capture.lost_calls import purpose
from gym_capture.capture.records import CallIntent, RecordProblem
from gym_capture.rollout_counts import CallCounts

__all__ = [
    "Abandoned",
    "Begun",
    "Committed",
    "Completed",
    "DeliveryKnown",
    "Event",
    "Fact",
    "HandedOn",
    "MarkedIncomplete",
    "ProblemFound",
    "Registered",
    "Replayed",
    "Retired",
    "WentOn",
]


@dataclass(frozen=True, slots=True)
class Begun:
    """A call is about to generate."""

    kind: ClassVar = "begun"
    epoch: int
    intent: CallIntent

    @property
    def key(self) -> str:
        return self.intent.model_call_id

    @property
    def value(self) -> bytes:
        """The call's purpose (`lost_calls.purpose`)."""
        return purpose(self.intent)


@dataclass(frozen=True, slots=True)
class Committed:
    """A call has a record. The record itself is kept by the store, beside the state."""

    kind: ClassVar = "committed"
    epoch: int
    call_id: str
    payload_digest: bytes
    counts: CallCounts

    @property
    def key(self) -> str:
        return self.call_id

    @property
    def value(self) -> bytes:
        return self.payload_digest


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A call was refused before it generated."""

    kind: ClassVar = "abandoned"
    value: ClassVar = b""
    epoch: int
    call_id: str

    @property
    def key(self) -> str:
        return self.call_id


@dataclass(frozen=True, slots=True)
class MarkedIncomplete:
    """The capture of the rollout lacks something."""

    kind: ClassVar = "marked"
    value: ClassVar = b""
    epoch: int
    reason: str

    @property
    def key(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class ProblemFound:
    """Something masks the rollout."""

    kind: ClassVar = "problem"
    value: ClassVar = b""
    epoch: int
    problem: RecordProblem

    @property
    def key(self) -> RecordProblem:
        return self.problem


@dataclass(frozen=True, slots=True)
class DeliveryKnown:
    """The end of a call's reply was handed to its client's connection, or it is certain that it was not.

    Learned after the call is recorded; of most calls, never.
    """

    value: ClassVar = b""
    epoch: int
    call_id: str
    delivered: bool

    @property
    def kind(self) -> str:
        return "delivered" if self.delivered else "undelivered"

    @property
    def key(self) -> str:
        return self.call_id


@dataclass(frozen=True, slots=True)
class Registered:
    """Which rollout it is."""

    kind: ClassVar = "registered"
    value: ClassVar = b""
    epoch: int
    text: str
    """As `Registration.as_text` writes it."""

    @property
    def key(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Completed:
    """How the rollout ended."""

    kind: ClassVar = "completed"
    value: ClassVar = b""
    epoch: int
    text: str
    """As `Outcome.as_text` writes it."""

    @property
    def key(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class HandedOn:
    """Another attempt goes on from the records."""

    kind: ClassVar = "handed"
    key: ClassVar = ""
    value: ClassVar = b""
    epoch: int


@dataclass(frozen=True, slots=True)
class WentOn:
    """The attempt goes on from the records of `source`."""

    kind: ClassVar = "went_on"
    value: ClassVar = b""
    epoch: int
    source: str

    @property
    def key(self) -> str:
        return self.source


@dataclass(frozen=True, slots=True)
class Replayed:
    """A call is answered from the record `recorded` of an earlier attempt."""

    kind: ClassVar = "replayed"
    epoch: int
    recorded: str
    call_id: str

    @property
    def key(self) -> str:
        return self.recorded

    @property
    def value(self) -> bytes:
        return self.call_id.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Retired:
    """Everything before `epoch` is gone."""

    epoch: int
    consumed_epoch: int | None
    """The epoch that was consumed as `snapshot_id` at `version`; None: the rollout was cleared or closed."""
    snapshot_id: str
    version: int
    retired_at: float
    """Unix seconds."""
    keeps_records: bool
    """The consumed records stay readable where the store keeps files."""
    closed: bool = False
    """The rollout was closed."""

    @property
    def refuses_calls(self) -> bool:
        return self.closed or self.consumed_epoch is not None


Fact: TypeAlias = (
    Begun
    | Committed
    | Abandoned
    | MarkedIncomplete
    | ProblemFound
    | DeliveryKnown
    | Registered
    | Completed
    | HandedOn
    | WentOn
    | Replayed
)
Event: TypeAlias = Fact | Retired
