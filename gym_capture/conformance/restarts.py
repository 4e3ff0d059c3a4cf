"""The checks of a store that survives a restart.

Invariant and form are those of `checks`; each gets the store, and a way to open it again on the same records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gym_capture.capture.operations import Clear, Close, Commit, Drop, MarkDelivery, MarkIncomplete
from gym_capture.conformance.support import (
    DurabilityCheck,
    Reopen,
    Store,
    begin,
    expect,
    expect_entries,
    expect_equal,
    expect_error,
    expect_late_writes_refused,
    expect_same,
    run_call,
    sample_entry,
)
from gym_capture.errors import RetiredRolloutError


async def snapshot_survives_a_restart(store: Store, reopen: Reopen) -> None:
    """After a restart a rollout has the same snapshot, and its calls go on under the same epoch."""
    entry, epoch = await run_call(store, "r", "c")
    await begin(store, "r", "open")
    await store.write(MarkIncomplete("r", "why", epoch=epoch))
    await store.write(MarkDelivery("r", "c", delivered=False, epoch=epoch))
    before = await store.freeze("r")
    expect_equal([entry.delivered for entry in before.entries], [False], "delivered")
    store = await reopen(store)
    expect_same(await store.freeze("r"), before)
    expect_equal(await begin(store, "r", "open"), epoch, "epoch")
    await store.write(Commit(entry, epoch=epoch))
    expect_same(await store.freeze("r"), before)
    await store.write(Commit(sample_entry("r", "open"), epoch=epoch))
    expect_equal((await store.freeze("r")).incomplete, ("why",), "incomplete")
    await store.close()


async def retirement_survives_a_restart(store: Store, reopen: Reopen) -> None:
    """After a restart a dropped rollout stays dropped and a closed one closed; late writers of a cleared one are still
    refused."""
    _, dropped_epoch = await run_call(store, "dropped", "c")
    snapshot = await store.freeze("dropped")
    await store.write(Drop("dropped", snapshot.snapshot_id, snapshot.version))
    _, cleared_epoch = await run_call(store, "r", "c")
    await store.write(Clear("r"))
    await run_call(store, "closed", "c")
    for rollout_id in ("closed", "unheard"):
        await store.write(Close(rollout_id))
    store = await reopen(store)
    expect_equal(list(await store.rollout_ids()), [], "live rollouts")
    await store.write(Drop("dropped", snapshot.snapshot_id, snapshot.version))
    late = sample_entry("dropped", "late")
    await expect_error(store.write(Commit(late, epoch=dropped_epoch)), RetiredRolloutError, "a late put")
    await expect_error(begin(store, "dropped", "late"), RetiredRolloutError, "a late call")
    for rollout_id in ("closed", "unheard"):
        await expect_error(begin(store, rollout_id, "late"), RetiredRolloutError, f"a late call of {rollout_id}")
    await expect_late_writes_refused(store, cleared_epoch)
    entry, epoch = await run_call(store, "r", "c")
    expect(epoch not in (cleared_epoch, dropped_epoch), "a new attempt must have a new epoch")
    expect_entries(await store.freeze("r"), entry)
    await store.close()


DURABILITY_CHECKS: Final[Mapping[str, DurabilityCheck]] = {
    check.__name__: check for check in (snapshot_survives_a_restart, retirement_survives_a_restart)
}
"""By name."""
