"""A Ray cluster of the demo's own, and the graph served on it by `serve run`.

Invariant: nothing is shared with whatever else runs on the machine - free ports, a Ray session folder of its own, an
address that is handed on explicitly - and what a user would run is what runs: `serve run` with a config file, which
is the given one with another port, model folder and records directory.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import ray
import yaml
from ray import serve
from ray.exceptions import RayError

from gym_capture.cluster.env import private_cluster_env
from gym_capture.cluster.quiet import quiet_start
from gym_capture.demo.processes import Child, ChildProcesses, free_port
from gym_capture.errors import ConfigError, EngineError
from gym_capture.serving.config import APP_IMPORT_PATH, DEPLOYMENT
from gym_capture.serving.state import connect

ENGINE_BACK_WITHIN_S: Final = 300.0
"""A graph that nobody but Serve would start again is given up after that."""
_READY_WITHIN_S: Final = 300.0
_APPLICATION: Final = "default"
_PORT: Final = 8000
"""Serve's, where a config names none; so is the application's name."""
_POLL_S: Final = 0.5
_STEADY_ANSWERS: Final = 20
_SHOWN_LINES: Final = 6
_REPLICA_PORTS: Final = 100
_FAILED: Final = re.compile("failed to start", re.IGNORECASE)
"""In what Serve says of a deployment of which it starts a replica again."""
_PYDANTIC_SAYS: Final = "For further information visit https://errors.pydantic.dev"
_OBJECT_STORE_BYTES: Final = 256 * 2**20


@contextmanager
def private_ray(*, cpus: int, namespace: str, ha_proxy: bool = True) -> Iterator[str]:
    """A Ray cluster that ends with the block; this process is its driver. Yields its address.

    `cpus` are logical: they say what may run beside what, not how fast. Without `ha_proxy`, Serve's own proxy takes
    requests.
    """
    # Ray puts sockets below this folder, and a socket's path may have 107 characters.
    session = tempfile.mkdtemp(prefix="gym-capture-ray-")
    on_terminate = signal.getsignal(signal.SIGTERM)
    # The cluster's processes inherit it. Errors of its C++ parts stand in their logs; here they would only be noise.
    first = free_port()
    ports = private_cluster_env(
        metrics_port=free_port(),
        stats_port=free_port(),
        fallback_port=free_port(),
        replica_ports=(first, first + _REPLICA_PORTS),
        ha_proxy=ha_proxy,
    )
    os.environ.update(ports)
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    with quiet_start():
        ray.init(
            address="local",
            num_cpus=cpus,
            namespace=namespace,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=session,
        )
    signal.signal(signal.SIGTERM, on_terminate)  # Ray puts its own there
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def graph_config(
    base: Mapping[str, Any], *, port: int, args: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The Serve config `base` on another port, with some of the graph's arguments and of its deployment's options
    replaced.

    Raises `ConfigError` unless it deploys exactly this project's graph.
    """
    config = copy.deepcopy(dict(base))
    applications = config.get("applications")
    if not isinstance(applications, list) or [app.get("import_path") for app in applications] != [APP_IMPORT_PATH]:
        raise ConfigError(f"the demo needs a Serve config with one application, of import_path {APP_IMPORT_PATH}")
    config["http_options"] = {**config.get("http_options", {}), "host": "127.0.0.1", "port": port}
    (application,) = applications
    application["args"] = {**application.get("args", {}), **args}
    if options:
        (deployment,) = application.get("deployments") or [{"name": DEPLOYMENT}]
        application["deployments"] = [{**deployment, **options}]
    return config


@contextmanager
def served_graph(
    children: ChildProcesses,
    *,
    base: Mapping[str, Any],
    args: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    address: str,
    directory: Path,
    on_wait: Callable[[str], None],
) -> Iterator[str]:
    """Serves the graph for the length of the block. Yields its URL once it is ready.

    `args`, `options`: as `graph_config` takes them. The config stands in `directory`/serve.yaml.

    Raises `ConfigError` or `EngineError` with the end of the log if it does not become ready.
    """
    config = graph_config(base, port=free_port(), args=args, options=options)
    with serving(children, config, address=address, directory=directory, on_wait=on_wait) as served:
        yield served.url


class Served(NamedTuple):
    """A graph that serves, and the `serve run` that does it."""

    url: str
    child: Child


