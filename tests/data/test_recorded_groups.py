"""A build without a list takes groups and rewards from the records; with one, the list is all that counts."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gym_capture.build.builder import BuildOptions
from gym_capture.capture.operations import Complete, Drop, MarkIncomplete, Register
from gym_capture.capture.outcomes import Outcome, Registration, Standing
from gym_capture.conformance import Store
from gym_capture.conformance.support import run_call
from gym_capture.data.directory import build_directory
from gym_capture.data.requests import groups_recorded, request_table
from gym_capture.stores.base import ListedStore, standings_of
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore


async def play(store: Store, rollout_id: str, *, group: str | None, task: Any = None, **outcome: Any) -> None:
    """One call; registered in a group if there is one, completed if there is an outcome."""
    if group is not None:
        told = None if task is None else json.dumps(task)
        await store.write(Register(rollout_id, Registration(group_id=group, task=told)))
    await run_call(store, rollout_id, f"call-{rollout_id}")
    if outcome:
        await store.write(Complete(rollout_id, Outcome(**outcome)))


async def play_all(store: Store) -> None:
    await play(store, "a-lost", group="a", reward=0.0)
    await play(store, "b-open", group="b")
    await play(store, "a-won", group="a", reward=1.0, reward_components=(("speed", 0.5),), task="count to 3")
    await play(store, "a-failed", group="a", failure="gave_up", task={"not": "an input"})
    await play(store, "plain", group=None)
    await play(store, "scored", group=None, reward=3.0)
    await store.write(Register("silent", Registration(group_id="b")))


def rows_of(out: Path) -> dict[str, Any]:
    return {row["rollout_id"]: row for path in sorted(out.glob("part-*")) for row in pq.read_table(path).to_pylist()}


def built(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    build_directory(source, out=out, options=BuildOptions(), **options)
    return rows_of(out)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    async def write() -> None:
        store = await LogStore.open(tmp_path / "records" / "shard-0000")
        await play_all(store)
        await store.close()

    asyncio.run(write())
    return tmp_path / "records"


def test_groups_and_rewards_are_those_on_record(log: Path, tmp_path: Path) -> None:
    rows = built(log, tmp_path / "out")
    assert {name: row["group_id"] for name, row in rows.items()} == {
        "a-lost": "a",
        "a-won": "a",
        "a-failed": "a",
        "b-open": "b",
        "silent": "b",
        "plain": "plain",
        "scored": "scored",
    }
    assert rows["a-won"]["reward"] == 1.0
    assert rows["a-won"]["reward_components"] == [{"key": "speed", "value": 0.5}]
    assert rows["a-won"]["advantage"] == pytest.approx(1.0, abs=1e-5)
    assert rows["a-lost"]["advantage"] == pytest.approx(-1.0, abs=1e-5)
    assert (rows["a-won"]["input"], rows["a-failed"]["input"]) == ('"count to 3"', None)
    masked = {name: row["mask_reasons"] for name, row in rows.items() if row["masked"]}
    assert masked["a-failed"] == ["incomplete:gave_up"]
    assert masked["b-open"] == ["missing_reward"]
    assert "missing_reward" in masked["silent"]
    assert rows["b-open"]["reward"] is None
    assert sorted(masked) == ["a-failed", "b-open", "silent"]
    # Nobody said what they are to be compared with.
    for name, reward in (("plain", None), ("scored", 3.0)):
        assert rows[name]["reward"] == reward
        assert rows[name]["advantage"] is None or math.isnan(rows[name]["advantage"])


def test_a_list_says_all_there_is_to_say(log: Path, tmp_path: Path) -> None:
    listed = request_table(
        [{"rollout_id": "a-won", "group_id": "x", "reward": 0.25}, {"rollout_id": "a-lost", "group_id": "x"}]
    )
    rows = built(log, tmp_path / "out", requests=listed)
    assert sorted(rows) == ["a-lost", "a-won"]
    assert (rows["a-won"]["group_id"], rows["a-won"]["reward"]) == ("x", 0.25)
    assert rows["a-won"]["reward_components"] is None
    assert rows["a-lost"]["mask_reasons"] == ["missing_reward"]


async def test_what_was_said_is_listed_alike_by_a_store_that_lists_and_one_that_is_read(tmp_path: Path) -> None:
    memory, log = await MemoryStore.open(), await LogStore.open(tmp_path)
    for store in (memory, log):
        await play_all(store)
        await store.write(Register("gone", Registration(group_id="a")))
        snapshot = await store.freeze("gone")
        await store.write(Drop("gone", snapshot.snapshot_id, snapshot.version))
    assert isinstance(log, ListedStore)
    assert not isinstance(memory, ListedStore)
    found = await standings_of(log)
    assert found == await standings_of(memory)
    assert [each.rollout_id for each in found] == ["a-failed", "a-lost", "a-won", "b-open", "plain", "scored", "silent"]
    await log.close()


async def test_a_rollout_of_a_damaged_capture_keeps_its_group(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path / "records" / "shard-0000")
    await play(store, "r", group="g", reward=1.0)
    epoch = await store.write(Register("r", Registration(group_id="g")))
    await store.write(MarkIncomplete("r", "why", epoch=epoch))
    await store.close()
    row = (await asyncio.to_thread(built, tmp_path / "records", tmp_path / "out"))["r"]
    assert (row["group_id"], row["reward"], row["masked"]) == ("g", 1.0, True)


def test_a_group_is_one_wherever_its_rollouts_stand() -> None:
    registration = Registration(group_id="g")
    standings = [Standing("a", registration, None), Standing("b", None, None), Standing("c", registration, None)]
    groups = groups_recorded(standings)
    assert [[request.rollout_id for request in group] for group in groups] == [["a", "c"], ["b"]]
