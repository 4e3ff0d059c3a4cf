"""Messages between a process and a state actor.

Invariant: a record travels as the bytes in which it will be kept, so it is encoded once and decoded once on its way.

Flow: `StateClient` sends requests in batches -> the actor answers each: what it asked for, or the error.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeGuard

from gym_capture.capture.codec import decode_entry, encode_suffix
from gym_capture.capture.operations import Commit, Operation
from gym_capture.capture.protocols import Resolution
from gym_capture.capture.records import CallIntent


class BeginCall(NamedTuple):
    """`Begin`, and what the call continues: one round trip for both. Answered with `Begun`."""

    intent: CallIntent
    turn_keys: tuple[str, ...] = ()
    """As `LineageStore.resolve` takes them."""
    asked_keys: tuple[str, ...] = ()


CommitBytes: TypeAlias = tuple[bytes, int]
"""`Commit`, on its way: the record, as `codec.encode_suffix` writes it, and the epoch.

As plain as can be, since there are as many as calls: Ray's pickler takes five times as long over an object of a class.
"""


class Resolve(NamedTuple):
    """`LineageStore.resolve`: for a request that is only measured."""

    rollout_id: str
    turn_keys: tuple[str, ...]


class TooLong(NamedTuple):
    """A call of the rollout was refused: its conversation has outgrown the model's context."""

    rollout_id: str


class IsOutgrown(NamedTuple):
    """Whether that is the last that became of its calls."""

    rollout_id: str


class ReadCounts(NamedTuple):
    """`CountedStore.counts` of rollouts that the shard has."""

    rollout_ids: tuple[str, ...]


class ReadStatus(NamedTuple):
    """`CountedStore.status`."""

    rollout_id: str


class Begun(NamedTuple):
    """Answer to `BeginCall`: the epoch that the call's writes carry, and what it continues."""

    epoch: int
    resolution: Resolution
    may_be_retry: bool = False
    """Another call may have been recorded for the same request: whether this one's reply is delivered will matter."""
    went_on: tuple[str, ...] = ()
    """The earlier attempts whose records may answer it."""


Request: TypeAlias = BeginCall | CommitBytes | Resolve | TooLong | IsOutgrown | ReadCounts | ReadStatus | Operation


def packed(operation: Operation) -> Request:
    """An operation as it travels. Raises `RecordError` as `codec.encode_suffix`."""
    if not isinstance(operation, Commit):
        return operation
    data = encode_suffix(operation.entry) if operation.encoded is None else operation.encoded
    return data, operation.epoch


def is_commit(request: Request) -> TypeGuard[CommitBytes]:
    return type(request) is tuple  # the others are of classes of their own


def unpacked(sent: CommitBytes) -> Commit:
    """The operation again. Raises `RecordError` for what is no record."""
    data, epoch = sent
    return Commit(decode_entry(data), epoch=epoch, encoded=data)
