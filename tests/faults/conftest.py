"""What the fault tests share."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_capture.demo.processes import ChildProcesses
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from tests.faults.cluster import Cluster, make_home, scripted


@pytest.fixture(scope="session")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


@pytest.fixture(scope="module")
def running_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a file for each generation that is under way in `cluster`."""
    return tmp_path_factory.mktemp("running")


@pytest.fixture(scope="module")
def cluster(running_dir: Path) -> Iterator[Cluster]:
    """Two replicas with scripted engines and two state actors: half a minute to start."""
    with serving(scripted(token_s=0.004, running_dir=str(running_dir))) as cluster:
        yield cluster


@contextmanager
def serving(args: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Iterator[Cluster]:
    home = make_home()
    with ChildProcesses() as children:
        cluster = Cluster(children, home, args=args, options=options)
        try:
            asyncio.run(cluster.start())
            yield cluster
            cluster.stop()
        finally:
            cluster.kill()
    assert children.leftovers == ()
    shutil.rmtree(home)
