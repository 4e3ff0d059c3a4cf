"""Agents in processes of their own, whom nobody dispatches, on the graph as a user serves it, and the trajectories that
come of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson
import pyarrow.parquet as pq
import pytest

from tests.serving.graph import Graph, gym_capture

pytestmark = pytest.mark.engine

TARGET = 3
AGENTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "registry-once": (1, ("count",)),
    "registry-twice": (3, ("count", "count")),
    "registry-different": (2, ("count", "more", "count")),
    "registry-late": (3, ("count",)),
    "registry-never": (2, ()),
}
"""Rollout: how many turns it plays, and what its agent says in the end."""


class Agent:
    """One of them, running."""

    def __init__(self, graph: Graph, rollout_id: str) -> None:
        turns, self.endings = AGENTS[rollout_id]
        said = [graph.url, rollout_id, "registry-count", TARGET, turns, *self.endings]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.counter_agent", *map(str, said)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def played(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "played\n"

    def ended(self) -> dict[str, Any]:
        """Lets it say how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n" * len(self.endings))
        self._process.stdin.close()
        found: dict[str, Any] = orjson.loads(self._process.stdout.read())
        assert self._process.wait(timeout=120) == 0
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def built(graph: Graph, out: Path, *options: str) -> dict[str, Any]:
    """The rows of these rollouts; whatever else is on record in this graph is built too."""
    done = gym_capture("build-job", "--namespace", graph.namespace, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    rows = [row for path in sorted(out.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]
    return {row["rollout_id"]: row for row in rows if row["group_id"] == "registry-count"}


def test_agents_that_nobody_dispatches(graph: Graph, tmp_path: Path) -> None:
    agents = {rollout_id: Agent(graph, rollout_id) for rollout_id in AGENTS}
    try:
        for agent in agents.values():
            agent.played()
        answers = {name: agent.ended() for name, agent in agents.items() if name != "registry-late"}
        assert answers == {
            "registry-once": {"count": 1, "completed": [200], "late_call": 409},
            "registry-twice": {"count": 3, "completed": [200, 200], "late_call": 409},
            "registry-different": {"count": 2, "completed": [200, 409, 200], "late_call": 409},
            "registry-never": {"count": 2, "completed": [], "late_call": None},
        }
        rows = built(graph, tmp_path / "early")
        for name in ("registry-late", "registry-never"):
            assert (rows[name]["reward"], rows[name]["mask_reasons"]) == (None, ["missing_reward"])
        rewards = {name: row["reward"] for name, row in rows.items() if not row["masked"]}
        assert rewards == {"registry-once": 1 / 3, "registry-twice": 1.0, "registry-different": 2 / 3}
        advantages = {name: rows[name]["advantage"] for name in rewards}
        expected = {"registry-once": -(1.5**0.5), "registry-twice": 1.5**0.5, "registry-different": 0.0}
        assert advantages == pytest.approx(expected, abs=1e-3)

        # What comes late is not too late for the next build.
        assert agents["registry-late"].ended() == {"count": 3, "completed": [200], "late_call": 409}
        rows = built(graph, tmp_path / "late", "--retire")
    finally:
        for agent in agents.values():
            agent.kill()
    assert rows["registry-late"]["reward"] == 1.0
    assert [name for name, row in rows.items() if row["masked"]] == ["registry-never"]
    for name, (turns, _) in AGENTS.items():
        row = rows[name]
        assert (row["n_calls"], row["chains"]) == (turns, 1)
        assert row["contiguous_links"] == row["eligible_links"] == turns - 1
        assert row["generated_tokens_delivered"] == row["generated_tokens_captured"] == sum(row["loss_mask"]) > 0
        assert orjson.loads(row["input"]) == f"Count to {TARGET}."
    # Only what was completed is retired.
    with httpx.Client(base_url=graph.url, trust_env=False, timeout=60) as http:
        for name in AGENTS:
            assert http.get(f"/rollouts/{name}").status_code == (200 if name == "registry-never" else 404)
        assert http.get("/rollouts/registry-never").json()["state"] == "open"
        assert http.post("/rollouts/registry-late/complete", json={"reward": 1.0}).status_code == 410
        assert http.post("/rollouts/registry-never/complete", json={"failure": "gave_up"}).status_code == 200
