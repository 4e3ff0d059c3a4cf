"""Logs that a stopped graph left, read by many workers, each through the actor that owns the log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pytest

from gym_capture.capture.operations import Begin, Commit
from gym_capture.capture.records import CallIntent
from gym_capture.data.job import JobOptions, write_trajectories
from gym_capture.data.log_source import opened_logs
from gym_capture.data.report import report
from gym_capture.data.requests import request_table
from gym_capture.data.sources import SourceSpec, retire
from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.stores.log import LogStore

from . import made_rollouts


async def record(directory: Path, *rollout_ids: str) -> None:
    store = await LogStore.open(directory)
    for rollout_id in rollout_ids:
        for entry in reversed(made_rollouts.snapshot(rollout_id).entries):
            intent = CallIntent(rollout_id=rollout_id, model_call_id=entry.model_call_id, created_at=0.0)
            await store.write(Commit(entry, epoch=await store.write(Begin(intent))))
    await store.close()


async def live(source: SourceSpec) -> list[str]:
    return list(await (await source.open()).rollout_ids())


@pytest.mark.usefixtures("cluster")
def test_trajectories_of_all_logs_below_a_directory_and_retiring_them(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path / "records" / "shard-0000", "a", "b"))
    asyncio.run(record(tmp_path / "records" / "shard-0001", "c"))
    rollouts = request_table({"rollout_id": name, "group_id": "g", "reward": 1.0} for name in ("a", "c", "gone"))
    with opened_logs(tmp_path / "records") as source:
        built = write_trajectories(
            rollouts, source=source, out=tmp_path / "out", options=JobOptions(rollouts_per_part=1, workers=2)
        )
        assert (built.complete, built.missing) == (2, ("gone",))
        assert asyncio.run(retire(source, built.snapshots)) == ()
        assert asyncio.run(live(source)) == ["b"]
    rows = {row["rollout_id"]: row for row in pa.dataset.dataset(tmp_path / "out").to_table().to_pylist()}
    (trajectory,) = (row for name, row in rows.items() if name == "a")
    whole = made_rollouts.snapshot("a").entries[0]
    assert trajectory["token_ids"][-4:] == whole.generation_token_ids.tolist()
    assert trajectory["n_calls"] == 2


@pytest.mark.usefixtures("cluster")
async def test_a_log_that_is_in_use_is_an_error(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    await store.write(Begin(CallIntent(rollout_id="r", model_call_id="c", created_at=0.0)))
    with pytest.raises(StoreUnavailableError, match="in use"):
        await asyncio.to_thread(lambda: opened_logs(tmp_path).__enter__())
    await store.close()


@pytest.mark.usefixtures("cluster")
def test_a_directory_without_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no records"), opened_logs(tmp_path):
        pass


async def test_a_rollout_that_has_changed_since_it_was_built_is_kept(tmp_path: Path) -> None:
    source = SourceSpec(import_path="gym_capture.stores.log:LogStore.open", kwargs={"directory": tmp_path})

    await record(tmp_path, "a", "b")
    store = await LogStore.open(tmp_path)
    frozen = {name: await store.freeze(name) for name in ("a", "b")}
    await store.write(Begin(CallIntent(rollout_id="b", model_call_id="late", created_at=0.0)))
    await store.close()
    consumed = report([], [])
    snapshots = {name: (snapshot.snapshot_id, snapshot.version) for name, snapshot in frozen.items()}
    assert await retire(source, replace(consumed, snapshots=snapshots).snapshots) == ("b",)
