"""TRL's `AsyncGRPOTrainer` and the graph drive each other, by the script of docs/trainers/trl.md. `make test-trl-graph`

A real graph, a job that plays on it for as long as TRL trains, and TRL's own trainer, client and batches. The model is
random; what is looked at is who trained what, sampled by which weights.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import Child, ChildProcesses
from gym_capture.models import tiny_dir
from gym_capture.serving.state import connect
from tests.docs.pages import ROOT, blocks_of
from tests.serving.graph import Graph
from tests.trainers.plain_attention import without_a_gpu
from tests.weight_folders import moved, weights_folder
from trainer_bridge.groups import Position
from trainer_bridge.stream import TrainSequence, parquet_batches, read_rollouts
from trainer_bridge.weight_client import WeightClient

pytestmark = pytest.mark.engine

NAMESPACE = "trl"
STEPS, STEPS_AGAIN, BATCH, STALENESS = 5, 2, 8, 2
ON_A_CPU = [
    "--use_cpu",
    "true",
    "--bf16",
    "false",
    "--gradient_checkpointing",
    "false",
    "--report_to",
    "none",
    "--save_strategy",
    "no",
]


@pytest.fixture(scope="module")
def children() -> Iterator[ChildProcesses]:
    with ChildProcesses() as children:
        yield children


@pytest.fixture(scope="module")
def graph(children: ChildProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    directory = tmp_path_factory.mktemp("graph")
    base = yaml.safe_load((ROOT / "serve_configs" / "cpu_demo.yaml").read_text(encoding="utf-8"))
    state = {"shards": 1, "namespace": NAMESPACE, "directory": str(directory / "records")}
    with (
        private_ray(cpus=6, namespace=NAMESPACE) as address,
        served_graph(
            children,
            base=base,
            args={"model": str(tiny_dir()), "state": state},
            address=address,
            directory=directory,
            on_wait=lambda _: None,
        ) as url,
    ):
        yield Graph(url=url, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def job(graph: Graph, children: ChildProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trajectories of a job that plays on and on."""
    directory = tmp_path_factory.mktemp("job")
    said = {
        "format_version": 1,
        "out": str(directory / "job"),
        "endpoint": {
            "url": graph.url,
            "ray_address": ray.get_runtime_context().gcs_address,
            "namespace": NAMESPACE,
        },
        "environment": {"name": "tests.trainers.talk:Remarks"},
        "harness": {"name": "tests.trainers.talk:Talk"},
        "tasks": {"count": 2000},
        "samples": 4,
        "limits": {"concurrency": 4},
    }
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(said), encoding="utf-8")
    command = [sys.executable, "-m", "gym_capture.cli", "rollouts", "run", str(file)]
    child: Child = children.start([*command, "--build", str(directory / "built")], log=directory / "job.log")
    yield directory / "built"
    assert child.ended() is None, child.log_tail()
    child.stop()


class Trained(list[tuple[int, tuple[int, ...], tuple[float, ...]]]):
    """What went through TRL's loss: the version of the trainer that it made, and ids and log probabilities of a row."""

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        step = AsyncGRPOTrainer.training_step

        def noted(trainer: Any, model: Any, inputs: dict[str, torch.Tensor], items: Any) -> Any:
            kept = inputs["token_index"] >= 0
            labels = inputs["shift_labels"][inputs["attention_mask"].bool()][inputs["token_index"][kept]]
            segments, log_probs = inputs["segment_id"][kept], inputs["old_log_probs"][kept]
            for segment in segments.unique():
                of = segments == segment
                row = (trainer.worker_version(), tuple(labels[of].tolist()), tuple(log_probs[of].tolist()))
                self.append(row)
            return step(trainer, model, inputs, items)

        patch.setattr(AsyncGRPOTrainer, "training_step", noted)
        patch.setattr(
            AsyncGRPOTrainer,
            "worker_version",
            lambda trainer: trainer.rollout_worker.model_version + trainer.rollout_worker.versions_before,
            raising=False,
        )


def script(directory: Path) -> Path:
    page = ROOT / "docs" / "trainers" / "trl.md"
    (text,) = [block.text for block in blocks_of(page) if block.file == "train_trl.py"]
    path = directory / "train_trl.py"
    path.write_text(text, encoding="utf-8")
    return path