@contextmanager
def serving(
    children: ChildProcesses,
    config: Mapping[str, Any],
    *,
    address: str,
    directory: Path,
    on_wait: Callable[[str], None],
    timeout_s: float = _READY_WITHIN_S,
    is_shared: bool = False,
    on_failure: Callable[[str], None] = lambda text: None,
) -> Iterator[Served]:
    """Serves a Serve config for the length of the block, and yields once it is ready. Raises as `served_graph`.

    `is_shared`: others may deploy applications of theirs on the cluster, which then stay. `on_failure`: is told of
    replicas that fail to start; Serve tries a few times more, and may wait minutes before it says that it gives up.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file, log = directory / "serve.yaml", directory / "serve.log"
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", address, str(file)]
    child = children.start(command, log=log)
    url = local_url(config)
    try:
        _wait_ready(child, url, on_wait, timeout_s, on_failure)
        on_wait("healthy")
        yield Served(url, child)
    finally:
        own = {str(each.get("name", _APPLICATION)) for each in config["applications"]}
        _end(child, own, others=_applications() - own if is_shared else frozenset())


def _applications() -> frozenset[str]:
    """What Serve runs on the cluster; nothing if it has gone."""
    try:
        return frozenset(serve.status().applications)
    except RayError:
        return frozenset()


def _end(child: Child, own: Set[str], *, others: Set[str]) -> None:
    """Ends what was deployed; Serve as a whole only if nobody else has deployed something meanwhile."""
    if not others:
        serve.shutdown()  # from here, so that Serve's client in this process forgets the controller too
        child.stop()
        return
    child.kill()  # asked to end, `serve run` would shut Serve down
    for name in sorted(own):
        serve.delete(name)


def local_url(config: Mapping[str, Any]) -> str:
    """Where this machine finds what a Serve config serves."""
    http = config.get("http_options", {})
    (application, *_) = config["applications"]
    prefix = str(application.get("route_prefix", "/")).rstrip("/")
    return f"http://127.0.0.1:{http.get('port', _PORT)}{prefix}"


async def grammar_calls_of(rollout_ids: Sequence[str], *, namespace: str) -> frozenset[str]:
    """Ids of the calls of the graph's rollouts that were sampled under a grammar."""
    source = connect(namespace=namespace)
    snapshots = [await source.freeze(rollout_id) for rollout_id in rollout_ids]
    return frozenset(
        entry.model_call_id
        for snapshot in snapshots
        for entry in snapshot.entries
        if entry.request.sampling.get("structured_outputs")
    )


def _wait_ready(
    child: Child, url: str, on_wait: Callable[[str], None], timeout_s: float, on_failure: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + timeout_s
    told: set[str] = set()
    answers = 0
    while time.monotonic() < deadline:
        if child.ended() is not None:
            raise ConfigError(f"serve run ended; the end of {child.log}:\n{child.log_tail()}")
        try:
            # A new connection each time; and nothing between here and 127.0.0.1 is a proxy's business.
            answered = httpx.get(f"{url}/healthz", trust_env=False, timeout=5.0).status_code == 200
        except httpx.HTTPError:
            answered = False  # not there yet: what Serve says of it tells waiting from failing
        # HAProxy takes on a new replica by starting anew; for a moment the old process still answers some, with 404.
        answers = answers + 1 if answered else 0
        if answers == _STEADY_ANSWERS:
            return
        if not answered:
            on_wait(_deployment_state(child))
            for failure in set(_failures()) - told:
                told.add(failure)
                on_failure(failure)
        time.sleep(_POLL_S if not answered else _POLL_S / 5)
    raise EngineError(f"not ready after {timeout_s:g} s; the end of {child.log}:\n{child.log_tail()}")


def _deployment_state(child: Child) -> str:
    """The state of the application in Serve's words. Raises `ConfigError` once Serve has given up."""
    for name, application in serve.status().applications.items():
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            why = [deployment.message for deployment in application.deployments.values()] or [application.message]
            ends = ["\n".join(_lines(message)[-_SHOWN_LINES:]) for message in why]
            raise ConfigError(f"{name} failed to deploy, all of it in {child.log}:\n" + "\n".join(ends))
        return str(application.status.value).lower()
    return "starting Serve"


def _lines(message: str) -> list[str]:
    """Without where Pydantic has more to say: it is what the last line would be."""
    return [line for line in message.strip().splitlines() if not line.strip().startswith(_PYDANTIC_SAYS)]


def _failures() -> Iterator[str]:
    """Of replicas that failed to start and that Serve starts again: the last line of why, in its words."""
    for application in serve.status().applications.values():
        for deployment in application.deployments.values():
            lines = _lines(deployment.message)
            if lines and application.status == "DEPLOYING" and _FAILED.search(deployment.message):
                yield lines[-1].strip()
