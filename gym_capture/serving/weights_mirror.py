"""The second copy of the record of weights, in an actor on another node (`mirror`, `weights_record`)."""

from __future__ import annotations

from pathlib import Path

import ray

from gym_capture.serving.mirror import Peer, Peers, peer_answer
from gym_capture.serving.weights_record import RecordFile, generation_of
from gym_capture.stores.mirror import MirrorTakenError


class RecordActor:
    """Hosts a copy. Answers in the order in which it is asked."""

    def __init__(self, directory: str) -> None:
        self._file = RecordFile(Path(directory))

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def generation(self) -> int:
        return generation_of(self._file.read() or b"{}")

    def read(self) -> bytes:
        return self._file.read() or b""

    def write(self, generation: int, data: bytes) -> None:
        if generation < self.generation():
            raise MirrorTakenError(f"generation {self.generation()} has written to this copy, {generation} may not")
        self._file.write(data)


class RecordCopy(Peer):
    """The copy as the record sees it."""

    def read(self) -> bytes:
        return bytes(peer_answer(self.actor.read.remote()))

    def write(self, generation: int, data: bytes) -> None:
        peer_answer(self.actor.write.remote(generation, data))


def copies_of(*, directory: Path, namespace: str) -> Peers[RecordCopy]:
    """The copies of the record in `directory`, kept on other nodes."""
    return Peers("weights", (RecordActor, directory / "mirror-weights"), RecordCopy, place=0, namespace=namespace)
