"""One small Ray cluster for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from . import made_rollouts


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    # Workers do not get the path that pytest found the test modules by.
    root = Path(made_rollouts.__file__).parents[made_rollouts.__name__.count(".")]
    environment = {"env_vars": {"PYTHONPATH": str(root)}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()
