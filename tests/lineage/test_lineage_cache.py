"""Whatever is evicted, and whenever, no answer of the lineage changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.capture.operations import Begin, Clear, Commit, MarkDelivery
from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import CallIntent, Continues, Root, TokenEntry, Unresolved, suffix_of
from gym_capture.capture.suffixes import StoredRollout, stored_form
from gym_capture.errors import StoreUnavailableError
from gym_capture.lineage.cache import LineageCache
from gym_capture.lineage.index import LineageIndex
from gym_capture.stores.memory import MemoryStore
from tests.calls import call

ROLLOUTS = ("r1", "r2", "r3")
TINY = 1
"""Bytes: only the rollout used last stays."""


def said(resolution: Resolution) -> object:
    if isinstance(resolution, Resolved):
        return resolution.call_id, resolution.turn, resolution.cumulative_ids.tolist()
    return resolution


class Shard:
    """A store and the cache over it, as a state actor has them, with a gate before every reading of the store."""

    def __init__(self, *, max_bytes: int) -> None:
        self.store = MemoryStore()
        self.cache = LineageCache(self.read, max_bytes=max_bytes)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = asyncio.Event()
        self.fails: StoreUnavailableError | None = None

    async def read(self, rollout_id: str) -> StoredRollout:
        snapshot = await self.store.freeze(rollout_id)
        self.reading.set()
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        return StoredRollout(stored_form(snapshot), snapshot.incomplete)

    async def put(self, entry: TokenEntry) -> None:
        intent = CallIntent(rollout_id=entry.rollout_id, model_call_id=entry.model_call_id, created_at=0.0)
        await self.store.write(Commit(entry, epoch=await self.store.write(Begin(intent))))
        assert await self.cache.add(entry) == ()

    async def clear(self, rollout_id: str) -> None:
        await self.store.write(Clear(rollout_id))
        self.cache.forget(rollout_id)

    async def evict(self, rollout_id: str) -> None:
        """By using another one; the cache must be a tiny one."""
        await self.put(call("other", [1], [2], parent=Root(), rollout_id=f"not-{rollout_id}"))

    async def resolved(self, rollout_id: str, *turn_keys: str) -> object:
        return said((await self.cache.resolve(rollout_id, turn_keys))[0])


FIRST = call("a", [1, 2], [3], parent=Root(), turn_key="k1")
SECOND = suffix_of(call("b", [1, 2, 3, 4], [5], parent=Continues("a", 3), turn_key="k2"))


def test_rollouts_that_do_not_fit_together_are_all_answered() -> None:
    """Each is asked for a turn of the loop after the other, while that one is read: none evicts it again."""

    async def run() -> None:
        shard = Shard(max_bytes=TINY)
        names = [f"r{number}" for number in range(6)]
        for name in names:
            await shard.put(replace(FIRST, rollout_id=name))
        asked = []
        for name in names:
            asked.append(asyncio.ensure_future(shard.resolved(name, "k1")))
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await asyncio.gather(*asked) == [("a", 0, [1, 2, 3])] * len(names)
        assert shard.cache.reads <= len(names)
        await shard.evict("r0")
        assert shard.cache.in_memory == 1

    asyncio.run(run())


def test_a_call_may_be_a_retry_of_one_that_has_no_record() -> None:
    def asking(call_id: str, digest: str) -> CallIntent:
        return CallIntent(rollout_id="r1", model_call_id=call_id, created_at=0.0, request_digest=digest)

    async def run() -> None:
        shard = Shard(max_bytes=10_000)

        async def begin(call_id: str, digest: str) -> bool:
            intent = asking(call_id, digest)
            await shard.store.write(Begin(intent))
            return (await shard.cache.begin(intent, ()))[1]

        assert not await begin("a", "hi")
        assert not await begin("a", "hi"), "repeating an intent makes no other call of it"
        assert await begin("b", "hi")
        assert not await begin("c", "something else")
        shard.cache.end("r1", "a")
        assert await begin("d", "hi"), "b is open yet"
        shard.cache.end("r1", "b")
        shard.cache.end("r1", "d")
        assert not await begin("e", "hi")

        # Read back: that calls are open is known, what they were asked is not.
        shard.cache = LineageCache(shard.read, max_bytes=10_000)
        shard.cache.expect(["r1"])
        assert await begin("f", "new")
        await shard.clear("r1")
        assert not await begin("f", "new")

    asyncio.run(run())


def test_what_was_recorded_while_the_rollout_is_read_back_is_not_open() -> None:
    async def run() -> None:
        shard = Shard(max_bytes=10_000)
        intent = CallIntent(rollout_id="r1", model_call_id="a", created_at=0.0, request_digest="hi")
        epoch = await shard.store.write(Begin(intent))
        shard.cache.expect(["r1"])
        shard.gate.clear()
        reading = asyncio.ensure_future(shard.cache.resolve("r1", ()))
        await shard.reading.wait()
        await shard.store.write(Commit(FIRST, epoch=epoch))
        adding = asyncio.ensure_future(shard.cache.add(FIRST))
        await asyncio.sleep(0)
        shard.gate.set()
        await asyncio.gather(reading, adding)
        other = replace(intent, model_call_id="b", request_digest="new")
        assert not (await shard.cache.begin(other, ("k1",)))[1]

    asyncio.run(run())


def test_a_rewritten_turn_is_known_after_an_eviction() -> None:
    async def run() -> None:
        shard = Shard(max_bytes=TINY)
        await shard.put(with_values(FIRST, asked_key="asked"))
        for _ in range(2):
            resolution, _ = await shard.cache.resolve("r1", ("rewritten",), ("asked",))
            assert resolution == Unresolved("rewritten_turn")
            await shard.evict("r1")

    asyncio.run(run())


# --- any sequence ----------------------------------------------------------------------------------------------------


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[object, ...]]:
    """Calls that continue earlier ones, marks, retirements and questions, in any mixture over a few rollouts."""
    made: list[tuple[object, ...]] = []
    recorded: dict[str, list[TokenEntry]] = {name: [] for name in ROLLOUTS}
    for number in range(draw(st.integers(1, 25))):
        name = draw(st.sampled_from(ROLLOUTS))
        what = draw(st.sampled_from(("put", "put", "put", "mark", "clear", "ask", "ask", "restart")))
        calls = recorded[name]
        if what == "put":
            generation = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
            key = f"k{draw(st.integers(0, 4))}"
            if draw(st.booleans()) and calls:
                parent = draw(st.sampled_from(calls))
                prompt = [*parent.cumulative_ids().tolist(), 9]
                entry = call(f"c{number}", prompt, generation, parent=Continues(parent.model_call_id, parent.cum_len))
            else:
                entry = call(f"c{number}", [1], generation, parent=Root())
            entry = with_values(entry, rollout_id=name, turn_key=key)
            calls.append(entry)
            made.append(("put", suffix_of(entry) if draw(st.booleans()) else entry))
        elif what == "mark" and calls:
            made.append(("mark", name, draw(st.sampled_from(calls)).model_call_id, draw(st.booleans())))
        elif what == "clear":
            calls.clear()
            made.append(("clear", name))
        elif what == "restart":
            made.append(("restart",))
        else:
            made.append(("ask", name, tuple(f"k{turn}" for turn in draw(st.lists(st.integers(0, 5), max_size=3)))))
    return made


@given(operations(), st.integers(0, 6_000))
@settings(max_examples=150, deadline=None)
def test_eviction_never_changes_an_answer(made: list[tuple[object, ...]], max_bytes: int) -> None:
    async def run() -> None:
        shard, everything = Shard(max_bytes=max_bytes), LineageIndex()
        for operation in made:
            match operation:
                case ("put", TokenEntry() as entry):
                    await shard.put(entry)
                    assert everything.add(entry) == ()
                case ("mark", str(name), str(call_id), bool(delivered)):
                    intent = CallIntent(rollout_id=name, model_call_id=call_id, created_at=0.0)
                    epoch = await shard.store.write(Begin(intent))
                    await shard.store.write(MarkDelivery(name, call_id, delivered=delivered, epoch=epoch))
                    await shard.cache.mark_delivery(name, call_id, delivered=delivered)
                    everything.mark_delivery(name, call_id, delivered=delivered)
                case ("clear", str(name)):
                    await shard.clear(name)
                    everything.forget(name)
                case ("ask", str(name), tuple(keys)):
                    resolution, may_be_retry = await shard.cache.resolve(name, keys)
                    expected = everything.resolve(name, keys)
                    assert said(resolution) == said(expected)
                    assert may_be_retry == everything.may_be_retry(name, expected)
                case _:
                    shard.cache = LineageCache(shard.read, max_bytes=max_bytes)
                    shard.cache.expect(await shard.store.rollout_ids())
            assert shard.cache.nbytes <= max_bytes or shard.cache.in_memory == 1

    asyncio.run(run())


# --- one interleaving each -------------------------------------------------------------------------------------------


def run(play: Callable[[Shard], Awaitable[None]]) -> None:
    async def played() -> None:
        await play(Shard(max_bytes=TINY))

    asyncio.run(played())


async def test_the_least_recently_used_rollouts_go_first() -> None:
    one = LineageIndex()
    one.add(FIRST)
    shard = Shard(max_bytes=2 * one.total_bytes + 100)
    for name in ("r1", "r2"):
        await shard.put(replace(FIRST, rollout_id=name))
    await shard.resolved("r1", "k1")
    await shard.put(replace(FIRST, rollout_id="r3"))
    assert (shard.cache.in_memory, shard.cache.evictions, shard.cache.reads) == (2, 1, 0)
    await shard.resolved("r1", "k1")
    assert shard.cache.reads == 0
    await shard.resolved("r2", "k1")
    assert shard.cache.reads == 1


def test_one_reading_serves_all_who_wait_and_nobody_else_waits() -> None:
    async def play(shard: Shard) -> None:
        await shard.put(FIRST)
        await shard.evict("r1")
        shard.gate.clear()
        waiting = [asyncio.ensure_future(shard.resolved("r1", "k1")) for _ in range(5)]
        await shard.reading.wait()
        assert await shard.resolved("not-r1") == Root()
        waiting[0].cancel()
        shard.gate.set()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [("a", 0, [1, 2, 3])] * 4
        assert shard.cache.reads == 1

    run(play)


def test_a_record_that_comes_while_its_rollout_is_read_is_not_missed() -> None:
    async def play(shard: Shard) -> None:
        await shard.put(FIRST)
        await shard.evict("r1")
        shard.gate.clear()
        asking = asyncio.ensure_future(shard.resolved("r1", "k1"))
        await shard.reading.wait()
        putting = asyncio.ensure_future(shard.put(SECOND))
        await asyncio.sleep(0)
        shard.gate.set()
        assert await asking == ("a", 0, [1, 2, 3])
        await putting
        assert await shard.resolved("r1", "k1", "k2") == ("b", 1, [1, 2, 3, 4, 5])

    run(play)


def test_a_record_of_an_absent_rollout_waits_for_nothing() -> None:
    async def play(shard: Shard) -> None:
        await shard.put(FIRST)
        await shard.evict("r1")
        await shard.put(SECOND)
        assert shard.cache.reads == 0
        assert await shard.resolved("r1", "k1", "k2") == ("b", 1, [1, 2, 3, 4, 5])
        assert shard.cache.reads == 1

    run(play)


def test_what_is_being_read_of_a_retired_attempt_is_thrown_away() -> None:
    async def play(shard: Shard) -> None:
        await shard.put(FIRST)
        await shard.evict("r1")
        shard.gate.clear()
        asking = asyncio.ensure_future(shard.resolved("r1", "k1"))
        await shard.reading.wait()
        late = asyncio.ensure_future(shard.put(SECOND))
        await asyncio.sleep(0)
        await shard.clear("r1")
        await shard.put(with_values(FIRST, model_call_id="new", turn_key="k3"))
        shard.gate.set()
        assert await asking == Unresolved("no_match")
        await late
        assert await shard.resolved("r1", "k1", "k2") == Unresolved("no_match")
        assert await shard.resolved("r1", "k3") == ("new", 0, [1, 2, 3])

    run(play)


def test_a_store_that_cannot_be_read_says_so_and_is_asked_again() -> None:
    async def play(shard: Shard) -> None:
        await shard.put(FIRST)
        await shard.evict("r1")
        shard.fails = StoreUnavailableError("the disk is gone")
        with pytest.raises(StoreUnavailableError):
            await shard.resolved("r1", "k1")
        shard.fails = None
        assert await shard.resolved("r1", "k1") == ("a", 0, [1, 2, 3])

    run(play)
