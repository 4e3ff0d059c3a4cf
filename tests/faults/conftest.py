"""What the fault tests share."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from gym_capture.demo.processes import Household
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.models import tiny_dir
from tests.faults.cluster import Cluster, make_home


@pytest.fixture(scope="session")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two replicas and two state actors: half a minute to start."""
    home = make_home()
    (home / "running").mkdir()
    with Household() as household:
        cluster = Cluster(household, home, engine_args={"token_s": 0.004, "running_dir": str(home / "running")})
        try:
            asyncio.run(cluster.start())
            yield cluster
            cluster.stop()
        finally:
            cluster.kill()
    assert household.leftovers == ()
    shutil.rmtree(home)
