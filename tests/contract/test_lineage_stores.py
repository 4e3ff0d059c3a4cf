"""The contract of lineage, over the state actors' own class, and over stores that get it wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Clear, Close, Commit, Drop, Operation
from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Snapshot, Unresolved, suffix_of
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.conformance import Result
from gym_capture.conformance.lineage import (
    LINEAGE_CHECKS,
    LINEAGE_DURABILITY_CHECKS,
    StoreWithLineage,
    run_lineage_check,
)
from gym_capture.errors import GymCaptureError
from gym_capture.lineage.index import LineageIndex
from gym_capture.serving.state import StateShard
from gym_capture.serving.state_messages import Request, Resolve, packed
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore


class Shard:
    """What a replica's client does with a state actor, with the actor's object in its place."""

    def __init__(self, directory: Path, store: str = f"{__name__}:open_log") -> None:
        self._shard = StateShard(index=0, shards=1, store=store, store_kwargs={}, directory=str(directory))

    async def write(self, operation: Operation) -> int:
        if isinstance(operation, Commit):
            operation = replace(operation, encoded=encode_entry(suffix_of(operation.entry)))
        return cast(int, await self._asked(packed(operation)))

    async def _asked(self, request: Request) -> object:
        (answer,) = await self._shard.batch([request])
        if isinstance(answer, GymCaptureError):
            raise answer
        return answer

    async def freeze(self, rollout_id: str) -> Snapshot:
        return decode_snapshot(await self._shard.freeze(rollout_id))

    async def rollout_ids(self) -> Sequence[str]:
        return await self._shard.rollout_ids()

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        return cast(Resolution, await self._asked(Resolve(rollout_id, tuple(turn_keys))))

    async def close(self) -> None:
        """An actor that ends takes its store's lock with it; this one is asked to let go."""
        while OPENED:
            await OPENED.pop().close()


OPENED: list[LogStore] = []
"""The stores of shards that have not been closed."""


async def open_log(*, directory: Path) -> LogStore:
    """The store that a shard hosts by default."""
    store = await LogStore.open(directory)
    OPENED.append(store)
    return store


class Recorded(MemoryStore):
    """A store and an index of what it acknowledged, in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.index = LineageIndex()

    async def write(self, operation: Operation) -> int:
        epoch = await super().write(operation)
        match operation:
            case Commit(entry):
                self.index.add(entry)
            case Drop() | Clear() | Close():
                self.index.forget(operation.rollout_id)
        return epoch

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        return self.index.resolve(rollout_id, turn_keys)


async def open_recorded(*, directory: Path | None = None) -> Recorded:
    """Opened as a state actor opens a store."""
    return Recorded()


@pytest.mark.parametrize("name", LINEAGE_CHECKS)
async def test_lineage_index_keeps_the_contract(name: str) -> None:
    _assert_passed(await run_lineage_check(name, open_recorded))


@pytest.mark.parametrize("name", [*LINEAGE_CHECKS, *LINEAGE_DURABILITY_CHECKS])
async def test_state_shard_keeps_the_contract(name: str, tmp_path: Path) -> None:
    async def shard() -> Shard:
        return Shard(tmp_path)

    async def reopen(store: StoreWithLineage) -> StoreWithLineage:
        await store.close()
        return await shard()

    _assert_passed(await run_lineage_check(name, shard, reopen=reopen))


class OffByOne(Recorded):
    """Leaves out the stop token, as who decodes and tokenizes again does."""

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        found = await super().resolve(rollout_id, turn_keys)
        return Resolved(found.call_id, found.turn, found.cumulative_ids[:-1]) if isinstance(found, Resolved) else found


class ToTheLetter(Recorded):
    """Knows turns only as they were sent."""

    async def write(self, operation: Operation) -> int:
        if isinstance(operation, Commit):
            operation = replace(operation, entry=with_values(operation.entry, other_turn_keys={}))
        return await super().write(operation)


class Promiscuous(Recorded):
    """Has one conversation for all rollouts."""

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        answers = [self.index.resolve(rollout_id, turn_keys) for rollout_id in await self.rollout_ids()]
        found = [answer for answer in answers if isinstance(answer, Resolved)]
        return found[0] if found else self.index.resolve(rollout_id, turn_keys)


class Late(Recorded):
    """Shows a record some time after it acknowledged it."""

    async def write(self, operation: Operation) -> int:
        if not isinstance(operation, Commit):
            return await super().write(operation)
        epoch = await MemoryStore.write(self, operation)
        asyncio.get_running_loop().call_later(0.001, self.index.add, operation.entry)
        return epoch


class NeverForgets(Recorded):
    """Keeps what earlier attempts said."""

    async def write(self, operation: Operation) -> int:
        forgets = isinstance(operation, Clear)
        return await (MemoryStore.write(self, operation) if forgets else super().write(operation))


class Guesses(Recorded):
    """Takes any of the calls that it cannot tell apart."""

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        found = await super().resolve(rollout_id, turn_keys)
        ids = self.index.cumulative_ids(rollout_id, "c1")
        return found if found != Unresolved("ambiguous") or ids is None else Resolved("c1", 1, ids)


@pytest.mark.parametrize(
    ("wrong", "name", "failure"),
    [
        (OffByOne, "recorded_call_is_resolved", "cumulative ids: got [1, 2, 3, 4], expected [1, 2, 3, 4, 5]"),
        (ToTheLetter, "turn_may_be_handed_back_otherwise", "call c must be the parent: got Unresolved"),
        (Promiscuous, "never_across_rollouts", "before the other rollout has a call: got Resolved"),
        (Late, "put_is_visible_when_acknowledged", "call c0 must be the parent: got Unresolved"),
        (NeverForgets, "earlier_attempts_are_forgotten", "after clear: got Resolved"),
        (Guesses, "different_ids_are_ambiguous", "resolution: got Resolved"),
    ],
)
async def test_suite_reports_what_a_lineage_does_wrong(wrong: type[Recorded], name: str, failure: str) -> None:
    async def made() -> Recorded:
        return wrong()

    result = await run_lineage_check(name, made)
    assert (result.failure or "").startswith(failure)


async def test_a_check_of_restarts_needs_a_way_to_restart() -> None:
    (name,) = LINEAGE_DURABILITY_CHECKS
    result = await run_lineage_check(name, open_recorded)
    assert result.failure == "needs a way to reopen the store"
    assert result.contract.startswith("After a restart")


def _assert_passed(result: Result) -> None:
    assert result.passed, f"{result.contract}\n{result.failure}"
