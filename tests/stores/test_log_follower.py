"""What a follower shows of a log is what the store would give, at every moment, and the log stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Begin, Clear, Commit, Complete, Drop, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores import compaction, log_follower
from gym_capture.stores.frames import RecordType
from gym_capture.stores.log import LogStore
from gym_capture.stores.log_follower import LogFollower
from gym_capture.stores.log_reader import LogReader
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import segment_numbers
from tests.stores.test_log_reader import ROLLOUTS, write_all


def follow(follower: LogFollower) -> LogFollower:
    while follower.advance():
        pass
    return follower


def live(follower: LogFollower) -> list[str]:
    return sorted(name for name, each in follower.rollouts.items() if each.places or each.masking)


async def call(store: LogStore, rollout_id: str, call_id: str) -> None:
    epoch = await store.write(Begin(sample_intent(rollout_id, call_id)))
    await store.write(Commit(sample_entry(rollout_id, call_id), epoch=epoch))


async def check_against(store: LogStore, follower: LogFollower) -> None:
    assert live(follower) == sorted(await store.rollout_ids())
    for rollout_id in await store.rollout_ids():
        frozen, expected = follower.read(rollout_id), await store.freeze(rollout_id)
        assert frozen is not None
        snapshot = frozen.snapshot
        assert (snapshot.snapshot_id, snapshot.version) == (expected.snapshot_id, expected.version)
        assert (snapshot.incomplete, snapshot.problems) == (expected.incomplete, expected.problems)
        assert (snapshot.registration, snapshot.outcome) == (expected.registration, expected.outcome)
        assert sorted(map(encode_entry, snapshot.entries)) == sorted(map(encode_entry, expected.entries))
        said = follower.rollouts[rollout_id]
        assert (said.registration, said.outcome) == (expected.registration, expected.outcome)


async def test_a_log_is_followed_while_it_is_written(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path)
    await write_all(tmp_path)
    store = await LogStore.open(tmp_path, segment_bytes=2_000)
    for n in range(12):
        await call(store, f"r{n % 5}", f"c{n}")
        if n % 5 == 0:
            await store.write(Register(f"r{n}", Registration(group_id=f"g{n}")))
        await check_against(store, follow(follower))
    follower.news()
    await store.write(Complete("r0", Outcome(reward=1.0)))
    follow(follower)
    assert (follower.news(), follower.news()) == (["r0"], [])
    assert follower.rollouts["r1"].calls == 3
    await check_against(store, follower)
    await store.close()


async def test_what_is_consumed_is_gone_and_compaction_loses_nothing(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, segment_bytes=4_000)
    follower = LogFollower(tmp_path)
    for n in range(30):
        await call(store, f"r{n}", "c1")
        await call(store, "stays", f"c{n}")
    follow(follower)
    for n in range(30):
        frozen = await store.freeze(f"r{n}")
        await store.write(Drop(f"r{n}", frozen.snapshot_id, frozen.version))
        if n % 10 == 0:
            follow(follower)
    await store.compact()
    assert min(segment_numbers(tmp_path)) > 1, "nothing was compacted"
    await store.close()
    store = await LogStore.open(tmp_path, segment_bytes=4_000)
    await call(store, "new", "c1")
    follow(follower)
    assert live(follower) == ["new", "stays"]
    assert follower.rollouts["stays"].calls == 30
    await check_against(store, follower)
    await store.write(Clear("stays"))
    await call(store, "stays", "second")
    await check_against(store, follow(follower))
    await store.close()


async def test_a_copy_whose_original_is_still_there_is_no_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(directory: Path, number: int) -> None:
        raise OSError("the store ends here")

    store = await LogStore.open(tmp_path, segment_bytes=4_000)
    for n in range(10):
        await call(store, f"r{n}", "c1")
        await call(store, "stays", f"c{n}")
    monkeypatch.setattr(compaction, "delete_segment", ends)
    for n in range(10):
        frozen = await store.freeze(f"r{n}")
        await store.write(Drop(f"r{n}", frozen.snapshot_id, frozen.version))
    await store.compact()
    await store.close()
    frames = [frame for segment in read_segments(tmp_path) for frame in segment.frames]
    committed = [frame for frame in frames if (frame.rollout_id, frame.type) == ("stays", RecordType.COMMITTED)]
    assert len(committed) > 10, "nothing was copied"
    assert follow(LogFollower(tmp_path)).rollouts["stays"].calls == 10


async def test_a_rollout_whose_records_were_moved_since_the_last_look_is_not_shown_in_part(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, segment_bytes=4_000)
    for n in range(10):
        await call(store, f"r{n}", "c1")
        await call(store, "stays", f"c{n}")
    follower = follow(LogFollower(tmp_path))
    for n in range(10):
        frozen = await store.freeze(f"r{n}")
        await store.write(Drop(f"r{n}", frozen.snapshot_id, frozen.version))
    await store.compact()
    with pytest.raises(StoreUnavailableError, match="ask for stays again"):
        follower.read("stays")
    await check_against(store, follow(follower))
    await store.close()


async def test_a_batch_that_is_half_written_is_looked_at_again(tmp_path: Path) -> None:
    await write_all(tmp_path)
    *_, last = read_segments(tmp_path)
    data = last.path.read_bytes()
    batches = [frame.offset for frame in last.frames if frame.starts_batch]
    for cut in range(batches[-2] + 1, len(data), 37):
        follower = LogFollower(tmp_path)
        last.path.write_bytes(data[:cut])
        follow(follower)
        assert not follower.is_damaged
        last.path.write_bytes(data)
        follow(follower)
        for rollout_id in ROLLOUTS:
            one, other = follower.read(rollout_id), follow(LogFollower(tmp_path)).read(rollout_id)
            assert (one and one.snapshot.snapshot_id) == (other and other.snapshot.snapshot_id)


@pytest.mark.parametrize("look_bytes", [1, 300, 1_000])
async def test_a_log_is_read_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_bytes: int) -> None:
    monkeypatch.setattr(log_follower, "_LOOK_BYTES", look_bytes)
    await write_all(tmp_path)
    follower = LogFollower(tmp_path)
    looks = 1
    while follower.advance():
        looks += 1
    assert looks > 1
    store = await LogStore.open(tmp_path)
    await check_against(store, follower)
    await store.close()


@pytest.mark.parametrize("look_bytes", [300, 1 << 20])
async def test_damage_masks_what_a_reader_says_it_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_bytes: int
) -> None:
    monkeypatch.setattr(log_follower, "_LOOK_BYTES", look_bytes)
    await write_all(tmp_path)
    first = next(iter(read_segments(tmp_path)))
    data = first.path.read_bytes()
    for place in range(40, len(data), 211):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        first.path.write_bytes(damaged)
        follower = follow(LogFollower(tmp_path))
        reader = LogReader(tmp_path)
        try:
            assert live(follower) == reader.rollout_ids()
            for rollout_id in reader.rollout_ids():
                frozen = follower.read(rollout_id)
                assert frozen is not None
                encoded = reader.freeze_encoded(rollout_id)
                assert f'"{frozen.snapshot.snapshot_id}"'.encode() in encoded
        finally:
            reader.close()


async def test_nothing_is_changed_and_nothing_is_locked(tmp_path: Path) -> None:
    await write_all(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    follow(LogFollower(tmp_path)).read("a")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    store = await LogStore.open(tmp_path)
    follow(LogFollower(tmp_path))
    await store.close()


def test_a_fifo_among_the_segments_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "segment-0000000001.log")
    with pytest.raises(StoreUnavailableError, match="is a FIFO"):
        LogFollower(tmp_path).advance()


async def test_a_directory_that_went_away_ends_a_look(tmp_path: Path) -> None:
    await write_all(tmp_path)
    follower = follow(LogFollower(tmp_path))
    (tmp_path / "segment-0000009999.log").symlink_to("nowhere")
    with pytest.raises(StoreUnavailableError, match="No such file"):
        follower.advance()
    shutil.rmtree(tmp_path)
    with pytest.raises(StoreUnavailableError, match="No such file"):
        follower.advance()


async def test_bytes_that_are_no_records_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await write_all(tmp_path)
    *_, last = read_segments(tmp_path)
    begin = [frame.offset for frame in last.frames if frame.starts_batch][-1]
    data = last.path.read_bytes()
    monkeypatch.setattr(log_follower, "_LOOK_BYTES", 1 << 20)
    most = 0

    def read(fd: int, size: int, offset: int) -> bytes:
        nonlocal most
        most = max(most, size)
        return pread(fd, size, offset)

    pread = os.pread
    monkeypatch.setattr(os, "pread", read)
    follower = follow(LogFollower(tmp_path))
    with last.path.open("r+b") as file:
        file.truncate(begin)
        file.truncate(begin + (16 << 20))
    follow(follower)
    assert not follower.is_damaged, "a batch that was never acknowledged"
    with last.path.open("ab") as file:
        file.write(data[begin:])
    follow(follower)
    assert follower.is_damaged
    assert most <= 1 << 20
    reader = LogReader(tmp_path)
    try:
        assert live(follower) == reader.rollout_ids()
    finally:
        reader.close()
