"""Torn tails are cut, damage is named, and no rollout that it touches passes for whole."""

import asyncio
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Begin, Clear, Commit
from gym_capture.capture.records import Snapshot
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import CorruptLogError, StoreUnavailableError
from gym_capture.stores.frames import (
    SEGMENT_HEADER_BYTES,
    Damage,
    Draft,
    Frame,
    RecordType,
    SegmentHeader,
    pack_frame,
    pack_key,
    pack_segment_header,
    read_segment_header,
    scan_segment,
)
from gym_capture.stores.log import LogStore
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import segment_path


def contents(snapshot: Snapshot) -> tuple[str, list[bytes]]:
    return snapshot.snapshot_id, sorted(map(encode_entry, snapshot.entries))


def is_masked(snapshot: Snapshot) -> bool:
    return bool(snapshot.problems or snapshot.incomplete)


async def begin(store: LogStore, rollout_id: str, call_id: str) -> int:
    return await store.write(Begin(sample_intent(rollout_id, call_id)))


async def call(store: LogStore, rollout_id: str, call_id: str) -> None:
    epoch = await begin(store, rollout_id, call_id)
    await store.write(Commit(sample_entry(rollout_id, call_id), epoch=epoch))


class Log:
    """A log directory, and what it held when its store was closed."""

    def __init__(
        self, directory: Path, rollouts: dict[str, tuple[str, list[bytes]]], frames: tuple[Frame, ...]
    ) -> None:
        self.directory = directory
        self.rollouts = rollouts
        self.frames = frames


async def _snapshots(directory: Path) -> tuple[LogStore, dict[str, Snapshot]]:
    store = await LogStore.open(directory)
    return store, {rollout_id: await store.freeze(rollout_id) for rollout_id in await store.rollout_ids()}


def snapshots(directory: Path) -> dict[str, Snapshot]:
    async def read() -> dict[str, Snapshot]:
        store, found = await _snapshots(directory)
        await store.close()
        return found

    return asyncio.run(read())


@pytest.fixture(scope="module")
def log() -> Log:
    """Two segments; in the second, `b` begins, `gone` is retired, and batches hold one record and several."""
    directory = Path(tempfile.mkdtemp())

    async def write() -> dict[str, tuple[str, list[bytes]]]:
        store = await LogStore.open(directory)
        await call(store, "a", "c1")
        await call(store, "gone", "c1")
        await call(store, "a", "c2")
        await store.close()
        store = await LogStore.open(directory)
        await asyncio.gather(call(store, "b", "c1"), call(store, "a", "c3"))
        await store.write(Clear("gone"))
        await call(store, "b", "c2")
        found = {rollout_id: contents(await store.freeze(rollout_id)) for rollout_id in await store.rollout_ids()}
        await store.close()
        return found

    rollouts = asyncio.run(write())
    frames = tuple(frame for segment in read_segments(directory) for frame in segment.frames)
    return Log(directory, rollouts, frames)


# --- the tail ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_cut_log_is_what_it_was_at_some_moment(log: Log, data: st.DataObject) -> None:
    """Whatever length a crash leaves the last segment at, opening it finds the whole records before, and no damage."""
    with tempfile.TemporaryDirectory() as copy:
        directory = Path(copy)
        shutil.copytree(log.directory, directory, dirs_exist_ok=True)
        path = segment_path(directory, 2)
        size = data.draw(st.integers(0, path.stat().st_size))
        junk = data.draw(st.sampled_from([b"", b"\0" * 40, b"\xf5GCF", path.read_bytes()[size : size + 500][::-1]]))
        # The header was durable before anything was written behind it.
        original = path.read_bytes()
        left = original[:size] + (junk if size >= SEGMENT_HEADER_BYTES else b"")
        path.write_bytes(left)
        whole = [
            frame
            for frame in _frames_of(log, 2)
            if original[: frame.offset + frame.size] == left[: frame.offset + frame.size]
        ]

        async def check() -> None:
            store, found = await _snapshots(directory)
            assert store.recovery.damaged == ()
            assert store.recovery.records == len(_frames_of(log, 1)) + len(whole)
            assert not any(snapshot.problems for snapshot in found.values())
            epoch = await begin(store, "a", "after")
            await store.write(Commit(sample_entry("a", "after"), epoch=epoch))
            await store.close()
            store, again = await _snapshots(directory)
            assert (store.recovery.damaged, store.recovery.torn_bytes) == ((), 0)
            assert "after" in {entry.model_call_id for entry in again["a"].entries}
            await store.close()

        asyncio.run(check())


