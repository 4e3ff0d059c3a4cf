"""The contract of lineage, one sentence a check, over anything that records calls and resolves requests.

Invariant: as in `gym_capture.conformance`; the sentences are those of `protocols.LineageStore`. What is resolved is
compared id for id with what was recorded, so a store that is off by one id fails.

Flow: `run_lineage_check(name, factory)` for each of `LINEAGE_CHECKS`, and of `LINEAGE_DURABILITY_CHECKS` for one that
survives a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from gym_capture.capture.operations import Clear, Close, Commit, Drop
from gym_capture.capture.protocols import LineageStore, Resolution, Resolved
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Continues, Root, TokenEntry, Unresolved, suffix_of
from gym_capture.capture.suffixes import StoredRecord
from gym_capture.conformance import Result, contract_of, run_one
from gym_capture.conformance.support import (
    Store,
    begin,
    expect,
    expect_equal,
    expect_error,
    run_call,
    sample_entry,
)
from gym_capture.errors import ConflictingCallError
from gym_capture.reasons import RequestRule, UnresolvedReason


class StoreWithLineage(Store, LineageStore, Protocol):
    """The store under test: one whose records can be looked up as parents."""


LineageFactory: TypeAlias = Callable[[], Awaitable[StoreWithLineage]]
"""Makes an empty store."""
LineageReopen: TypeAlias = Callable[[StoreWithLineage], Awaitable[StoreWithLineage]]
"""Closes a store and opens it again on the same records, as after a restart."""
LineageCheck: TypeAlias = Callable[[StoreWithLineage], Awaitable[None]]
LineageDurabilityCheck: TypeAlias = Callable[[StoreWithLineage, LineageReopen], Awaitable[None]]


async def run_lineage_check(
    name: str, factory: LineageFactory, *, reopen: LineageReopen | None = None, timeout_s: float = 60.0
) -> Result:
    """One check by its name. Raises `KeyError` for a name that is in neither list."""
    if name in LINEAGE_CHECKS:
        return await run_one(name, LINEAGE_CHECKS[name], factory, timeout_s)
    check = LINEAGE_DURABILITY_CHECKS[name]
    if reopen is None:
        return Result(name, contract_of(check), "needs a way to reopen the store")

    async def over_a_restart(store: StoreWithLineage) -> None:
        await check(store, reopen)

    over_a_restart.__doc__ = check.__doc__
    return await run_one(name, over_a_restart, factory, timeout_s)


# --- what a request continues ------------------------------------------------------------------------------------


async def no_turns_is_a_root(store: StoreWithLineage) -> None:
    """A request without assistant turns starts a conversation, whatever is recorded."""
    expect_equal(await store.resolve("r", ()), Root(), "before the first call")
    await run_call(store, "r", "c")
    expect_equal(await store.resolve("r", ()), Root(), "after a call")


async def recorded_call_is_resolved(store: StoreWithLineage) -> None:
    """A request that echoes a recorded call's turn continues that call, from its exact cumulative ids."""
    entry, _ = await run_call(store, "r", "c")
    _expect_parent(await store.resolve("r", _keys(entry)), entry, turn=0)


async def ids_of_suffixes_are_whole(store: StoreWithLineage) -> None:
    """A call that was put as a suffix is continued from its whole prompt and generation, however long the chain."""
    entry, epoch = await run_call(store, "r", "c0")
    turns = [entry]
    for number in range(1, 6):
        entry = _following(entry, f"c{number}", new=(7, number), generation=(40 + number, 9))
        await _record(store, suffix_of(entry), epoch)
        turns.append(entry)
        _expect_parent(await store.resolve("r", _keys(*turns)), entry, turn=number)


async def latest_known_turn_decides(store: StoreWithLineage) -> None:
    """Of a request's turns the latest that a call owns decides; turns that no call owns may follow it."""
    first, epoch = await run_call(store, "r", "c1")
    second = _following(first, "c2")
    await _record(store, second, epoch)
    _expect_parent(await store.resolve("r", _keys(first, second)), second, turn=1)
    _expect_parent(await store.resolve("r", (*_keys(first), "a turn of the client's own")), first, turn=0)
    _expect_parent(await store.resolve("r", ("a few-shot turn", *_keys(first))), first, turn=1)


