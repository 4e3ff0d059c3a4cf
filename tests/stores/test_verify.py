"""Verifying a log finds each kind of damage, names it, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Drop
from gym_capture.conformance import sample_entry
from gym_capture.conformance.support import run_call
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores import verify as verify_module
from gym_capture.stores.frames import (
    FORMAT_VERSION,
    SEGMENT_HEADER_BYTES,
    Draft,
    RecordType,
    SegmentHeader,
    pack_frame,
    pack_key,
    pack_segment_header,
)
from gym_capture.stores.log import LogStore
from gym_capture.stores.replay import Segment, read_segment, read_segments
from gym_capture.stores.segments import segment_path
from gym_capture.stores.verify import verify


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three rollouts of one call each, in one segment: for each an intent and an entry."""

    async def write() -> None:
        store = await LogStore.open(tmp_path)
        for rollout_id in ("a", "b", "c"):
            await run_call(store, rollout_id, "c1")
        await store.close()

    asyncio.run(write())
    return tmp_path


def only_segment(log: Path) -> Segment:
    (segment,) = read_segments(log)
    return segment


def damage(log: Path, offset: int, *, size: int = 1) -> None:
    path = only_segment(log).path
    data = bytearray(path.read_bytes())
    for at in range(offset, offset + size):
        data[at] ^= 0xFF
    path.write_bytes(data)


def found(log: Path) -> list[tuple[str, str | None, str | None]]:
    before = {path: path.read_bytes() for path in log.iterdir()}
    verification = verify(log)
    assert {path: path.read_bytes() for path in log.iterdir()} == before
    assert verification.is_sound is not bool(verification.findings)
    return [(finding.kind, finding.rollout_id, finding.call_id) for finding in verification.findings]


def test_a_sound_log_has_no_findings(log: Path) -> None:
    verification = verify(log)
    assert (verification.findings, verification.masked_rollouts) == ((), ())
    assert (verification.segments, verification.records) == (1, 6)
    assert verification.size_bytes == segment_path(log, 1).stat().st_size


def test_a_directory_without_segments_is_sound(tmp_path: Path) -> None:
    assert verify(tmp_path).is_sound


def test_a_damaged_record_is_named_and_masks_its_rollout(log: Path) -> None:
    frame = only_segment(log).frames[1]
    damage(log, frame.offset + frame.size - 10)
    assert found(log) == [("corrupt", "a", "c1")]
    verification = verify(log)
    assert (verification.findings[0].start, verification.findings[0].end) == (frame.offset, frame.offset + frame.size)
    assert "the checksum of a committed record fails" in verification.findings[0].detail
    assert verification.masked_rollouts == ("a",)


def test_damage_to_the_head_of_a_record_masks_whoever_it_may_be(log: Path) -> None:
    damage(log, only_segment(log).frames[1].offset)
    assert found(log) == [("corrupt", None, None)]
    assert verify(log).masked_rollouts == ("a", "b", "c")


def test_a_torn_tail_is_found_and_masks_nobody(log: Path) -> None:
    with only_segment(log).path.open("ab") as file:
        file.write(b"\xf5GCF unfinished")
    assert found(log) == [("torn_tail", None, None)]
    assert verify(log).masked_rollouts == ()


def test_a_write_that_is_under_way_is_no_torn_tail(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = only_segment(log).path
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 7)
    # The writer finishes while the reader waits.
    monkeypatch.setattr(verify_module.time, "sleep", lambda seconds: path.write_bytes(whole))
    assert verify(log).is_sound
    assert path.read_bytes() == whole


def test_lost_headers_are_found(log: Path) -> None:
    damage(log, 0, size=SEGMENT_HEADER_BYTES)
    assert found(log) == [("lost_header", None, None)]


def test_a_segment_of_a_newer_format_is_found_and_the_others_are_read(log: Path) -> None:
    packed = bytearray(pack_segment_header(SegmentHeader(1, 100))[: SEGMENT_HEADER_BYTES // 2])
    struct.pack_into("<H", packed, 8, FORMAT_VERSION + 1)
    struct.pack_into("<I", packed, len(packed) - 4, zlib.crc32(packed[:-4]))
    segment_path(log, 2).write_bytes(bytes(packed) * 2 + b"whatever")
    frame = read_segment(log, 1, is_last=False).frames[1]
    path = segment_path(log, 1)
    data = bytearray(path.read_bytes())
    data[frame.offset + frame.size - 10] ^= 1
    path.write_bytes(data)
    assert found(log) == [("corrupt", "a", "c1"), ("newer_version", None, None)]
    assert "a newer one" in verify(log).findings[1].detail


def with_record(log: Path, rollout_id: str, type_: RecordType, payload: bytes) -> None:
    """Puts a record whose checksums hold at the end of the log."""
    segment = only_segment(log)
    assert segment.header is not None
    draft = Draft(type_, 1, pack_key(rollout_id, "c9"), payload)
    with segment.path.open("ab") as file:
        file.write(pack_frame(draft, seed=segment.header.seed, starts_batch=True))


def newer_entry() -> bytes:
    data = bytearray(encode_entry(sample_entry("a", "c9")))
    data[4:6] = (2).to_bytes(2, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("type_", "payload", "kind"),
    [
        (RecordType.COMMITTED, newer_entry, "newer_version"),
        (RecordType.COMMITTED, lambda: b"not an entry", "unreadable_record"),
        (RecordType.BEGUN, lambda: b'{"v":2}', "newer_version"),
        (RecordType.BEGUN, lambda: b"{", "unreadable_record"),
        (RecordType.RETIRED, lambda: b"[]", "unreadable_record"),
    ],
)
def test_a_whole_record_that_says_nothing_this_version_reads_is_found(
    log: Path, type_: RecordType, payload: Callable[[], bytes], kind: str
) -> None:
    with_record(log, "a", type_, payload())
    assert found(log) == [(kind, "a", "c9")]
    assert verify(log).masked_rollouts == (("a",) if kind == "unreadable_record" else ())


def test_an_entry_whose_content_was_damaged_before_it_was_framed_is_found(log: Path) -> None:
    data = bytearray(encode_entry(sample_entry("a", "c9")))
    data[-1] ^= 1
    with_record(log, "a", RecordType.COMMITTED, bytes(data))
    assert found(log) == [("unreadable_record", "a", "c9")]


async def test_a_log_is_verified_while_a_store_writes_to_it_and_compacts_it(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, segment_bytes=4096)
    done = asyncio.Event()

    async def write() -> None:
        number = 0
        while not done.is_set():
            await run_call(store, f"r{number}", "c")
            snapshot = await store.freeze(f"r{number}")
            await store.write(Drop(snapshot.rollout_id, snapshot.snapshot_id, snapshot.version))
            number += 1

    writer = asyncio.create_task(write())
    for _ in range(20):
        assert (await asyncio.to_thread(verify, tmp_path)).is_sound
    done.set()
    await writer
    await store.close()


def test_a_directory_that_cannot_be_read_is_said(log: Path) -> None:
    segment_path(log, 2).mkdir()
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        verify(log)
