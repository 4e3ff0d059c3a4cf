"""New weights on a served graph, while calls run and while its parts are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_capture.capture.records import WeightSpan
from gym_capture.errors import WeightsBusyError, WeightsRefusedError
from tests.faults.apis import APIS
from tests.faults.audit import read
from tests.faults.cluster import Cluster, scripted
from tests.faults.conftest import serving
from tests.faults.engine import doing, hold, question, running
from tests.serving.replica import until
from tests.weight_folders import moved, tiny_tensors
from trainer_bridge.weight_client import WeightClient
from trainer_bridge.weight_sync import WeightSync

TRAINER_TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in ("running", "steps", "weights")}


@pytest.fixture(scope="module")
def cluster(dirs: dict[str, Path]) -> Iterator[Cluster]:
    """Two replicas with scripted engines, whose steps with weights can be held up."""
    args: dict[str, Any] = scripted(token_s=0.01, running_dir=str(dirs["running"]), weights_dir=str(dirs["steps"]))
    with serving({**args, "weights": {"trainer_timeout_s": TRAINER_TIMEOUT_S}}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[WeightClient]:
    with WeightClient(cluster.url, timeout_s=120) as client:
        yield client


@pytest.fixture
def sync(client: WeightClient, dirs: dict[str, Path]) -> WeightSync:
    return WeightSync(client, dirs["weights"])


async def ask(cluster: Cluster, rollout_id: str, *, words: int) -> httpx.Response:
    body = {**APIS[0].body((), question(rollout_id, words=words)), "stream": True}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        return await http.post(f"{cluster.url}/ng-rollout/{rollout_id}/v1/chat/completions", json=body)


def spans(cluster: Cluster, rollout_id: str) -> tuple[WeightSpan, ...]:
    (entry,) = read(cluster.records).snapshots[rollout_id].entries
    return entry.policy.weight_versions


async def serves(client: WeightClient, version: str, *, replicas: int = 2) -> None:
    """Until so many replicas do, and nothing goes on."""

    def so() -> bool:
        info = client.info()
        return (info["weight_version"], len(info["replicas"]), info["is_updating"]) == (version, replicas, False)

    async with asyncio.timeout(240):
        while True:
            if await asyncio.to_thread(so):
                return
            await asyncio.sleep(0.2)


async def test_calls_go_on_through_an_update_and_their_records_say_which_version_sampled_what(
    cluster: Cluster, sync: WeightSync, dirs: dict[str, Path]
) -> None:
    names = [f"flight-{number}" for number in range(8)]
    asking = [asyncio.ensure_future(ask(cluster, name, words=60)) for name in names]
    await until(lambda: set(names) <= set(running(dirs["running"])))
    pushed = await asyncio.to_thread(sync.push, 1, moved(1))
    assert (pushed.version, pushed.replicas) == (1, 2)
    replies = await asyncio.gather(*asking)
    assert all("[DONE]" in reply.text for reply in replies)
    assert (await ask(cluster, "after", words=1)).status_code == 200
    assert [span.version for span in spans(cluster, "after")] == ["1"]
    versions = {tuple(span.version for span in spans(cluster, name)) for name in names}
    assert versions <= {("0",), ("0", "1")}
    assert ("0", "1") in versions


async def test_what_cannot_be_served_is_refused_and_nothing_changes(cluster: Cluster, sync: WeightSync) -> None:
    with pytest.raises(WeightsRefusedError, match="does not follow version 1"):
        await asyncio.to_thread(sync.push, 0, moved(0))
    tensors = dict(tiny_tensors())
    del tensors["model.norm.weight"]
    with pytest.raises(WeightsRefusedError, match=r"replica .* refuses .*it lacks model.norm.weight"):
        await asyncio.to_thread(sync.push, 2, tensors)
    assert sync._client.info()["weight_version"] == "1"


async def test_a_replica_is_killed_while_it_loads(
    cluster: Cluster, client: WeightClient, sync: WeightSync, dirs: dict[str, Path]
) -> None:
    """The update fails for all, the trainer's client tries again once there is one that answers."""
    held = hold(dirs["steps"], "apply 2")
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(sync.push, 2, moved(2))
        await until(lambda: len(doing(dirs["steps"], "apply 2")) == 2)
        with pytest.raises(WeightsBusyError):
            client._asked("POST", "/start_weight_update")
        victim = doing(dirs["steps"], "apply 2")[0]
        (process,) = [each for each in cluster.processes("ray::ServeReplica:") if each.pid == victim]
        process.kill()
        held.unlink()
        pushed = await asyncio.wrap_future(pushing)
    assert pushed.version == 2
    await serves(client, "2")
    assert set(doing(dirs["steps"], "apply 1")) - {victim}  # the other had gone back


async def test_the_coordinator_is_killed_while_replicas_load(
    cluster: Cluster, client: WeightClient, sync: WeightSync, dirs: dict[str, Path]
) -> None:
    held = hold(dirs["steps"], "apply 3")
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(sync.push, 3, moved(3))
        await until(lambda: len(doing(dirs["steps"], "apply 3")) == 2)
        (coordinator,) = cluster.processes("ray::WeightCoordinator")
        coordinator.kill()
        held.unlink()
        pushed = await asyncio.wrap_future(pushing)
    assert pushed.version == 3
    await serves(client, "3")
    assert (await ask(cluster, "third", words=1)).status_code == 200
    assert [span.version for span in spans(cluster, "third")] == ["3"]


async def test_a_trainer_that_is_gone_does_not_hold_up_the_graph(cluster: Cluster, client: WeightClient) -> None:
    client._asked("POST", "/pause?mode=keep")
    client._asked("POST", "/start_weight_update")
    reply = await ask(cluster, "held", words=1)
    assert reply.status_code == 200
    assert client.info()["is_paused"] is False
    assert client.info()["is_updating"] is False


async def test_everything_is_killed_and_comes_back_with_the_version_it_had(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.kill)
    await cluster.start()
    assert (await ask(cluster, "revived", words=1)).status_code == 200
    assert [span.version for span in spans(cluster, "revived")] == ["3"]
    with WeightClient(cluster.url) as client:
        assert client.info()["weight_version"] == "3"
