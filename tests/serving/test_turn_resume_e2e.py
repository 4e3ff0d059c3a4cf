"""A job on a served graph is killed in the middle of its rollouts, and goes on from what is recorded of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from gym_capture.serving.state import connect
from tests.serving.graph import Graph, gym_capture, whole

pytestmark = pytest.mark.engine

ROLLOUTS = 2


def replayed_calls(graph: Graph) -> int:
    count: int = httpx.get(f"{graph.url}/stats", trust_env=False).json()["replayed_calls"]
    return count


def kill_when_halted(folder: Path, *command: Any) -> None:
    """Runs a command on the graph's cluster until all rollouts have halted, and kills it."""
    with (folder / "driver.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "gym_capture.cli", *map(str, command)],
            env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 240
        while len(list(folder.glob("halted-*"))) < ROLLOUTS:
            assert driver.poll() is None, (folder / "driver.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()


async def test_a_killed_job_goes_on_from_the_records_of_its_rollouts(graph: Graph, tmp_path: Path) -> None:
    play: tuple[Any, ...] = ("rollouts", "run", "--url", graph.url, "--namespace", graph.namespace)
    play += ("--out", tmp_path / "job", "--job-id", "cut", "--generate", "1", "--samples", str(ROLLOUTS))
    play += ("--harness", "tests.serving.halting:halting_loop", "--set", f"harness.folder={tmp_path}")
    play += ("--set", "harness.halts_before=3", "--resume-turns")
    kill_when_halted(tmp_path, *play)
    attempts = sorted(json.loads(line)["rollout_id"] for line in (tmp_path / "job" / "attempts.jsonl").open())
    cut = {rollout_id: whole(await graph.snapshot(rollout_id)) for rollout_id in attempts}
    assert [len(entries) for entries in cut.values()] == [2] * ROLLOUTS

    # The state actors die as well, before anything is handed on.
    assert graph.kill_state_actors() == 2
    (tmp_path / "go").touch()
    before = replayed_calls(graph)
    played = gym_capture(*play, "--build", tmp_path / "built")
    assert played.returncode == 0, played.stderr
    assert f"{2 * ROLLOUTS} calls were answered from the records of attempts that were cut" in played.stderr
    assert replayed_calls(graph) - before == 2 * ROLLOUTS

    rows = [json.loads(line) for line in (tmp_path / "job" / "rollouts.jsonl").open()]
    for row in rows:
        assert (row["attempt"], row["n_calls"], row["replayed_calls"], row["diverged_at"]) == (2, 3, 2, None)
        entries = whole(await graph.snapshot(row["rollout_id"]))
        first = cut[row["rollout_id"].removesuffix("2") + "1"]
        assert [entry.policy.replayed_from for entry in entries] == [*(each.model_call_id for each in first), None]
        for entry, of in zip(entries, first, strict=False):
            assert entry.prompt_token_ids.tobytes() == of.prompt_token_ids.tobytes()
            assert entry.generation_token_ids.tobytes() == of.generation_token_ids.tobytes()
            assert entry.generation_log_probs.tobytes() == of.generation_log_probs.tobytes()
            assert (entry.reply, entry.request.sampling) == (of.reply, of.request.sampling)
    report = json.loads((tmp_path / "built" / "_report.json").read_text())
    assert (report["complete"], report["trajectories"]) == (ROLLOUTS, ROLLOUTS)
    live = await connect(namespace=graph.namespace).rollout_ids()
    assert [rollout_id for rollout_id in live if rollout_id.startswith("cut.")] == sorted(
        row["rollout_id"] for row in rows
    )
