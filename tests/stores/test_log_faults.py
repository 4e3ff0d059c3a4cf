"""Disks that are slow, full or broken; callers that go away; a directory that is in use."""

import asyncio
import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from gym_capture.capture.operations import Begin, Clear, Commit
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import ConflictingCallError, RecordError, RetiredRolloutError, StoreUnavailableError
from gym_capture.stores.log import LogStore
from gym_capture.stores.segments import Disk
from tests.stores.disks import FailingSync, FullDisk, GatedSync
from tests.stores.puts import encoded_commit


async def begin(store: LogStore, rollout_id: str, call_id: str) -> int:
    return await store.write(Begin(sample_intent(rollout_id, call_id)))


async def recorded_calls(store: LogStore, rollout_id: str) -> list[str]:
    return sorted(entry.model_call_id for entry in (await store.freeze(rollout_id)).entries)


def segment_sizes(directory: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(directory.glob("*.log"))]


async def turns_of_the_loop() -> None:
    """Lets everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- acknowledging -----------------------------------------------------------------------------------------------


async def test_nothing_is_acknowledged_or_shown_before_its_sync_returns(tmp_path: Path) -> None:
    sync = GatedSync()

    store = await LogStore.open(tmp_path, disk=Disk(sync=sync))
    epoch = await begin(store, "r", "c")
    before = await store.freeze("r")
    with sync.held():
        put = asyncio.create_task(store.write(Commit(sample_entry("r", "c"), epoch=epoch)))
        repeat = asyncio.create_task(store.write(Commit(sample_entry("r", "c"), epoch=epoch)))
        await sync.reached()
        await turns_of_the_loop()
        assert not put.done()
        assert not repeat.done()
        assert (await store.freeze("r")).snapshot_id == before.snapshot_id
    await asyncio.gather(put, repeat)
    assert await recorded_calls(store, "r") == ["c"]
    await store.close()


async def test_one_sync_covers_all_that_arrived_meanwhile(tmp_path: Path) -> None:
    sync = GatedSync()

    store = await LogStore.open(tmp_path, disk=Disk(sync=sync))
    epochs = [await begin(store, f"r{index}", "c") for index in range(50)]
    with sync.held():
        first = asyncio.create_task(begin(store, "first", "c"))
        await sync.reached()
        puts = [
            asyncio.create_task(store.write(Commit(sample_entry(f"r{index}", "c"), epoch=epoch)))
            for index, epoch in enumerate(epochs)
        ]
        await turns_of_the_loop()
        calls = sync.calls
    await asyncio.gather(first, *puts)
    assert sync.calls == calls + 1
    await store.close()


async def test_without_fsync_nothing_is_synced(tmp_path: Path) -> None:
    sync = GatedSync()

    store = await LogStore.open(tmp_path, fsync=False, disk=Disk(sync=sync))
    await begin(store, "r", "c")
    await store.close()
    assert sync.calls == 0


async def test_write_of_a_caller_that_went_away_counts(tmp_path: Path) -> None:
    sync = GatedSync()

    store = await LogStore.open(tmp_path, disk=Disk(sync=sync))
    epoch = await begin(store, "r", "c")
    with sync.held():
        other = asyncio.create_task(begin(store, "other", "c"))
        await sync.reached()
        put = asyncio.create_task(store.write(Commit(sample_entry("r", "c"), epoch=epoch)))
        await turns_of_the_loop()
        put.cancel()
        await turns_of_the_loop()
        assert put.cancelled()
    await other
    await store.close()
    store = await LogStore.open(tmp_path)
    assert await recorded_calls(store, "r") == ["c"]
    await store.close()


async def test_closing_makes_durable_what_was_submitted(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    epoch = await begin(store, "r", "c0")
    puts = [
        asyncio.create_task(store.write(Commit(sample_entry("r", f"c{index}"), epoch=epoch))) for index in range(20)
    ]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*puts)
    store = await LogStore.open(tmp_path)
    assert len(await recorded_calls(store, "r")) == 20
    await store.close()


async def test_puts_on_behalf_of_many_are_answered_one_by_one(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    a, b = await begin(store, "a", "c"), await begin(store, "b", "c")
    batches = store.stats().commits.batches
    first = encoded_commit(sample_entry("a", "c"), a)
    answers = await store.write_many(
        [
            first,
            encoded_commit(sample_entry("a", "late"), a + 100),
            encoded_commit(sample_entry("a", "x" * 70_000), a),  # too long for the log
            encoded_commit(sample_entry("b", "c"), b),
            encoded_commit(sample_entry("a", "c", text="other"), a),
            encoded_commit(sample_entry("a", "d"), cast(int, float(a))),
            first,
        ]
    )
    kinds = [a, RetiredRolloutError, RecordError, b, ConflictingCallError, RecordError, a]
    assert [answer if isinstance(answer, int) else type(answer) for answer in answers] == kinds
    assert store.stats().commits.batches == batches + 2  # the two of one call do not share a batch
    await store.close()


# --- failing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_bytes", [0, 1, 70, 300, 5000])
async def test_full_disk_refuses_and_recovers_when_there_is_space_again(room_bytes: int, tmp_path: Path) -> None:
    disk = FullDisk(room_bytes=1 << 20)

    store = await LogStore.open(tmp_path, segment_bytes=3000, disk=Disk(write=disk))
    epoch = await begin(store, "r", "c0")
    await store.write(Commit(sample_entry("r", "c0"), epoch=epoch))
    disk.room_bytes = room_bytes
    acknowledged = ["c0"]
    for index in range(1, 30):
        put = store.write(Commit(sample_entry("r", f"c{index}"), epoch=epoch))
        (outcome,) = await asyncio.gather(put, return_exceptions=True)
        if outcome == epoch:
            acknowledged.append(f"c{index}")
        else:
            assert isinstance(outcome, StoreUnavailableError)
            assert outcome.retryable
            assert "No space left" in str(outcome)
    assert len(acknowledged) < 10
    assert await recorded_calls(store, "r") == sorted(acknowledged)
    assert len(segment_sizes(tmp_path)) < 10  # failing attempts leave no litter
    disk.room_bytes = 1 << 20
    await store.write(Commit(sample_entry("r", "c29"), epoch=epoch))
    before = await store.freeze("r")
    await store.close()
    store = await LogStore.open(tmp_path)
    assert (await store.freeze("r")).snapshot_id == before.snapshot_id
    assert await recorded_calls(store, "r") == sorted({*acknowledged, "c29"})
    assert (store.recovery.damaged, store.recovery.torn_bytes) == ((), 0)
    await store.close()


async def test_file_size_limit_of_the_system_is_a_failed_write(tmp_path: Path) -> None:
    """The same with a real limit, behind no seam."""

    store = await LogStore.open(tmp_path)
    epoch = await begin(store, "r", "c0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreUnavailableError, match="File too large"):
            await store.write(Commit(sample_entry("r", "c0", prompt=range(1000)), epoch=epoch))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await store.write(Commit(sample_entry("r", "c0", prompt=range(1000)), epoch=epoch))
    await store.close()
    store = await LogStore.open(tmp_path)
    assert await recorded_calls(store, "r") == ["c0"]
    await store.close()


async def test_first_call_of_a_rollout_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    disk = FullDisk(room_bytes=0)

    store = await LogStore.open(tmp_path, disk=Disk(write=disk))
    with pytest.raises(StoreUnavailableError):
        await begin(store, "r", "c")
    assert await store.rollout_ids() == []
    with pytest.raises(RetiredRolloutError):
        await store.write(Commit(sample_entry("r", "c"), epoch=1))
    disk.room_bytes = 1 << 20
    epoch = await begin(store, "r", "c")
    await store.write(Commit(sample_entry("r", "c"), epoch=epoch))
    await store.close()


async def test_segment_whose_sync_failed_is_not_written_to_again(tmp_path: Path) -> None:
    sync = FailingSync()

    store = await LogStore.open(tmp_path, disk=Disk(sync=sync))
    epoch = await begin(store, "r", "c0")
    await store.write(Commit(sample_entry("r", "c0"), epoch=epoch))
    sizes = segment_sizes(tmp_path)
    sync.failures = 1
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        await store.write(Commit(sample_entry("r", "c1"), epoch=epoch))
    assert await recorded_calls(store, "r") == ["c0"]
    await store.write(Commit(sample_entry("r", "c2"), epoch=epoch))
    assert segment_sizes(tmp_path)[:-1] == sizes
    assert store.stats().commits.failed_batches == 1
    await store.close()
    store = await LogStore.open(tmp_path)
    assert await recorded_calls(store, "r") == ["c0", "c2"]
    await store.close()


async def test_log_that_cannot_be_cut_back_takes_no_more_writes(tmp_path: Path) -> None:
    sync = FailingSync()

    def truncate(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = await LogStore.open(tmp_path, disk=Disk(sync=sync, truncate=truncate))
    epoch = await begin(store, "r", "c0")
    sync.failures = 1
    for call_id in ("c1", "c2"):
        with pytest.raises(StoreUnavailableError):
            await store.write(Commit(sample_entry("r", call_id), epoch=epoch))
    assert await recorded_calls(store, "r") == []
    await store.close()
    store = await LogStore.open(tmp_path)
    assert await recorded_calls(store, "r") in ([], ["c1"])  # written, never acknowledged: either is right
    assert store.recovery.damaged == ()
    await store.write(Commit(sample_entry("r", "c1"), epoch=epoch))
    await store.close()


# --- the directory -----------------------------------------------------------------------------------------------


async def test_directory_has_one_holder(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    with pytest.raises(StoreUnavailableError, match=f"in use by process {os.getpid()}: .*`gym-capture state stop`"):
        await LogStore.open(tmp_path)
    other = await asyncio.to_thread(subprocess.run, _opener(tmp_path), capture_output=True, text=True)
    assert other.returncode != 0
    assert "StoreUnavailableError" in other.stderr
    await store.close()
    other = await asyncio.to_thread(subprocess.run, _opener(tmp_path), capture_output=True, text=True)
    assert other.returncode == 0, other.stderr


def _opener(directory: Path) -> list[str]:
    code = "import asyncio, sys; from gym_capture.stores.log import LogStore; asyncio.run(LogStore.open(sys.argv[1]))"
    return [sys.executable, "-c", code, str(directory)]


async def test_files_are_private(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path / "a" / "b")
    await begin(store, "r", "c")
    await store.close()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    for path in (tmp_path / "a" / "b").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_directory_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="cannot be opened"):
        await LogStore.open(tmp_path / "file" / "log")


async def test_call_id_that_does_not_fit_is_refused_alone(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    with pytest.raises(RecordError, match="too long for the log"):
        await begin(store, "r", "c" * 70_000)
    await begin(store, "r", "c")
    await store.close()


async def test_live_rollouts_are_there_when_a_store_opens(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    for rollout_id in ("b", "a", "gone"):
        for call_id in ("c1", "c2"):
            epoch = await begin(store, rollout_id, call_id)
            await store.write(Commit(sample_entry(rollout_id, call_id), epoch=epoch))
    await store.write(Clear("gone"))
    await store.close()
    store = await LogStore.open(tmp_path)
    live = {
        name: [entry.model_call_id for entry in (await store.freeze(name)).entries]
        for name in await store.rollout_ids()
    }
    assert live == {"a": ["c1", "c2"], "b": ["c1", "c2"]}
    await store.close()
