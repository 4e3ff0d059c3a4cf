"""The config that the demo serves is the given one, in other clothes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gym_capture.commands.check_configs import AppModels, check_config
from gym_capture.demo import graph
from gym_capture.demo.graph import graph_config
from gym_capture.errors import ConfigError
from gym_capture.serving.config import APP_IMPORT_PATH, DEPLOYMENT, GraphArgs, Limits

CPU_DEMO = Path(__file__).parents[2] / "serve_configs" / "cpu_demo.yaml"


def test_port_and_arguments_are_replaced_and_nothing_else() -> None:
    base: dict[str, Any] = yaml.safe_load(CPU_DEMO.read_text(encoding="utf-8"))
    before = copy.deepcopy(base)
    options = {"num_replicas": 2, "user_config": {"drain_s": 5}}
    config = graph_config(base, port=1234, args={"model": "/folder", "prefix_supply": False}, options=options)
    assert base == before
    assert config["http_options"] == {"host": "127.0.0.1", "port": 1234}
    args = config["applications"][0]["args"]
    assert (args["model"], args["prefix_supply"]) == ("/folder", False)
    args.update(model=before["applications"][0]["args"]["model"], prefix_supply=True)
    assert check_config(yaml.safe_dump(config), {APP_IMPORT_PATH: AppModels(GraphArgs, {DEPLOYMENT: Limits})}) == []
    assert config["applications"][0].pop("deployments") == [{"name": DEPLOYMENT, **options}]
    assert config["applications"] == before["applications"]


@pytest.mark.parametrize(
    "base",
    [
        {},
        {"applications": []},
        {"applications": [{"import_path": "other:app"}]},
        {"applications": [{"import_path": APP_IMPORT_PATH}, {"import_path": "other:app"}]},
    ],
)
def test_a_config_that_serves_something_else_is_refused(base: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one application"):
        graph_config(base, port=1, args={})


class OneCluster:
    """What Serve runs, and the `serve run` of a graph, which shuts Serve down when it is asked to end."""

    def __init__(self, *applications: str) -> None:
        self.applications = dict.fromkeys(applications)
        self.child = SimpleNamespace(stop=self.shutdown, kill=lambda: None, ended=lambda: None)

    def status(self) -> OneCluster:
        return self

    def shutdown(self) -> None:
        self.applications.clear()

    def delete(self, name: str) -> None:
        del self.applications[name]


@pytest.mark.parametrize(
    ("is_shared", "deployed", "left"),
    [(True, ["gym-capture", "another"], ["another"]), (True, ["gym-capture"], []), (False, ["gym-capture"], [])],
)
def test_what_others_deployed_meanwhile_outlives_the_graph(
    is_shared: bool, deployed: list[str], left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = OneCluster(*deployed)
    monkeypatch.setattr(graph, "serve", cluster)
    monkeypatch.setattr(graph, "_wait_ready", lambda *_: None)
    children: Any = SimpleNamespace(start=lambda *_, **__: cluster.child)
    config = {"applications": [{"name": "gym-capture"}]}
    with graph.serving(children, config, address="", directory=tmp_path, on_wait=lambda _: None, is_shared=is_shared):
        pass
    assert list(cluster.applications) == left
