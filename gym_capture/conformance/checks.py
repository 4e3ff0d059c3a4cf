"""The contract of stores, one sentence a check."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from gym_capture.capture.operations import (
    Abandon,
    Begin,
    Clear,
    Commit,
    Drop,
    MarkDelivery,
    MarkIncomplete,
    Operation,
)
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Continues, LostCall, suffix_of
from gym_capture.conformance.closing import (
    clear_reopens_a_closed_rollout,
    closed_rollout_takes_no_calls,
    dropped_rollout_may_be_closed,
)
from gym_capture.conformance.support import (
    Check,
    Store,
    begin,
    expect,
    expect_clean,
    expect_entries,
    expect_equal,
    expect_error,
    expect_late_writes_refused,
    expect_same,
    run_call,
    sample_entry,
    sample_intent,
)
from gym_capture.errors import (
    ConflictingCallError,
    InvalidRolloutIdError,
    RetiredRolloutError,
    StaleSnapshotError,
    StoreUnavailableError,
)
from gym_capture.reasons import CaptureMark, ProblemReason, join_reason

# --- reading back what was written -------------------------------------------------------------------------------


async def unknown_rollout_is_empty(store: Store) -> None:
    """A rollout that is unknown gives an empty snapshot at version 0."""
    snapshot = await store.freeze("r")
    expect_equal((snapshot.rollout_id, snapshot.version, snapshot.entries), ("r", 0, ()), "snapshot")
    expect_clean(snapshot)
    expect_equal(list(await store.rollout_ids()), [], "live rollouts")


async def entry_comes_back_whole(store: Store) -> None:
    """An entry is read back with every field as it was put."""
    entry, _ = await run_call(store, "r", "c")
    snapshot = await store.freeze("r")
    expect_entries(snapshot, entry)
    expect_clean(snapshot)


async def suffixes_come_back(store: Store) -> None:
    """A call that continues another is read back whole, put whole or as a suffix."""
    first, epoch = await run_call(store, "r", "c1")
    whole = sample_entry("r", "c2", prompt=(1, 2, 3, 4, 5, 6), parent=Continues("c1", first.cum_len))
    other = sample_entry("r", "c3", prompt=(1, 2, 3, 4, 5, 7), parent=Continues("c1", first.cum_len))
    for record in (whole, suffix_of(other)):
        await begin(store, "r", record.model_call_id)
        await store.write(Commit(record, epoch=epoch))
    expect_entries(await store.freeze("r"), first, whole, other)


async def strange_text_comes_back(store: Store) -> None:
    """Text that a model or a client can produce comes back exactly: half an emoji, control characters, any script."""
    for index, text in enumerate(("\ud83d", "a\0b\x1b\u2028", "😀 日本 \udc80", "", '"\\')):
        epoch = await begin(store, f"r{index}", "c")
        entry = with_values(sample_entry(f"r{index}", "c", text=text), requested_model=f"m{text}", stop_reason=text)
        await store.write(Commit(entry, epoch=epoch))
        expect_entries(await store.freeze(f"r{index}"), entry)


async def engine_arrays_come_back(store: Store) -> None:
    """Arrays of the engine beside the ids keep their dtype and shape."""
    epoch = await begin(store, "r", "c")
    entry = with_values(
        sample_entry("r", "c"),
        routed_experts=np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2),
        sampling_mask=np.array([[True, False], [False, True]]),
    )
    await store.write(Commit(entry, epoch=epoch))
    expect_entries(await store.freeze("r"), entry)


async def empty_generation_comes_back(store: Store) -> None:
    """A call that generated nothing has a record too."""
    epoch = await begin(store, "r", "c")
    empty = sample_entry("r", "c", generation=())
    entry = with_values(empty, finish_reason="abort", output_items=(), token_item_index=None)
    await store.write(Commit(entry, epoch=epoch))
    expect_entries(await store.freeze("r"), entry)


async def rollouts_do_not_mix(store: Store) -> None:
    """Rollouts are apart, also when their calls have the same ids."""
    first, _ = await run_call(store, "a", "c")
    second, _ = await run_call(store, "b.1-_", "c")
    expect_entries(await store.freeze("a"), first)
    expect_entries(await store.freeze("b.1-_"), second)
    expect_equal(list(await store.rollout_ids()), ["a", "b.1-_"], "live rollouts")


# --- intents -----------------------------------------------------------------------------------------------------


async def intent_repeats(store: Store) -> None:
    """Repeating an intent is a no-op that returns the same epoch, before and after the call's record is put."""
    epoch = await begin(store, "r", "c")
    before = await store.freeze("r")
    expect_equal(await begin(store, "r", "c"), epoch, "epoch")
    expect_same(await store.freeze("r"), before)
    await store.write(Commit(sample_entry("r", "c"), epoch=epoch))
    recorded = await store.freeze("r")
    expect_equal(await begin(store, "r", "c"), epoch, "epoch")
    expect_same(await store.freeze("r"), recorded)


