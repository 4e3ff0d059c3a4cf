"""Messages between a process and a state actor.

Invariant: a record travels as the bytes in which it will be kept, so it is encoded once and decoded once on its way.

Flow: `StateClient` sends requests in batches -> the actor answers each: what it asked for, or the error.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

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


class CommitBytes(NamedTuple):
    """`Commit`, on its way."""

    data: bytes
    """The record, as `codec.encode_suffix` writes it."""
    epoch: int


class Resolve(NamedTuple):
    """`LineageStore.resolve`: for a request that is only measured."""

    rollout_id: str
    turn_keys: tuple[str, ...]


class Begun(NamedTuple):
    """Answer to `BeginCall`: the epoch that the call's writes carry, and what it continues."""

    epoch: int
    resolution: Resolution
    may_be_retry: bool = False
    """Another call may have been recorded for the same request: whether this one's reply is delivered will matter."""


Request: TypeAlias = BeginCall | CommitBytes | Resolve | Operation


def packed(operation: Operation) -> Request:
    """An operation as it travels. Raises `RecordError` as `codec.encode_suffix`."""
    if not isinstance(operation, Commit):
        return operation
    data = encode_suffix(operation.entry) if operation.encoded is None else operation.encoded
    return CommitBytes(data, operation.epoch)


def unpacked(sent: CommitBytes) -> Commit:
    """The operation again. Raises `RecordError` for what is no record."""
    return Commit(decode_entry(sent.data), epoch=sent.epoch, encoded=sent.data)
