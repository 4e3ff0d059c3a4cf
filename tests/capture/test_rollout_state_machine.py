"""Any sequence of operations, against a model of a few lines: over the memory store, and over the log store with
restarts, tiny segments and compaction in between.

The model knows nothing of logs: it has, for each rollout, the facts of its current attempt.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.facts import (
    Abandoned,
    Begun,
    Committed,
    Completed,
    DeliveryKnown,
    Event,
    HandedOn,
    MarkedIncomplete,
    ProblemFound,
    Registered,
    Replayed,
    Retired,
    WentOn,
)
from gym_capture.capture.operations import (
    Abandon,
    Begin,
    Clear,
    Close,
    Commit,
    Complete,
    Drop,
    GoOn,
    HandOn,
    MarkDelivery,
    MarkIncomplete,
    Register,
    Replay,
)
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import CallIntent, RecordProblem, Snapshot, TokenEntry
from gym_capture.capture.rollout_state import RolloutState, call_counts
from gym_capture.capture.snapshot_codec import encode_snapshot
from gym_capture.conformance import Store, sample_entry, sample_intent
from gym_capture.errors import (
    CompletedRolloutError,
    ConflictingCallError,
    ConflictingRegistrationError,
    GymCaptureError,
    ReplayedCallError,
    RetiredRolloutError,
    StaleSnapshotError,
    StoreError,
    StoreUnavailableError,
    UnknownRolloutError,
)
from gym_capture.rollout_counts import CallCounts, RolloutCounts
from gym_capture.stores.base import counts_of, status_of
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore
from gym_capture.stores.segments import Disk
from tests.stores.disks import FullDisk

T = TypeVar("T")

ROLLOUTS = st.sampled_from(["a", "b", "c"])
CALLS = st.sampled_from(["c1", "c2", "c3", "c4"])
VARIANTS = st.integers(0, 1)
REGISTRATIONS = st.builds(Registration, group_id=st.just("g"), sample=st.integers(0, 1))
OUTCOMES = st.builds(Outcome, reward=st.sampled_from([None, 0.0, 1.0]))
ENDLESS = 1 << 60


@dataclass
class Attempt:
    """What the model knows of the current attempt at a rollout."""

    epoch: int | None = None
    """None: no call has begun."""
    is_over: bool = False
    """It was dropped or closed."""
    begun: set[str] = field(default_factory=set)
    recorded: dict[str, TokenEntry] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    marks: set[str] = field(default_factory=set)
    conflicts: set[str] = field(default_factory=set)
    deliveries: set[tuple[str, bool]] = field(default_factory=set)
    registration: Registration | None = None
    outcome: Outcome | None = None
    is_handed_on: bool = False
    went_on: set[str] = field(default_factory=set)
    replayed: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> int:
        of_calls = (self.begun, self.recorded, self.abandoned, self.marks, self.conflicts, self.deliveries)
        of_others = (self.went_on, self.replayed)
        said = (self.registration is not None, self.outcome is not None, self.is_handed_on)
        return sum(map(len, (*of_calls, *of_others))) + sum(said)

    @property
    def takes_no_calls(self) -> bool:
        return self.is_over or self.is_handed_on

    def shown(self, call_id: str) -> TokenEntry:
        """The call's record as a snapshot shows it: with what was said of its reply's delivery, no before yes."""
        said = [delivered for marked, delivered in self.deliveries if marked == call_id]
        return replace(self.recorded[call_id], delivered=all(said) if said else None)


@dataclass(frozen=True)
class Writer:
    """Someone who was given an epoch: now, or a while ago."""

    rollout_id: str
    epoch: int


class StoreMachine(RuleBasedStateMachine):
    """Operations on a store, and on the model; after each, what the store shows is what the model says."""

    writers = Bundle("writers")
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.attempts: dict[str, Attempt] = {}
        self.given_out: set[tuple[str, int]] = set()
        self.consumed: set[tuple[str, str]] = set()
        self.store: Store = self.run(self.opened())

    forgets_tombstones = False
    """Whether the store may sweep tombstones at any time; then one that is over may be treated as an unknown one."""

    async def opened(self) -> Store:
        return await MemoryStore.open()

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(operation)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()

    def attempt(self, rollout_id: str) -> Attempt:
        return self.attempts.setdefault(rollout_id, Attempt())

    def is_late(self, writer: Writer) -> bool:
        attempt = self.attempt(writer.rollout_id)
        return attempt.epoch != writer.epoch or attempt.is_handed_on

    # the rules

    @rule(target=writers, rollout_id=ROLLOUTS, call_id=CALLS)
    def begin(self, rollout_id: str, call_id: str) -> Any:
        attempt = self.attempt(rollout_id)
        operation = self.store.write(Begin(sample_intent(rollout_id, call_id)))
        try:
            epoch = self.run(operation)
        except RetiredRolloutError:
            assert attempt.takes_no_calls
            return multiple()
        except CompletedRolloutError:
            assert attempt.outcome is not None
            assert call_id not in attempt.begun
            return multiple()
        assert not attempt.is_handed_on
        assert attempt.outcome is None or call_id in attempt.begun
        self.opened_by(rollout_id, epoch).begun.add(call_id)
        return Writer(rollout_id, epoch)

    def opened_by(self, rollout_id: str, epoch: int) -> Attempt:
        """The attempt that goes on, or begins, with what was answered by this epoch."""
        attempt = self.attempt(rollout_id)
        if attempt.is_over:
            assert self.forgets_tombstones
            attempt = self.attempts[rollout_id] = Attempt()
        if attempt.epoch is None:
            assert (rollout_id, epoch) not in self.given_out
            attempt.epoch = epoch
            self.given_out.add((rollout_id, epoch))
        assert epoch == attempt.epoch
        return attempt

    @rule(target=writers, rollout_id=ROLLOUTS, registration=REGISTRATIONS)
    def register(self, rollout_id: str, registration: Registration) -> Any:
        attempt = self.attempt(rollout_id)
        try:
            epoch = self.run(self.store.write(Register(rollout_id, registration)))
        except RetiredRolloutError:
            assert attempt.takes_no_calls
            return multiple()
        except ConflictingRegistrationError:
            assert attempt.registration not in (None, registration)
            return multiple()
        assert not attempt.is_handed_on
        assert attempt.registration in (None, registration)
        self.opened_by(rollout_id, epoch).registration = registration
        return Writer(rollout_id, epoch)

    @rule(rollout_id=ROLLOUTS, outcome=OUTCOMES)
    def complete(self, rollout_id: str, outcome: Outcome) -> None:
        attempt = self.attempt(rollout_id)
        refused: tuple[type[GymCaptureError], ...] = ()
        if attempt.is_over:
            refused = (RetiredRolloutError, UnknownRolloutError) if self.forgets_tombstones else (RetiredRolloutError,)
        elif attempt.is_handed_on:
            refused = (RetiredRolloutError,)
        elif not attempt.facts:
            refused = (UnknownRolloutError,)
        elif attempt.outcome not in (None, outcome):
            refused = (CompletedRolloutError,)
        if refused:
            with pytest.raises(refused):
                self.run(self.store.write(Complete(rollout_id, outcome)))
        else:
            assert self.run(self.store.write(Complete(rollout_id, outcome))) == attempt.epoch
            attempt.outcome = outcome

    @rule(writer=writers, call_id=CALLS, variant=VARIANTS)
    def commit(self, writer: Writer, call_id: str, variant: int) -> None:
        """A first put, a retry, another content, a put without an intent, a late one: as it comes."""
        attempt = self.attempt(writer.rollout_id)
        entry = sample_entry(writer.rollout_id, call_id, generation=(7, variant))
        operation = self.store.write(Commit(entry, epoch=writer.epoch))
        if self.is_late(writer):
            with pytest.raises(RetiredRolloutError):
                self.run(operation)
        elif encode_entry(attempt.recorded.setdefault(call_id, entry)) != encode_entry(entry):
            with pytest.raises(ConflictingCallError):
                self.run(operation)
            attempt.conflicts.add(call_id)
        else:
            self.run(operation)

    @rule(writer=writers, call_id=CALLS)
    def abandon(self, writer: Writer, call_id: str) -> None:
        operation = self.store.write(Abandon(writer.rollout_id, call_id, epoch=writer.epoch))
        if self.is_late(writer):
            with pytest.raises(RetiredRolloutError):
                self.run(operation)
        else:
            self.run(operation)
            self.attempt(writer.rollout_id).abandoned.add(call_id)

    @rule(writer=writers, reason=st.sampled_from(["capture_failed:c1", "engine"]))
    def fail(self, writer: Writer, reason: str) -> None:
        operation = self.store.write(MarkIncomplete(writer.rollout_id, reason, epoch=writer.epoch))
        if self.is_late(writer):
            with pytest.raises(RetiredRolloutError):
                self.run(operation)
        else:
            self.run(operation)
            self.attempt(writer.rollout_id).marks.add(reason)

    @rule(writer=writers, call_id=CALLS, delivered=st.booleans())
    def mark_delivery(self, writer: Writer, call_id: str, delivered: bool) -> None:
        """Of a call that may have no record yet, or never gets one."""
        operation = self.store.write(MarkDelivery(writer.rollout_id, call_id, delivered=delivered, epoch=writer.epoch))
        if self.is_late(writer):
            with pytest.raises(RetiredRolloutError):
                self.run(operation)
        else:
            self.run(operation)
            self.attempt(writer.rollout_id).deliveries.add((call_id, delivered))

    @rule(target=snapshots, rollout_id=ROLLOUTS)
    def freeze(self, rollout_id: str) -> tuple[Snapshot, int | None]:
        return self.run(self.store.freeze(rollout_id)), self.attempt(rollout_id).epoch

    @rule(frozen=consumes(snapshots))
    def drop(self, frozen: tuple[Snapshot, int | None]) -> None:
        snapshot, epoch = frozen
        attempt = self.attempt(snapshot.rollout_id)
        operation = self.store.write(Drop(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version))
        is_current = snapshot.version == attempt.facts and (not attempt.facts or epoch == attempt.epoch)
        last_dropped = (snapshot.rollout_id, snapshot.snapshot_id) in self.consumed
        if is_current and attempt.facts:
            self.run(operation)
            self.attempts[snapshot.rollout_id] = Attempt(is_over=True)
            self.consumed = {pair for pair in self.consumed if pair[0] != snapshot.rollout_id}
            self.consumed.add((snapshot.rollout_id, snapshot.snapshot_id))
        elif is_current or last_dropped:
            self.run(operation)
        elif self.forgets_tombstones and not attempt.facts:
            with contextlib.suppress(StaleSnapshotError):
                self.run(operation)
        else:
            with pytest.raises(StaleSnapshotError):
                self.run(operation)

    @rule(rollout_id=ROLLOUTS)
    def dispatch_again(self, rollout_id: str) -> None:
        self.run(self.store.write(Clear(rollout_id)))
        attempt = self.attempt(rollout_id)
        if attempt.facts or attempt.is_over:
            self.attempts[rollout_id] = Attempt()
            self.consumed = {pair for pair in self.consumed if pair[0] != rollout_id}

    @rule(rollout_id=ROLLOUTS)
    def close(self, rollout_id: str) -> None:
        """Whether or not anything is known of it."""
        self.supersede(rollout_id, by=Close(rollout_id))

    def supersede(self, rollout_id: str, *, by: Close | HandOn) -> None:
        self.run(self.store.write(by))
        if not self.attempt(rollout_id).is_over or self.forgets_tombstones:
            self.consumed = {pair for pair in self.consumed if pair[0] != rollout_id}
        self.attempts[rollout_id] = Attempt(is_over=True)

    @rule(rollout_id=ROLLOUTS)
    def hand_on(self, rollout_id: str) -> None:
        """Whether or not anything is known of it."""
        attempt = self.attempt(rollout_id)
        if not attempt.facts:
            self.supersede(rollout_id, by=HandOn(rollout_id))
            return
        self.run(self.store.write(HandOn(rollout_id)))
        attempt.is_handed_on = True

    @rule(target=writers, rollout_id=ROLLOUTS, source=st.sampled_from(["x", "y"]))
    def go_on(self, rollout_id: str, source: str) -> Any:
        attempt = self.attempt(rollout_id)
        try:
            epoch = self.run(self.store.write(GoOn(rollout_id, source)))
        except RetiredRolloutError:
            assert attempt.takes_no_calls
            return multiple()
        assert not attempt.is_handed_on
        self.opened_by(rollout_id, epoch).went_on.add(source)
        return Writer(rollout_id, epoch)

    @rule(writer=writers, call_id=CALLS, recorded=st.sampled_from(["r1", "r2"]))
    def replay(self, writer: Writer, call_id: str, recorded: str) -> None:
        operation = self.store.write(Replay(writer.rollout_id, call_id, recorded, epoch=writer.epoch))
        if self.is_late(writer):
            with pytest.raises(RetiredRolloutError):
                self.run(operation)
        elif self.attempt(writer.rollout_id).replayed.setdefault(recorded, call_id) != call_id:
            with pytest.raises(ReplayedCallError):
                self.run(operation)
        else:
            self.run(operation)

    # what holds after each

    @invariant()
    def store_shows_what_the_model_says(self) -> None:
        live = [rollout_id for rollout_id, attempt in self.attempts.items() if attempt.facts]
        assert list(self.run(self.store.rollout_ids())) == sorted(live)
        for rollout_id, attempt in self.attempts.items():
            snapshot = self.run(self.store.freeze(rollout_id))
            again = self.run(self.store.freeze(rollout_id))
            assert (again.snapshot_id, again.version) == (snapshot.snapshot_id, snapshot.version)
            assert snapshot.version == attempt.facts
            got = {entry.model_call_id: encode_entry(entry) for entry in snapshot.entries}
            assert len(got) == len(snapshot.entries)
            assert got == {call_id: encode_entry(attempt.shown(call_id)) for call_id in attempt.recorded}
            dangling = sorted(attempt.begun - attempt.recorded.keys() - attempt.abandoned)
            marks = (*sorted(attempt.marks), *(["handed_on"] if attempt.is_handed_on else []))
            assert snapshot.incomplete == (*marks, *(f"dangling_intent:{c}" for c in dangling))
            assert snapshot.went_on == tuple(sorted(attempt.went_on))
            assert [problem.call_id for problem in snapshot.problems] == sorted(attempt.conflicts)
            assert (snapshot.registration, snapshot.outcome) == (attempt.registration, attempt.outcome)
            status = self.run(status_of(self.store, rollout_id))
            assert encode_snapshot(status.snapshot) == encode_snapshot(replace(snapshot, entries=(), orphans=()))
            recorded = [call_counts(entry) for entry in snapshot.entries]
            assert status.counts == RolloutCounts(
                calls=len(recorded),
                generated_tokens=sum(call.generated_tokens for call in recorded),
                eligible_links=sum(call.is_eligible for call in recorded),
                contiguous_links=sum(call.is_supplied for call in recorded),
                flaws=len(attempt.marks) + attempt.is_handed_on + len(attempt.conflicts),
            )
            assert self.run(counts_of(self.store, [rollout_id])) == [status.counts]


class LogMachine(StoreMachine):
    """The same over a log in tiny segments, closed and read back in between."""

    @initialize(segment_bytes=st.sampled_from([1, 1500, 1 << 20]))
    def choose_segments(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.restart()

    async def opened(self) -> Store:
        return await LogStore.open(
            self.directory,
            segment_bytes=self.segment_bytes,
            disk=Disk(write=self.disk),
            tombstone_ttl_s=-1.0 if self.forgets_tombstones else 1e9,
        )

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.segment_bytes = 1 << 20
        self.disk = FullDisk(ENDLESS)
        super().__init__()

    @rule()
    def restart(self) -> None:
        self.run(self.store.close())
        self.store = self.run(self.opened())

    @rule(writer=StoreMachine.writers, call_id=CALLS, room_bytes=st.integers(0, 100))
    def commit_on_a_full_disk(self, writer: Writer, call_id: str, room_bytes: int) -> None:
        """Nothing comes of it, and the log goes on when there is space again."""
        attempt = self.attempt(writer.rollout_id)
        expected: type[StoreError] = StoreUnavailableError
        if self.is_late(writer):
            expected = RetiredRolloutError
        elif call_id in attempt.conflicts:
            expected = ConflictingCallError
        self.disk.room_bytes = room_bytes
        with pytest.raises(expected):
            self.run(
                self.store.write(Commit(sample_entry(writer.rollout_id, call_id, generation=(8,)), epoch=writer.epoch))
            )
        self.disk.room_bytes = ENDLESS

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


class SweepingLogMachine(LogMachine):
    """The same with a log that sweeps each tombstone as soon as it is safe to."""

    forgets_tombstones = True


TestMemoryStore = StoreMachine.TestCase
TestMemoryStore.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestLogStore = LogMachine.TestCase
TestLogStore.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestSweepingLogStore = SweepingLogMachine.TestCase
TestSweepingLogStore.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


# --- why a log may be replayed in any order ----------------------------------------------------------------------

EPOCHS = st.integers(1, 3)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Begun, EPOCHS, CALLS.map(lambda call_id: sample_intent("r", call_id))),
    st.builds(Committed, EPOCHS, CALLS, st.just(b"digest"), st.just(CallCounts(3, True, False))),
    st.builds(Abandoned, EPOCHS, CALLS),
    st.builds(MarkedIncomplete, EPOCHS, st.sampled_from(["x", "y"])),
    st.builds(
        ProblemFound,
        EPOCHS,
        CALLS.map(lambda call_id: RecordProblem(reason="p", call_id=call_id, field=None, detail="")),
    ),
    st.builds(DeliveryKnown, EPOCHS, CALLS, st.booleans()),
    st.builds(Registered, EPOCHS, REGISTRATIONS.map(Registration.as_text)),
    st.builds(Completed, EPOCHS, OUTCOMES.map(Outcome.as_text)),
    st.builds(HandedOn, EPOCHS),
    st.builds(WentOn, EPOCHS, st.sampled_from(["x", "y"])),
    st.builds(Replayed, EPOCHS, st.sampled_from(["r1", "r2"]), st.just("c1")),
    EPOCHS.map(lambda epoch: Retired(epoch, epoch - 1, "s", 1, 0.0, keeps_records=False)),
)


@given(st.lists(EVENTS, max_size=20), st.data())
def test_order_and_repetition_of_facts_do_not_matter(events: list[Event], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(events + data.draw(st.lists(st.sampled_from(events or [None]), max_size=5))))
    states = [RolloutState("r", 0), RolloutState("r", 0)]
    for state, order in zip(states, (events, [event for event in shuffled if event is not None]), strict=True):
        for event in order:
            state.apply(event)
    assert states[0] == states[1]
    frozen = [state.freeze() for state in states]
    assert encode_snapshot(frozen[0].snapshot) == encode_snapshot(frozen[1].snapshot)
    assert frozen[0].delivery == frozen[1].delivery


def test_snapshot_ids_are_those_that_earlier_versions_gave() -> None:
    """Whoever consumed a snapshot before an upgrade still drops exactly that one."""
    state = RolloutState("r", 7)
    lost = RecordProblem(reason="corrupt_log", call_id=None, field=None, detail="bytes 1 to 2")
    for event in (
        Begun(7, CallIntent(rollout_id="r", model_call_id="c1", created_at=1.0, request_key="1" * 32)),
        Begun(7, CallIntent(rollout_id="r", model_call_id="c2", created_at=1.0)),
        Committed(7, "c1", bytes(range(16)), CallCounts(3, True, False)),
        Abandoned(7, "c2"),
        MarkedIncomplete(7, "capture_failed:c3"),
        ProblemFound(7, lost),
        DeliveryKnown(7, "c1", True),
        DeliveryKnown(7, "c4", False),
    ):
        state.apply(event)
    assert (state.snapshot_id(), state.version) == ("393cac4437946aa77a7dd91531319ae5", 8)
    assert RolloutState("r", 3).snapshot_id() == "d24e5aebd23be5490557cf3e0f27da9f"
