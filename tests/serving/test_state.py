"""State shards and their client, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from gym_capture.capture.codec import encode_suffix
from gym_capture.capture.operations import Abandon, Begin, Close, Commit, MarkDelivery, MarkIncomplete, Operation
from gym_capture.capture.protocols import LineageStore, Resolved
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import CallIntent, Continues, Root, Snapshot, Unresolved, suffix_of
from gym_capture.errors import ConflictingCallError, GymCaptureError, RetiredRolloutError, StoreUnavailableError
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.serving.outgrown import Outgrown
from gym_capture.serving.state import StateClient
from gym_capture.serving.state_messages import BeginCall, Request
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore
from tests.calls import call
from tests.serving.shards import LOG, LocalActor, client, client_of, shard


def intent(call_id: str, rollout_id: str = "r1") -> CallIntent:
    return CallIntent(rollout_id=rollout_id, model_call_id=call_id, created_at=1.0)


async def test_resolving_leaves_no_trace(tmp_path: Path) -> None:
    """A request that is only measured, not generated, is told its parent and leaves no intent behind."""

    state = client(tmp_path)
    lineage: LineageStore = state
    epoch = await state.write(Begin(intent("a")))
    await state.write(Commit(call("a", [1, 2], [3], parent=Root(), turn_key="k1"), epoch=epoch))
    before = await state.freeze("r1")

    resolution = await lineage.resolve("r1", ["k1"])
    assert isinstance(resolution, Resolved)
    assert (resolution.call_id, resolution.turn) == ("a", 0)
    np.testing.assert_array_equal(resolution.cumulative_ids, [1, 2, 3])
    assert await lineage.resolve("r1", []) == Root()
    assert await lineage.resolve("r1", ["k2"]) == Unresolved("no_match")
    assert await lineage.resolve("r2", ["k1"]) == Unresolved("unknown_rollout")

    after = await state.freeze("r1")
    assert (after.snapshot_id, after.version, after.incomplete) == (before.snapshot_id, before.version, ())
    assert await state.rollout_ids() == ["r1"]


async def test_a_rollout_is_outgrown_as_long_as_a_refusal_is_the_last_of_its_calls(tmp_path: Path) -> None:
    state = client(tmp_path)
    epoch = await state.write(Begin(intent("a")))
    assert not await state.is_outgrown("r1")
    await state.too_long("r1")
    assert await state.is_outgrown("r1")
    assert not await state.is_outgrown("r2")
    await state.write(Commit(call("a", [1, 2], [3], parent=Root(), turn_key="k1"), epoch=epoch))
    assert not await state.is_outgrown("r1")
    await state.too_long("r1")
    await state.write(Close("r1"))
    assert not await state.is_outgrown("r1")


def test_what_is_known_of_outgrown_rollouts_is_bounded() -> None:
    outgrown = Outgrown(most=2)
    for rollout_id in ("a", "b", "a", "c"):
        outgrown.refused(rollout_id)
    assert [rollout_id in outgrown for rollout_id in "abc"] == [True, False, True]


async def test_a_turn_with_its_stop_string_and_a_rewritten_one_are_known_across_the_actor(tmp_path: Path) -> None:
    state = client(tmp_path)
    epoch = await state.write(Begin(intent("a")))
    entry = with_values(
        call("a", [1, 2], [3], parent=Root(), turn_key="k1"),
        asked_key="asked",
        other_turn_keys={"with stop": "stop_string_put_back"},
    )
    await state.write(Commit(entry, epoch=epoch))
    put_back = (await state.begin(intent("b"), ["with stop"], ["asked"])).resolution
    assert isinstance(put_back, Resolved)
    assert (put_back.call_id, put_back.rule) == ("a", "stop_string_put_back")
    assert (await state.begin(intent("c"), ["other"], ["asked"])).resolution == Unresolved("rewritten_turn")
    assert (await state.stats()).resolutions["unresolved:rewritten_turn"] == 1


async def test_resolutions_of_a_process_travel_together(tmp_path: Path) -> None:
    """Many at once need few actor calls, and each gets its own answer."""

    state = client(tmp_path, shards=2)
    for name in ("r1", "r2", "r3"):
        epoch = await state.write(Begin(intent("a", name)))
        entry = call("a", [1], [int(name[1:])], parent=Root(), turn_key="k", rollout_id=name)
        await state.write(Commit(entry, epoch=epoch))
    answers = await asyncio.gather(*(state.resolve(f"r{1 + number % 3}", ["k"]) for number in range(60)))
    for number, answer in enumerate(answers):
        assert isinstance(answer, Resolved)
        assert answer.cumulative_ids.tolist() == [1, 1 + number % 3]


class Unprintable:
    """What no caller should send, and what does not even have a text."""

    def __repr__(self) -> str:
        return "<unprintable>"


@pytest.mark.parametrize("store", [LOG, f"{MemoryStore.__module__}:MemoryStore.open"])
async def test_a_wrong_type_fails_its_own_caller_and_nobody_else(tmp_path: Path, store: str) -> None:
    """Whatever one of many callers sends: the others of its batch are answered, and the store is as sound as before."""

    state = client(tmp_path, store=store)
    epoch = await state.write(Begin(intent("a")))
    entry = call("a", [1, 2], [3], parent=Root(), turn_key="k1")
    wrong: list[Any] = [
        state.write(MarkIncomplete("r1", cast(str, 5), epoch=epoch)),
        state.write(MarkIncomplete("r1", cast(str, None), epoch=epoch)),
        state.write(MarkIncomplete("r1", "x", epoch=float(epoch))),  # type: ignore[arg-type]  # equals the epoch
        state.write(Commit(entry, epoch=cast(int, True))),  # equals the first epoch, too
        state.write(Abandon("r1", cast(str, Unprintable()), epoch=epoch)),
        state.write(MarkDelivery("r1", cast(str, ["a"]), delivered=True, epoch=epoch)),
        state.begin(CallIntent(rollout_id="r1", model_call_id="b", created_at=cast(float, "noon")), ()),
        state.begin(CallIntent(rollout_id="r1", model_call_id=cast(str, 7), created_at=1.0), ()),
        state._send("r1", (cast(bytes, 5), epoch)),
        state._send("r1", (b"not a record", epoch)),
        state._send("r1", (encode_suffix(entry)[:-8], epoch)),
        state._send("r1", Commit(entry, epoch=epoch)),
        state._send("r1", cast(Request, ("no", "such", "request"))),
        state._send("r1", BeginCall(cast(CallIntent, "a"))),
    ]
    right: list[Any] = [state.write(Begin(intent(f"c{number}"))) for number in range(3)]
    answers = await asyncio.gather(*wrong, *right, state.write(Commit(entry, epoch=epoch)), return_exceptions=True)
    for answer in answers[: len(wrong)]:
        assert isinstance(answer, GymCaptureError)
        assert not isinstance(answer, StoreUnavailableError)  # to repeat it is no use
    assert answers[len(wrong) :] == [epoch, epoch, epoch, epoch]
    found = await state.freeze("r1")
    assert [entry.model_call_id for entry in found.entries] == ["a"]
    assert found.incomplete == ("dangling_intent:c0", "dangling_intent:c1", "dangling_intent:c2")


class Together(LogStore):
    """A store that notes which puts it was given together."""

    seen: ClassVar[list[list[str]]] = []
    is_broken: ClassVar[bool] = False

    async def write_many(self, operations: Sequence[Operation]) -> list[int | GymCaptureError]:
        commits = [operation for operation in operations if isinstance(operation, Commit)]
        if commits:
            assert all(encode_suffix(commit.entry) == commit.encoded for commit in commits)
            self.seen.append([commit.call_id for commit in commits])
            if self.is_broken:
                raise StoreUnavailableError("the disk is gone")
        return await super().write_many(operations)


async def test_puts_that_arrive_together_are_stored_together_and_answered_each(tmp_path: Path) -> None:
    """Among other calls, each caller gets the answer to its own; two of one call are decided one after the other."""

    Together.seen.clear()
    state = client(tmp_path, store=f"{__name__}:Together.open", store_kwargs={"fsync": False})
    epochs = [await state.write(Begin(intent("first", f"r{number}"))) for number in range(4)]
    puts = [
        state.write(Commit(call("c", [1], [number], parent=Root(), turn_key="k", rollout_id=f"r{number}"), epoch=epoch))
        for number, epoch in enumerate(epochs)
    ]
    again = call("c", [1], [0], parent=Root(), turn_key="k", rollout_id="r0")
    other = call("c", [1], [9], parent=Root(), turn_key="k", rollout_id="r1")
    late = call("d", [1], [9], parent=Root(), rollout_id="r2")
    orphan = suffix_of(call("e", [1, 1, 2], [9], parent=Continues("nobody", 2), rollout_id="r3"))
    answers = await asyncio.gather(
        state.write(Begin(intent("x", "r0"))),
        puts[0],
        state.write(Commit(again, epoch=epochs[0])),
        puts[1],
        state.write(Begin(intent("y", "r1"))),
        state.write(Commit(other, epoch=epochs[1])),
        state.write(Commit(late, epoch=epochs[2] + 99)),
        puts[2],
        state.write(Commit(orphan, epoch=epochs[3])),
        puts[3],
        return_exceptions=True,
    )
    r0, r1, r2, r3 = epochs
    kinds = [r0, r0, r0, r1, r1, ConflictingCallError, RetiredRolloutError, r2, r3, r3]
    assert [answer if isinstance(answer, int) else type(answer) for answer in answers] == kinds
    assert Together.seen == [["c", "c", "c", "c", "d", "c", "e", "c"]]
    for number in range(4):
        found = await state.resolve(f"r{number}", ["k"])
        assert isinstance(found, Resolved)
        assert found.cumulative_ids.tolist() == [1, number]
    assert (await state.freeze("r3")).incomplete == ("lineage_parent_missing:e", "dangling_intent:first")
    stats = await state.stats()
    assert (stats.puts, stats.put_failures, stats.waiting_puts) == (6, 2, 0)


async def test_when_a_store_fails_as_a_whole_each_put_is_told_of_its_own_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = client(tmp_path, store=f"{__name__}:Together.open", store_kwargs={"fsync": False})
    epochs = [await state.write(Begin(intent("c", f"r{number}"))) for number in range(3)]
    entries = [call("c", [1], [2], parent=Root(), rollout_id=f"r{number}") for number in range(3)]
    monkeypatch.setattr(Together, "is_broken", True)
    answers = await asyncio.gather(
        *(state.write(Commit(entry, epoch=epoch)) for entry, epoch in zip(entries, epochs, strict=True)),
        return_exceptions=True,
    )
    told = [answer.rollout_id for answer in answers if isinstance(answer, StoreUnavailableError)]
    assert told == ["r0", "r1", "r2"]
    assert (await state.stats()).put_failures == 3


# --- bounded memory --------------------------------------------------------------------------------------------------


async def play(state: StateClient, rollout_id: str, *, calls: int) -> None:
    """A conversation of so many calls, each found to continue the one before."""
    ids, keys = [1, 2], list[str]()
    for number in range(calls):
        call_id = f"c{number}"
        begun = await state.begin(intent(call_id, rollout_id), keys)
        parent: Root | Continues = Root()
        if keys:
            assert isinstance(begun.resolution, Resolved)
            assert begun.resolution.call_id == f"c{number - 1}"
            assert begun.resolution.cumulative_ids.tolist() == ids
            parent = Continues(begun.resolution.call_id, len(ids))
            ids = [*ids, 3]
        generated = [int(rollout_id[1:]), number]
        keys.append(f"k{number}")
        entry = call(call_id, ids, generated, parent=parent, turn_key=keys[-1], rollout_id=rollout_id)
        await begun.sink.put(entry)
        ids = ids + generated


async def test_conversations_go_on_although_none_stays_in_memory(tmp_path: Path) -> None:
    """More live rollouts than there is memory for: every request still finds its parent, before and after a restart."""

    actor = LocalActor(lambda: shard(tmp_path, lineage_bytes=1))
    state = client_of(actor)
    names = [f"r{number}" for number in range(20)]
    await asyncio.gather(*(play(state, name, calls=5) for name in names))
    await actor.restart()
    for name in names:
        resolution = await state.resolve(name, ["k0", "k1", "k2", "k3", "k4"])
        assert isinstance(resolution, Resolved)
        assert resolution.call_id == "c4"
        snapshot = await state.freeze(name)
        assert (len(snapshot.entries), snapshot.incomplete, snapshot.problems) == (5, (), ())


class Unreadable(MemoryStore):
    """A store that cannot be read for a while. Not one that keeps what a producer has encoded, either."""

    is_readable = True

    async def freeze(self, rollout_id: str) -> Snapshot:
        if not self.is_readable:
            raise StoreUnavailableError("the disk is gone")
        return await super().freeze(rollout_id)


STORES: list[Unreadable] = []


async def open_unreadable(**_: object) -> Unreadable:
    STORES.append(Unreadable())
    return STORES[-1]


async def test_a_closed_rollout_is_forgotten_by_lineage_too_and_stays_closed_when_its_actor_restarts(
    tmp_path: Path,
) -> None:
    actor = LocalActor(lambda: shard(tmp_path))
    state = client_of(actor)
    begun = await state.begin(intent("a"), [])
    await begun.sink.put(call("a", [1, 2], [3], parent=Root(), turn_key="k"))
    for name in ("r1", "unheard"):
        await state.write(Close(name))
    for _ in range(2):
        assert not isinstance(await state.resolve("r1", ["k"]), Resolved)
        for name in ("r1", "unheard"):
            with pytest.raises(RetiredRolloutError):
                await state.begin(intent("late", name), ["k"])
        with pytest.raises(RetiredRolloutError):
            await begun.sink.put(call("b", [1, 2, 3], [4], parent=Root()))
        stats = await state.stats()
        assert (stats.live_rollouts, stats.lineage_rollouts) == (0, 0)
        await actor.restart()


async def test_a_call_that_cannot_be_resolved_has_not_begun(tmp_path: Path) -> None:
    """It is refused retryably, and leaves no open intent to mask its rollout."""

    state = client(tmp_path, store=f"{__name__}:open_unreadable", lineage_bytes=1)
    await play(state, "r1", calls=2)
    await play(state, "r2", calls=2)
    STORES[-1].is_readable = False
    with pytest.raises(StoreUnavailableError):
        await state.begin(intent("late", "r1"), ["k0"])
    STORES[-1].is_readable = True
    snapshot = await state.freeze("r1")
    assert (len(snapshot.entries), snapshot.incomplete) == (2, ())


async def test_records_are_kept_as_their_producer_encoded_them(tmp_path: Path) -> None:
    """A shard neither encodes what it stores again, nor decodes what it hands out."""

    state = client(tmp_path)
    await play(state, "r1", calls=3)
    first, second, third = (await state.freeze("r1")).entries
    assert third.parent == Continues("c1", 7)
    encoded = await state.shards[0].freeze.remote("r1")
    assert encoded.endswith(b"".join(map(encode_suffix, (first, second, third))))


class Unread(LogStore):
    """A log of which no record is read."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        raise AssertionError

    async def freeze_encoded(self, rollout_id: str) -> bytes:
        raise AssertionError


