"""The record of which weights are served, and its copy on another node."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_capture.errors import StoreError, StoreUnavailableError
from gym_capture.serving import weights_record
from gym_capture.serving.weights_messages import Version
from gym_capture.serving.weights_record import RecordFile, WeightsRecord, generation_of
from gym_capture.stores.mirror import MirrorLostError, MirrorTakenError


def version(number: int) -> Version:
    return Version(number=number, model="/models/policy", folder=f"/weights/{number}", digest=str(number))


class Node:
    """A node that keeps a copy, until it is lost."""

    def __init__(self, directory: Path) -> None:
        self._file = RecordFile(directory)
        self.is_lost = False
        self.is_silent = False

    def generation(self) -> int:
        return generation_of(self.read() or b"{}")

    def read(self) -> bytes:
        if self.is_lost or self.is_silent:
            raise MirrorLostError("gone")
        return self._file.read() or b""

    def write(self, generation: int, data: bytes) -> None:
        if generation < self.generation():
            raise MirrorTakenError("taken")
        self._file.write(data)


class Nodes:
    """The other nodes: copies run on those that were found."""

    def __init__(self, *nodes: Node) -> None:
        self.all = list(nodes)
        self.running: list[Node] = []

    def _alive(self) -> list[Node]:
        return [node for node in self.all if not node.is_lost]

    def newest(self) -> Node | None:
        return max((node for node in self._alive() if node in self.running), key=Node.generation, default=None)

    def find(self) -> Node | None:
        self.running = self._alive()[:1]
        return next(iter(self.running), None)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(Node(tmp_path / "b"), Node(tmp_path / "c"))


def test_a_record_whose_node_is_lost_is_opened_from_its_copy(tmp_path: Path, nodes: Nodes) -> None:
    record = WeightsRecord(tmp_path / "a", copies=nodes)
    assert record.open() is None
    record.write(version(1))
    record.write(version(2))
    assert WeightsRecord(tmp_path / "elsewhere", copies=nodes).open() == version(2)
    assert WeightsRecord(tmp_path / "elsewhere").open() == version(2), "it is on the new node's disk, too"


def test_a_cluster_that_is_started_anew_finds_the_copy_that_no_actor_hosts(tmp_path: Path, nodes: Nodes) -> None:
    record = WeightsRecord(tmp_path / "a", copies=nodes)
    record.open()
    record.write(version(1))
    nodes.running = []
    assert WeightsRecord(tmp_path / "empty", copies=nodes).open() == version(1)


def test_what_a_record_left_behind_is_not_taken_for_it(tmp_path: Path, nodes: Nodes) -> None:
    """It went on elsewhere, and comes back to the first node."""
    record = WeightsRecord(tmp_path / "a", copies=nodes)
    record.open()
    record.write(version(1))
    elsewhere = WeightsRecord(tmp_path / "elsewhere", copies=nodes)
    elsewhere.open()
    elsewhere.write(version(2))
    with pytest.raises(OSError, match="opened anew on another node"):
        record.write(version(3))
    assert WeightsRecord(tmp_path / "a", copies=nodes).open() == version(2)


@pytest.mark.parametrize("when", ["at the next version", "meanwhile"])
def test_another_copy_is_made_when_one_is_lost(tmp_path: Path, nodes: Nodes, when: str) -> None:
    record = WeightsRecord(tmp_path / "a", copies=nodes)
    record.open()
    record.write(version(1))
    nodes.all[0].is_lost = True
    if when == "meanwhile":
        record.keep_copied()
    else:
        record.write(version(2))
    assert WeightsRecord(tmp_path / "elsewhere", copies=nodes).open() == record.read()


def test_a_record_goes_on_alone_and_is_copied_once_there_is_a_node(tmp_path: Path, nodes: Nodes) -> None:
    for node in nodes.all:
        node.is_lost = True
    record = WeightsRecord(tmp_path / "a", copies=nodes)
    record.open()
    record.write(version(1))
    record.keep_copied()
    nodes.all.append(Node(tmp_path / "d"))
    record.keep_copied()
    assert WeightsRecord(tmp_path / "elsewhere", copies=nodes).open() == version(1)


def test_a_copy_that_does_not_answer_is_not_taken_for_none(tmp_path: Path, nodes: Nodes) -> None:
    def silent() -> Node:
        raise MirrorLostError("it does not answer")

    nodes.newest = silent  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        WeightsRecord(tmp_path / "a", copies=nodes).open()


@pytest.mark.parametrize("damaged", [b"{", b"[]", b'{"number": 1}', b'{"generation": "x"}'])
def test_a_damaged_record_is_said(tmp_path: Path, damaged: bytes) -> None:
    RecordFile(tmp_path).write(damaged)
    with pytest.raises(StoreError, match="does not say which weights are served"):
        WeightsRecord(tmp_path).open()


def test_a_full_disk_leaves_record_and_copy_as_they_were(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = WeightsRecord(tmp_path / "a", copies=nodes)
    record.open()
    record.write(version(1))
    replace_file: Callable[[Path, bytes], None] = weights_record.replace_file

    def full(path: Path, data: bytes) -> None:
        if path.parent == tmp_path / "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, data)

    with monkeypatch.context() as disk:
        disk.setattr(weights_record, "replace_file", full)
        with pytest.raises(OSError, match="No space"):
            record.write(version(2))
        with pytest.raises(StoreUnavailableError, match="No space"):
            WeightsRecord(tmp_path / "a", copies=nodes).open()
    assert record.read() == version(1)
    assert WeightsRecord(tmp_path / "elsewhere", copies=nodes).open() == version(1)


@pytest.mark.parametrize("is_there_version", [True, False])
def test_a_record_that_had_no_copy_has_one_once_it_is_asked_for(
    tmp_path: Path, nodes: Nodes, is_there_version: bool
) -> None:
    """Whatever an earlier graph has left in the copy, however often it was opened."""
    for number in range(3):
        earlier = WeightsRecord(tmp_path / "earlier", copies=nodes)
        earlier.open()
        earlier.write(version(number))
    record = WeightsRecord(tmp_path / "a")
    record.open()
    if is_there_version:
        record.write(version(7))
    record.keep_copied(nodes)
    if not is_there_version:
        record.write(version(7))
    assert WeightsRecord(tmp_path / "elsewhere", copies=nodes).open() == version(7)


def test_a_copy_that_cannot_be_begun_is_begun_when_it_is_tried_again(tmp_path: Path, nodes: Nodes) -> None:
    record = WeightsRecord(tmp_path / "a")
    record.open()
    record.write(version(1))
    nodes.all[0].is_silent = True
    with pytest.raises(StoreUnavailableError, match=r"no copy of .* can be begun: gone"):
        record.keep_copied(nodes)
    record.write(version(2))
    nodes.all[0].is_silent = False
    record.keep_copied(nodes)
    assert WeightsRecord(tmp_path / "elsewhere", copies=nodes).open() == version(2)
