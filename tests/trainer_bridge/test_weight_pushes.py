"""Weights that a run pushes: versions go up, also over restarts, and what the graph serves belongs to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gym_capture.errors import WeightsFailedError
from gym_capture.weights import payload_at
from trainer_bridge.grpo import StepMetrics
from trainer_bridge.loop import Trainer
from trainer_bridge.weight_client import WeightClient
from trainer_bridge.weight_pushes import WeightPushes

from .test_loop import GROUPS, Killed, lines, trainer, weights


class Graph(WeightClient):
    """One that is not there: what it serves is in a file, so that it outlives its trainers."""

    def __init__(self, home: Path, *, patience_s: float = 60.0) -> None:
        super().__init__("http://nowhere", patience_s=patience_s)
        self._file = home / "served.json"
        self.is_gone = False
        if not self._file.exists():
            self._keep({"weight_version": "0", "folder": None, "digest": None, "is_updating": False})

    def _keep(self, served: Mapping[str, Any]) -> None:
        self._file.write_text(json.dumps(served))

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        if self.is_gone:
            raise WeightsFailedError("the graph does not answer", retryable=True)
        served: dict[str, Any] = json.loads(self._file.read_text())
        match path:
            case "/update_weights":
                assert body is not None
                served["offered"] = body["update_info"]["folder"]
            case "/abort_weight_update":
                return {"was_under_way": False}
            case "/finish_weight_update":
                payload = payload_at(served.pop("offered"))
                assert payload.version > int(served["weight_version"])
                version = str(payload.version)
                served |= {"weight_version": version, "folder": payload.folder, "digest": payload.digest}
                self._keep(served)
                return {"paused_s": 0.25, "replicas": 2}
        self._keep(served)
        return served

    @property
    def version(self) -> int:
        return int(self.info()["weight_version"])


def pushing(tmp_path: Path, graph: Graph, every: int = 1, **loop: Any) -> Trainer:
    made = trainer(tmp_path / "run", **loop)
    made._pushes = WeightPushes(graph, tmp_path / "weights", every=every)
    return made


def test_each_step_is_pushed_and_its_line_says_what_the_push_before_it_took(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    made = pushing(tmp_path, graph)
    made.run(GROUPS[:3])
    assert graph.version == 3
    found = lines(tmp_path / "run")
    assert [(line["version"], line["pushed_version"], line["paused_s"]) for line in found] == [
        (0, None, None),
        (1, 1, 0.25),
        (2, 2, 0.25),
    ]
    folder = graph.info()["folder"]
    assert [path.name for path in (tmp_path / "weights").iterdir() if str(path) == folder]
    assert made.progress.weights == {"version": 3, "folder": folder}


def test_every_other_step(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    pushing(tmp_path, graph, every=2).run(GROUPS[:5])
    assert graph.version == 2


def test_a_run_that_was_killed_has_the_graph_serve_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    graph = Graph(tmp_path)

    def kill(progress: Any, metrics: StepMetrics) -> None:
        if progress.step == 3:
            raise Killed

    first = pushing(tmp_path, graph)
    with pytest.raises(Killed):
        first.run(GROUPS, on_step=kill)
    assert first._pushes is not None
    first._pushes.close()
    assert graph.version == 3  # of a step that is behind the checkpoint of step 2
    again = pushing(tmp_path, graph)
    assert again.resume()
    pushed = again.serve(again=True)
    assert pushed is not None
    assert pushed.version == graph.version == 4
    folder = Path(graph.info()["folder"])
    loaded = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    own = again.grpo.model.state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own)


def test_a_run_that_ended_well_and_goes_on_pushes_nothing_anew(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    pushing(tmp_path, graph).run(GROUPS[:2])
    again = pushing(tmp_path, graph)
    again.resume()
    assert again.serve() is None
    again.run(GROUPS[2:4])
    assert graph.version == 4


def test_a_graph_that_serves_other_weights_gets_those_of_a_new_run(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    pushing(tmp_path, graph).run(GROUPS[:2])
    other = pushing(tmp_path / "other", graph)
    pushed = other.serve()
    assert pushed is not None
    assert pushed.version == 3


def test_a_graph_that_is_gone_is_an_error_behind_a_checkpoint(tmp_path: Path) -> None:
    graph = Graph(tmp_path, patience_s=0.0)

    def go(progress: Any, metrics: StepMetrics) -> None:
        graph.is_gone = progress.step == 2

    made = pushing(tmp_path, graph, checkpoint_every=100)
    made.run(GROUPS[:1])
    with pytest.raises(WeightsFailedError, match="does not answer"):
        made.run(GROUPS[1:], on_step=go)
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    graph.is_gone = False
    again = pushing(tmp_path, graph)
    again.resume()
    assert again.progress.step == 3
    assert torch.equal(weights(again), weights(made))


def test_a_run_that_is_told_to_stop_waits_for_no_graph(tmp_path: Path) -> None:
    graph = Graph(tmp_path, patience_s=1e9)
    made = pushing(tmp_path, graph, checkpoint_every=100)

    def stop(progress: Any, metrics: StepMetrics) -> None:
        graph.is_gone = True
        if progress.step == 1:
            made.stop()

    made.run(GROUPS, on_step=stop)
    again = pushing(tmp_path, graph)
    again.resume()
    assert again.progress.step == 1
