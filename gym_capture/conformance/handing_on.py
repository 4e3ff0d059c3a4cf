"""The checks of attempts that go on from others. Invariant and form are those of `checks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gym_capture.capture.operations import Clear, Close, GoOn, HandOn, Replay
from gym_capture.conformance.support import (
    Check,
    DurabilityCheck,
    Reopen,
    Store,
    begin,
    expect_entries,
    expect_equal,
    expect_error,
    expect_late_writes_refused,
    run_call,
)
from gym_capture.errors import ReplayedCallError, RetiredRolloutError
from gym_capture.reasons import CaptureMark


async def handed_on_keeps_records_and_refuses_writers(store: Store) -> None:
    """What was handed on stays readable and is incomplete, and its writers are refused; of nothing it is closing."""
    entry, epoch = await run_call(store, "r", "c")
    for _ in range(2):
        await store.write(HandOn("r"))
        await store.write(HandOn("unheard"))
        await expect_late_writes_refused(store, epoch)
        for rollout_id in ("r", "unheard"):
            await expect_error(begin(store, rollout_id, "late"), RetiredRolloutError, f"a late call of {rollout_id}")
            await expect_error(store.write(GoOn(rollout_id, "x")), RetiredRolloutError, "going on")
        snapshot = await store.freeze("r")
        expect_entries(snapshot, entry)
        expect_equal(snapshot.incomplete, (CaptureMark.HANDED_ON,), "what it lacks")
        expect_equal((await store.freeze("unheard")).version, 0, "version")


async def handed_on_may_be_closed_or_cleared(store: Store) -> None:
    """What was handed on is forgotten when it is closed or cleared, and takes calls again only when it is cleared. What
    was closed before is not opened by it."""
    _, epoch = await run_call(store, "r", "c")
    await store.write(HandOn("r"))
    await store.write(Close("r"))
    await store.write(HandOn("r"))
    expect_equal((await store.freeze("r")).version, 0, "version")
    await expect_error(begin(store, "r", "late"), RetiredRolloutError, "a late call")
    await store.write(Clear("r"))
    entry, _ = await run_call(store, "r", "c")
    await store.write(HandOn("r"))
    expect_entries(await store.freeze("r"), entry)
    await store.write(Clear("r"))
    entry, _ = await run_call(store, "r", "new")
    expect_entries(await store.freeze("r"), entry)
    await expect_late_writes_refused(store, epoch)


async def going_on_is_remembered(store: Store) -> None:
    """A rollout that goes on from others says from which; a call of it may have begun or not."""
    await store.write(GoOn("r", "b"))
    _, epoch = await run_call(store, "r", "c")
    expect_equal(await store.write(GoOn("r", "a")), epoch, "epoch")
    expect_equal(await store.write(GoOn("r", "b")), epoch, "epoch")
    expect_equal((await store.freeze("r")).went_on, ("a", "b"), "what it goes on from")
    await store.write(Clear("r"))
    await run_call(store, "r", "c")
    expect_equal((await store.freeze("r")).went_on, (), "what it goes on from, cleared")


async def record_is_replayed_once(store: Store) -> None:
    """A recorded call answers one call of a rollout, which may say so again; another call is refused."""
    epoch = await begin(store, "r", "c")
    for _ in range(2):
        expect_equal(await store.write(Replay("r", "c", "recorded", epoch=epoch)), epoch, "epoch")
        await expect_error(
            store.write(Replay("r", "d", "recorded", epoch=epoch)), ReplayedCallError, "a second call for the record"
        )
    await store.write(Replay("r", "d", "another", epoch=epoch))
    other = await begin(store, "other", "d")
    await store.write(Replay("other", "d", "recorded", epoch=other))
    await store.write(Clear("r"))
    await expect_error(store.write(Replay("r", "c", "recorded", epoch=epoch)), RetiredRolloutError, "a late replay")


async def handing_on_survives_a_restart(store: Store, reopen: Reopen) -> None:
    """After a restart what was handed on still is, what went on still does, and no record is replayed twice."""
    entry, epoch = await run_call(store, "r", "c")
    await store.write(HandOn("r"))
    await store.write(GoOn("next", "r"))
    next_epoch = await begin(store, "next", "n")
    await store.write(Replay("next", "n", "c", epoch=next_epoch))
    store = await reopen(store)
    await expect_late_writes_refused(store, epoch)
    snapshot = await store.freeze("r")
    expect_entries(snapshot, entry)
    expect_equal(snapshot.incomplete, (CaptureMark.HANDED_ON,), "what it lacks")
    expect_equal((await store.freeze("next")).went_on, ("r",), "what it goes on from")
    await store.write(Replay("next", "n", "c", epoch=next_epoch))
    await expect_error(
        store.write(Replay("next", "m", "c", epoch=next_epoch)), ReplayedCallError, "a second call for the record"
    )
    await store.close()


CHECKS: Final[Mapping[str, Check]] = {
    check.__name__: check
    for check in (
        handed_on_keeps_records_and_refuses_writers,
        handed_on_may_be_closed_or_cleared,
        going_on_is_remembered,
        record_is_replayed_once,
    )
}
DURABILITY_CHECKS: Final[Mapping[str, DurabilityCheck]] = {
    check.__name__: check for check in (handing_on_survives_a_restart,)
}
