"""Weights that a run pushes: versions go up, also over restarts, and what the graph serves belongs to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gym_capture.errors import WeightsError, WeightsFailedError
from gym_capture.weights import PauseMode, payload_at
from trainer_bridge.grpo import StepMetrics
from trainer_bridge.loop import Trainer
from trainer_bridge.weight_client import Pushed, WeightClient
from trainer_bridge.weight_pushes import WeightPushes
from trainer_bridge.weight_sync import Weights, WeightSync

from .test_loop import GROUPS, Killed, lines, trainer, weights


class Graph(WeightClient):
    """One that is not there: what it serves is in a file, so that it outlives its trainers."""

    def __init__(self, home: Path, *, patience_s: float = 60.0) -> None:
        super().__init__("http://nowhere", patience_s=patience_s)
        self._file = home / "served.json"
        self.is_gone = False
        if not self._file.exists():
            served = {"weight_version": "0", "folder": None, "digest": None}
            self._keep({**served, "is_updating": False, "is_paused": False, "problem": None})

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


def same_as_served(graph: Graph, made: Trainer) -> bool:
    folder = Path(graph.info()["folder"])
    loaded = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return all(torch.equal(loaded[name], tensor) for name, tensor in made.grpo.model.state_dict().items())


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
    assert same_as_served(graph, again)


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

    class Going(WeightPushes):
        def push(self, step: int, weights: Weights) -> None:
            graph.is_gone = step == 2
            super().push(step, weights)

    made = trainer(tmp_path / "run", checkpoint_every=100)
    made._pushes = Going(graph, tmp_path / "weights")
    made.run(GROUPS[:1])
    with pytest.raises(WeightsFailedError, match="does not answer"):
        made.run(GROUPS[1:])
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    graph.is_gone = False
    again = pushing(tmp_path, graph)
    again.resume()
    assert again.progress.step == 3
    assert torch.equal(weights(again), weights(made))


@pytest.mark.parametrize("broken", ["graph", "disk"])
def test_weights_that_could_not_be_pushed_are_pushed_by_the_run_that_goes_on(tmp_path: Path, broken: str) -> None:
    """The graph has the version that the run had pushed last; its checkpoint has the weights of a step behind that."""
    graph = Graph(tmp_path, patience_s=0.0)

    class Cut(WeightPushes):
        def finished(self) -> Pushed | None:
            if self.version == 2 and broken == "graph":
                self._under_way = Future()
                self._under_way.set_exception(WeightsFailedError("the answer was lost", retryable=True))
            return super().finished()

        def push(self, step: int, weights: Weights) -> None:
            if step == 3 and broken == "disk":
                weights = iter([("w", "no tensor")])  # type: ignore[list-item]
            super().push(step, weights)

    made = trainer(tmp_path / "run", checkpoint_every=100)
    made._pushes = Cut(graph, tmp_path / "weights")
    with pytest.raises(WeightsError):
        made.run(GROUPS)
    made._pushes.close()
    assert (graph.version, made.progress.step) == (2, 3)
    again = pushing(tmp_path, graph)
    again.resume()
    pushed = again.serve(again=True)
    assert pushed is not None
    assert pushed.version == 3
    assert same_as_served(graph, again)


def test_pushes_that_are_closed_try_nothing_again(tmp_path: Path) -> None:
    """As for whoever interrupts a run that has the graph serve its weights first."""
    graph = Graph(tmp_path, patience_s=1e9)
    pushes = WeightPushes(graph, tmp_path / "weights")
    pushes.begin({"w": torch.ones(1)}, None)
    graph.is_gone = True
    pushes.push(1, {"w": torch.ones(1)})
    pushes.close()
    with pytest.raises(WeightsFailedError, match="does not answer"):
        pushes.finished()


def test_a_graph_that_does_not_know_what_it_serves_is_named(tmp_path: Path) -> None:
    graph = Graph(tmp_path)
    graph._keep({"weight_version": None, "folder": None, "digest": None, "is_updating": False})
    with pytest.raises(WeightsFailedError, match="does not know yet"):
        WeightPushes(graph, tmp_path / "weights").begin({"w": torch.ones(1)}, None)


@pytest.mark.parametrize(("mode", "resumed"), [("keep", 0), ("wait", 2)])
def test_a_graph_whose_answer_was_lost_is_not_left_paused(tmp_path: Path, mode: PauseMode, resumed: int) -> None:
    asked: list[str] = []

    class Lossy(Graph):
        def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
            asked.append(path)
            first_resume = path == "/resume" and asked.count(path) == 1
            answer = super()._asked(method, path, body)
            if first_resume or (mode == "keep" and path == "/finish_weight_update"):
                raise WeightsFailedError("the answer was lost", retryable=True)
            return answer

    graph = Lossy(tmp_path)
    payload = WeightSync(graph, tmp_path / "weights").write(1, {"w": torch.ones(1)})
    assert graph.push(payload, mode=mode).version == 1
    assert asked.count("/resume") == resumed


@pytest.mark.parametrize("said", [b"<html></html>", b"[]"])
def test_what_is_no_graph_is_named(said: bytes) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *values: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with (
            WeightClient(f"http://127.0.0.1:{server.server_address[1]}") as client,
            pytest.raises(WeightsFailedError, match=r"/weight_info is no graph"),
        ):
            client.info()
        server.shutdown()


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