async def calls_share_an_epoch(store: Store) -> None:
    """All calls of one attempt carry the same epoch, also those that begin at the same moment."""
    epochs = await asyncio.gather(*(begin(store, "r", f"c{index}") for index in range(8)))
    expect_equal(len(set(epochs)), 1, "number of epochs")


async def dangling_intent_is_incomplete(store: Store) -> None:
    """An intent without an entry makes the snapshot incomplete."""
    await begin(store, "r", "c")
    snapshot = await store.freeze("r")
    expect_equal(snapshot.incomplete, (join_reason(CaptureMark.DANGLING_INTENT, "c"),), "incomplete")
    expect(snapshot.version > 0, "an intent must give the rollout a version")


async def lost_calls_are_not_guessed(store: Store) -> None:
    """Of an intent without an entry, the snapshot says what the other intents show of it - or nothing."""
    request, answer = "1" * 32, "2" * 32
    asked = replace(sample_intent("r", "lost"), request_key=request)
    after = replace(sample_intent("r", "next"), request_key="3" * 32, asked_key=request, answer_key=answer)
    for intent in (asked, replace(asked, model_call_id="try"), after):
        epoch = await store.write(Begin(intent))
    for call_id in ("try", "next"):
        await store.write(Commit(sample_entry("r", call_id), epoch=epoch))
    shown = LostCall(model_call_id="lost", retries=("try",), answers=(answer,))
    found = (await store.freeze("r")).lost_calls
    expect(found in ((), (shown,)), f"lost calls: got {found!r}, expected {shown!r} or nothing")


async def abandoned_call_is_not_missed(store: Store) -> None:
    """An abandoned call leaves neither a record nor a gap. Repeating it is a no-op."""
    epoch = await begin(store, "r", "c")
    await store.write(Abandon("r", "c", epoch=epoch))
    snapshot = await store.freeze("r")
    expect_entries(snapshot)
    expect_clean(snapshot)
    await store.write(Abandon("r", "c", epoch=epoch))
    expect_same(await store.freeze("r"), snapshot)


async def record_without_intent_is_accepted(store: Store) -> None:
    """A record under the current epoch is accepted although its intent is unknown."""
    first, epoch = await run_call(store, "r", "c1")
    second = sample_entry("r", "c2")
    await store.write(Commit(second, epoch=epoch))
    snapshot = await store.freeze("r")
    expect_entries(snapshot, first, second)
    expect_clean(snapshot)


async def rollout_ids_are_checked(store: Store) -> None:
    """An id outside the allowed alphabet is refused before it becomes a file name."""
    for rollout_id in ("", "..", "a/b", "a\0b", "x" * 129):
        await expect_error(begin(store, rollout_id, "c"), InvalidRolloutIdError, f"rollout id {rollout_id[:9]!r}")
    expect_equal(list(await store.rollout_ids()), [], "live rollouts")


# --- repeats and conflicts ---------------------------------------------------------------------------------------


async def put_repeats(store: Store) -> None:
    """The same call with the same content again is a no-op, also at the same moment."""
    epoch = await begin(store, "r", "c")
    entry = sample_entry("r", "c")
    await asyncio.gather(*(store.write(Commit(entry, epoch=epoch)) for _ in range(8)))
    before = await store.freeze("r")
    expect_entries(before, entry)
    await store.write(Commit(entry, epoch=epoch))
    expect_same(await store.freeze("r"), before)
    expect_clean(before)


