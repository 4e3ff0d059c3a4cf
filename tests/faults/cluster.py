"""The graph of the fault tests in a Ray cluster of its own, in a process that can be killed with all that is below it.

python -m tests.faults.cluster HOME

Invariant: everything that the cluster leaves in the file system lies below HOME, and it listens on no port and no
socket of another cluster. What outlives a cluster are its logs in HOME/records: the next one goes on from them.

Flow: `Cluster.start` runs this file -> the graph is served -> its URL stands in HOME/url -> `Cluster.kill` ends every
process without a warning, or `stop` as Ctrl-C does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import yaml

from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import Child, ChildProcesses
from gym_capture.models import tiny_dir

REPLICAS: Final = 2
SHARDS: Final = 2
NAMESPACE: Final = "faults"
_ENGINE: Final = "tests.faults.engine:start"  # by name: the process that serves the graph need not import torch
_CPU_DEMO: Final = Path(__file__).parents[2] / "serve_configs" / "cpu_demo.yaml"
_READY_WITHIN_S: Final = 300.0
_ENDS_WITHIN_S: Final = 30.0


def make_home() -> Path:
    """A new folder: Ray puts sockets below it, and a socket's path may have 107 characters."""
    return Path(tempfile.mkdtemp(prefix="gf", dir="/tmp"))


def scripted(**engine_args: Any) -> dict[str, Any]:
    """The arguments of a graph of scripted engines."""
    return {
        "engine": _ENGINE,
        "engine_args": engine_args,
        "ray_actor_options": {"num_cpus": 1},
    }


def replica_urls(cluster: Cluster) -> list[str]:
    """Where the replicas themselves take requests, behind HAProxy's back."""
    urls = []
    for process in cluster.processes("ray::ServeReplica:"):
        for connection in process.net_connections("tcp"):
            url = f"http://127.0.0.1:{connection.laddr.port}"
            if connection.status == psutil.CONN_LISTEN and _answers(url):
                urls.append(url)
    return urls


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/healthz", trust_env=False, timeout=5).status_code == 200
    return False


class Cluster:
    """One cluster after the other on the same logs. `children` must be left for the last one to end."""

    def __init__(
        self,
        children: ChildProcesses,
        home: Path,
        *,
        args: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        ha_proxy: bool = True,
    ) -> None:
        """`args` of the graph, on top of those of the demo; `options` of its deployment, two replicas if not told.
        Without `ha_proxy`, Serve's own proxy is in front.
        """
        self.home = home
        self.url = ""
        """Where the graph is served now; every cluster has ports of its own."""
        self._children = children
        self._child: Child | None = None
        self._not_mine = frozenset(psutil.Process().children())
        (home / "args.json").write_text(json.dumps(args))
        (home / "options.json").write_text(json.dumps({"num_replicas": REPLICAS, **(options or {})}))
        (home / "ha_proxy.json").write_text(json.dumps(ha_proxy))

    @property
    def records(self) -> list[Path]:
        """The log directories of the state actors."""
        return sorted((self.home / "records").glob("shard-*"))

    async def start(self) -> None:
        """Returns once the graph answers."""
        ready = self.home / "url"
        ready.unlink(missing_ok=True)
        self._child = self._children.start(
            [sys.executable, "-m", "tests.faults.cluster", str(self.home)], log=self.home / "cluster.log"
        )
        async with asyncio.timeout(_READY_WITHIN_S):
            while not ready.exists():
                if self._child.ended() is not None:
                    raise RuntimeError(f"the cluster did not start:\n{self._child.log_tail()}")
                await asyncio.sleep(0.2)
        self.url = ready.read_text()

    async def redeploy(
        self, *, args: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Serves the graph with other arguments, or other options of its deployment, as a user does who has edited the
        config. Returns once Serve knows; what comes of it takes its time.
        """
        file = self.home / "serve" / "serve.yaml"
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        (application,) = config["applications"]
        application["args"].update(args or {})
        application["deployments"][0].update(options or {})
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", str(file)],
            env={**os.environ, **json.loads((self.home / "environment.json").read_text())},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()

    def processes(self, title: str = "") -> list[psutil.Process]:
        """The cluster's, those that have lost their parents included; or those whose name starts with `title`."""
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            if child not in self._not_mine:
                with suppress(psutil.NoSuchProcess):
                    found += [child, *child.children(recursive=True)]
        return [process for process in found if _runs_as(process, title)]

    def kill(self) -> None:
        """Every process at once, as if the machine had gone; only that what they wrote to files is there."""
        while alive := self.processes():
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=_ENDS_WITHIN_S)
        self._clear()

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self._child is not None and self._child.ended() is None:
            self._child.stop()
        self._clear()

    def _clear(self) -> None:
        for name in ("ray", "haproxy"):
            shutil.rmtree(self.home / name, ignore_errors=True)


def _runs_as(process: psutil.Process, title: str) -> bool:
    """Whether it runs, under a name like that; what has ended, but nobody has asked after, does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and str(process.name()).startswith(title)
    except psutil.NoSuchProcess:
        return False


def serve_until_told(home: Path) -> None:
    """The cluster and its graph, until this process is interrupted."""
    _keep_below(home)
    args = {
        "model": str(tiny_dir()),
        "state": {"shards": SHARDS, "namespace": NAMESPACE, "directory": str(home / "records")},
        **json.loads((home / "args.json").read_text()),
    }
    ha_proxy: bool = json.loads((home / "ha_proxy.json").read_text())
    base = yaml.safe_load(_CPU_DEMO.read_text(encoding="utf-8"))
    with (
        ChildProcesses() as children,
        private_ray(cpus=2 * REPLICAS, namespace=NAMESPACE, ha_proxy=ha_proxy) as address,
        served_graph(
            children,
            base=base,
            args=args,
            options=json.loads((home / "options.json").read_text()),
            address=address,
            directory=home / "serve",
            on_wait=lambda _: None,
        ) as url,
    ):
        of_ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        (home / "environment.json").write_text(json.dumps({**of_ray, "RAY_ADDRESS": address}))
        (home / "url.new").write_text(url)
        (home / "url.new").rename(home / "url")
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(60)


def _keep_below(home: Path) -> None:
    """Ray and HAProxy have folders of their own for all clusters of a machine; a killed cluster leaves them full."""
    (home / "ray").mkdir(exist_ok=True)
    tempfile.tempdir = str(home / "ray")
    haproxy = home / "haproxy"
    os.environ.update(
        RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=str(haproxy / "haproxy.cfg"),
        RAY_SERVE_HAPROXY_SOCKET_PATH=str(haproxy / "admin.sock"),
        RAY_SERVE_HAPROXY_SERVER_STATE_BASE=str(haproxy),
        RAY_SERVE_HAPROXY_SERVER_STATE_FILE=str(haproxy / "server-state"),
        RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH=str(haproxy / "metrics.sock"),
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve_until_told(Path(sys.argv[1]))
