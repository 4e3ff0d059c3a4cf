"""The second copy of what an actor keeps on its node's disk, in an actor on another node: of a shard's log, here.

Invariant: a mirror that is written to is never on the node of its owner. One that was left on the owner's own node, by
an owner that came back there, is read from if it is the newest, and then ended.

Flow: `mirror_of` gives a shard's store the log's end of it -> the store asks for the newest copy, then for a peer to
write to -> the actor appends the same bytes and syncs them. Which copy counts and what happens when one is lost stands
in `gym_capture.stores.mirror`. `Peers` finds the copies of anything that is kept so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_capture.stores.mirror import Mirror, MirrorDirectory, MirrorLostError

_P = TypeVar("_P", bound="Peer")

_ANSWER_WITHIN_S: Final = 30.0


def mirror_of(*, index: int, directory: Path, namespace: str) -> Mirror:
    """The log's end of the mirror of shard `index`; copies are kept in `directory` of other nodes."""
    host = (MirrorActor, directory / f"mirror-{index:04d}")
    peers = Peers(f"{index}", host, _Remote, place=index, namespace=namespace)
    return Mirror(peers.find, newest=peers.newest)


def alive_nodes() -> list[str]:
    """Ids of the nodes, in the order of their addresses: a cluster that is started anew has the same order."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node["NodeID"] for node in sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))]


class MirrorActor:
    """Hosts a copy. Answers in the order in which it is asked."""

    def __init__(self, directory: str) -> None:
        self._kept = MirrorDirectory(directory)

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def claim(self, generation: int) -> None:
        self._kept.claim(generation)

    def generation(self) -> int:
        return self._kept.generation()

    def set_generation(self, generation: int) -> None:
        self._kept.set_generation(generation)

    def inventory(self) -> dict[int, tuple[int, bytes]]:
        return self._kept.inventory()

    def append(self, generation: int, number: int, offset: int, data: bytes) -> None:
        self._kept.append(generation, number, offset, data)()

    def read(self, number: int, offset: int, size: int) -> bytes:
        return self._kept.read(number, offset, size)

    def cut(self, generation: int, number: int, size: int) -> None:
        self._kept.cut(generation, number, size)


class Peer:
    """A copy in an actor. Blocks, so it is for threads, not for an event loop. Raises `MirrorLostError`."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self.actor = actor

    def node_id(self) -> str:
        return str(peer_answer(self.actor.node_id.remote()))

    def generation(self) -> int:
        return int(peer_answer(self.actor.generation.remote()))


class _Remote(Peer):
    """A `Receiver` in an actor."""

    def claim(self, generation: int) -> None:
        peer_answer(self.actor.claim.remote(generation))

    def set_generation(self, generation: int) -> None:
        peer_answer(self.actor.set_generation.remote(generation))

    def inventory(self) -> dict[int, tuple[int, bytes]]:
        found: dict[int, tuple[int, bytes]] = peer_answer(self.actor.inventory.remote())
        return found

    def append(self, generation: int, number: int, offset: int, data: bytes) -> Callable[[], None]:
        reply = self.actor.append.remote(generation, number, offset, data)
        return lambda: peer_answer(reply)

    def read(self, number: int, offset: int, size: int) -> bytes:
        return bytes(peer_answer(self.actor.read.remote(number, offset, size)))

    def cut(self, generation: int, number: int, size: int) -> None:
        peer_answer(self.actor.cut.remote(generation, number, size))


class Peers(Generic[_P]):
    """The actors that keep copies of one thing: named after it and their node."""

    def __init__(
        self, name: str, host: tuple[type, Path], reach: Callable[[ActorHandle[Any]], _P], *, place: int, namespace: str
    ) -> None:
        """`host`: the class of the actor, and its directory. `place`: which of the nodes elsewhere it is started on."""
        self._host, self._directory = host
        self._reach = reach
        self._place = place
        self._namespace = namespace
        self._prefix = f"mirror-{name}@"

    def newest(self) -> _P | None:
        """Of those that run, wherever they are."""
        return max(self._running(), key=Peer.generation, default=None)

    def find(self) -> _P | None:
        """The one to write to, started if need be; all others end. None if there is no other node."""
        here = str(ray.get_runtime_context().get_node_id())
        elsewhere = [node for node in alive_nodes() if node != here]
        kept: _P | None = None
        for remote in self._running():
            if kept is None and remote.node_id() in elsewhere:
                kept = remote
            else:
                ray.kill(remote.actor)
        if kept is not None or not elsewhere:
            return kept
        return self._reach(self._start(elsewhere[self._place % len(elsewhere)]))

    def _running(self) -> list[_P]:
        names = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == self._namespace and actor["name"].startswith(self._prefix)
        ]
        found: list[_P] = []
        for name in sorted(names):
            try:
                remote = self._reach(ray.get_actor(name, namespace=self._namespace))
                ray.get(remote.actor.generation.remote(), timeout=_ANSWER_WITHIN_S)
            except (ValueError, RayActorError, ActorUnschedulableError):
                continue  # it ended with its node or its process: Ray takes a moment to forget the name
            except GetTimeoutError as error:
                raise MirrorLostError(f"{name} does not answer") from error
            found.append(remote)
        return found

    def _start(self, node_id: str) -> ActorHandle[Any]:
        return (
            ray.remote(self._host)
            .options(
                name=f"{self._prefix}{node_id}",
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(str(self._directory))
        )


def peer_answer(reply: Any) -> Any:
    """Raises `MirrorLostError`."""
    try:
        return ray.get(reply, timeout=_ANSWER_WITHIN_S)
    except RayTaskError as error:
        if isinstance(error.cause, MirrorLostError):
            raise error.cause from None
        raise MirrorLostError(f"the mirror failed: {error.cause!r}") from error
    except (RayActorError, ActorUnschedulableError, GetTimeoutError) as error:
        raise MirrorLostError("the mirror does not answer") from error
