"""A rollout job with a remote agent: the service a process of its own, the graph served, the environment counting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import ray
import yaml

from gym_capture.build.builder import build
from gym_capture.demo.processes import free_port
from tests.rollouts.counting_agent import TURNS, number_in
from tests.rollouts.scripted_agent import ROOT, process
from tests.serving.graph import Graph, whole

pytestmark = pytest.mark.engine

TASKS: Final = 2
SAMPLES: Final = 3


async def test_every_rollout_has_its_own_count_and_its_own_tokens(graph: Graph, tmp_path: Path) -> None:
    port = free_port()
    with process(["-m", "tests.rollouts.counting_agent", str(port)], port=port) as url:
        job = {
            "format_version": 1,
            "out": str(tmp_path / "job"),
            "job_id": "remote",
            "endpoint": {"url": graph.url, "namespace": graph.namespace},
            "environment": {"name": "tests.rollouts.counter:Counter"},
            "tasks": {"count": TASKS},
            "samples": SAMPLES,
            "harness": {"name": "remote-agent", "url": url},
            "limits": {"concurrency": TASKS * SAMPLES, "max_attempts": 1, "rollout_timeout_s": 240},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        played = subprocess.run(
            [sys.executable, "-m", "gym_capture.cli", "rollouts", "run", str(tmp_path / "job.yaml")],
            env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    rows = [json.loads(line) for line in (tmp_path / "job" / "rollouts.jsonl").read_text().splitlines()]
    assert played.returncode == 0, (played.stderr, rows)
    assert len(rows) == TASKS * SAMPLES
    for row in rows:
        snapshot = await graph.snapshot(row["rollout_id"])
        calls = whole(snapshot)
        *before, last = [
            "".join(part["text"] for item in call.reply.output_items for part in item["content"]) for call in calls
        ]
        # What was counted is what the policy said in this rollout, and in no other one.
        value = 1000 * int(row["task_id"].removeprefix("count-")) + sum(map(number_in, before))
        assert row["reward_components"] == {"value": value, "calls": TURNS}
        assert (row["reward"], row["answer"]) == (value + TURNS, last)

        built = build(snapshot)
        assert (built.masked, len(built.trajectories)) == (False, 1)
        assert (built.counts.n_calls, built.counts.contiguous_links) == (TURNS + 1, TURNS)
        sampled = sum(call.generation_token_ids.size for call in calls)
        assert built.counts.generated_tokens_delivered == built.counts.generated_tokens_captured == sampled > 0
