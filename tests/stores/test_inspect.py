"""A log directory can be looked into while it is in use, and nothing in it changes by that."""

from pathlib import Path

import pytest

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Begin, Clear, Commit, Drop
from gym_capture.capture.records import TokenEntry
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.inspect import read_snapshots, scan
from gym_capture.stores.log import LogStore
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import segment_path


async def call(store: LogStore, rollout_id: str, call_id: str, text: str = "hello") -> TokenEntry:
    epoch = await store.write(Begin(sample_intent(rollout_id, call_id)))
    entry = sample_entry(rollout_id, call_id, text=text)
    await store.write(Commit(entry, epoch=epoch))
    return entry


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def test_log_is_read_while_a_store_has_it_open(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    await call(store, "b", "c1")
    await call(store, "a", "c1")
    await call(store, "a", "c2")
    await store.write(Begin(sample_intent("a", "lost")))
    before = files(tmp_path)
    report = scan(tmp_path)
    assert [(rollout.rollout_id, rollout.calls) for rollout in report.rollouts] == [("a", 2), ("b", 1)]
    assert report.rollouts[0].incomplete == ("dangling_intent:lost",)
    assert (report.is_sound, report.torn_bytes, report.consumed) == (True, 0, ())
    assert report.size_bytes == store.stats().total_bytes
    assert sum(rollout.size_bytes for rollout in report.rollouts) == store.stats().live_bytes
    for snapshot in read_snapshots(tmp_path):
        expected = await store.freeze(snapshot.rollout_id)
        assert (snapshot.snapshot_id, snapshot.incomplete) == (expected.snapshot_id, expected.incomplete)
        assert list(map(encode_entry, snapshot.entries)) == list(map(encode_entry, expected.entries))
    assert files(tmp_path) == before
    await store.close()


async def test_damage_and_torn_tail_are_reported_and_left_alone(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    await call(store, "a", "c1")
    await call(store, "b", "c1")
    await store.close()
    (segment,) = read_segments(tmp_path)
    data = bytearray(segment.path.read_bytes())
    frame = segment.frames[1]
    data[frame.offset + frame.size - 10] ^= 1
    segment.path.write_bytes(data + b"unfinished")
    before = files(tmp_path)
    report = scan(tmp_path)
    assert not report.is_sound
    assert [(damage.start, damage.rollout_id) for damage in report.damaged] == [(frame.offset, "a")]
    assert report.torn_bytes == len(b"unfinished")
    assert [rollout.problems for rollout in report.rollouts] == [("corrupt_log",), ()]
    assert [[problem.reason for problem in snapshot.problems] for snapshot in read_snapshots(tmp_path)] == [
        ["corrupt_log"],
        [],
    ]
    assert files(tmp_path) == before


async def test_consumed_rollouts_are_read_back_attempt_by_attempt(tmp_path: Path) -> None:
    async def write() -> list[str]:
        store = await LogStore.open(tmp_path, segment_bytes=1, keep_records=True)
        consumed = []
        for attempt in ("first", "second"):
            await store.write(Clear("r"))
            await call(store, "r", "c1", text=attempt)
            await call(store, "r", "c2", text=attempt)
            snapshot = await store.freeze("r")
            consumed.append(snapshot.snapshot_id)
            await store.write(Drop("r", snapshot.snapshot_id, snapshot.version))
        await call(store, "live", "c")
        await store.compact()
        await store.close()
        return consumed

    consumed = await write()
    assert scan(tmp_path).consumed == ("r", "r")
    assert [snapshot.rollout_id for snapshot in read_snapshots(tmp_path)] == ["live"]
    snapshots = list(read_snapshots(tmp_path, consumed=True))
    assert [snapshot.snapshot_id for snapshot in snapshots] == consumed
    for snapshot, text in zip(snapshots, ("first", "second"), strict=True):
        assert [entry.reply.output_items[0]["content"][0]["text"] for entry in snapshot.entries] == [text, text]


def test_directory_without_a_log_is_empty(tmp_path: Path) -> None:
    report = scan(tmp_path)
    assert (report.segments, report.rollouts, report.size_bytes) == ((), (), 0)
    assert list(read_snapshots(tmp_path, consumed=True)) == []


async def test_segment_that_is_deleted_meanwhile_says_so(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, segment_bytes=1)
    await call(store, "a", "c")
    await call(store, "b", "c")
    await store.close()
    snapshots = read_snapshots(tmp_path)
    assert next(snapshots).rollout_id == "a"
    segment_path(tmp_path, 4).unlink()
    with pytest.raises(StoreUnavailableError, match="changed while it was read"):
        next(snapshots)