async def conflicting_put_is_refused(store: Store) -> None:
    """Other content for a recorded call is refused; the first record stays and the rollout is masked, once."""
    entry, epoch = await run_call(store, "r", "c")
    for log_prob in (-3.0, -4.0):
        other = replace(entry, generation_log_probs=np.full(2, log_prob, dtype=np.float32))
        await expect_error(store.write(Commit(other, epoch=epoch)), ConflictingCallError, "a conflicting put")
    snapshot = await store.freeze("r")
    expect_entries(snapshot, entry)
    problems = [(problem.reason, problem.call_id) for problem in snapshot.problems]
    expect_equal(problems, [(ProblemReason.CONFLICTING_CALL_ID, "c")], "problems")


async def one_of_two_conflicting_puts_wins(store: Store) -> None:
    """Of two puts of one call with different content at the same moment, one is recorded and one refused."""
    epoch = await begin(store, "r", "c")
    entries = [sample_entry("r", "c", generation=(4, index)) for index in range(2)]
    puts = (store.write(Commit(entry, epoch=epoch)) for entry in entries)
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    winners = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome == epoch]
    expect_equal(len(winners), 1, "puts that were acknowledged")
    expect(any(isinstance(outcome, ConflictingCallError) for outcome in outcomes), f"outcomes: got {outcomes!r}")
    snapshot = await store.freeze("r")
    expect_entries(snapshot, *winners)
    expect_equal([problem.reason for problem in snapshot.problems], [ProblemReason.CONFLICTING_CALL_ID], "problems")


async def incomplete_marks_are_kept(store: Store) -> None:
    """A mark of incompleteness is in every later snapshot, once for each reason."""
    entry, epoch = await run_call(store, "r", "c")
    failed = join_reason(CaptureMark.CAPTURE_FAILED, "c")
    for reason in (failed, "client_gone", "client_gone"):
        await store.write(MarkIncomplete("r", reason, epoch=epoch))
    snapshot = await store.freeze("r")
    expect_equal(snapshot.incomplete, (failed, "client_gone"), "incomplete")
    expect_entries(snapshot, entry)


async def delivery_marks_show_in_the_record(store: Store) -> None:
    """A mark of a reply's delivery shows in the call's record and bumps the version, in any order."""
    first, epoch = await run_call(store, "r", "c1")
    await store.write(MarkDelivery("r", "c2", delivered=False, epoch=epoch))
    second, _ = await run_call(store, "r", "c2")
    third, _ = await run_call(store, "r", "c3")
    unmarked, _ = await run_call(store, "r", "c4")
    before = await store.freeze("r")
    for _ in range(2):
        await store.write(MarkDelivery("r", "c1", delivered=True, epoch=epoch))
        await store.write(MarkDelivery("r", "c3", delivered=False, epoch=epoch))
        await store.write(MarkDelivery("r", "c3", delivered=True, epoch=epoch))
    after = await store.freeze("r")
    expect_equal(after.version, before.version + 3, "version after three new facts, each said twice")
    expect(after.snapshot_id != before.snapshot_id, "the snapshot id must change with the content")
    said = {"c1": True, "c2": False, "c3": False, "c4": None}
    expect_equal({entry.model_call_id: entry.delivered for entry in after.entries}, said, "delivered")
    marked = (replace(entry, delivered=said[entry.model_call_id]) for entry in (first, second, third, unmarked))
    expect_entries(after, *marked)
    for entry in (first, second, third, unmarked):
        await store.write(Commit(entry, epoch=epoch))
    expect_same(await store.freeze("r"), after)


async def concurrent_puts_all_arrive(store: Store) -> None:
    """Calls of many rollouts at the same moment are all there, each exactly once."""
    calls = [(f"r{index % 5}", f"c{index}") for index in range(60)]
    await asyncio.gather(*(run_call(store, rollout_id, call_id) for rollout_id, call_id in calls))
    for rollout_id in {rollout_id for rollout_id, _ in calls}:
        snapshot = await store.freeze(rollout_id)
        expect_entries(snapshot, *(sample_entry(*call) for call in calls if call[0] == rollout_id))
        expect_clean(snapshot)


# --- freezing, dropping, clearing --------------------------------------------------------------------------------