def _frames_of(log: Log, number: int) -> list[Frame]:
    (segment,) = [segment for segment in read_segments(log.directory) if segment.number == number]
    return list(segment.frames)


def test_batch_that_was_never_acknowledged_is_cut_as_a_whole(tmp_path: Path) -> None:
    """The disk wrote the end of the last batch and not its beginning."""

    async def write() -> None:
        store = await LogStore.open(tmp_path)
        epoch = await begin(store, "r", "c0")
        await asyncio.gather(*(store.write(Commit(sample_entry("r", f"c{index}"), epoch=epoch)) for index in range(4)))
        await store.close()

    asyncio.run(write())
    (segment,) = read_segments(tmp_path)
    assert [frame.starts_batch for frame in segment.frames] == [True, True, False, False, False]
    torn = segment.frames[2]
    data = bytearray(segment.path.read_bytes())
    data[torn.offset : torn.offset + torn.size] = bytes(torn.size)
    segment.path.write_bytes(data)
    found = snapshots(tmp_path)
    assert [entry.model_call_id for entry in found["r"].entries] == ["c0"]
    assert found["r"].problems == ()
    assert segment.path.stat().st_size == torn.offset


# --- damage ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_no_flipped_byte_goes_unnoticed(log: Log, data: st.DataObject) -> None:
    """A rollout is as it was, or it is masked. Only the last record, which cannot be told from a torn one, may be cut:
    its rollout is then incomplete by the intent that it left open."""
    with tempfile.TemporaryDirectory() as copy:
        directory = Path(copy)
        shutil.copytree(log.directory, directory, dirs_exist_ok=True)
        number = data.draw(st.sampled_from([1, 2]))
        path = segment_path(directory, number)
        damaged = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged)
        for found in (snapshots(directory), snapshots(directory)):
            for rollout_id, expected in log.rollouts.items():
                assert contents(found[rollout_id]) == expected or is_masked(found[rollout_id])
            assert "gone" not in found or is_masked(found["gone"])


async def test_damaged_record_masks_the_rollout_it_names_and_no_other(log: Log, tmp_path: Path) -> None:
    shutil.copytree(log.directory, tmp_path, dirs_exist_ok=True)
    frame = next(frame for frame in log.frames if (frame.rollout_id, frame.type) == ("a", RecordType.COMMITTED))
    _flip(segment_path(tmp_path, 1), frame.offset + frame.size - 10)

    store, found = await _snapshots(tmp_path)
    (damage,) = store.recovery.damaged
    assert (damage.segment, damage.start, damage.rollout_id) == (1, frame.offset, "a")
    assert store.recovery.masked_rollouts == ("a",)
    (problem,) = found["a"].problems
    assert (problem.reason, problem.call_id) == ("corrupt_log", "c1")
    assert contents(found["b"]) == log.rollouts["b"]
    await store.compact()
    await store.close()
    # It is written down: nothing new the next time, and the damaged segment is kept for whoever looks into it.
    store, again = await _snapshots(tmp_path)
    assert store.recovery.masked_rollouts == ()
    assert again["a"].snapshot_id == found["a"].snapshot_id
    await store.close()


