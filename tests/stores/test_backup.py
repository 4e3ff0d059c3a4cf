"""A log that is copied while it is written, as docs/operations.md says, opens with all that was acknowledged before."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Begin, Commit, Drop
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.stores.log import LogStore


async def play(store: LogStore, rollout_id: str) -> None:
    epoch = await store.write(Begin(sample_intent(rollout_id, "c")))
    await store.write(Commit(sample_entry(rollout_id, "c", prompt=range(2_000)), epoch=epoch))


async def drop(store: LogStore, rollout_id: str) -> None:
    snapshot = await store.freeze(rollout_id)
    await store.write(Drop(rollout_id, snapshot.snapshot_id, snapshot.version))


async def copied(source: Path, to: Path, meanwhile: Callable[[int], Awaitable[None]]) -> bool:
    """As `rsync -a --delete`, which lists files before it copies them. False: one of them was gone by then."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    try:
        for number, file in enumerate(sorted(path for path in source.iterdir() if path.is_file())):
            await meanwhile(number)
            shutil.copyfile(file, to / file.name)
    except FileNotFoundError:
        return False
    return True


async def test_a_copy_of_a_log_that_is_written_has_what_was_acknowledged(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path / "log", segment_bytes=60_000)
    kept = [f"kept-{number}" for number in range(12)]
    for number, rollout_id in enumerate(kept):  # what is alive stands among what is not
        await play(store, rollout_id)
        for other in range(3):
            await play(store, f"consumed-{number}-{other}")
    before = {rollout_id: await store.freeze(rollout_id) for rollout_id in kept}
    attempts = 0

    async def goes_on(number: int) -> None:
        await play(store, f"later-{attempts}-{number}")
        if attempts == number == 0:
            for rollout_id in await store.rollout_ids():
                if rollout_id.startswith("consumed"):
                    await drop(store, rollout_id)
            await store.compact()  # moves what is alive to newer segments than were listed

    copy = tmp_path / "copy"
    while not await copied(tmp_path / "log", copy, goes_on):
        attempts += 1
    await store.close()
    assert attempts > 0
    opened = await LogStore.open(copy)
    for rollout_id, snapshot in before.items():
        found = await opened.freeze(rollout_id)
        assert found.problems == ()
        assert [*map(encode_entry, found.entries)] == [*map(encode_entry, snapshot.entries)]
    await opened.close()
