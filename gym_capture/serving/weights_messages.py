"""What the coordinator of the weight plane and its replicas say to each other.

Flow: a replica joins with its `Seat` and is told to `Load` the current version, or is welcome -> it asks for an
`Order`, obeys it, and hands its `Report` in when it asks for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from gym_capture.engines.weights import TransferStep
from gym_capture.errors import GymCaptureError
from gym_capture.weights import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Weights that a graph serves."""

    number: int
    """0: those of the model folder, as long as nothing was pushed."""
    model: str
    """The model folder that they belong to."""
    folder: str | None = None
    """Where they are. None: in the model folder, for number 0; else nowhere, since they came by a transfer."""
    digest: str = ""
    """`Payload.digest`; of a transfer, an id of its own."""

    @property
    def can_be_loaded(self) -> bool:
        return self.folder is not None or self.number == 0

    def is_same(self, other: Version) -> bool:
        """The same weights under the same number, wherever they are."""
        return (self.number, self.model, self.digest) == (other.number, other.model, other.digest)


class Seat(NamedTuple):
    """A replica, as it joins."""

    replica: str
    version: Version
    """What it has."""
    is_sound: bool
    """Its weights are whole: no load failed, none is under way."""
    world_size: int
    dtype: str
    node: str
    """Replicas of one node see the same disks."""
    cannot_load: str | None = None
    """The digest of what it was told to load, and could not."""


class Load(NamedTuple):
    """Load this, and join again."""

    version: Version


class Later(NamedTuple):
    """A transfer is under way, whose group is complete: join again in a while."""


class Welcome(NamedTuple):
    """The replica is a member: it has the current version, or cannot have it before the next update."""

    is_paused: bool
    is_current: bool
    must_answer: bool = False
    """It has not, and neither has any other: its routes must be there all the same, or nobody could push weights."""


class Check(NamedTuple):
    """Say what the manifest of `folder` says (a `Payload`), once it has been verified."""

    folder: str
    allow_non_finite: bool
    was_read: bool = False
    """Another replica of the node has verified it: see only that it is there."""


class Apply(NamedTuple):
    """Pause, and load this version."""

    version: Version


class Label(NamedTuple):
    """What is loaded is this version."""

    version: Version


class Pause(NamedTuple):
    mode: PauseMode
    clear_cache: bool


class Resume(NamedTuple):
    pass


class Checksums(NamedTuple):
    pass


class Transfer(NamedTuple):
    """A step of an update by the engine's own backend."""

    step: TransferStep
    info: Mapping[str, Any] | list[Any]


class Leave(NamedTuple):
    """The replica is a member no more; if it `must_end`, it cannot be trusted to serve, and is replaced."""

    reason: str
    must_end: bool


class Rejoin(NamedTuple):
    """The coordinator does not know the replica: it has started anew."""


class Nothing(NamedTuple):
    """Ask again."""


Order: TypeAlias = Check | Apply | Label | Pause | Resume | Checksums | Transfer | Leave | Rejoin | Nothing


class Numbered(NamedTuple):
    """An order, and the number by which its report is known."""

    number: int
    order: Order


class Report(NamedTuple):
    """What became of an order."""

    number: int
    value: object = None
    error: GymCaptureError | None = None
