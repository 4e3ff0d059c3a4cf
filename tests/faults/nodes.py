"""The graph with real engines on a Ray cluster of several nodes, one engine a node: nodes are lost and come back, and
engines come and go by load, while rollout jobs run. Is anything lost, and do rollouts go on with their exact prefix?

python -m tests.faults.nodes      (part of: make test-faults)

Invariant: what is said of calls is the word of HAProxy on the head node, through which all of them go: which engine
answered a call, with what status, and whether its reply was sent to the end. A node that is lost is killed as a whole
while it is known to be in the middle of calls.

Flow: `served_nodes` starts a head without an engine, two nodes with room for one each, and the graph -> `Site.play`
runs a job with the command line -> `Site.lose_one_in_the_middle` -> `judged` compares what HAProxy saw, the job's rows
and the log.
"""

from __future__ import annotations

import asyncio
import csv
import json
import re
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from ray._private.node import Node

from gym_capture.build.builder import build
from gym_capture.cluster.env import private_cluster_env
from gym_capture.demo.graph import served_graph
from gym_capture.demo.processes import Child, ChildProcesses, free_port
from gym_capture.models import tiny_dir
from gym_capture.reasons import AttemptFailure, CaptureMark, reason_name
from tests.faults.audit import read
from tests.faults.cluster import make_home
from tests.rollouts.nodes import Nodes, nodes

_CPU_DEMO: Final = Path(__file__).parents[2] / "serve_configs" / "cpu_demo.yaml"
_NAMESPACE: Final = "jobs"
_SHARDS: Final = 3
_WITHIN_S: Final = 600.0
_ON_ITS_WAY_S: Final = 0.5
_CALLS: Final = 3
"""Of a rollout of the tool loop, which is what the jobs play."""
_ROOM: Final = {"engine": 1}
_ACCESS: Final = re.compile(
    r"http_frontend (?P<backend>\S+)/(?P<server>\S+) \S+ (?P<status>\d+) \S+ - - (?P<end>\S{4}) .*"
    r'"POST /ng-rollout/(?P<rollout_id>[^/]+)/v1/'
)


@dataclass(frozen=True, slots=True)
class Request:
    """What HAProxy says of a call."""

    rollout_id: str
    server: str
    """The engine, by a name that its successor does not have."""
    status: int
    whole: bool
    """Its reply was sent to the end, which the client had to wait for."""

    @property
    def acknowledged(self) -> bool:
        return self.status == 200 and self.whole


class ProxyLog:
    """What HAProxy writes of each request, in the order in which they ended."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        self._socket.bind(("127.0.0.1", 0))
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def _read(self) -> None:
        with suppress(OSError):  # closed
            while True:
                self.lines.append(self._socket.recv(65536).decode(errors="replace"))

    def close(self) -> None:
        self._socket.close()

    def requests(self) -> list[Request]:
        found = filter(None, map(_ACCESS.search, list(self.lines)))
        return [
            Request(match["rollout_id"], match["server"], int(match["status"]), match["end"].startswith("--"))
            for match in found
        ]


@dataclass(frozen=True, slots=True)
class Server:
    """A server of HAProxy's."""

    name: str
    port: int
    is_up: bool
    calls: int
    """Under way."""


