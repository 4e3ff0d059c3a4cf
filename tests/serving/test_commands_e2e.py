"""The commands of the README, one after the other, on a served graph: roll out, build, train, export."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from openai.types.responses import Response
from pyarrow.parquet import read_table

from gym_capture.data.schema import SCHEMA
from gym_capture.models import tiny_dir
from tests.serving.graph import Graph, gym_capture
from trainer_bridge.nemo_rl import contiguity_walk

pytestmark = pytest.mark.engine


def test_roll_out_build_and_train(graph: Graph, tmp_path: Path) -> None:
    play = ("rollouts", "run", "--url", graph.url, "--namespace", graph.namespace, "--out", tmp_path / "job")
    play += ("--generate", "2", "--samples", "2", "--build", tmp_path / "streamed", "--json")
    played = gym_capture(*play)
    assert played.returncode == 0, played.stderr
    assert "4 of 4 rollouts finished" in played.stderr
    rows = [json.loads(line) for line in (tmp_path / "job" / "rollouts.jsonl").read_text().splitlines()]
    job_id = json.loads((tmp_path / "job" / "job.json").read_text())["job_id"]
    assert job_id.startswith("job-")
    assert sorted(row["rollout_id"] for row in rows) == [
        f"{job_id}.register-0-{task}.{n}-a1" for task in (0, 1) for n in (0, 1)
    ]
    assert all(row["n_calls"] == 3 for row in rows)
    recorded = [row["recorded"] for row in rows]
    assert all((each["calls"], each["flaws"], each["timed_puts"]) == (3, 0, 3) for each in recorded)
    assert all(0 < each["contiguous_links"] <= each["eligible_links"] == 2 for each in recorded)
    last = json.loads(played.stdout.splitlines()[-1])
    assert (last["done"], last["masked"], last["calls"]) == (4, 0, 12)
    assert last["built"] == {"groups": 2, "rollouts": 4, "masked": 0, "trajectories": 4}
    for name in ("generated_tokens", "eligible_links", "contiguous_links"):
        assert last[name] == sum(each[name] for each in recorded)
    for row in rows:
        standing = httpx.get(f"{graph.url}/rollouts/{row['rollout_id']}", trust_env=False).json()
        counts = {name: standing[name] for name in row["recorded"].keys() & standing.keys()}
        assert len(counts) == 4
        assert counts == {name: row["recorded"][name] for name in counts}

    again = gym_capture(*play)
    assert "4 of 4 rollouts finished; 4 were over before this run" in again.stderr
    last = json.loads(again.stdout.splitlines()[-1])
    assert (last["calls"], last["built"]["groups"]) == (0, 2)

    built = gym_capture(
        "build-job", tmp_path / "job" / "rollouts.jsonl", "--namespace", graph.namespace, "--out", tmp_path / "parquet"
    )
    assert built.returncode == 0, built.stderr
    report = json.loads((tmp_path / "parquet" / "_report.json").read_text())
    assert (report["requested"], report["complete"], report["trajectories"]) == (4, 4, 4)
    assert report["generated_tokens_delivered"] == report["generated_tokens_captured"] > 0
    assert report["generated_tokens_captured"] == sum(each["generated_tokens"] for each in recorded)

    # What was built while the job played is the same; only there it is known who played what.
    columns = [name for name in SCHEMA.names if name not in ("agent_name", "input")]
    tables = [read_table(tmp_path / out, columns=columns).sort_by("trajectory_id") for out in ("parquet", "streamed")]
    assert tables[0].equals(tables[1])
    assert len(list((tmp_path / "streamed").glob("part-*.parquet"))) == 2
    by_group = [json.loads(line) for line in (tmp_path / "job" / "rows.jsonl").read_text().splitlines()]
    assert {row["rollout_id"] for row in by_group} == {row["rollout_id"] for row in rows}
    for row in by_group:
        assert not row["mask_sample"]
        response = Response.model_validate(row["response"])
        assert {item.type for item in response.output} >= {"function_call"}
        assert len([m for m in contiguity_walk(row["response"]["output"]) if m.role == "assistant"]) == 3
        assert {tool["name"] for tool in row["responses_create_params"]["tools"]} == {"add", "multiply"}

    trained = gym_capture("train-step", "--model", tiny_dir(), "--data", tmp_path / "parquet", "--json")
    assert trained.returncode == 0, trained.stderr
    metrics = json.loads(trained.stdout)
    assert metrics["trained_tokens"] == report["generated_tokens_delivered"]

    arguments = ("--to", "nemo-rl", "--agent", "tool-agent", "--out", tmp_path / "nemo-rl")
    exported = gym_capture("export", tmp_path / "parquet", *arguments)
    assert exported.returncode == 0, exported.stderr
    records = [json.loads(line) for line in (tmp_path / "nemo-rl" / "rollouts.jsonl").read_text().splitlines()]
    outputs = [record["response"]["output"] for record in records]
    sampled = [len(m.token_ids) for output in outputs for m in contiguity_walk(output) if m.role == "assistant"]
    assert sum(sampled) == report["generated_tokens_delivered"]
    assert {item["type"] for output in outputs for item in output} >= {"function_call"}


def test_the_state_of_a_graph_that_is_served_is_not_stopped(graph: Graph) -> None:
    refused = gym_capture("state", "stop", "--namespace", graph.namespace)
    assert refused.returncode == 2
    assert "Serve runs gym-capture on this cluster" in refused.stderr
    assert "`serve shutdown -y`" in refused.stderr
    assert "--force" in refused.stderr
    assert httpx.get(f"{graph.url}/healthz", trust_env=False).status_code == 200
