"""What agents notice of disks that are full, slow or damaged, and of clocks that jump: an error, a wait, or nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import httpx
import pytest

from gym_capture.build.builder import build
from gym_capture.capture.operations import Begin, Commit, Drop
from gym_capture.capture.records import Continues
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.errors import RetiredRolloutError
from gym_capture.reasons import reason_name
from gym_capture.stores.frames import RecordType
from gym_capture.stores.log import LogStore
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import Disk
from tests.faults.apis import APIS, Api
from tests.faults.bench import Bench, bench, play
from tests.faults.engine import answer, question
from tests.serving.replica import until
from tests.stores.disks import FullDisk, GatedSync


async def begun(graph: Bench, api: Api, rollout_id: str, *, stream: bool) -> httpx.Response:
    """A response whose body is still to come."""
    body = api.body((), question(rollout_id, words=8)) | {"stream": stream}
    request = graph.http.build_request("POST", f"/ng-rollout/{rollout_id}/v1/{api.path}", json=body)
    return await graph.http.send(request, stream=True)


async def test_a_full_disk_turns_calls_away_until_there_is_room_again(template: HfChatTemplate, tmp_path: Path) -> None:
    disk = FullDisk(10**9)

    async with bench(template, tmp_path, disk=Disk(write=disk)) as graph:
        await play(graph, "before", turns=2)
        disk.room_bytes = 0
        refused = await graph.http.post("/ng-rollout/new/v1/chat/completions", json=APIS[0].body((), "in 4 words"))
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        waiting = [asyncio.create_task(play(graph, name, turns=2)) for name in ("before", "during")]
        await until(lambda: graph.ledger.failures.total() >= 4)
        assert not any(task.done() for task in waiting)
        disk.room_bytes = 10**9
        await asyncio.gather(*waiting)
        found = graph.audit()
    assert found.all() == []
    assert (found.calls, found.masked) == (6, {})
    assert all(kind.startswith("503") for kind in graph.ledger.failures)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_reply_whose_record_does_not_fit_arrives_and_its_rollout_is_masked(
    template: HfChatTemplate, tmp_path: Path, stream: bool
) -> None:
    disk = FullDisk(10**9)

    async with bench(template, tmp_path, disk=Disk(write=disk)) as graph:
        await play(graph, "other", turns=1)
        disk.room_bytes = 450  # the intent of one more call
        response = await begun(graph, APIS[0], "r", stream=stream)
        call_id = response.headers["request-id"]
        whole = (await response.aread()).decode()
        assert disk.room_bytes == 0
        disk.room_bytes = 10**9
        snapshot = graph.log().snapshots["r"]
        assert (snapshot.entries, snapshot.incomplete) == ((), (f"dangling_intent:{call_id}",))
        assert build(snapshot).masked
        assert ("[DONE]" in whole) if stream else json.loads(whole)["id"] == call_id
        await play(graph, "other", turns=2)
        assert graph.audit().all() == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_CP_09_a_slow_disk_delays_the_end_of_a_reply(
    template: HfChatTemplate, tmp_path: Path, api: Api, stream: bool
) -> None:
    """Its text is there before, its end never is."""
    sync = GatedSync()

    async def heard(response: httpx.Response) -> str:
        return "".join([delta async for delta in api.deltas(response.aiter_lines())])

    async with bench(template, tmp_path, disk=Disk(sync=sync)) as graph:
        began = asyncio.create_task(begun(graph, api, "r", stream=stream))
        if stream:
            response = await began
            ended = asyncio.create_task(heard(response))
        with sync.held():
            await sync.reached()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not (ended if stream else began).done()
        if stream:
            text = await ended
        else:
            response = await began
            await response.aread()
            text = api.text(response.json())
        await response.aclose()
        call_id = response.headers["request-id"]
        assert text == answer(question("r", words=8), call_id)
        # What the agent has seen is on the disk, and not only in the memory of the server.
        assert graph.log().committed == {call_id: 1}


async def test_a_corrupt_byte_masks_its_rollout_and_both_are_served(template: HfChatTemplate, tmp_path: Path) -> None:
    async with bench(template, tmp_path) as graph:
        await play(graph, "hit", turns=3)
        spared = await play(graph, "spared", turns=3)
        corrupt(tmp_path / "shard-0000", "hit")
        await graph.actor.restart()
        await play(graph, "hit", turns=1)
        await play(graph, "spared", turns=2)
        snapshots = graph.log().snapshots
        built = {name: build(snapshot) for name, snapshot in snapshots.items()}
        assert "corrupt_log" in {reason_name(reason) for reason in built["hit"].mask_reasons}
        assert not built["spared"].masked
        (trajectory,) = built["spared"].trajectories
        assert list(trajectory.call_ids) == [turn.call_id for turn in spared.turns]


def corrupt(directory: Path, rollout_id: str) -> None:
    """Flips a byte in the middle of the record of the rollout's second call."""
    segments = list(read_segments(directory))
    found = [
        (segment.path, frame)
        for segment in segments
        for frame in segment.frames
        if frame.rollout_id == rollout_id and frame.type is RecordType.COMMITTED
    ]
    path, frame = found[1]
    with path.open("r+b") as file:
        file.seek(frame.offset + frame.size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


# --- clocks ------------------------------------------------------------------------------------------------------


async def test_a_clock_that_jumps_changes_no_order(template: HfChatTemplate, tmp_path: Path) -> None:
    """Every call is made before its parent, by the clock; or years later."""
    years = itertools.cycle([2.0e9, 1.0e9, 3.0e9, 0.0, -5.0])

    async with bench(template, tmp_path, clock=lambda: next(years)) as graph:
        played = await play(graph, "r", turns=4)
        await graph.actor.restart()
        await play(graph, "r", turns=4)
        found = graph.audit()
        assert found.all() == []
        assert (found.calls, found.masked) == (8, {})
        entries = {entry.model_call_id: entry for entry in graph.log().snapshots["r"].entries}
    times = [entries[turn.call_id].created_at for turn in played.turns]
    assert times != sorted(times)
    parents = [entries[turn.call_id].parent for turn in played.turns[1:]]
    assert all(isinstance(parent, Continues) for parent in parents)


@pytest.mark.parametrize("jump_s", [-1e9, 1e9], ids=["back", "ahead"])
async def test_a_clock_that_jumps_revives_nothing_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    now = time.time

    store = await LogStore.open(tmp_path, segment_bytes=1)
    epoch = await store.write(Begin(sample_intent("gone", "c")))
    kept = await store.write(Begin(sample_intent("kept", "c")))
    await store.write(Commit(sample_entry("kept", "c"), epoch=kept))
    snapshot = await store.freeze("gone")
    await store.write(Drop("gone", snapshot.snapshot_id, snapshot.version))
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    for _ in range(2):
        await store.compact()
        with pytest.raises(RetiredRolloutError):
            await store.write(Commit(sample_entry("gone", "c"), epoch=epoch))
        assert await store.rollout_ids() == ["kept"]
        (entry,) = (await store.freeze("kept")).entries
        assert entry.model_call_id == "c"
        await store.close()
        store = await LogStore.open(tmp_path, segment_bytes=1)
    await store.close()
