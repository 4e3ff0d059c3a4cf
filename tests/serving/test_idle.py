"""Rollouts that nobody uses: how long that is known, and when they are given up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from gym_capture.capture.operations import Begin, Clear, Commit, Drop, Operation
from gym_capture.capture.records import Root
from gym_capture.errors import RetiredRolloutError
from gym_capture.serving.idle import IdleTimes
from gym_capture.stores.memory import MemoryStore
from tests.calls import call
from tests.serving.shards import LocalActor, client_of, shard
from tests.serving.test_state import intent, play


class Watched(MemoryStore):
    """A store that says when something was dropped from it."""

    DROPPED: ClassVar[asyncio.Event]

    async def write(self, operation: Operation) -> int:
        epoch = await super().write(operation)
        if isinstance(operation, Drop):
            self.DROPPED.set()
        return epoch


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def test_use_begins_the_time_anew_and_reading_makes_no_rollout() -> None:
    clock = Clock()
    times = IdleTimes(["a", "b"], clock=clock)
    clock.now_s += 5
    times.wrote("c")
    times.read("a")
    times.read("nobody")
    clock.now_s += 5
    assert times.longest_s() == 10
    assert times.idle(10) == ["b"]
    assert times.idle(5) == ["b", "c", "a"]
    times.forget("b")
    assert times.idle(10) == []
    assert times.longest_s() == 5


def test_nothing_is_idle_where_there_is_nothing() -> None:
    assert (IdleTimes([]).longest_s(), IdleTimes([]).idle(0)) == (0.0, [])


async def test_what_is_given_up_is_counted_and_refuses_late_writers(tmp_path: Path) -> None:
    actor = LocalActor(lambda: shard(tmp_path))
    state = client_of(actor)
    await play(state, "r1", calls=2)
    epoch = await state.write(Begin(intent("late", "r2")))
    assert await actor.shard.retire_idle(3_600.0) == []
    assert await actor.shard.retire_idle(0.0) == ["r1", "r2"]
    stats = await state.stats()
    assert (stats.idle_retired, stats.live_rollouts, stats.lineage_rollouts, stats.longest_idle_s) == (2, 0, 0, 0)
    with pytest.raises(RetiredRolloutError):
        await state.write(Commit(call("late", [1], [2], parent=Root(), rollout_id="r2"), epoch=epoch))
    with pytest.raises(RetiredRolloutError):
        await state.write(Begin(intent("next", "r1")))
    await state.write(Clear("r1"))
    await state.write(Begin(intent("next", "r1")))

    await actor.restart()
    assert await state.rollout_ids() == ["r1"]
    assert await actor.shard.retire_idle(0.0) == ["r1"]


async def test_an_actor_looks_for_them_by_itself_only_if_it_is_told_to(tmp_path: Path) -> None:
    Watched.DROPPED = asyncio.Event()
    limited = LocalActor(lambda: shard(tmp_path, store=f"{__name__}:Watched.open", max_idle_s=0.01))
    await client_of(limited).write(Begin(intent("a")))
    async with asyncio.timeout(30):
        await Watched.DROPPED.wait()
    await limited.shard.close()

    unlimited = shard(tmp_path / "unlimited")
    await unlimited.rollout_ids()
    assert unlimited._tasks == []
