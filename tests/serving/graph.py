"""A served graph, as its clients and its data jobs reach it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from openai import AsyncOpenAI

from gym_capture.capture.records import Snapshot, TokenEntry
from gym_capture.serving.state import connect


@dataclass(frozen=True)
class Graph:
    """Where a graph is served."""

    url: str
    namespace: str

    def client(self, rollout_id: str) -> AsyncOpenAI:
        """The SDK as an agent of that rollout has it. Failures show: nothing is tried again."""
        base_url = f"{self.url}/ng-rollout/{rollout_id}/v1"
        return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)

    async def snapshot(self, rollout_id: str) -> Snapshot:
        """The rollout, once no call of it is open: a client has its error before the record of it is written."""
        source = connect(namespace=self.namespace)
        async with asyncio.timeout(60):
            while True:
                snapshot = await source.freeze(rollout_id)
                if not any(reason.startswith("dangling_intent") for reason in snapshot.incomplete):
                    return snapshot
                await asyncio.sleep(0.05)

    def processes(self, title: str) -> list[psutil.Process]:
        """Those that run below this one under a name like that."""
        return running_below(psutil.Process(), title)

    def kill_state_actors(self) -> int:
        """Ends every state actor's process without a warning. Returns how many."""
        processes = self.processes("ray::StateShard")
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=10)
        return len(processes)


def running_below(process: psutil.Process, title: str) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if _runs_as(each, title)]


def _runs_as(process: psutil.Process, title: str) -> bool:
    try:
        return " ".join(process.cmdline()).startswith(title)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended since it was listed
        return False


def whole(snapshot: Snapshot) -> list[TokenEntry]:
    """The calls, oldest first."""
    assert snapshot.orphans == ()
    return sorted(snapshot.entries, key=lambda entry: entry.created_at)


def environment() -> dict[str, str]:
    """Of a command on the graph's cluster."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def gym_capture(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command on the graph's cluster."""
    return subprocess.run(
        [sys.executable, "-m", "gym_capture.cli", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
