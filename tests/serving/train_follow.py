"""`gym-capture train` beside a job on the graph as it serves, over the files that it builds: `make test-faults`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gym_capture.models import tiny_dir
from tests.serving.graph import Graph
from tests.serving.test_train_e2e import ends, job_file, lines, running, until_step
from trainer_bridge.stream import parquet_batches

pytestmark = pytest.mark.engine


def test_a_folder_is_followed_to_the_end_of_its_job_and_a_signal_leaves_a_checkpoint(
    graph: Graph, tmp_path: Path
) -> None:
    run, data, log = tmp_path / "run", tmp_path / "data", tmp_path / "log"
    arguments = [
        *("train", "--model", tiny_dir(), "--out", run, "--data", data, "--follow"),
        *("--rollouts-per-step", "2", "--checkpoint-every", "100", "--lr", "1e-4"),
        *("--push", graph.url, "--push-every", "2"),
    ]
    job = ["rollouts", "run", job_file(graph, tmp_path, tasks=4), "--build", data]
    with running(*arguments, log=log) as trainer, running(*job, log=tmp_path / "job-log") as player:
        until_step(trainer, run, 1, log)
        trainer.send_signal(signal.SIGTERM)
        assert ends(trainer, log) == 143, log.read_text()
        made = lines(run)[-1]["step"]
        said = " ".join(log.read_text().split())
        assert f"stopped by SIGTERM: a checkpoint of step {made} is in" in said
        assert ends(player, tmp_path / "job-log") == 0
    with running(*arguments, log=log) as trainer:
        assert ends(trainer, log) == 0, log.read_text()
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
    built = {each for batch in parquet_batches(data) for each in batch.column("group_id").to_pylist()}
    (state,) = sorted((run / "checkpoints").glob("step-00000004/state.json"))
    assert set(json.loads(state.read_text())["progress"]["position"]["settled"]) == built
