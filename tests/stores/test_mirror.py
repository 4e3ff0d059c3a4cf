"""A log with a second copy: losing either costs nothing that was acknowledged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_capture.capture.operations import Begin, Commit
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.log import LogStore
from gym_capture.stores.mirror import Mirror, MirrorDirectory, MirrorLostError, Receiver
from gym_capture.stores.segments import Disk
from tests.stores.disks import FullDisk
from tests.stores.test_compaction import big_entry, contents, drop


class Peer:
    """A peer on another node, which can be lost: at once, or in the middle of an append."""

    def __init__(self, directory: Path) -> None:
        self._kept = MirrorDirectory(directory)
        self.is_lost = False
        self.loses_appends = False

    def claim(self, generation: int) -> None:
        self._check()
        self._kept.claim(generation)

    def generation(self) -> int:
        self._check()
        return self._kept.generation()

    def set_generation(self, generation: int) -> None:
        self._check()
        self._kept.set_generation(generation)

    def inventory(self) -> dict[int, tuple[int, bytes]]:
        self._check()
        return self._kept.inventory()

    def append(self, generation: int, number: int, offset: int, data: bytes) -> Callable[[], None]:
        self._check()
        if self.loses_appends:
            self.lose()
            return self._check
        return self._kept.append(generation, number, offset, data)

    def read(self, number: int, offset: int, size: int) -> bytes:
        self._check()
        return self._kept.read(number, offset, size)

    def cut(self, generation: int, number: int, size: int) -> None:
        self._check()
        self._kept.cut(generation, number, size)

    def lose(self) -> None:
        self.is_lost = True
        self._kept.close()

    def _check(self) -> None:
        if self.is_lost:
            raise MirrorLostError("gone")


class Nodes:
    """Where peers can be: `start` makes one on the next node, unless there is none."""

    def __init__(self, directory: Path, *, nodes: int = 1) -> None:
        self._directory = directory
        self._free = list(range(nodes))
        self.peers: list[Peer] = []

    def find(self) -> Receiver | None:
        if self.peers and not self.peers[-1].is_lost:
            return self.peers[-1]
        return self._start() if self._free else None

    def newest(self) -> Receiver | None:
        return next((peer for peer in reversed(self.peers) if not peer.is_lost), None)

    def add(self) -> None:
        self._free.append(len(self.peers))

    def _start(self) -> Peer:
        self.peers.append(Peer(self.path(self._free.pop(0))))
        return self.peers[-1]

    def path(self, number: int) -> Path:
        return self._directory / f"peer-{number}"

    def mirror(self) -> Mirror:
        return Mirror(self.find, newest=self.newest, look_again_after_s=0.0)


async def opened(directory: Path, nodes: Nodes, disk: Disk | None = None) -> LogStore:
    options = {} if disk is None else {"disk": disk}
    return await LogStore.open(directory, segment_bytes=20_000, mirror=nodes.mirror(), **options)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.log")}


async def record(store: LogStore, rollout_id: str, *call_ids: str) -> None:
    for call_id in call_ids:
        epoch = await store.write(Begin(sample_intent(rollout_id, call_id)))
        await store.write(Commit(big_entry(rollout_id, call_id), epoch=epoch))


async def everything(store: LogStore) -> list[object]:
    return [contents(await store.freeze(rollout_id)) for rollout_id in await store.rollout_ids()]


async def test_both_copies_are_the_same_bytes(tmp_path: Path) -> None:
    """Through many segments, retirements, compaction and a restart."""

    nodes = Nodes(tmp_path)
    store = await opened(tmp_path / "log", nodes)
    await record(store, "stay", "c1", "c2")
    for number in range(12):
        await record(store, f"r{number}", "c1")
        await drop(store, f"r{number}")
    await store.compact()
    assert 1 < len(files(nodes.path(0))) < 12
    assert files(nodes.path(0)) == files(tmp_path / "log")
    await store.close()
    store = await opened(tmp_path / "log", nodes)
    await record(store, "stay", "c3")
    assert files(nodes.path(0)) == files(tmp_path / "log")
    assert not store.stats().has_lost_mirror
    await store.close()


async def test_a_lost_log_begins_with_what_its_mirror_has(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    store = await opened(tmp_path / "log", nodes)
    for number in range(5):
        await record(store, f"r{number}", "c1", "c2", "c3")
    await drop(store, "r2")
    before = await everything(store)
    await store.close()
    shutil.rmtree(tmp_path / "log")
    store = await opened(tmp_path / "elsewhere", nodes)
    assert await everything(store) == before
    await record(store, "r1", "c4")
    assert files(nodes.path(0)) == files(tmp_path / "elsewhere")
    await store.close()


async def test_what_a_log_left_behind_is_not_taken_for_it(tmp_path: Path) -> None:
    """A node that was thought lost comes back with an old log: the newer copy counts."""

    nodes = Nodes(tmp_path)
    store = await opened(tmp_path / "a", nodes)
    await record(store, "r1", "c1")
    await store.close()
    store = await opened(tmp_path / "b", nodes)
    await record(store, "r1", "c2")
    before = await everything(store)
    await store.close()
    store = await opened(tmp_path / "a", nodes)
    assert await everything(store) == before
    assert files(nodes.path(0)) == files(tmp_path / "a")
    await store.close()


async def test_an_owner_that_was_thought_lost_acknowledges_nothing_more(tmp_path: Path) -> None:
    """It may still run, cut off from whoever opened the log anew; they share a mirror, not a disk."""

    nodes = Nodes(tmp_path)
    seldom = Mirror(nodes.find, newest=nodes.newest, look_again_after_s=3_600.0)
    old = await LogStore.open(tmp_path / "a", mirror=seldom)
    epoch = await old.write(Begin(sample_intent("r1", "c1")))
    new = await opened(tmp_path / "b", nodes)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="opened anew on another node"):
            await old.write(Commit(sample_entry("r1", "c1"), epoch=epoch))
    await new.write(Commit(sample_entry("r1", "c1"), epoch=epoch))
    with pytest.raises(StoreUnavailableError):
        await old.write(Begin(sample_intent("r1", "c2")))
    assert files(nodes.path(0)) == files(tmp_path / "b")
    await old.close()
    await new.close()


@pytest.mark.parametrize("in_the_middle", [False, True])
async def test_a_lost_mirror_is_replaced_and_filled_up(tmp_path: Path, in_the_middle: bool) -> None:
    nodes = Nodes(tmp_path, nodes=2)
    store = await opened(tmp_path / "log", nodes)
    await record(store, "r1", "c1", "c2", "c3")
    if in_the_middle:
        nodes.peers[0].loses_appends = True
    else:
        nodes.peers[0].lose()
    await record(store, "r1", "c4")
    assert len(nodes.peers) == 2
    assert files(nodes.path(1)) == files(tmp_path / "log")
    await store.close()


async def test_a_log_without_a_node_for_its_mirror_goes_on_and_says_so(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    store = await opened(tmp_path / "log", nodes)
    await record(store, "r1", "c1")
    nodes.peers[0].lose()
    await record(store, "r1", "c2")
    assert store.stats().has_lost_mirror
    nodes.add()
    await record(store, "r1", "c3")
    assert not store.stats().has_lost_mirror
    assert files(nodes.path(1)) == files(tmp_path / "log")
    await store.close()


async def test_a_write_that_failed_is_in_neither_copy(tmp_path: Path) -> None:
    nodes, disk = Nodes(tmp_path), FullDisk(1 << 60)
    store = await opened(tmp_path / "log", nodes, Disk(write=disk))
    await record(store, "r1", "c1")
    epoch = await store.write(Begin(sample_intent("r1", "c2")))
    disk.room_bytes = 50
    with pytest.raises(StoreUnavailableError):
        await store.write(Commit(sample_entry("r1", "c2"), epoch=epoch))
    assert files(nodes.path(0)) == files(tmp_path / "log")
    disk.room_bytes = 1 << 60
    await store.write(Commit(sample_entry("r1", "c2"), epoch=epoch))
    assert files(nodes.path(0)) == files(tmp_path / "log")
    await store.close()


async def test_an_old_log_is_not_opened_in_place_of_a_mirror_that_is_lost_while_it_is_read(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    store = await opened(tmp_path / "log", nodes)
    await record(store, "r1", "c1")
    await store.close()
    peer = nodes.peers[0]
    peer.lose()
    with pytest.raises(StoreUnavailableError, match="the mirror of the log cannot be read"):
        await LogStore.open(tmp_path / "elsewhere", mirror=Mirror(lambda: peer, newest=lambda: peer))
