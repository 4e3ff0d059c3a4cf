"""What a build reads of a log is what the store would give, whatever is in it, and the log stays as it is."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.capture.operations import (
    Abandon,
    Begin,
    Clear,
    Close,
    Commit,
    Complete,
    Drop,
    MarkDelivery,
    MarkIncomplete,
    Register,
)
from gym_capture.capture.outcomes import Outcome, Registration, Standing
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.log import LogStore
from gym_capture.stores.log_reader import LogReader
from gym_capture.stores.segments import segment_numbers, segment_path

ROLLOUTS = ("a", "again", "dropped", "cleared", "closed", "told", "nobody")


async def call(store: LogStore, rollout_id: str, call_id: str) -> int:
    epoch = await store.write(Begin(sample_intent(rollout_id, call_id)))
    await store.write(Commit(sample_entry(rollout_id, call_id), epoch=epoch))
    return epoch


async def write_all(directory: Path) -> None:
    """Two segments with whatever can be said of a rollout."""
    store = await LogStore.open(directory)
    for rollout_id in ROLLOUTS[:5]:
        await call(store, rollout_id, "c1")
    await store.write(Register("told", Registration(group_id="g", sample=3)))
    await store.close()
    store = await LogStore.open(directory)
    epoch = await call(store, "a", "c2")
    await store.write(Begin(sample_intent("a", "dangling")))
    await store.write(Begin(sample_intent("a", "refused")))
    await store.write(Abandon("a", "refused", epoch=epoch))
    await store.write(MarkIncomplete("a", "engine_lost", epoch=epoch))
    await store.write(MarkDelivery("a", "c2", delivered=True, epoch=epoch))
    await call(store, "told", "c1")
    await store.write(Complete("told", Outcome(reward=0.5)))
    frozen = await store.freeze("dropped")
    await store.write(Drop("dropped", frozen.snapshot_id, frozen.version))
    for rollout_id in ("again", "cleared"):
        await store.write(Clear(rollout_id))
    await store.write(Close("closed"))
    await call(store, "again", "c7")
    await call(store, "b", "c1")
    await store.close()


Contents = tuple[list[str], list[bytes], list[Standing]]


def read(directory: Path) -> Contents:
    reader = LogReader(directory)
    try:
        found = reader.rollout_ids()
        assert all(rollout_id in reader for rollout_id in found)
        asked = [reader.freeze_encoded(rollout_id) for rollout_id in (*found, *ROLLOUTS)]
        return found, asked, list(reader.standings())
    finally:
        reader.close()


def stored(directory: Path) -> Contents:
    async def opened() -> Contents:
        store = await LogStore.open(directory)
        found = list(await store.rollout_ids())
        asked = [await store.freeze_encoded(rollout_id) for rollout_id in (*found, *ROLLOUTS)]
        standings = list(await store.standings())
        await store.close()
        return found, asked, standings

    return asyncio.run(opened())


def contents(directory: Path) -> dict[int, bytes]:
    return {number: segment_path(directory, number).read_bytes() for number in segment_numbers(directory)}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log")
    asyncio.run(write_all(directory))
    return directory


def test_every_rollout_is_the_one_that_the_store_has(log: Path) -> None:
    before = contents(log)
    found = read(log)
    assert contents(log) == before
    assert found == stored(log)
    assert found[0] == ["a", "again", "b", "told"]
    assert [each.outcome for each in found[2] if each.rollout_id == "told"] == [Outcome(reward=0.5)]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_damage_masks_the_rollouts_that_it_masks_in_the_store(log: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "log"
        shutil.copytree(log, copy)
        for _ in range(data.draw(st.integers(1, 2))):
            path = segment_path(copy, data.draw(st.sampled_from(segment_numbers(copy))))
            whole = bytearray(path.read_bytes())
            at = data.draw(st.integers(0, len(whole) - 1))
            if data.draw(st.booleans()):
                whole[at] ^= 0x55
            else:
                del whole[at + 1 :]
            path.write_bytes(whole)
        before = contents(copy)
        found = read(copy)
        assert contents(copy) == before
        assert found == stored(copy)


def test_a_copied_record_is_there_once(tmp_path: Path) -> None:
    """Compaction leaves copies if it is interrupted."""

    async def write() -> None:
        store = await LogStore.open(tmp_path, segment_bytes=1)
        for call_id in ("c1", "c2"):
            await call(store, "a", call_id)
        await store.close()

    asyncio.run(write())
    numbers = segment_numbers(tmp_path)
    shutil.copy(segment_path(tmp_path, numbers[1]), segment_path(tmp_path, numbers[-1] + 1))
    assert read(tmp_path) == stored(tmp_path)


def test_records_that_go_bad_after_the_opening_are_a_problem_of_their_rollout(log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "log"
    shutil.copytree(log, copy)
    reader = LogReader(copy)
    path = segment_path(copy, segment_numbers(copy)[0])
    path.write_bytes(path.read_bytes()[:64].ljust(path.stat().st_size, b"x"))
    assert b"corrupt_log" in reader.freeze_encoded("a")
    reader.close()


def test_a_log_has_one_owner(log: Path) -> None:
    reader = LogReader(log)
    with pytest.raises(StoreUnavailableError, match="in use"):
        LogReader(log)
    reader.close()
    LogReader(log).close()