@pytest.mark.parametrize("store", [LOG, f"{__name__}:Unread.open", "gym_capture.stores.memory:MemoryStore.open"])
async def test_how_rollouts_stand_is_told_without_their_records(tmp_path: Path, store: str) -> None:
    """Also of many at once, on several shards, in the order in which they were asked for."""
    state = client(tmp_path, shards=2, store=store, store_kwargs={})
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        begun = await state.begin(intent("a", name), [])
        await begun.sink.put(call("a", [1, 2], [3] * number, parent=Root(), rollout_id=name))
        supplied = {"prefix_requested": True, "prefix_supplied": number % 2 == 0}
        ids = [1, 2, *[3] * number]
        await begun.sink.put(call("b", ids, [4], parent=Continues("a", len(ids)), rollout_id=name, **supplied))
    begun = await state.begin(intent("lost", "r1"), [])
    await begun.sink.mark_incomplete("capture_failed:x")

    asked = [*reversed(names), "nothing"]
    counts = await state.counts(asked)
    assert all(each.timed_puts == each.calls and (each.put_ms or 0) > 0 for each in counts[:-1])
    counts = [each._replace(timed_puts=0, put_s=0.0) for each in counts]
    assert counts == [
        *(
            RolloutCounts(2, number + 1, 1, int(number % 2 == 0), flaws=int(number == 1))
            for number in reversed(range(len(names)))
        ),
        RolloutCounts(),
    ]
    status = await state.status("r1")
    assert status.counts == counts[asked.index("r1")]
    assert status.snapshot.incomplete == ("capture_failed:x", "dangling_intent:lost")
    assert (status.snapshot.entries, status.snapshot.orphans) == ((), ())
    assert (await state.status("nothing")).snapshot.version == 0
