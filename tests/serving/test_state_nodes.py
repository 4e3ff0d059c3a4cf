"""Two copies of each log, and of the record of weights, on a cluster of several nodes, of which one is lost together
with its disk.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

from gym_capture.capture.operations import Clear
from gym_capture.capture.protocols import Resolved
from gym_capture.demo.processes import free_port
from gym_capture.errors import StoreUnavailableError
from gym_capture.serving import weights_actor
from gym_capture.serving.state import StateClient, connect, start_shards
from gym_capture.serving.weights_actor import CoordinatorClient, start_coordinator
from gym_capture.serving.weights_messages import Seat, Version
from gym_capture.serving.weights_record import FILE
from tests.serving.shards import LOG
from tests.serving.test_state import play

NAMESPACE = "nodes"
NODES = 3
SHARDS = 3


@dataclass(frozen=True)
class Nodes:
    """Raylets of their own on this machine. What an actor keeps below `records` is on the disk of its node."""

    cluster: Cluster
    records: Path

    def disk_of(self, node: Node) -> list[Path]:
        """The logs and mirrors that actors of this node keep."""
        workers = {process.pid for process in _raylet(node).children(recursive=True)}
        locks = {path: int(path.read_text()) for path in sorted(self.records.glob("*/lock"))}
        return [path.parent for path, holder in locks.items() if holder in workers]

    def shards(self) -> list[psutil.Process]:
        return [psutil.Process(int(path.read_text())) for path in self.records.glob("shard-*/lock")]

    def lose(self, node: Node) -> None:
        """At once, with every process on it and its disk. The record of weights is on that, too."""
        disk, raylet = self.disk_of(node), _raylet(node)
        for process in (*raylet.children(recursive=True), raylet):
            process.kill()
        for path in disk:  # before Ray has noticed: whatever starts elsewhere must not find it
            shutil.rmtree(path)
        (self.records / FILE).unlink()
        self.cluster.remove_node(node, allow_graceful=False)


def _raylet(node: Node) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    folder = tempfile.mkdtemp(prefix="gcr-")  # paths of sockets must be short
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        environment.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
        head = {"gcs_server_port": free_port(), "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(NODES - 1):
                cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
            yield Nodes(cluster, tmp_path)
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


async def check(state: StateClient, names: list[str], *, calls: int) -> None:
    assert await state.rollout_ids() == sorted(names)
    for name in names:
        resolution = await state.resolve(name, [f"k{number}" for number in range(calls)])
        assert isinstance(resolution, Resolved)
        assert resolution.call_id == f"c{calls - 1}"
        snapshot = await state.freeze(name)
        assert (len(snapshot.entries), snapshot.incomplete, snapshot.problems) == (calls, (), ())


async def mirrored(state: StateClient) -> None:
    """Waits until every log has its second copy again: a write makes a shard look for a node."""
    async with asyncio.timeout(120):
        number = 0
        while (await state.stats()).lost_mirrors or number < SHARDS * 4:
            await play(state, f"r9{number:03}", calls=1)
            await state.write(Clear(f"r9{number:03}"))
            number += 1
            await asyncio.sleep(0.1)


def coordinator_of(nodes: Nodes) -> CoordinatorClient:
    """One that was started without copies, and has them since the graph was deployed again."""
    for replicas in (1, 2):
        actor = start_coordinator(
            namespace=NAMESPACE,
            directory=str(nodes.records),
            trainer_timeout_s=60,
            step_timeout_s=60,
            replicas=replicas,
        )
    return CoordinatorClient(actor, replica=ray.get_actor("state-0", namespace=NAMESPACE))


async def served_after(weights: CoordinatorClient) -> str:
    """The version that a coordinator starts with which has lost its node. No replica tells it."""
    async with asyncio.timeout(120):
        while True:
            try:
                info = await weights.operate("info")
            except StoreUnavailableError:
                await asyncio.sleep(0.1)
                continue
            return str(info["weight_version"])


async def test_a_node_is_lost_with_its_disk_and_nothing_that_was_acknowledged(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_shards(
        namespace=NAMESPACE, shards=SHARDS, store=LOG, store_kwargs={}, directory=str(nodes.records), replicas=2
    )

    state = connect(namespace=NAMESPACE)
    names = [f"r{number}" for number in range(12)]
    await asyncio.gather(*(play(state, name, calls=4) for name in names))
    assert (await state.stats()).lost_mirrors == 0
    disks = {node: [path.name for path in nodes.disk_of(node)] for node in nodes.cluster.list_all_nodes()}
    for disk in disks.values():
        numbers = [name.partition("-")[2] for name in disk]
        assert len(set(numbers)) == len(numbers), "a log and its copy must not be on one disk"
    # Dealt out in turn, and back on the node that has their log when only their process was lost.
    assert [sum(name.startswith("shard") for name in disk) for disk in disks.values()] == [1] * NODES
    for process in nodes.shards():
        process.kill()
    await check(state, names, calls=4)
    for node, disk in disks.items():
        assert [path.name for path in nodes.disk_of(node) if path.name.startswith("shard")] == [
            name for name in disk if name.startswith("shard")
        ]
    lost = next(iter(nodes.cluster.worker_nodes))
    monkeypatch.setattr(weights_actor, "alive_nodes", lambda: [lost.node_id])
    weights = coordinator_of(nodes)
    served = Version(number=7, model="/models/policy", folder="/weights/7", digest="7")
    await weights.join(Seat("a", served, is_sound=True, world_size=1, dtype="float32", node="n"))
    assert (nodes.records / "mirror-weights" / FILE).exists()

    nodes.lose(lost)
    await check(state, names, calls=4)
    assert await served_after(weights) == "7"
    assert (nodes.records / FILE).exists(), "it is on the disk of the coordinator's new node"
    more = [f"r{number}" for number in range(20, 26)]
    await asyncio.gather(*(play(state, name, calls=4) for name in more))
    await check(state, names + more, calls=4)
    await mirrored(state)