async def turn_may_be_handed_back_otherwise(store: StoreWithLineage) -> None:
    """A call owns its turn as some clients hand it back, too; the answer names the rule."""
    entry = with_values(
        sample_entry("r", "c"), other_turn_keys={"with the stop string": RequestRule.STOP_STRING_PUT_BACK}
    )
    await _record(store, entry, await begin(store, "r", "c"))
    for key, rule in ((entry.keys.turn_key or "", None), ("with the stop string", RequestRule.STOP_STRING_PUT_BACK)):
        resolution = await store.resolve("r", (key,))
        _expect_parent(resolution, entry, turn=0)
        expect_equal(resolution.rule if isinstance(resolution, Resolved) else "", rule, "rule")


async def branches_share_their_parent(store: StoreWithLineage) -> None:
    """A call stays a parent after calls have continued it: every branch gets it."""
    parent, epoch = await run_call(store, "r", "c")
    for number in range(3):
        await _record(store, _following(parent, f"branch {number}", new=(7,), generation=(50 + number,)), epoch)
        _expect_parent(await store.resolve("r", _keys(parent)), parent, turn=0)


# --- what it does not --------------------------------------------------------------------------------------------


async def unknown_turn_is_unresolved(store: StoreWithLineage) -> None:
    """A request of whose turns no call owns any is unresolved, with a reason."""
    await run_call(store, "r", "c")
    for rollout_id, what in (("r", "an unknown turn"), ("never seen", "a turn of an unknown rollout")):
        resolution = await store.resolve(rollout_id, ("an unknown turn",))
        expect(isinstance(resolution, Unresolved) and bool(resolution.reason), f"{what}: got {resolution!r}")


async def never_across_rollouts(store: StoreWithLineage) -> None:
    """The same conversation in two rollouts is two conversations: neither gets the other's ids."""
    mine, _ = await run_call(store, "mine", "c")
    _expect_unresolved(await store.resolve("other", _keys(mine)), "before the other rollout has a call")
    theirs = with_values(sample_entry("other", "c", prompt=(8, 8), generation=(8,)), turn_key=mine.keys.turn_key)
    await _record(store, theirs, await begin(store, "other", "c"))
    _expect_parent(await store.resolve("mine", _keys(mine)), mine, turn=0)
    _expect_parent(await store.resolve("other", _keys(mine)), theirs, turn=0)


async def different_ids_are_ambiguous(store: StoreWithLineage) -> None:
    """Two calls that own a turn and differ in ids: `Unresolved("ambiguous")`, also where an earlier turn is clear."""
    root, epoch = await run_call(store, "r", "c0")
    one = _following(root, "c1", generation=(50,))
    two = with_values(_following(root, "c2", generation=(51,)), turn_key=one.keys.turn_key)
    for entry in (one, two):
        await _record(store, entry, epoch)
    expect_equal(await store.resolve("r", _keys(root, one)), Unresolved(UnresolvedReason.AMBIGUOUS), "resolution")
    _expect_parent(await store.resolve("r", _keys(root)), root, turn=0)


async def equal_ids_are_interchangeable(store: StoreWithLineage) -> None:
    """Of calls that own a turn and have the same ids, the smallest call id stands for all."""
    _, epoch = await run_call(store, "r", "other")
    entries = [with_values(sample_entry("r", call_id), turn_key="shared") for call_id in ("b", "a", "c")]
    for entry in entries:
        await _record(store, entry, epoch)
    _expect_parent(await store.resolve("r", ("shared",)), entries[1], turn=0)


async def refused_put_changes_nothing(store: StoreWithLineage) -> None:
    """A put that was refused is no parent: the first record of the call stays what it is continued from."""
    entry, epoch = await run_call(store, "r", "c")
    other = with_values(sample_entry("r", "c", generation=(60, 61)), turn_key="key of the refused")
    await expect_error(store.write(Commit(other, epoch=epoch)), ConflictingCallError, "a conflicting put")
    _expect_parent(await store.resolve("r", _keys(entry)), entry, turn=0)
    _expect_unresolved(await store.resolve("r", _keys(other)), "the refused record's turn")


async def earlier_attempts_are_forgotten(store: StoreWithLineage) -> None:
    """A call that was cleared, dropped or closed is no parent of the next attempt's calls."""
    old, _ = await run_call(store, "r", "old")
    await store.write(Clear("r"))
    _expect_unresolved(await store.resolve("r", _keys(old)), "after clear")
    new, _ = await run_call(store, "r", "new")
    _expect_unresolved(await store.resolve("r", _keys(old)), "in the next attempt")
    _expect_parent(await store.resolve("r", _keys(new)), new, turn=0)
    snapshot = await store.freeze("r")
    await store.write(Drop("r", snapshot.snapshot_id, snapshot.version))
    _expect_unresolved(await store.resolve("r", _keys(new)), "after drop")
    closed, _ = await run_call(store, "closed", "c")
    await store.write(Close("closed"))
    _expect_unresolved(await store.resolve("closed", _keys(closed)), "after close")


