"""The contract over real state actors, checked as a user does: with the command, on a Ray cluster that it starts."""

from __future__ import annotations

import json
import subprocess
import sys

from gym_capture.conformance import CHECKS, DURABILITY_CHECKS
from gym_capture.conformance.lineage import LINEAGE_CHECKS, LINEAGE_DURABILITY_CHECKS


def test_state_actors_keep_the_contract() -> None:
    store = "gym_capture.serving.actor_store:ActorStore.open"
    command = [sys.executable, "-m", "gym_capture.cli", "conformance", store, "--durability", "--lineage", "--json"]
    done = subprocess.run([*command, "--kwargs", '{"shards": 1}'], capture_output=True, text=True, timeout=500)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result for result in results if not result["passed"]] == [], done.stderr
    names = {*CHECKS, *DURABILITY_CHECKS, *LINEAGE_CHECKS, *LINEAGE_DURABILITY_CHECKS}
    assert {result["name"] for result in results} == names
    assert done.returncode == 0, done.stderr