async def freeze_repeats(store: Store) -> None:
    """Freezing the same content gives the same snapshot id and version."""
    await run_call(store, "r", "c")
    await begin(store, "r", "d")
    expect_same(await store.freeze("r"), await store.freeze("r"))


async def every_write_bumps_the_version(store: Store) -> None:
    """A write after a freeze gives the next snapshot a higher version and another id."""
    epoch = await begin(store, "r", "c")
    operations = (
        Commit(sample_entry("r", "c"), epoch=epoch),
        Begin(sample_intent("r", "d")),
        Abandon("r", "d", epoch=epoch),
        MarkIncomplete("r", "why", epoch=epoch),
        MarkDelivery("r", "c", delivered=True, epoch=epoch),
    )
    before = await store.freeze("r")
    for operation in operations:
        expect_equal(await store.write(operation), epoch, "epoch")
        after = await store.freeze("r")
        expect(after.version > before.version, f"version: got {after.version}, expected > {before.version}")
        expect(after.snapshot_id != before.snapshot_id, "the snapshot id must change with the content")
        before = after


async def drop_retires_what_was_consumed(store: Store) -> None:
    """Dropping the current snapshot forgets the rollout. Repeating it is a no-op."""
    await run_call(store, "r", "c")
    other, _ = await run_call(store, "other", "c")
    snapshot = await store.freeze("r")
    for _ in range(2):
        await store.write(Drop("r", snapshot.snapshot_id, snapshot.version))
        empty = await store.freeze("r")
        expect_equal((empty.version, empty.entries), (0, ()), "snapshot of a dropped rollout")
        expect_equal(list(await store.rollout_ids()), ["other"], "live rollouts")
    expect_entries(await store.freeze("other"), other)


async def stale_drop_is_refused(store: Store) -> None:
    """Dropping a snapshot that was written to since is refused and loses nothing."""
    first, epoch = await run_call(store, "r", "c1")
    stale = await store.freeze("r")
    second = sample_entry("r", "c2")
    await store.write(Commit(second, epoch=epoch))
    await expect_error(store.write(Drop("r", stale.snapshot_id, stale.version)), StaleSnapshotError, "a stale drop")
    current = await store.freeze("r")
    expect_entries(current, first, second)
    await expect_error(store.write(Drop("r", stale.snapshot_id, current.version)), StaleSnapshotError, "another's id")
    await store.write(Drop("r", current.snapshot_id, current.version))


async def late_writes_are_refused(store: Store) -> None:
    """A writer of a dropped attempt is refused, whatever it writes, and revives nothing."""
    _, epoch = await run_call(store, "r", "c")
    snapshot = await store.freeze("r")
    await store.write(Drop("r", snapshot.snapshot_id, snapshot.version))
    await expect_late_writes_refused(store, epoch)
    await expect_error(begin(store, "r", "late"), RetiredRolloutError, "a late call")
    expect_equal((await store.freeze("r")).version, 0, "version")
    expect_equal(list(await store.rollout_ids()), [], "live rollouts")


async def clear_opens_a_new_attempt(store: Store) -> None:
    """Clearing forgets what an earlier attempt left; its late writers cannot write to the next one."""
    _, old_epoch = await run_call(store, "r", "c")
    await begin(store, "r", "d")
    await store.write(Clear("r"))
    expect_equal((await store.freeze("r")).version, 0, "version")
    entry, epoch = await run_call(store, "r", "c")
    expect(epoch != old_epoch, "a new attempt must have a new epoch")
    await expect_late_writes_refused(store, old_epoch)
    snapshot = await store.freeze("r")
    expect_entries(snapshot, entry)
    expect_clean(snapshot)


async def clear_reopens_a_dropped_rollout(store: Store) -> None:
    """A dropped rollout takes calls again once it was cleared, and dropping its old snapshot does not touch them."""
    _, old_epoch = await run_call(store, "r", "c")
    old = await store.freeze("r")
    await store.write(Drop("r", old.snapshot_id, old.version))
    await store.write(Clear("r"))
    await store.write(Clear("r"))
    entry, epoch = await run_call(store, "r", "c")
    expect(epoch != old_epoch, "a new attempt must have a new epoch")
    snapshot = await store.freeze("r")
    expect(snapshot.snapshot_id != old.snapshot_id, "equal calls of two attempts must not share a snapshot id")
    drop_again = Drop("r", old.snapshot_id, old.version)
    await expect_error(store.write(drop_again), StaleSnapshotError, "dropping the old snapshot")
    expect_entries(await store.freeze("r"), entry)


