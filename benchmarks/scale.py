"""Many rollouts at a time on one replica: what a call costs must not grow with how many there are.

The engine is scripted, so the figures are the graph's own: HTTP, parsing, lineage, splice, record, commit. Cost is the
processor time of all server processes by the number of calls, which other load on the machine does not change much;
wall time is reported beside it. One JSON line; exit code 1 below the target.

    python -m benchmarks.scale [--few 100] [--many 1000] [--calls 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
import yaml

from benchmarks.scripted import GENERATED, IMPORT_PATH
from benchmarks.serving_pair import chat_url, client_session, nonce, quantile, refuse_errors
from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import ChildProcesses
from gym_capture.models import tiny_dir

MAX_COST_RATIO: Final = 1.25
_ROOT: Final = Path(__file__).parent.parent
_SERVE_CONFIG: Final = _ROOT / "serve_configs" / "cpu_demo.yaml"
_NAMESPACE: Final = "gym-capture-scale"
_TASK_WORDS: Final = 100


@dataclass(frozen=True, slots=True)
class Load:
    """What one load came to."""

    rollouts: int
    calls: int
    wall_s: float
    server_cpu_s: float
    latencies_s: list[float]

    @property
    def cost_ms(self) -> float:
        """Processor time of a call."""
        return 1e3 * self.server_cpu_s / self.calls


@contextmanager
def scripted_graph() -> Iterator[str]:
    """The graph with an engine that costs nothing, for the length of the block."""
    base = yaml.safe_load(_SERVE_CONFIG.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="gym-capture-scale-") as folder, ChildProcesses() as children:
        args = {
            "model": str(tiny_dir()),
            "engine": IMPORT_PATH,
            "engine_args": {},
            "ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": {"PYTHONPATH": str(_ROOT)}}},
            "state": {"shards": 1, "namespace": _NAMESPACE, "directory": f"{folder}/records"},
        }
        with (
            private_ray(cpus=8, namespace=_NAMESPACE) as address,
            served_graph(
                children,
                base=base,
                args=args,
                options={"user_config": {"running_calls": 4096}},
                address=address,
                directory=Path(folder),
                on_wait=lambda _: None,
            ) as url,
        ):
            yield url


def play(url: str, *, rollouts: int, calls: int) -> Load:
    """All rollouts at the same time, each call of a rollout right after the one before."""
    latencies: list[float] = []

    async def rollout(client: aiohttp.ClientSession, target: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{nonce()} " + "task " * _TASK_WORDS}]
        for _ in range(calls):
            began = time.perf_counter()
            async with client.post(target, json={"model": "policy", "messages": messages}) as response:
                await refuse_errors(response)
                reply = await response.json()
            latencies.append(time.perf_counter() - began)
            assert reply["usage"]["completion_tokens"] == GENERATED
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on with the next step."}]

    async def everything() -> None:
        async with client_session() as client:
            name = nonce()
            targets = (chat_url(url, rollout_id=f"{name}-{number}") for number in range(rollouts))
            await asyncio.gather(*(rollout(client, target) for target in targets))

    cpu, began = _server_cpu_s(), time.perf_counter()
    asyncio.run(everything())
    return Load(
        rollouts=rollouts,
        calls=len(latencies),
        wall_s=time.perf_counter() - began,
        server_cpu_s=_server_cpu_s() - cpu,
        latencies_s=latencies,
    )


def _server_cpu_s() -> float:
    """Processor time so far of the processes that this one started."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return float(sum(one.user + one.system for one in times))


def main() -> int:
    """Returns 1 if the claim fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--few", type=int, default=100, help="rollouts at a time of the load to compare with")
    parser.add_argument("--many", type=int, default=1000, help="rollouts at a time")
    parser.add_argument("--calls", type=int, default=10, help="calls of each rollout")
    asked = parser.parse_args()
    with scripted_graph() as url:
        play(url, rollouts=asked.few, calls=asked.calls)  # warms up
        few, many = (play(url, rollouts=number, calls=asked.calls) for number in (asked.few, asked.many))
        stats = _stats(url)
    ratio = many.cost_ms / few.cost_ms
    eligible = stats["prefix_requested"]
    figures = {
        "benchmark": "scale",
        **{f"{name}_rollouts": load.rollouts for name, load in (("few", few), ("many", many))},
        **{f"{name}_cpu_ms_per_call": round(load.cost_ms, 2) for name, load in (("few", few), ("many", many))},
        **{f"{name}_calls_per_s": round(load.calls / load.wall_s) for name, load in (("few", few), ("many", many))},
        **{f"{name}_p50_s": round(quantile(load.latencies_s, 0.5), 3) for name, load in (("few", few), ("many", many))},
        "cost_ratio": round(ratio, 3),
        "target": MAX_COST_RATIO,
        "prefix_supplied": stats["prefix_supplied"],
        "prefix_eligible": eligible,
    }
    print(json.dumps(figures), flush=True)
    expected = (2 * asked.few + asked.many) * (asked.calls - 1)
    return int(ratio > MAX_COST_RATIO or not eligible == stats["prefix_supplied"] == expected)


def _stats(url: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with client_session() as client, client.get(f"{url}/stats") as response:
            await refuse_errors(response)
            found: dict[str, Any] = await response.json()
            return found

    return asyncio.run(ask())


if __name__ == "__main__":
    sys.exit(main())
