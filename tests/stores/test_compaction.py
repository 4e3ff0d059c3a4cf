"""Retired rollouts give their disk space back, and nothing else is lost, moved or revived by it."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Begin, Clear, Commit, Drop
from gym_capture.capture.records import Snapshot, TokenEntry
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import RetiredRolloutError
from gym_capture.stores.frames import RecordType
from gym_capture.stores.log import LogStore
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import Disk
from tests.stores.disks import GatedSync
from tests.stores.puts import encoded_commit


def big_entry(rollout_id: str, call_id: str) -> TokenEntry:
    return sample_entry(rollout_id, call_id, prompt=range(2000))


async def begin(store: LogStore, rollout_id: str, call_id: str) -> int:
    return await store.write(Begin(sample_intent(rollout_id, call_id)))


async def drop(store: LogStore, rollout_id: str) -> None:
    snapshot = await store.freeze(rollout_id)
    await store.write(Drop(rollout_id, snapshot.snapshot_id, snapshot.version))


def log_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.log"))


def contents(snapshot: Snapshot) -> tuple[str, int, list[bytes]]:
    return snapshot.snapshot_id, snapshot.version, sorted(map(encode_entry, snapshot.entries))


async def test_space_of_dropped_rollouts_comes_back(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, segment_bytes=100_000)
    kept = {}
    for index in range(60):
        rollout_id = f"r{index}"
        epoch = await begin(store, rollout_id, "c")
        await store.write(Commit(big_entry(rollout_id, "c"), epoch=epoch))
        if index % 20 == 0:
            kept[rollout_id] = contents(await store.freeze(rollout_id))
        else:
            await drop(store, rollout_id)
    await store.compact()
    stats = store.stats()
    assert stats.live_rollouts == 3
    assert stats.total_bytes < 3 * 100_000
    assert stats.total_bytes == log_bytes(tmp_path)
    for _ in range(2):
        assert {r: contents(await store.freeze(r)) for r in await store.rollout_ids()} == kept
        await store.close()
        store = await LogStore.open(tmp_path, segment_bytes=100_000)
    assert store.recovery.damaged == ()
    await store.close()


async def test_tombstone_outlives_the_records_that_it_retires(tmp_path: Path) -> None:
    """A tombstone whose time is over still has to hide records in an older segment."""

    store = await LogStore.open(tmp_path, segment_bytes=1, tombstone_ttl_s=-1)
    stay, old, filler = [await begin(store, rollout_id, "c") for rollout_id in ("stay", "old", "filler")]
    # One segment with the records of `old` that is worth keeping, for the sake of `stay`.
    await store.write_many(
        [encoded_commit(big_entry("stay", "c"), stay), encoded_commit(sample_entry("old", "c"), old)]
    )
    # One segment with the tombstone of `old` that is not, once `filler` is dropped.
    await asyncio.gather(drop(store, "old"), store.write(Commit(big_entry("filler", "c"), epoch=filler)))
    await drop(store, "filler")
    await store.compact()
    await store.close()
    store = await LogStore.open(tmp_path, segment_bytes=1)
    assert await store.rollout_ids() == ["stay"]
    with pytest.raises(RetiredRolloutError):
        await begin(store, "old", "late")
    await store.close()


async def test_a_rollout_that_stays_for_ever_does_not_keep_all_tombstones(tmp_path: Path) -> None:
    """Tombstones may only go from the oldest segment; one that is alive as a whole must not hold them back for ever."""

    store = await LogStore.open(tmp_path, segment_bytes=100_000, fsync=False, tombstone_ttl_s=-1)
    stay = await begin(store, "stay", "c")
    await store.write_many([encoded_commit(big_entry("stay", f"c{index}"), stay) for index in range(20)])
    before = contents(await store.freeze("stay"))
    for index in range(2_000):
        await begin(store, f"r{index}", "c")
        await drop(store, f"r{index}")
    await store.compact()
    tombstones = [
        frame.rollout_id
        for segment in read_segments(tmp_path)
        for frame in segment.frames
        if frame.type is RecordType.RETIRED
    ]
    assert len(tombstones) < 1_500
    assert contents(await store.freeze("stay")) == before
    assert await store.rollout_ids() == ["stay"]
    await store.close()
    store = await LogStore.open(tmp_path, fsync=False)
    assert contents(await store.freeze("stay")) == before
    assert await store.rollout_ids() == ["stay"]
    await store.close()


async def test_swept_tombstone_still_refuses_late_writers(tmp_path: Path) -> None:
    """The store has forgotten the rollout, but no attempt gets the epoch of the old one again."""

    store = await LogStore.open(tmp_path, segment_bytes=1, tombstone_ttl_s=-1)
    stay = await begin(store, "stay", "c")
    epochs = [await begin(store, "r", "c")]
    for _ in range(3):
        await drop(store, "r")
        await store.write(Commit(sample_entry("stay", f"c{len(epochs)}"), epoch=stay))
        await store.compact()
        await store.close()
        store = await LogStore.open(tmp_path, segment_bytes=1, tombstone_ttl_s=-1)
        await store.write(Clear("r"))
        epochs.append(await begin(store, "r", "c"))
        for epoch in epochs[:-1]:
            with pytest.raises(RetiredRolloutError):
                await store.write(Commit(sample_entry("r", "c"), epoch=epoch))
    assert len(set(epochs)) == len(epochs)
    await store.close()


async def test_epochs_are_not_given_out_again_after_their_records_are_gone(tmp_path: Path) -> None:
    """Each opening starts a segment. In the end the one that is left holds records of the first epoch only."""

    store = await LogStore.open(tmp_path)
    stay, junk = [await begin(store, rollout_id, "c") for rollout_id in ("stay", "junk")]
    await store.write(Commit(big_entry("junk", "c"), epoch=junk))
    await store.close()

    store = await LogStore.open(tmp_path)
    await store.write(Clear("junk"))
    last = await begin(store, "last", "c")
    await store.write(Commit(big_entry("last", "c"), epoch=last))
    await store.write(Clear("last"))
    await store.close()

    store = await LogStore.open(tmp_path, tombstone_ttl_s=-1)
    await store.write(Commit(sample_entry("stay", "c"), epoch=stay))
    await store.compact()
    assert store.stats().segments == 1
    await store.close()

    store = await LogStore.open(tmp_path)
    assert store.recovery.records == 2
    assert await begin(store, "next", "c") > last
    await store.close()


async def test_epochs_are_not_given_out_again_when_nothing_is_left(tmp_path: Path) -> None:
    epochs: list[int] = []
    for _ in range(3):
        store = await LogStore.open(tmp_path, tombstone_ttl_s=-1)
        await store.compact()
        epochs.append(await begin(store, "r", "c"))
        await store.write(Clear("r"))
        await store.close()
    assert len(set(epochs)) == 3


async def test_no_copy_of_a_record_follows_the_tombstone_that_retires_it(tmp_path: Path) -> None:
    """A rollout is dropped after compaction has read its records and before it writes them again."""
    sync = GatedSync()

    store = await LogStore.open(tmp_path)
    small, junk = [await begin(store, rollout_id, "c") for rollout_id in ("small", "junk")]
    await store.write(Commit(sample_entry("small", "c"), epoch=small))
    await store.write(Commit(big_entry("junk", "c"), epoch=junk))
    await store.close()

    store = await LogStore.open(tmp_path, disk=Disk(sync=sync))
    await store.write(Clear("junk"))
    snapshot = await store.freeze("small")
    with sync.held():
        dropping = asyncio.create_task(store.write(Drop("small", snapshot.snapshot_id, snapshot.version)))
        await sync.reached()
        compacting = asyncio.create_task(store.compact())
        await store.freeze("small")  # read behind the compaction, so that has read its segment by now
        assert not dropping.done()
    await asyncio.gather(dropping, compacting)
    await store.close()
    frames = [frame for segment in read_segments(tmp_path) for frame in segment.frames if frame.rollout_id == "small"]
    types = [frame.type for frame in frames]
    # Clearing sets off a pass of its own, whose copies may be there already: before the tombstone they are harmless.
    assert types.count(RecordType.RETIRED) == 1
    assert types[-1] is RecordType.RETIRED


async def test_consumed_records_stay_with_keep_records(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, segment_bytes=1, keep_records=True, tombstone_ttl_s=-1)
    for attempt in range(2):
        await store.write(Clear("r"))
        epoch = await begin(store, "r", "c")
        await store.write(Commit(sample_entry("r", "c", text=f"attempt {attempt}"), epoch=epoch))
        await drop(store, "r")
    epoch = await begin(store, "stale", "c")
    await store.write(Commit(big_entry("stale", "c"), epoch=epoch))
    await store.write(Clear("stale"))
    await store.compact()
    await store.close()
    # Whether a consumed rollout is kept was decided when it was dropped.
    store = await LogStore.open(tmp_path, segment_bytes=1, tombstone_ttl_s=-1)
    assert await store.rollout_ids() == []
    assert (await store.freeze("r")).entries == ()
    await store.compact()
    await store.close()
    data = b"".join(path.read_bytes() for path in tmp_path.glob("*.log"))
    assert (b"attempt 0" in data, b"attempt 1" in data) == (True, True)
    assert len(data) < 8000  # the cleared record, never consumed, is gone


@pytest.mark.parametrize("seed", range(4))
async def test_compaction_among_concurrent_rollouts(seed: int, tmp_path: Path) -> None:
    """Many attempts that write, freeze, drop and start over while segments are rewritten under them."""
    rng = random.Random(seed)

    async def lifecycle(store: LogStore, rollout_id: str, attempts: int, is_kept: bool) -> None:
        for attempt in range(attempts):
            await store.write(Clear(rollout_id))
            calls = [f"a{attempt}c{index}" for index in range(rng.randint(1, 6))]
            epochs = await asyncio.gather(*(begin(store, rollout_id, call_id) for call_id in calls))
            entries = [
                replace(sample_entry(rollout_id, call_id), prompt_token_ids=np.arange(1, rng.randint(2, 500)))
                for call_id in calls
            ]
            await asyncio.gather(*(store.write(Commit(entry, epoch=epochs[0])) for entry in entries))
            snapshot = await store.freeze(rollout_id)
            assert contents(snapshot)[2] == sorted(map(encode_entry, entries))
            if attempt < attempts - 1 or not is_kept:
                await store.write(Drop(rollout_id, snapshot.snapshot_id, snapshot.version))
                with pytest.raises(RetiredRolloutError):
                    await store.write(Commit(entries[0], epoch=epochs[0]))

    ttl_s = rng.choice([-1.0, 1e9])
    store = await LogStore.open(tmp_path, segment_bytes=5000, fsync=False, tombstone_ttl_s=ttl_s)
    await asyncio.gather(*(lifecycle(store, f"r{index}", rng.randint(1, 4), index % 5 == 0) for index in range(40)))
    await store.compact()
    kept = {rollout_id: contents(await store.freeze(rollout_id)) for rollout_id in await store.rollout_ids()}
    assert sorted(kept) == sorted(f"r{index}" for index in range(0, 40, 5))
    await store.close()
    store = await LogStore.open(tmp_path, segment_bytes=5000)
    assert {r: contents(await store.freeze(r)) for r in await store.rollout_ids()} == kept
    await store.close()