def trains(graph: Graph, job: Path, directory: Path, steps: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script as it is typed. What it has made."""
    options = {
        "model": tiny_dir(),
        "trajectories": job,
        "weights": directory / "weights",
        "vllm_server_base_url": graph.url,
        "output_dir": directory / "run",
        "max_steps": steps,
        "temperature": 1.0,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "token_budget": 800,  # else what the graph says of the model: too much for steps on a CPU
        "max_staleness": STALENESS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    patch.setattr(sys, "argv", ["train_trl.py", *words, *ON_A_CPU])
    return runpy.run_path(str(script(directory)), run_name="__main__")


def built(job: Path) -> dict[tuple[tuple[int, ...], tuple[float, ...]], TrainSequence]:
    """Every trajectory that there is to train, by what a loss sees of it."""
    return {
        (tuple(each.token_ids[each.loss_mask].tolist()), tuple(each.log_probs[each.loss_mask].tolist())): each
        for rollout in read_rollouts(parquet_batches(str(job)))
        for each in rollout.sequences
    }


def versions(sequence: TrainSequence) -> set[int]:
    return {int(span.weight_version or -1) for span in sequence.spans}


def test_the_script_trains_on_the_graph_and_the_graph_serves_what_it_trains(
    graph: Graph, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_gpu(monkeypatch)
    trained = Trained()
    trained.watch(monkeypatch)
    with WeightClient(graph.url) as client:
        before = client.checksums()
        made = trains(graph, job, tmp_path, STEPS, monkeypatch)
        assert client.info()["weight_version"] == str(STEPS + 1)  # once before the first step, and after each
        assert client.checksums() != before
        in_graph = load_file(next(Path(client.info()["folder"]).glob("*.safetensors")))
    serves_what_the_trainer_has(graph, made["trainer"].model, in_graph)
    logged = [line for line in made["trainer"].state.log_history if "loss" in line]
    assert len(logged) == STEPS
    assert all(np.isfinite([line["loss"], line["grad_norm"], line["kl"]]).all() for line in logged)
    # Nothing had been learned yet: TRL finds the probabilities that vLLM sampled with.
    assert logged[0]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert abs(logged[0]["kl"]) < 1e-5

    # A trainer of another life goes on: with other groups, and with the versions that follow.
    again = trains(graph, job, tmp_path, STEPS_AGAIN, monkeypatch)
    with WeightClient(graph.url) as client:
        assert client.info()["weight_version"] == str(STEPS + 1 + STEPS_AGAIN + 1)
    assert again["worker"].versions_before == STEPS + 1

    there = built(job)
    rows = [there[ids, log_probs] for _, ids, log_probs in trained]
    assert Counter(row.trajectory_id for row in rows).most_common(1)[0][1] == 1
    assert {len({span.call_id for span in row.spans}) for row in rows} == {2}
    for (live, _, _), row in zip(trained, rows, strict=True):
        # TRL looks at how old a sample is as it takes it for a batch: one step ahead, two for one that did not fit.
        assert live - STALENESS - 2 <= min(versions(row)) <= max(versions(row)) <= live
    assert max(max(versions(row)) for row in rows) >= STEPS + STEPS_AGAIN - STALENESS - 1
    settled = Position.from_json(json.loads((tmp_path / "run" / "groups.json").read_bytes())).settled
    groups = {row.trajectory_id.split(".")[1] for row in rows}
    assert groups <= settled


def serves_what_the_trainer_has(graph: Graph, model: torch.nn.Module, in_graph: dict[str, torch.Tensor]) -> None:
    """Bit by bit in the folder that is served, and in what the engine makes of it."""
    mine = dict(model.named_parameters())
    assert mine.keys() == in_graph.keys()
    assert all(torch.equal(tensor.detach(), in_graph[name]) for name, tensor in mine.items())
    asked = {"model": "policy", "max_tokens": 16, "messages": [{"role": "user", "content": "And now?"}]}
    url = f"{graph.url}/ng-rollout/after/v1/chat/completions"
    assert httpx.post(url, json=asked, trust_env=False, timeout=120).status_code == 200
    (entry,) = asyncio.run(connect(namespace=NAMESPACE).freeze("after")).entries
    assert [span.version for span in entry.policy.weight_versions] == [str(STEPS + 1)]
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir(), dtype=torch.float32)
    plain.load_state_dict(in_graph, strict=False)
    ids = torch.from_numpy(entry.cumulative_ids().astype(np.int64))
    with torch.no_grad():
        scored = torch.log_softmax(plain(ids[None]).logits[0], dim=-1)
    start = entry.prompt_len
    expected = scored[torch.arange(start - 1, ids.numel() - 1), ids[start:]].numpy()
    np.testing.assert_allclose(entry.generation_log_probs, expected, atol=1e-3)


def test_trls_own_client_finds_a_server_that_it_knows(graph: Graph, tmp_path: Path) -> None:
    """Its requests in its order, all but the tensors, which go by NCCL."""
    client = VLLMClient(graph.url)
    client.wait_for_server_ready()
    assert client.get_dtype() == "torch.float32"
    assert client.get_max_model_len() == 4096
    assert client.get_world_size() == 1
    with WeightClient(graph.url) as weights:
        served = int(weights.info()["weight_version"])
        payload = weights_folder(tmp_path, served + 1)
        client.pause()
        assert httpx.get(f"{graph.url}/is_paused", trust_env=False).json()["is_paused"]
        client.start_weight_update()
        client.update_weights({"folder": payload.folder})
        client.finish_weight_update()
        client.resume()
        assert not httpx.get(f"{graph.url}/is_paused", trust_env=False).json()["is_paused"]
        assert weights.info()["weight_version"] == str(served + 1)
        assert load_file(Path(payload.folder) / "model.safetensors").keys() == moved(served + 1).keys()


def test_a_transfer_that_this_graph_cannot_take_changes_nothing(graph: Graph) -> None:
    """TRL's default on a graph without NCCL: refused before the first step, and the graph serves on."""
    client = VLLMClient(graph.url)
    names = list(moved(1))
    info = {"names": names, "dtype_names": ["float32"] * len(names), "shapes": [[1]] * len(names)}
    with WeightClient(graph.url) as weights:
        served = weights.info()["weight_version"]
        with pytest.raises(RuntimeError, match="Failed to set up the NCCL weight-transfer group") as refused:
            WeightTransferClient(client, info).init_weight_transfer()
        assert "weight_transfer_config" in str(refused.value.__cause__)
        # Its way through an update that fails, which ends with a `finish` all the same.
        client.pause()
        client.start_weight_update()
        with pytest.raises(Exception, match="Request failed"):
            client.update_weights(info)
        with pytest.raises(Exception, match="Request failed"):
            client.finish_weight_update()
        client.resume()
        assert weights.info()["weight_version"] == served
        assert not weights.info()["is_updating"]
    asked = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "Well?"}]}
    url = f"{graph.url}/ng-rollout/well/v1/chat/completions"
    assert httpx.post(url, json=asked, trust_env=False, timeout=120).status_code == 200
