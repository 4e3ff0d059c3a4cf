"""The contract of stores, of what is said of a rollout from outside of its calls: one sentence a check."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from gym_capture.capture.operations import Abandon, Begin, Clear, Commit, Complete, Drop, MarkDelivery, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.conformance.support import (
    Check,
    DurabilityCheck,
    Reopen,
    Store,
    begin,
    expect,
    expect_clean,
    expect_entries,
    expect_equal,
    expect_error,
    expect_same,
    run_call,
    sample_entry,
    sample_intent,
)
from gym_capture.errors import (
    CompletedRolloutError,
    ConflictingRegistrationError,
    RetiredRolloutError,
    UnknownRolloutError,
)

_TASK: Final = Registration(group_id="task\u2028 7", sample=2, task='{"goal": "½ \\ud83d"}')
_WON: Final = Outcome(reward=1.0, reward_components=(("speed", 0.25), ("solved", 1.0)), answer="42")
_FAILED: Final = Outcome(failure="gave_up")


async def registration_opens_a_rollout(store: Store) -> None:
    """A registered rollout is live before its first call, which shares its epoch; registering it again is a no-op."""
    epoch = await store.write(Register("r", _TASK))
    expect_equal(list(await store.rollout_ids()), ["r"], "live rollouts")
    before = await store.freeze("r")
    expect_equal((before.registration, before.outcome, before.version), (_TASK, None, 1), "registered rollout")
    expect_equal(await store.write(Register("r", _TASK)), epoch, "epoch")
    expect_same(await store.freeze("r"), before)
    entry, of_call = await run_call(store, "r", "c")
    expect_equal(of_call, epoch, "epoch of the first call")
    snapshot = await store.freeze("r")
    expect_entries(snapshot, entry)
    expect_clean(snapshot)


async def other_registration_is_refused(store: Store) -> None:
    """Registering other content for a rollout is refused, also at the same moment; the first stays."""
    others = [Registration(group_id="g", sample=sample) for sample in range(4)]
    answers = await asyncio.gather(*(store.write(Register("r", each)) for each in others), return_exceptions=True)
    taken = [each for each, answer in zip(others, answers, strict=True) if isinstance(answer, int)]
    expect_equal(len(taken), 1, "registrations that were acknowledged")
    expect_equal((await store.freeze("r")).registration, taken[0], "registration")
    await expect_error(store.write(Register("r", _TASK)), ConflictingRegistrationError, "another registration")


async def calls_may_come_before_the_registration(store: Store) -> None:
    """A rollout whose calls have begun may still be registered: under the same epoch."""
    entry, epoch = await run_call(store, "r", "c")
    expect_equal(await store.write(Register("r", _TASK)), epoch, "epoch")
    snapshot = await store.freeze("r")
    expect_equal(snapshot.registration, _TASK, "registration")
    expect_entries(snapshot, entry)


async def first_outcome_stands(store: Store) -> None:
    """The first outcome is kept; the same again is a no-op, another one is refused, also at the same moment."""
    entry, epoch = await run_call(store, "r", "c")
    before = await store.freeze("r")
    outcomes = [_WON, _FAILED, Outcome(), Outcome(reward=-1.0)]
    answers = await asyncio.gather(*(store.write(Complete("r", each)) for each in outcomes), return_exceptions=True)
    taken = [each for each, answer in zip(outcomes, answers, strict=True) if answer == epoch]
    expect_equal(len(taken), 1, "outcomes that were acknowledged")
    after = await store.freeze("r")
    expect_equal((after.outcome, after.version), (taken[0], before.version + 1), "outcome")
    expect(after.snapshot_id != before.snapshot_id, "the snapshot id must change with the content")
    for each in outcomes:
        if each == taken[0]:
            await store.write(Complete("r", each))
        else:
            await expect_error(store.write(Complete("r", each)), CompletedRolloutError, "another outcome")
    expect_same(await store.freeze("r"), after)
    expect_entries(after, entry)


async def outcomes_of_no_rollout_are_refused(store: Store) -> None:
    """An outcome is refused of a rollout that is unknown, and of one that was dropped; neither is revived."""
    await expect_error(store.write(Complete("r", _WON)), UnknownRolloutError, "an outcome of an unknown rollout")
    await run_call(store, "r", "c")
    snapshot = await store.freeze("r")
    await store.write(Drop("r", snapshot.snapshot_id, snapshot.version))
    await expect_error(store.write(Complete("r", _WON)), RetiredRolloutError, "an outcome of a dropped rollout")
    await expect_error(store.write(Register("r", _TASK)), RetiredRolloutError, "registering a dropped rollout")
    expect_equal(list(await store.rollout_ids()), [], "live rollouts")


async def completed_rollout_takes_no_new_call(store: Store) -> None:
    """After its outcome no call of a rollout begins; those that have begun end as ever."""
    _, epoch = await run_call(store, "r", "c")
    for call_id in ("under way", "no reply"):
        await begin(store, "r", call_id)
    await store.write(Complete("r", _WON))
    before = await store.freeze("r")
    await expect_error(store.write(Begin(sample_intent("r", "late"))), CompletedRolloutError, "a late call")
    expect_equal(await begin(store, "r", "under way"), epoch, "epoch of a call that begins again")
    expect_same(await store.freeze("r"), before)
    second = sample_entry("r", "under way")
    await store.write(Commit(second, epoch=epoch))
    await store.write(Abandon("r", "no reply", epoch=epoch))
    await store.write(MarkDelivery("r", "c", delivered=True, epoch=epoch))
    snapshot = await store.freeze("r")
    expect_clean(snapshot)
    expect_equal(sorted(entry.model_call_id for entry in snapshot.entries), ["c", "under way"], "recorded calls")
    expect_equal(snapshot.outcome, _WON, "outcome")


async def clear_forgets_registration_and_outcome(store: Store) -> None:
    """Clearing forgets what was said of the attempt, too: the next one is registered, called and completed anew."""
    await store.write(Register("r", _TASK))
    await store.write(Complete("r", _WON))
    await store.write(Clear("r"))
    await store.write(Register("r", Registration(group_id="other")))
    entry, _ = await run_call(store, "r", "c")
    await store.write(Complete("r", _FAILED))
    snapshot = await store.freeze("r")
    expect_equal(snapshot.outcome, _FAILED, "outcome")
    expect_entries(snapshot, entry)


async def outcome_survives_a_restart(store: Store, reopen: Reopen) -> None:
    """After a restart a rollout has its registration and its outcome, and takes no new call."""
    await store.write(Register("called", _TASK))
    await run_call(store, "called", "c")
    await store.write(Complete("called", _WON))
    await store.write(Register("silent", _TASK))
    before = [await store.freeze(rollout_id) for rollout_id in ("called", "silent")]
    store = await reopen(store)
    for snapshot in before:
        expect_same(await store.freeze(snapshot.rollout_id), snapshot)
    await expect_error(begin(store, "called", "late"), CompletedRolloutError, "a late call")
    await expect_error(store.write(Complete("called", _FAILED)), CompletedRolloutError, "another outcome")
    await expect_error(
        store.write(Register("silent", Registration(group_id="g"))),
        ConflictingRegistrationError,
        "another registration",
    )
    await store.write(Complete("called", _WON))
    await store.close()


CHECKS: Final[Mapping[str, Check]] = {
    check.__name__: check
    for check in (
        registration_opens_a_rollout,
        other_registration_is_refused,
        calls_may_come_before_the_registration,
        first_outcome_stands,
        outcomes_of_no_rollout_are_refused,
        completed_rollout_takes_no_new_call,
        clear_forgets_registration_and_outcome,
    )
}
"""As `checks.CHECKS`."""

DURABILITY_CHECKS: Final[Mapping[str, DurabilityCheck]] = {
    check.__name__: check for check in (outcome_survives_a_restart,)
}
"""As `checks.DURABILITY_CHECKS`."""
