"""The example store of docs/examples keeps the contract, and what its file system does to objects masks rollouts."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_capture.capture.operations import Begin, Clear, Commit, MarkDelivery, MarkIncomplete
from gym_capture.capture.records import LostCall, Snapshot
from gym_capture.conformance import CHECKS, DURABILITY_CHECKS, Store, run_check, sample_entry, sample_intent
from gym_capture.conformance.lineage import (
    LINEAGE_CHECKS,
    LINEAGE_DURABILITY_CHECKS,
    StoreWithLineage,
    run_lineage_check,
)
from gym_capture.conformance.support import expect_entries, run_call
from gym_capture.errors import StoreUnavailableError
from tests.contract.test_lineage_stores import Shard

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
Open = Callable[..., Awaitable[Any]]


@pytest.fixture
def open_store(monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from fs_store import open_store  # type: ignore[import-not-found]

    found: Open = open_store
    return found


@pytest.mark.parametrize("name", [*CHECKS, *DURABILITY_CHECKS])
@pytest.mark.parametrize("by_uri", [False, True])
async def test_the_example_keeps_the_contract(name: str, by_uri: bool, open_store: Open, tmp_path: Path) -> None:
    kwargs = {"uri": (tmp_path / "bucket").as_uri()} if by_uri else {}

    async def fresh() -> Store:
        store: Store = await open_store(directory=tmp_path / "shard-0000", **kwargs)
        return store

    async def reopen(store: Store) -> Store:
        await store.close()
        return await fresh()

    result = await run_check(name, fresh, reopen=reopen)
    assert result.passed, f"{result.contract}\n{result.failure}"
    assert (tmp_path / "shard-0000").exists() is not by_uri


async def test_it_says_what_lost_calls_were_for(open_store: Open, tmp_path: Path) -> None:
    async def run() -> tuple[LostCall, ...]:
        store = await open_store(directory=tmp_path / "shard-0000")
        lost = replace(sample_intent("r", "lost"), request_key="1" * 32)
        for call_id in ("lost", "try"):
            epoch = await store.write(Begin(replace(lost, model_call_id=call_id)))
        await store.write(Commit(sample_entry("r", "try"), epoch=epoch))
        await store.close()
        reopened = await open_store(directory=tmp_path / "shard-0000")
        snapshot: Snapshot = await reopened.freeze("r")
        await reopened.close()
        return snapshot.lost_calls

    assert await run() == (LostCall(model_call_id="lost", retries=("try",), answers=()),)


@pytest.mark.parametrize("name", [*LINEAGE_CHECKS, *LINEAGE_DURABILITY_CHECKS])
async def test_a_state_actor_hosts_the_example(name: str, open_store: Open, tmp_path: Path) -> None:
    async def shard() -> Shard:
        return Shard(tmp_path, "fs_store:open_store")

    async def restart(store: StoreWithLineage) -> StoreWithLineage:
        return await shard()  # as after a kill: nothing was closed

    result = await run_lineage_check(name, shard, reopen=restart)
    assert result.passed, f"{result.contract}\n{result.failure}"


def test_the_command_of_the_docs() -> None:
    command = [sys.executable, "-m", "gym_capture.cli", "conformance", "fs_store:open_store", "--durability"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout


def objects(directory: Path, kind: str = "") -> list[Path]:
    return sorted(path for path in directory.iterdir() if f"~{kind}" in path.name)


@pytest.mark.parametrize("kind", ["intent", "entry", "incomplete", "delivery"])
@pytest.mark.parametrize("cut_to", [0, 10, -1])
async def test_an_object_that_is_not_whole_masks_its_rollout_and_no_other(
    kind: str, cut_to: int, open_store: Open, tmp_path: Path
) -> None:
    store = await open_store(directory=tmp_path)
    _, epoch = await run_call(store, "r", "c")
    await store.write(MarkIncomplete("r", "why", epoch=epoch))
    await store.write(MarkDelivery("r", "c", delivered=True, epoch=epoch))
    other, _ = await run_call(store, "other", "c")
    await store.close()
    (damaged,) = (path for path in objects(tmp_path, kind) if path.name.startswith("r~"))
    damaged.write_bytes(damaged.read_bytes()[:cut_to])
    store = await open_store(directory=tmp_path)
    assert [problem.reason for problem in (await store.freeze("r")).problems] == ["corrupt_object"]
    snapshot = await store.freeze("other")
    expect_entries(snapshot, other)
    assert snapshot.problems == ()
    await store.close()


async def test_a_tombstone_that_is_not_whole_retires_nothing(open_store: Open, tmp_path: Path) -> None:
    store = await open_store(directory=tmp_path)
    entry, _ = await run_call(store, "r", "c")
    kept = {path: path.read_bytes() for path in objects(tmp_path)}
    await store.write(Clear("r"))
    await store.close()
    (tombstone,) = objects(tmp_path)
    tombstone.write_bytes(b"")
    for path, data in kept.items():  # as when the process died before it deleted them
        path.write_bytes(data)
    store = await open_store(directory=tmp_path)
    snapshot = await store.freeze("r")
    expect_entries(snapshot, entry)
    assert [problem.reason for problem in snapshot.problems] == ["corrupt_object"]
    await store.close()


async def test_an_entry_that_goes_missing_later_masks_its_rollout(open_store: Open, tmp_path: Path) -> None:
    store = await open_store(directory=tmp_path)
    await run_call(store, "r", "c")
    objects(tmp_path, "entry")[0].unlink()
    (problem,) = (await store.freeze("r")).problems
    assert (problem.reason, problem.call_id) == ("corrupt_object", "c")
    await store.close()


async def test_what_a_dead_process_did_not_delete_is_deleted_when_it_opens(open_store: Open, tmp_path: Path) -> None:
    store = await open_store(directory=tmp_path)
    await run_call(store, "r", "c")
    left = {path: path.read_bytes() for path in objects(tmp_path)}
    await store.write(Clear("r"))
    await store.close()
    assert [path.name.split("~")[2] for path in objects(tmp_path)] == ["retired"]
    for path, data in left.items():
        path.write_bytes(data)
    (tmp_path / "somebody's notes").touch()
    store = await open_store(directory=tmp_path)
    assert await store.rollout_ids() == []
    assert [path.name.split("~")[2] for path in objects(tmp_path)] == ["retired"]
    await store.close()


async def test_epochs_do_not_come_again_after_everything_was_deleted(open_store: Open, tmp_path: Path) -> None:
    store = await open_store(directory=tmp_path)
    _, epoch = await run_call(store, "r", "c")
    await store.close()
    shutil.rmtree(tmp_path)
    store = await open_store(directory=tmp_path)
    assert await store.write(Begin(sample_intent("r", "c"))) > epoch
    await store.close()


async def test_a_file_system_that_fails_is_said_and_recovers(open_store: Open, tmp_path: Path) -> None:
    directory = tmp_path / "records"
    store = await open_store(directory=directory)
    shutil.rmtree(directory)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        await store.write(Begin(sample_intent("r", "c")))
    assert await store.rollout_ids() == []
    directory.mkdir()
    entry, _ = await run_call(store, "r", "c")
    expect_entries(await store.freeze("r"), entry)
    await store.close()


async def test_a_caller_that_goes_away_leaves_no_object_that_is_not_known(open_store: Open, tmp_path: Path) -> None:
    store = await open_store(directory=tmp_path)
    epoch = await store.write(Begin(sample_intent("r", "c")))
    put = asyncio.ensure_future(store.write(Commit(sample_entry("r", "c"), epoch=epoch)))
    await asyncio.sleep(0)
    put.cancel()
    await asyncio.gather(put, return_exceptions=True)
    expect_entries(await store.freeze("r"), sample_entry("r", "c"))
    await store.close()
    store = await open_store(directory=tmp_path)
    expect_entries(await store.freeze("r"), sample_entry("r", "c"))
    await store.close()
