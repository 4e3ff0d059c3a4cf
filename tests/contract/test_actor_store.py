"""The contract over real state actors. What it says of actors that end is checked as a user does, with the command on a
Ray cluster that it starts, and a process for each time that a store is opened; the rest in one actor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from gym_capture.conformance import CHECKS, DURABILITY_CHECKS, run_check
from gym_capture.conformance.lineage import LINEAGE_CHECKS, LINEAGE_DURABILITY_CHECKS, run_lineage_check
from tests.contract.one_actor import HostedStore, start_host

ENDING = ("closed_store_is_unavailable", *DURABILITY_CHECKS, *LINEAGE_DURABILITY_CHECKS)


@pytest.fixture(scope="module")
def host() -> Iterator[ActorHandle[Any]]:
    # Workers do not get the path that pytest found the test modules by.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield start_host()
    ray.shutdown()


@pytest.mark.parametrize("name", [name for name in (*CHECKS, *LINEAGE_CHECKS) if name not in ENDING])
async def test_state_actors_keep_the_contract(name: str, host: ActorHandle[Any], tmp_path: Path) -> None:
    async def open_store() -> HostedStore:
        return await HostedStore.open(host, tmp_path)

    run = run_lineage_check if name in LINEAGE_CHECKS else run_check
    result = await run(name, open_store)
    assert result.passed, f"{result.contract}\n{result.failure}"


def test_state_actors_keep_it_when_they_end_and_begin_again() -> None:
    store = "gym_capture.serving.actor_store:ActorStore.open"
    command = [sys.executable, "-m", "gym_capture.cli", "conformance", store, "--lineage", "--json"]
    chosen = [word for name in ENDING for word in ("--check", name)]
    done = subprocess.run([*command, "--kwargs", '{"shards": 1}', *chosen], capture_output=True, text=True, timeout=500)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result for result in results if not result["passed"]] == [], done.stderr
    assert [result["name"] for result in results] == [*ENDING]
    assert done.returncode == 0, done.stderr