def test_damage_that_names_no_rollout_masks_those_that_may_have_written_there(log: Log, tmp_path: Path) -> None:
    """`b` began after the damaged segment was closed, so none of its records can have stood in it."""
    shutil.copytree(log.directory, tmp_path, dirs_exist_ok=True)
    frame = next(frame for frame in log.frames if frame.rollout_id == "gone")
    _flip(segment_path(tmp_path, 1), frame.offset + 13)
    found = snapshots(tmp_path)
    assert [problem.reason for problem in found["a"].problems] == ["corrupt_log"]
    assert contents(found["b"]) == log.rollouts["b"]
    assert "gone" not in found


def test_damaged_tombstone_still_retires(log: Log, tmp_path: Path) -> None:
    shutil.copytree(log.directory, tmp_path, dirs_exist_ok=True)
    frame = next(frame for frame in log.frames if frame.type is RecordType.RETIRED)
    _flip(segment_path(tmp_path, 2), frame.offset + frame.size - 1)
    found = snapshots(tmp_path)
    assert {rollout_id: contents(snapshot) for rollout_id, snapshot in found.items()} == log.rollouts


def test_segment_header_has_a_spare(log: Log, tmp_path: Path) -> None:
    shutil.copytree(log.directory, tmp_path, dirs_exist_ok=True)
    _flip(segment_path(tmp_path, 1), 3)
    assert {r: contents(snapshot) for r, snapshot in snapshots(tmp_path).items()} == log.rollouts


