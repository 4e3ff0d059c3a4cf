"""The second copy of a shard's log, in an actor on another node.

Invariant: a mirror that is written to is never on the node of its shard. One that was left on the shard's own node, by
a shard that came back there, is read from if it is the newest, and then ended.

Flow: `mirror_of` gives a shard's store the log's end of it -> the store asks for the newest copy, then for a peer to
write to -> the actor appends the same bytes and syncs them. Which copy counts and what happens when one is lost stands
in `gym_capture.stores.mirror`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_capture.stores.mirror import Mirror, MirrorDirectory, MirrorLostError, Receiver

_ANSWER_WITHIN_S: Final = 30.0


def mirror_of(*, index: int, directory: Path, namespace: str) -> Mirror:
    """The log's end of the mirror of shard `index`; copies are kept in `directory` of other nodes."""
    peers = _Peers(index, directory, namespace)
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


class _Remote:
    """A `Receiver` in an actor. Blocks, so it is for the threads of a store, not for its event loop."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self.actor = actor

    def node_id(self) -> str:
        return str(_answer(self.actor.node_id.remote()))

    def claim(self, generation: int) -> None:
        _answer(self.actor.claim.remote(generation))

    def generation(self) -> int:
        return int(_answer(self.actor.generation.remote()))

    def set_generation(self, generation: int) -> None:
        _answer(self.actor.set_generation.remote(generation))

    def inventory(self) -> dict[int, tuple[int, bytes]]:
        found: dict[int, tuple[int, bytes]] = _answer(self.actor.inventory.remote())
        return found

    def append(self, generation: int, number: int, offset: int, data: bytes) -> Callable[[], None]:
        reply = self.actor.append.remote(generation, number, offset, data)
        return lambda: _answer(reply)

    def read(self, number: int, offset: int, size: int) -> bytes:
        return bytes(_answer(self.actor.read.remote(number, offset, size)))

    def cut(self, generation: int, number: int, size: int) -> None:
        _answer(self.actor.cut.remote(generation, number, size))


class _Peers:
    """The actors that keep copies of one shard's log: named after the shard and their node."""

    def __init__(self, index: int, directory: Path, namespace: str) -> None:
        self._index = index
        self._directory = directory / f"mirror-{index:04d}"
        self._namespace = namespace
        self._prefix = f"mirror-{index}@"

    def newest(self) -> Receiver | None:
        return max(self._running(), key=_Remote.generation, default=None)

    def find(self) -> Receiver | None:
        here = str(ray.get_runtime_context().get_node_id())
        elsewhere = [node for node in alive_nodes() if node != here]
        kept: _Remote | None = None
        for remote in self._running():
            if kept is None and remote.node_id() in elsewhere:
                kept = remote
            else:
                ray.kill(remote.actor)
        if kept is not None or not elsewhere:
            return kept
        return _Remote(self._start(elsewhere[self._index % len(elsewhere)]))

    def _running(self) -> list[_Remote]:
        names = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == self._namespace and actor["name"].startswith(self._prefix)
        ]
        found: list[_Remote] = []
        for name in sorted(names):
            try:
                remote = _Remote(ray.get_actor(name, namespace=self._namespace))
                ray.get(remote.actor.generation.remote(), timeout=_ANSWER_WITHIN_S)
            except (ValueError, RayActorError, ActorUnschedulableError):
                continue  # it ended with its node or its process: Ray takes a moment to forget the name
            except GetTimeoutError as error:
                raise MirrorLostError(f"{name} does not answer") from error
            found.append(remote)
        return found

    def _start(self, node_id: str) -> ActorHandle[Any]:
        return (
            ray.remote(MirrorActor)
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


def _answer(reply: Any) -> Any:
    try:
        return ray.get(reply, timeout=_ANSWER_WITHIN_S)
    except RayTaskError as error:
        if isinstance(error.cause, MirrorLostError):
            raise error.cause from None
        raise MirrorLostError(f"the mirror failed: {error.cause!r}") from error
    except (RayActorError, ActorUnschedulableError, GetTimeoutError) as error:
        raise MirrorLostError("the mirror does not answer") from error
