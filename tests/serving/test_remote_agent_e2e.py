"""A rollout job with a remote agent: the service a process of its own, the graph served, the environment counting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import ray
import yaml

from gym_capture.build.builder import build
from gym_capture.capture.records import Continues, Root
from gym_capture.demo.processes import free_port
from tests.serving.graph import Graph, whole

pytestmark = pytest.mark.engine

ROOT: Final = Path(__file__).parents[2]
TASKS, SAMPLES = 2, 3


@contextmanager
def agent_service() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, str(ROOT / "docs" / "examples" / "remote_agent.py"), "--port", str(port)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def test_every_rollout_has_its_own_count_and_its_own_tokens(graph: Graph, tmp_path: Path) -> None:
    with agent_service() as url:
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
    assert played.returncode == 0, played.stderr
    rows = [json.loads(line) for line in (tmp_path / "job" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == TASKS * SAMPLES
    for row in rows:
        assert row["status"] == "finished"
        snapshot = await graph.snapshot(row["rollout_id"])
        root, *later = whole(snapshot)
        assert isinstance(root.parent, Root)
        assert [isinstance(call.parent, Continues) and call.prefix.supplied for call in later] == [True, True]
        # What the environment has counted is what the policy of this rollout sampled, and of no other one.
        items = [item for call in (root, *later) for item in call.reply.output_items]
        tools = [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"]
        start = 1000 * int(row["task_id"].removeprefix("count-"))
        assert len(tools) == 2
        assert row["reward_components"] == {"value": start + sum(tool["number"] for tool in tools), "calls": 2}
        assert row["reward"] == sum(row["reward_components"].values())

        built = build(snapshot)
        assert (built.masked, len(built.trajectories), built.counts.contiguous_links) == (False, 1, 2)
        assert int(built.trajectories[0].loss_mask.sum()) == sum(
            call.generation_token_ids.size for call in (root, *later)
        )
