"""State shards and their client, in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from gym_capture.protocols import LineageStore, Resolved
from gym_capture.records import CallIntent, Root, Unresolved
from tests.calls import call
from tests.serving.shards import client


def intent(call_id: str, rollout_id: str = "r1") -> CallIntent:
    return CallIntent(rollout_id=rollout_id, model_call_id=call_id, created_at=1.0)


def test_resolving_leaves_no_trace(tmp_path: Path) -> None:
    """A request that is only measured, not generated, is told its parent and leaves no intent behind."""

    async def run() -> None:
        state = client(tmp_path)
        lineage: LineageStore = state
        epoch = await state.begin_call(intent("a"))
        await state.put(call("a", [1, 2], [3], parent=Root(), turn_key="k1"), epoch=epoch)
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

    asyncio.run(run())


def test_resolutions_of_a_process_travel_together(tmp_path: Path) -> None:
    """Many at once need few actor calls, and each gets its own answer."""

    async def run() -> None:
        state = client(tmp_path, shards=2)
        for name in ("r1", "r2", "r3"):
            epoch = await state.begin_call(intent("a", name))
            entry = call("a", [1], [int(name[1:])], parent=Root(), turn_key="k", rollout_id=name)
            await state.put(entry, epoch=epoch)
        answers = await asyncio.gather(*(state.resolve(f"r{1 + number % 3}", ["k"]) for number in range(60)))
        for number, answer in enumerate(answers):
            assert isinstance(answer, Resolved)
            assert answer.cumulative_ids.tolist() == [1, 1 + number % 3]

    asyncio.run(run())