@dataclass
class Site:
    """The served graph."""

    nodes: Nodes
    home: Path
    url: str
    log: ProxyLog
    children: ChildProcesses
    cpus: int
    """Of a node with an engine, which takes one: the rest is for rollouts."""
    loses_disks: bool = False
    """A node is lost with what its state actors have on disk."""
    engines: list[Node] = field(default_factory=list)
    """The nodes that have room for an engine."""

    @property
    def records(self) -> list[Path]:
        return sorted((self.home / "records").glob("shard-*"))

    def add(self) -> Node:
        node = self.nodes.add(num_cpus=self.cpus, resources=_ROOM)
        self.engines.append(node)
        return node

    def play(self, name: str, *, on: str = "here", **sections: Any) -> Played:
        """Starts a job: the command line, in a process of its own."""
        out = self.home / name
        limits = {"retry_wait_s": 0.2, **sections.pop("limits", {})}
        job = {
            "format_version": 1,
            "out": str(out),
            "job_id": name,
            "endpoint": {
                "url": self.url,
                "ray_address": self.nodes.cluster.address,
                "namespace": _NAMESPACE,
            },
            "limits": limits,
            **sections,
        }
        file = self.home / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "gym_capture.cli", "rollouts", "run", str(file), "--on", on]
        child = self.children.start(command, log=self.home / f"{name}.log")
        return Played(name, out, child)

    def servers(self) -> dict[str, Server]:
        """The engines that HAProxy on the head node knows."""
        head = self.nodes.cluster.head_node
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.home / "haproxy" / head.node_id / "admin.sock"))
            admin.sendall(b"show stat\n")
            answer = b"".join(iter(lambda: admin.recv(65536), b"")).decode()
        found = {}
        for row in csv.DictReader(answer.removeprefix("# ").splitlines()):
            if row["svname"] not in ("FRONTEND", "BACKEND") and "REPLICA" in row["svname"]:
                port = int(row["addr"].rpartition(":")[2])
                found[row["svname"]] = Server(row["svname"], port, row["status"].startswith("UP"), int(row["scur"]))
        return found

    async def up(self, count: int) -> set[str]:
        """The names of the engines, once HAProxy has so many that are well, and no others."""
        async with asyncio.timeout(_WITHIN_S):
            while True:
                with suppress(OSError, KeyError, ValueError):  # a HAProxy that starts anew
                    servers = self.servers()
                    if len(servers) == count and all(server.is_up for server in servers.values()):
                        return set(servers)
                await asyncio.sleep(0.2)

    async def lose_one_in_the_middle(self, job: Played) -> str:
        """Kills a node of an engine, with all that is on it, in the middle of calls and of rollouts. Returns which
        engine it was.
        """
        async with asyncio.timeout(_WITHIN_S):
            while True:
                for node in self.engines:
                    if lost := await self._held_in_the_middle(node, job):
                        self.lose(node)
                        return lost
                await asyncio.sleep(0.05)

    def lose(self, node: Node) -> None:
        disk = self._disk_of(node) if self.loses_disks else []
        self.nodes.kill(node)
        for path in disk:  # before Ray has noticed: whatever starts elsewhere must not find it
            shutil.rmtree(path)
        self.nodes.forget(node)
        self.engines.remove(node)

    def _disk_of(self, node: Node) -> list[Path]:
        """The logs and mirrors that actors of this node keep."""
        workers = {process.pid for process in self.nodes.below(node)}
        locks = (self.home / "records").glob("*/lock")
        return [path.parent for path in locks if int(path.read_text()) in workers]

    async def _held_in_the_middle(self, node: Node, job: Played) -> str | None:
        """Stops all that is on a node, with its engine in the middle of calls and of rollouts, or goes on."""
        held = self.nodes.below(node)
        ports = {port for process in held for port in _listens(process)}
        if not self._busy(ports, job):
            return None
        _signal(held, signal.SIGSTOP)  # so that no call ends meanwhile
        await asyncio.sleep(_ON_ITS_WAY_S)  # but for one whose reply is on its way
        if busy := self._busy(ports, job):
            return busy
        _signal(held, signal.SIGCONT)
        return None

    def _busy(self, ports: set[int], job: Played) -> str | None:
        """The engine that listens there, if calls of it are under way, and rollouts between two calls or in the second
        or third.
        """
        over = {row["rollout_id"] for row in job.rows()}
        answered = Counter(
            (each.server, each.rollout_id)
            for each in self.log.requests()
            if each.acknowledged and each.rollout_id.startswith(f"{job.name}.") and each.rollout_id not in over
        )
        in_the_middle = {server for (server, _), calls in answered.items() if calls % _CALLS}
        found = [server.name for server in self.servers().values() if server.port in ports and server.calls]
        return next((name for name in found if name in in_the_middle), None)

    async def redeploy(self, **options: Any) -> None:
        """Other options of the deployment, as a user does who has edited the config."""
        file = self.home / "serve" / "serve.yaml"
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        config["applications"][0]["deployments"][0].update(options)
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
        process = await asyncio.create_subprocess_exec(
            *[*command, "--address", self.nodes.cluster.address, str(file)],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()


@dataclass(frozen=True)
class Played:
    """A job, under way or over."""

    name: str
    out: Path
    child: Child

    def rows(self) -> list[dict[str, Any]]:
        return _lines(self.out / "rollouts.jsonl")

    def failures(self) -> list[dict[str, Any]]:
        return _lines(self.out / "failures.jsonl")

    async def has(self, rows: int) -> None:
        """Returns once so many rollouts are over. Raises `RuntimeError` if the job ends before."""
        async with asyncio.timeout(_WITHIN_S):
            while len(self.rows()) < rows:
                if self.child.ended() is not None:
                    raise RuntimeError(f"the job ended:\n{self.child.log_tail()}")
                await asyncio.sleep(0.05)

    async def over(self) -> int:
        async with asyncio.timeout(_WITHIN_S):
            while (status := self.child.ended()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return status


@dataclass(slots=True)
class Verdict:
    """What became of a job's rollouts."""

    wrong: list[str] = field(default_factory=list)
    finished: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    links: int = 0
    """Calls that continue another one, all of them id for id."""
    servers: dict[str, list[str]] = field(default_factory=dict)
    """Of each rollout: the engines that answered its calls, in turn."""
    cut: int = 0
    """Calls that began and left no record. (HAProxy does not log those: it closes the connection without a word.)"""
    failures: Counter[str] = field(default_factory=Counter)
    """Attempts that failed, by reason."""

    @property
    def moved(self) -> list[str]:
        """Rollouts that went on at another engine."""
        return [rollout_id for rollout_id, servers in self.servers.items() if len(set(servers)) > 1]

    def line(self) -> str:
        failures = ", ".join(f"{count} x {reason}" for reason, count in self.failures.items()) or "none"
        return (
            f"{self.finished} finished, {self.links} links all contiguous, {self.cut} calls cut, {len(self.moved)} "
            f"rollouts moved, {self.masked.total()} masked; failed attempts: {failures}"
        )


def judged(site: Site, job: Played, *, rollouts: int) -> Verdict:
    """Whether a job has a row for each rollout, and the log each acknowledged call once, with its exact prefix."""
    found = Verdict(failures=Counter(failure["reason"] for failure in job.failures()))
    rows = {row["rollout_id"]: row for row in job.rows()}
    if len(rows) != rollouts:
        found.wrong.append(f"{rollouts} rollouts, {len(rows)} rows")
    requests = [request for request in site.log.requests() if request.rollout_id.startswith(f"{job.name}.")]
    log = read(site.records)
    found.wrong += [f"{call_id} is there {count} times" for call_id, count in log.committed.items() if count > 1]
    for rollout_id, row in rows.items():
        acknowledged = [request for request in requests if request.rollout_id == rollout_id and request.acknowledged]
        found.servers[rollout_id] = [request.server for request in acknowledged]
        if row["status"] != "finished":
            found.wrong.append(f"{rollout_id} failed: {row['error']}: {row['detail']}")
            continue
        found.finished += 1
        if len(acknowledged) != row["n_calls"]:
            found.wrong.append(f"{rollout_id} made {row['n_calls']} calls, HAProxy answered {len(acknowledged)}")
        snapshot = log.snapshots[rollout_id]
        if len(snapshot.entries) < row["n_calls"]:
            found.wrong.append(f"{rollout_id}: {row['n_calls']} calls acknowledged, {len(snapshot.entries)} recorded")
        built = build(snapshot)
        found.masked.update({reason_name(reason) for reason in built.mask_reasons})
        if set(map(reason_name, built.mask_reasons)) - {CaptureMark.DANGLING_INTENT}:
            found.wrong.append(f"{rollout_id} is masked: {built.mask_reasons}")
        counts = built.counts
        found.cut += counts.lost_tries + len(snapshot.incomplete)
        if counts.contiguous_links != counts.eligible_links or counts.unresolved_parent_calls:
            found.wrong.append(f"{rollout_id}: {counts}")
        main = [trajectory for trajectory in built.trajectories if trajectory.is_main]
        if [len(trajectory.call_ids) for trajectory in main] != [row["n_calls"]]:
            found.wrong.append(f"{rollout_id}: its agent made {row['n_calls']} calls, its main chain is {main}")
        found.links += counts.contiguous_links
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _listens(process: psutil.Process) -> set[int]:
    with suppress(psutil.NoSuchProcess):
        if process.name().startswith("ray::ServeReplica:"):
            connections = process.net_connections("tcp")
            return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return set()


@contextmanager
def served_nodes(*, options: Mapping[str, Any], cpus: int = 1, state_replicas: int = 1) -> Iterator[Site]:
    """A head, two nodes with room for an engine each, and the graph on them. `options`: of the deployment.

    `state_replicas`: with 2, a node is lost with what is on its disk; with 1, all have the same disk.
    """
    home = make_home()
    haproxy = home / "haproxy"
    first = free_port()
    log = ProxyLog()
    environment = {
        **private_cluster_env(
            metrics_port=free_port(),
            stats_port=free_port(),
            fallback_port=free_port(),
            replica_ports=(first, first + 100),
        ),
        # The nodes of one machine share its ports, and clients use the head's.
        "SERVE_SOCKET_REUSE_PORT_ENABLED": "1",
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_LOG_TARGET": log.target,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
    }
    base = yaml.safe_load(_CPU_DEMO.read_text(encoding="utf-8"))
    base["proxy_location"] = "EveryNode"
    ray_options = base["applications"][0]["args"]["ray_actor_options"]
    graph = {
        "model": str(tiny_dir()),
        "state": {
            "shards": _SHARDS,
            "namespace": _NAMESPACE,
            "directory": str(home / "records"),
            "replicas": state_replicas,
        },
        "ray_actor_options": {**ray_options, "num_cpus": 1, "resources": _ROOM},
    }
    with ChildProcesses() as children, nodes(environment=environment) as cluster:
        site = Site(cluster, home, "", log, children, cpus, loses_disks=state_replicas > 1)
        site.add()
        site.add()
        with served_graph(
            children,
            base=base,
            args=graph,
            options=options,
            address=cluster.cluster.address,
            directory=home / "serve",
            on_wait=lambda _: None,
        ) as site.url:
            yield site
    log.close()
    shutil.rmtree(home)


# --- the long version -------------------------------------------------------------------------------------------------


def _autoscaled(fewest: int) -> dict[str, Any]:
    """From `fewest` to two engines, by load, and quick about it."""
    config = {
        "min_replicas": fewest,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 4,
    }
    return {"num_replicas": "auto", "autoscaling_config": config}


async def run(site: Site) -> dict[str, Verdict]:
    """Everything that may happen to engines on nodes, one after the other."""
    found: dict[str, Verdict] = {}

    def job(name: str, *, rollouts: int, concurrency: int, on: str = "here", max_attempts: int = 1) -> Played:
        limits = {"concurrency": concurrency, "max_attempts": max_attempts}
        return site.play(name, on=on, tasks={"count": rollouts // 4}, samples=4, limits=limits, ray={"num_cpus": 0.5})

    async def judge(played: Played, rollouts: int) -> Verdict:
        status = await played.over()
        verdict = found[played.name] = judged(site, played, rollouts=rollouts)
        if status:
            verdict.wrong.append(f"exit status {status}:\n{played.child.log_tail()}")
        print(f"{played.name}: {verdict.line()}", file=sys.stderr)
        return verdict

    await site.up(2)
    played = job("node-lost", rollouts=96, concurrency=8)
    await played.has(rows=8)
    await site.lose_one_in_the_middle(played)
    site.add()
    both = await site.up(2)
    verdict = await judge(played, 96)
    if not verdict.cut or not verdict.moved:
        verdict.wrong.append("no call was cut, or no rollout went on at another engine")

    played = job("node-lost-with-workers", rollouts=48, concurrency=8, on="ray")
    await played.has(rows=8)
    await site.lose_one_in_the_middle(played)
    site.add()
    verdict = await judge(played, 48)
    if verdict.failures.keys() - {AttemptFailure.NODE_LOST}:
        verdict.wrong.append(f"attempts failed: {verdict.failures}")
    await site.up(2)

    await site.redeploy(**_autoscaled(1))
    one = await site.up(1)
    played = job("scaled", rollouts=200, concurrency=12)
    both = await site.up(2)
    verdict = await judge(played, 200)
    if not one < both:
        verdict.wrong.append(f"scaling up replaced engines: {one} became {both}")
    used = {server for servers in verdict.servers.values() for server in servers}
    if used != both:
        verdict.wrong.append(f"of {both}, {used} answered calls")
    if verdict.failures or verdict.masked:
        verdict.wrong.append("scaling cost attempts, or masked rollouts")
    await site.up(1)

    played = job("all-lost", rollouts=24, concurrency=6)
    await played.has(rows=4)
    await site.lose_one_in_the_middle(played)
    for node in list(site.engines):
        site.lose(node)
    site.add()
    verdict = await judge(played, 24)
    if verdict.failures.keys() - {AttemptFailure.GRAPH_LOST}:
        verdict.wrong.append(f"attempts failed: {verdict.failures}")
    return found


def main() -> int:
    with served_nodes(options=_autoscaled(2), cpus=2) as site:
        found = asyncio.run(run(site))
    wrong = [f"{name}: {line}" for name, verdict in found.items() for line in verdict.wrong]
    for line in wrong:
        print(line, file=sys.stderr)
    finished = sum(verdict.finished for verdict in found.values())
    links = sum(verdict.links for verdict in found.values())
    print(f"jobs={len(found)} finished={finished} links={links} wrong={len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
