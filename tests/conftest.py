"""Settings shared by all tests.

`make test` runs them in several processes at a time (pytest-xdist), since the long ones mostly wait for a cluster to
start, or to come back. A room is a file, or files that share something: its tests run in one process, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    from tests.engines.running import Running

# Test machines are shared: how long an example takes says nothing about the code. A run repeats the one before it;
# `pytest --hypothesis-profile hunt` looks for what no run has met yet.
_SHARED_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_SHARED_MACHINE)
settings.register_profile("hunt", derandomize=False, print_blob=True, **_SHARED_MACHINE)
settings.load_profile("repeatable")

_SERVING_ON_RAY: Final = "tests/serving, on Ray"
_ENGINE: Final = "tests, one engine"
_ROOMS: Final = {
    "tests/data/*": "tests/data",  # one Ray cluster
    # One served graph; and a process drives one Ray cluster at a time.
    "tests/serving/test_*_e2e.py": _SERVING_ON_RAY,
    "tests/serving/test_state_actors.py": _SERVING_ON_RAY,
    "tests/serving/test_state_nodes.py": _SERVING_ON_RAY,
    # One vLLM engine. The second file changes its weights, and at last kills it.
    "tests/commands/test_verify_logprobs.py": _ENGINE,
    "tests/engines/test_vllm_engine.py": _ENGINE,
}
_FIRST: Final = (
    "tests/faults/test_storm.py",
    "tests/demo/test_demo.py",
    _SERVING_ON_RAY,
    "tests/data",
    _ENGINE,
    "tests/faults/test_scaling.py",
    "tests/faults/test_weights.py",
    "tests/contract/test_actor_store.py",
    "tests/rollouts/test_on_ray.py",
    "tests/rollouts/test_submitted.py",
    "tests/test_models.py",
)
"""The rooms that take longest: what begins last must be short, or all wait for it."""


def _room(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    return next((room for pattern, room in _ROOMS.items() if fnmatch(path, pattern)), path)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    ranks = {room: rank for rank, room in enumerate(_FIRST)}
    # In a room, tests of the served graph come last: its cluster stays.
    items.sort(key=lambda item: (ranks.get(_room(item.nodeid), len(ranks)), "graph" in item.fixturenames))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Room after room, in the order above, each to the process that is free next."""
    from xdist.scheduler import LoadScopeScheduling

    class RoomScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _room(nodeid)

    config.option.loadscopereorder = False  # it would begin with the rooms of most tests, which are the short ones
    return RoomScheduling(config, log)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, as Ray and vLLM do."""
    return "asyncio"


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """A real engine: half a minute to start."""
    from tests.engines.running import running_engine  # vLLM: only where it runs

    with running_engine() as running:
        yield running
