"""What the tests of the serving side share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import ChildProcesses
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from tests.serving.graph import Graph

CPU_DEMO = Path(__file__).parents[2] / "serve_configs" / "cpu_demo.yaml"
NAMESPACE = "end-to-end"


@pytest.fixture(scope="session")
def template() -> HfChatTemplate:
    """A real tokenizer with the project's own chat template."""
    return HfChatTemplate.from_model_dir(tiny_dir())


@pytest.fixture(scope="package")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """The graph as a user serves it, with a random small model: one for all tests, it takes half a minute."""
    directory = tmp_path_factory.mktemp("graph")
    base = yaml.safe_load(CPU_DEMO.read_text(encoding="utf-8"))
    args = {
        "model": str(tiny_dir()),
        "state": {"shards": 2, "namespace": NAMESPACE, "directory": str(directory / "records")},
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_worker_niceness", "0")
        with (
            ChildProcesses() as children,
            private_ray(cpus=4, namespace=NAMESPACE) as address,
            served_graph(
                children,
                base=base,
                args=args,
                address=address,
                directory=directory,
                on_wait=lambda _: None,
            ) as url,
        ):
            yield Graph(url=url, namespace=NAMESPACE)