async def clear_of_nothing_is_allowed(store: Store) -> None:
    """Clearing or dropping what does not exist does nothing."""
    await store.write(Clear("r"))
    empty = await store.freeze("r")
    await store.write(Drop("r", empty.snapshot_id, empty.version))
    expect_equal(list(await store.rollout_ids()), [], "live rollouts")
    entry, _ = await run_call(store, "r", "c")
    expect_entries(await store.freeze("r"), entry)


async def unbegun_epoch_is_refused(store: Store) -> None:
    """A write under an epoch that the store never gave out is refused."""
    orphan = Commit(sample_entry("r", "c"), epoch=999)
    await expect_error(store.write(orphan), RetiredRolloutError, "a put without a rollout")
    _, epoch = await run_call(store, "r", "c")
    foreign = Commit(sample_entry("r", "d"), epoch=epoch + 999)
    await expect_error(store.write(foreign), RetiredRolloutError, "a foreign epoch")


async def racing_drop_loses_nothing(store: Store) -> None:
    """Of a put and a drop at the same moment, one is refused: no acknowledged record is dropped unseen."""
    for attempt in range(8):
        rollout_id = f"r{attempt}"
        _, epoch = await run_call(store, rollout_id, "c")
        snapshot = await store.freeze(rollout_id)
        late = sample_entry(rollout_id, "late")
        operations: list[Operation] = [
            Commit(late, epoch=epoch),
            Drop(rollout_id, snapshot.snapshot_id, snapshot.version),
        ]
        if attempt % 2:
            operations.reverse()
        outcomes = await asyncio.gather(*map(store.write, operations), return_exceptions=True)
        put, drop = reversed(outcomes) if attempt % 2 else outcomes
        entries = (await store.freeze(rollout_id)).entries
        if isinstance(put, int):
            expect(isinstance(drop, StaleSnapshotError), f"the put was acknowledged, the drop got {drop!r}")
            expect_equal(len(entries), 2, "entries")
        else:
            expect(isinstance(put, RetiredRolloutError), f"the put got {put!r}")
            expect(isinstance(drop, int), f"the put was refused, the drop got {drop!r}")
            expect_equal(len(entries), 0, "entries")


async def closed_store_is_unavailable(store: Store) -> None:
    """A closed store says so, retryably. Closing twice is allowed."""
    _, epoch = await run_call(store, "r", "c")
    await store.close()
    await store.close()
    late = Commit(sample_entry("r", "d"), epoch=epoch)
    await expect_error(store.write(late), StoreUnavailableError, "a put after close")
    await expect_error(store.freeze("r"), StoreUnavailableError, "a freeze after close")


CHECKS: Final[Mapping[str, Check]] = {
    check.__name__: check
    for check in (
        unknown_rollout_is_empty,
        entry_comes_back_whole,
        suffixes_come_back,
        strange_text_comes_back,
        engine_arrays_come_back,
        empty_generation_comes_back,
        rollouts_do_not_mix,
        intent_repeats,
        calls_share_an_epoch,
        dangling_intent_is_incomplete,
        lost_calls_are_not_guessed,
        abandoned_call_is_not_missed,
        record_without_intent_is_accepted,
        rollout_ids_are_checked,
        put_repeats,
        conflicting_put_is_refused,
        one_of_two_conflicting_puts_wins,
        incomplete_marks_are_kept,
        delivery_marks_show_in_the_record,
        concurrent_puts_all_arrive,
        freeze_repeats,
        every_write_bumps_the_version,
        drop_retires_what_was_consumed,
        stale_drop_is_refused,
        late_writes_are_refused,
        clear_opens_a_new_attempt,
        clear_reopens_a_dropped_rollout,
        closed_rollout_takes_no_calls,
        clear_reopens_a_closed_rollout,
        dropped_rollout_may_be_closed,
        clear_of_nothing_is_allowed,
        unbegun_epoch_is_refused,
        racing_drop_loses_nothing,
        closed_store_is_unavailable,
    )
}
"""The checks that every store is put through, by name."""
