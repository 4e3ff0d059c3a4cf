"""A Ray cluster of several raylets on this machine, of which some can be lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

from gym_capture.demo.processes import free_port

NAMESPACE = "jobs"


@dataclass(frozen=True)
class Nodes:
    cluster: Cluster

    def add(self, *, num_cpus: int = 1, **resources: Any) -> Node:
        node = self.cluster.add_node(num_cpus=num_cpus, **resources)
        self.cluster.wait_for_nodes()
        return node

    def address(self) -> str:
        """Of the dashboard."""
        return f"http://{self.cluster.webui_url}"

    def workers(self) -> list[psutil.Process]:
        """The processes that play rollouts."""
        raylets = [_raylet(node) for node in self.cluster.list_all_nodes()]
        every = [process for raylet in raylets for process in raylet.children(recursive=True)]
        return [process for process in every if "ray::_Worker" in _title(process)]

    def lose(self, node: Node) -> None:
        """At once, with every process on it."""
        self.kill(node)
        self.forget(node)

    def kill(self, node: Node) -> None:
        """Every process on it. Ray notices in a while."""
        for process in (*self.below(node), _raylet(node)):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def forget(self, node: Node) -> None:
        """One that was killed."""
        self.cluster.remove_node(node, allow_graceful=False)

    def below(self, node: Node) -> list[psutil.Process]:
        """All processes on it but its raylet."""
        return _raylet(node).children(recursive=True)


def _raylet(node: Node) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def nodes(*, dashboard: bool = False, environment: Mapping[str, str] | None = None) -> Iterator[Nodes]:
    """A head of one CPU, of which this process is a driver. `environment`: of its processes, on top of this one's."""
    folder = tempfile.mkdtemp(prefix="gcr-")  # paths of sockets must be short
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (environment or {}).items():
            patched.setenv(name, value)
        patched.setenv("RAY_TMPDIR", folder)
        patched.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
        # Workers do not get the path that pytest found the test modules by.
        patched.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        head = {"num_cpus": 1, "gcs_server_port": free_port(), "include_dashboard": dashboard}
        if dashboard:
            # Not that of another cluster: an agent that does not get its port takes no jobs.
            head |= {"dashboard_port": free_port(), "dashboard_agent_listen_port": free_port()}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
            yield Nodes(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


async def until(holds: Callable[[], bool]) -> None:
    """Waits for something of another process's."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
