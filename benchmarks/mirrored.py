"""What a second copy of the log costs: durable puts with `replicas: 2` over puts with one copy, side by side.

Two Ray nodes on this machine, and one disk for both: each put is synced twice to it, one after the other as the disk
takes them. On two machines the syncs are at the same time, and the network comes on top. No claim: the figure is what
one pays for surviving the loss of a node.

Run: python -m benchmarks.mirrored [DIRECTORY]     (files are made in a temporary directory inside it; default: here)

Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import ray
from ray.cluster_utils import Cluster

from benchmarks.state import ACTOR_PUTS, CONCURRENT, ROUNDS, SHARDS, put_rate, putter, report, started
from gym_capture.demo.processes import free_port


def main(parent: str = ".") -> int:
    with tempfile.TemporaryDirectory(dir=parent, prefix=".bench-mirrored-") as directory, _two_nodes():
        asyncio.run(_compare(Path(directory)))
    return 0


@contextmanager
def _two_nodes() -> Iterator[None]:
    session = tempfile.mkdtemp(prefix="gcr-")  # paths of sockets must be short
    os.environ |= {"RAY_TMPDIR": session, "RAY_BACKEND_LOG_LEVEL": "fatal"}
    head = {"gcs_server_port": free_port(), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, namespace="bench-mirrored", log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(session, ignore_errors=True)


async def _compare(directory: Path) -> None:
    rates: dict[int, list[float]] = {1: [], 2: []}
    latencies_s: dict[int, list[float]] = {1: [], 2: []}
    putters = {copies: await putter(started(directory, f"copies-{copies}", replicas=copies)) for copies in rates}
    for number in range(-1, ROUNDS):
        for copies, put in putters.items():
            rate, round_latencies_s = await put_rate(put, ACTOR_PUTS, f"{number}")
            if number >= 0:  # the first is a warm-up
                rates[copies].append(rate)
                latencies_s[copies] += round_latencies_s
    report(
        "state.mirrored_puts",
        shards=SHARDS,
        concurrent=CONCURRENT,
        puts_per_s={copies: round(median(found)) for copies, found in rates.items()},
        p50_ms={copies: round(1e3 * float(np.percentile(found, 50)), 2) for copies, found in latencies_s.items()},
        p99_ms={copies: round(1e3 * float(np.percentile(found, 99)), 2) for copies, found in latencies_s.items()},
        times_one_copy=round(median(two / one for one, two in zip(rates[1], rates[2], strict=True)), 2),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
