"""The quickstart, block after block as it stands in the page, on the graph as a user serves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from pyarrow.parquet import read_table

from tests.docs.pages import ROOT, blocks_of
from tests.serving.graph import Graph

pytestmark = pytest.mark.engine

SERVED_AT = "http://127.0.0.1:8000"
NOT_HERE = ("make setup", "gym-capture serve")
"""Blocks that the fixture stands for: it serves the same configuration, with the small random model."""
ROLLOUTS = {"what-i.0", "what-i.1", "name-a.0", "name-a.1"}


def test_from_an_agent_to_a_trainer(graph: Graph, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "gym-capture").write_text(f'#!/bin/sh\nexec {sys.executable} -m gym_capture.cli "$@"\n')
    (tools / "gym-capture").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    ran: list[tuple[str, str]] = []
    for block in blocks_of(ROOT / "docs" / "quickstart.md"):
        text = block.text.replace(SERVED_AT, graph.url).replace("model smollm2", "model tiny")
        text = text.replace("build-job", f"build-job --namespace {graph.namespace}")
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
            text = f"{sys.executable} {block.file} {graph.url}"
        elif block.language != "bash" or any(each in text for each in NOT_HERE):
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{block.where}\n{done.stdout}{done.stderr}"
        ran.append((block.text, done.stdout))
    agent, looked, built, trained = ran
    assert "OpenAI(base_url=" in agent[0]
    stats, standing, records = looked[1].replace("}{", "}\n{").splitlines()[:3]
    assert json.loads(stats)["prefix_supplied_ratio"] > 0
    counts = json.loads(standing)
    assert (counts["calls"], counts["eligible_links"], counts["contiguous_links"]) == (2, 1, 1)
    assert "generation_log_probs" in records
    assert "to train on" in built[1]
    rows = [row for part in (tmp_path / "runs/first").glob("*.parquet") for row in read_table(part).to_pylist()]
    ours = {row["rollout_id"]: row for row in rows if row["rollout_id"] in ROLLOUTS}
    assert set(ours) == ROLLOUTS
    assert all(not row["masked"] and len(row["call_ids"]) == 2 for row in ours.values())
    assert (tmp_path / "runs/first-nemo-rl").is_dir()
    assert trained[1]