def test_segment_without_header_is_damage_as_a_whole(log: Log, tmp_path: Path) -> None:
    shutil.copytree(log.directory, tmp_path, dirs_exist_ok=True)
    for place in (3, 3 + SEGMENT_HEADER_BYTES // 2):
        _flip(segment_path(tmp_path, 1), place)
    found = snapshots(tmp_path)
    assert is_masked(found["a"])
    assert contents(found["b"]) == log.rollouts["b"]


async def test_record_that_goes_bad_while_the_store_is_open_masks_its_rollout(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    await call(store, "r", "c1")
    await call(store, "r", "c2")
    (segment,) = read_segments(tmp_path)
    frame = next(frame for frame in segment.frames if (frame.call_id, frame.type) == ("c1", RecordType.COMMITTED))
    _flip(segment.path, frame.offset + frame.size - 10)
    snapshot = await store.freeze("r")
    assert [entry.model_call_id for entry in snapshot.entries] == ["c2"]
    assert [(problem.reason, problem.call_id) for problem in snapshot.problems] == [("corrupt_log", "c1")]
    await store.close()


def test_compaction_leaves_a_segment_alone_that_has_gone_bad(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await LogStore.open(tmp_path, segment_bytes=10_000)
        await call(store, "r", "c1")
        epoch = await begin(store, "junk", "c")
        await store.write(Commit(sample_entry("junk", "c", prompt=range(3000)), epoch=epoch))
        frame = next(frame for frame in next(iter(read_segments(tmp_path))).frames if frame.rollout_id == "r")
        _flip(segment_path(tmp_path, 1), frame.offset + 30)
        await store.write(Clear("junk"))
        await store.compact()
        assert segment_path(tmp_path, 1).exists()
        await store.close()

    asyncio.run(scenario())
    assert is_masked(snapshots(tmp_path)["r"])


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# --- newer versions ----------------------------------------------------------------------------------------------


async def test_newer_format_is_refused(tmp_path: Path) -> None:
    header = bytearray(pack_segment_header(SegmentHeader(seed=7, epoch_floor=1))[: SEGMENT_HEADER_BYTES // 2 - 4])
    header[8] = 2
    segment_path(tmp_path, 1).write_bytes((header + zlib.crc32(header).to_bytes(4, "little")) * 2)
    with pytest.raises(CorruptLogError, match="format version 2, this gym-capture reads 1"):
        await LogStore.open(tmp_path)


async def test_unknown_record_type_is_refused(tmp_path: Path) -> None:
    draft = Draft(99, 1, pack_key("r"), b"")  # type: ignore[arg-type]
    segment_path(tmp_path, 1).write_bytes(
        pack_segment_header(SegmentHeader(7, 1)) + pack_frame(draft, seed=7, starts_batch=True)
    )
    with pytest.raises(CorruptLogError, match="type 99"):
        await LogStore.open(tmp_path)


# --- framing -----------------------------------------------------------------------------------------------------

DRAFTS = st.builds(
    Draft,
    st.sampled_from(RecordType),
    st.integers(0, 2**64 - 1),
    st.builds(pack_key, st.text("abc", min_size=1, max_size=5), st.text(st.characters(), max_size=8)),
    # payloads that look like frames, too
    st.binary(max_size=60) | st.just(pack_frame(Draft(RecordType.BEGUN, 1, b"r\0c", b"x"), seed=7, starts_batch=True)),
)


@given(st.lists(DRAFTS, max_size=6), st.integers(0, 2**32 - 1))
def test_frames_are_read_back(drafts: list[Draft], seed: int) -> None:
    header = SegmentHeader(seed, 5)
    data = pack_segment_header(header) + b"".join(
        pack_frame(draft, seed=seed, starts_batch=index % 2 == 0) for index, draft in enumerate(drafts)
    )
    assert read_segment_header(data) == header
    frames = [found for found in scan_segment(data, header) if isinstance(found, Frame)]
    assert [(frame.type, frame.epoch, frame.payload) for frame in frames] == [
        (draft.type, draft.epoch, draft.payload) for draft in drafts
    ]
    assert [pack_key(frame.rollout_id, frame.call_id) for frame in frames] == [draft.key for draft in drafts]
    assert [frame.starts_batch for frame in frames] == [index % 2 == 0 for index in range(len(drafts))]
    assert sum(frame.size for frame in frames) == len(data) - SEGMENT_HEADER_BYTES


@given(st.lists(DRAFTS, min_size=1, max_size=5), st.data())
def test_reading_goes_on_behind_damage(drafts: list[Draft], data: st.DataObject) -> None:
    """All frames that the damage does not touch are found, and everything is either a frame or damage."""
    header = SegmentHeader(1, 5)
    packed = [pack_frame(draft, seed=1, starts_batch=True) for draft in drafts]
    segment = bytearray(pack_segment_header(header) + b"".join(packed))
    start = data.draw(st.integers(SEGMENT_HEADER_BYTES, len(segment) - 1))
    end = data.draw(st.integers(start + 1, len(segment)))
    segment[start:end] = data.draw(st.binary(min_size=end - start, max_size=end - start))
    untouched, offset = set(), SEGMENT_HEADER_BYTES
    for frame in packed:
        if offset + len(frame) <= start or offset >= end:
            untouched.add(offset)
        offset += len(frame)
    found = list(scan_segment(bytes(segment), header))
    assert {piece.offset for piece in found if isinstance(piece, Frame)} >= untouched
    place = SEGMENT_HEADER_BYTES
    for piece in found:
        begins, ends = (
            (piece.start, piece.end) if isinstance(piece, Damage) else (piece.offset, piece.offset + piece.size)
        )
        assert begins == place
        place = ends
    assert place == len(segment)


def test_frame_inside_a_record_is_not_taken_for_one() -> None:
    """What an agent writes can be a log: its frames were sealed with another seed."""
    inner = pack_frame(Draft(RecordType.RETIRED, 9, pack_key("victim"), b"[]"), seed=1, starts_batch=True)
    outer = pack_frame(Draft(RecordType.COMMITTED, 1, pack_key("r", "c"), inner), seed=2, starts_batch=True)
    segment = bytearray(pack_segment_header(SegmentHeader(2, 1)) + outer)
    segment[SEGMENT_HEADER_BYTES + 5] ^= 1
    assert list(scan_segment(bytes(segment), SegmentHeader(2, 1))) == [Damage(SEGMENT_HEADER_BYTES, len(segment))]


async def test_a_segment_that_is_no_file_is_an_error_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(segment_path(tmp_path, 1))
    with pytest.raises(StoreUnavailableError, match=r"cannot be opened: .*not a regular file"):
        await LogStore.open(tmp_path)
