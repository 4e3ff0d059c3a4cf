"""The checks of closing: a superseded attempt gets no further. Invariant and form are those of `checks`."""

from __future__ import annotations

from gym_capture.capture.operations import Clear, Close, Drop
from gym_capture.conformance.support import (
    Store,
    begin,
    expect,
    expect_entries,
    expect_equal,
    expect_error,
    expect_late_writes_refused,
    run_call,
)
from gym_capture.errors import RetiredRolloutError


async def closed_rollout_takes_no_calls(store: Store) -> None:
    """Closing forgets what is recorded and refuses every later call, also where nothing was recorded yet."""
    _, epoch = await run_call(store, "r", "c")
    await begin(store, "r", "under way")
    other, _ = await run_call(store, "other", "c")
    for _ in range(2):
        await store.write(Close("r"))
        await store.write(Close("unheard"))
        expect_equal((await store.freeze("r")).version, 0, "version")
        await expect_late_writes_refused(store, epoch)
        for rollout_id in ("r", "unheard"):
            await expect_error(begin(store, rollout_id, "late"), RetiredRolloutError, f"a late call of {rollout_id}")
    expect_equal(list(await store.rollout_ids()), ["other"], "live rollouts")
    expect_entries(await store.freeze("other"), other)


async def clear_reopens_a_closed_rollout(store: Store) -> None:
    """A closed rollout takes calls again once it was cleared; its late writers are still refused."""
    _, old_epoch = await run_call(store, "r", "c")
    for rollout_id in ("r", "unheard"):
        await store.write(Close(rollout_id))
        await store.write(Clear(rollout_id))
        entry, epoch = await run_call(store, rollout_id, "c")
        expect(epoch != old_epoch, "a new attempt must have a new epoch")
        expect_entries(await store.freeze(rollout_id), entry)
    await expect_late_writes_refused(store, old_epoch)


async def dropped_rollout_may_be_closed(store: Store) -> None:
    """Closing what was consumed, or cleared, leaves it refusing calls, and its drop may still be repeated."""
    await run_call(store, "r", "c")
    snapshot = await store.freeze("r")
    drop = Drop("r", snapshot.snapshot_id, snapshot.version)
    for operation in (drop, Close("r"), drop):
        await store.write(operation)
        await expect_error(begin(store, "r", "late"), RetiredRolloutError, "a late call")
    await run_call(store, "cleared", "c")
    await store.write(Clear("cleared"))
    await store.write(Close("cleared"))
    await expect_error(begin(store, "cleared", "late"), RetiredRolloutError, "a late call of a cleared one")