# --- when --------------------------------------------------------------------------------------------------------


async def put_is_visible_when_acknowledged(store: StoreWithLineage) -> None:
    """A resolve that starts after a put was acknowledged sees it, also while many others are under way."""

    async def play(rollout_id: str) -> None:
        entry, epoch = await run_call(store, rollout_id, "c0")
        turns = [entry]
        for number in range(1, 5):
            _expect_parent(await store.resolve(rollout_id, _keys(*turns)), entry, turn=number - 1)
            entry = _following(entry, f"c{number}")
            await _record(store, suffix_of(entry), epoch)
            turns.append(entry)

    await asyncio.gather(*(play(f"r{number}") for number in range(12)))


async def lineage_survives_a_restart(store: StoreWithLineage, reopen: LineageReopen) -> None:
    """After a restart recorded calls are continued as before, and what was dropped is still forgotten."""
    first, epoch = await run_call(store, "r", "c1")
    second = _following(first, "c2")
    await _record(store, suffix_of(second), epoch)
    gone, _ = await run_call(store, "gone", "c")
    snapshot = await store.freeze("gone")
    await store.write(Drop("gone", snapshot.snapshot_id, snapshot.version))
    store = await reopen(store)
    _expect_parent(await store.resolve("r", _keys(first, second)), second, turn=1)
    _expect_unresolved(await store.resolve("gone", _keys(gone)), "a dropped rollout")
    third = _following(second, "c3")
    await _record(store, suffix_of(third), await begin(store, "r", "c3"))
    _expect_parent(await store.resolve("r", _keys(first, second, third)), third, turn=2)
    await store.close()


def _keys(*entries: TokenEntry) -> Sequence[str]:
    return tuple(entry.keys.turn_key or "" for entry in entries)


def _following(
    parent: TokenEntry, call_id: str, *, new: Sequence[int] = (7,), generation: Sequence[int] = (8, 9)
) -> TokenEntry:
    """A whole record of a call that continues `parent`."""
    prompt = [*parent.cumulative_ids().tolist(), *new]
    return sample_entry(
        parent.rollout_id,
        call_id,
        prompt=prompt,
        generation=generation,
        parent=Continues(parent.model_call_id, parent.cum_len),
    )


async def _record(store: StoreWithLineage, entry: StoredRecord, epoch: int) -> None:
    await begin(store, entry.rollout_id, entry.model_call_id)
    await store.write(Commit(entry, epoch=epoch))


def _expect_parent(resolution: Resolution, entry: TokenEntry, *, turn: int) -> None:
    if not isinstance(resolution, Resolved):
        expect(False, f"call {entry.model_call_id} must be the parent: got {resolution!r}")
        return
    expect_equal((resolution.call_id, resolution.turn), (entry.model_call_id, turn), "call and turn")
    ids = resolution.cumulative_ids
    expect(ids.dtype == np.int32, f"cumulative ids must be int32: got {ids.dtype}")
    expect_equal(ids.tolist(), entry.cumulative_ids().tolist(), "cumulative ids")


def _expect_unresolved(resolution: Resolution, what: str) -> None:
    expect(isinstance(resolution, Unresolved), f"{what}: got {resolution!r}, expected Unresolved")


LINEAGE_CHECKS: Final[Mapping[str, LineageCheck]] = {
    check.__name__: check
    for check in (
        no_turns_is_a_root,
        recorded_call_is_resolved,
        ids_of_suffixes_are_whole,
        latest_known_turn_decides,
        turn_may_be_handed_back_otherwise,
        branches_share_their_parent,
        unknown_turn_is_unresolved,
        never_across_rollouts,
        different_ids_are_ambiguous,
        equal_ids_are_interchangeable,
        refused_put_changes_nothing,
        earlier_attempts_are_forgotten,
        put_is_visible_when_acknowledged,
    )
}
"""The checks that every lineage is put through, by name."""

LINEAGE_DURABILITY_CHECKS: Final[Mapping[str, LineageDurabilityCheck]] = {
    check.__name__: check for check in (lineage_survives_a_restart,)
}
"""The checks of a lineage that survives a restart."""
