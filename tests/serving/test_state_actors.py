"""State shards as real actors: started once, found by name, killed and back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray

from gym_capture.capture.operations import Close, Commit, GoOn, HandOn
from gym_capture.capture.protocols import Resolved
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.demo.graph import private_ray
from gym_capture.errors import ConfigError, ReplayedCallError, RetiredRolloutError, StoreUnavailableError
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollouts.metrics import JobMetrics
from gym_capture.rollouts.progress import JobProgress
from gym_capture.serving.state import connect, start_shards, stop_shards
from gym_capture.serving.weights_actor import CoordinatorClient, start_coordinator
from gym_capture.serving.weights_metrics import WeightMetrics
from gym_capture.serving.weights_update import Outcome
from tests.commands.test_rollout_view import failure
from tests.rollouts.test_progress import row
from tests.serving.exported import exported_by_jobs, exported_by_weights, exported_names
from tests.serving.shards import LOG
from tests.serving.test_state import play

NAMESPACE = "state-actors"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with private_ray(cpus=1, namespace=NAMESPACE):
        yield


def start(directory: Path, *, shards: int, namespace: str = NAMESPACE, replicas: int = 1) -> None:
    start_shards(
        namespace=namespace, shards=shards, store=LOG, store_kwargs={}, directory=str(directory), replicas=replicas
    )


def shard_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [process for process in children if process.name().startswith("ray::StateShard")]


@pytest.mark.usefixtures("cluster")
async def test_killed_actors_come_back_with_everything_that_was_acknowledged(tmp_path: Path) -> None:
    start(tmp_path, shards=2)
    state = connect(namespace=NAMESPACE)
    names = [f"r{number}" for number in range(8)]
    await asyncio.gather(*(play(state, name, calls=3) for name in names))
    killed = shard_processes()
    assert len(killed) == 2
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
    for name in names:
        resolution = await state.resolve(name, ["k0", "k1", "k2"])
        assert isinstance(resolution, Resolved)
        assert resolution.call_id == "c2"
        snapshot = await state.freeze(name)
        assert (len(snapshot.entries), snapshot.incomplete) == (3, ())
    assert await state.rollout_ids() == names


@pytest.mark.usefixtures("cluster")
async def test_killed_actors_know_who_goes_on_from_whom(tmp_path: Path) -> None:
    """An attempt and the one that goes on from it, on shards that are killed after each step."""
    start(tmp_path, shards=2, namespace="handed-on")
    state = connect(namespace="handed-on")
    first = "r1"
    second = next(name for name in ("r2", "r3", "r4", "r5") if state._index(name) != state._index(first))

    def kill_all() -> None:
        killed = shard_processes()
        for process in killed:
            os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(killed)

    await play(state, first, calls=2)
    epoch = await state.write(HandOn(first))
    kill_all()
    for _ in range(2):
        await state.write(HandOn(first))
        await state.write(GoOn(second, first))
    with pytest.raises(RetiredRolloutError):
        await state.begin(sample_intent(first, "late"), ())
    with pytest.raises(RetiredRolloutError):
        await state.write(Commit(sample_entry(first, "late"), epoch=epoch))
    kill_all()
    begun = await state.begin(sample_intent(second, "c"), ())
    assert begun.went_on == (first,)
    await begun.sink.replay("c", recorded="c0")
    kill_all()
    assert (await state.begin(sample_intent(second, "d"), ())).went_on == (first,)
    await begun.sink.replay("c", recorded="c0")
    with pytest.raises(ReplayedCallError):
        await begun.sink.replay("d", recorded="c0")
    assert len((await state.freeze(first)).entries) == 2
    await state.write(Close(first))
    kill_all()
    assert (await state.freeze(first)).version == 0
    assert first not in await state.rollout_ids()


@pytest.mark.usefixtures("cluster")
async def test_prometheus_can_scrape_what_actors_count(tmp_path: Path) -> None:
    """Under the names that the dashboard asks for, with the labels that it groups by."""

    async def run() -> str:
        start(tmp_path, shards=1, namespace="scraped")
        state = connect(namespace="scraped")
        await play(state, "r1", calls=3)
        a_job_plays()
        await weights_are_asked_for(tmp_path)
        (node,) = ray.nodes()
        endpoint = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
        async with asyncio.timeout(90), httpx.AsyncClient(trust_env=False) as http:
            while True:
                text = (await http.get(endpoint)).text
                wanted = ("ray_gym_capture_resolutions", "ray_gym_capture_job_groups_built", 'outcome="failed"')
                if all(each in text for each in wanted):
                    return text
                await asyncio.sleep(0.5)

    samples = [line for line in (await run()).splitlines() if 'namespace="scraped"' in line]
    names = {line.partition("{")[0] for line in samples}
    untouched = {name for name in exported_names() if name.endswith("_total")} - names
    assert names >= exported_names() - untouched
    assert {"ray_gym_capture_begins_total", "ray_gym_capture_puts_total"} <= names
    (resolved,) = [line for line in samples if "resolutions_total" in line and 'outcome="resolved"' in line]
    assert resolved.split()[-1] == "2.0"
    assert names >= exported_by_jobs()
    assert names >= exported_by_weights()
    (failed,) = [line for line in samples if "weights_updates_total" in line and 'outcome="failed"' in line]
    assert failed.split()[-1] == "1.0"
    of_job = {
        (line.partition("{")[0].removeprefix("ray_gym_capture_"), line.split()[-1])
        for line in samples
        if 'rollout_job="job-1"' in line
    }
    assert of_job >= {
        *(("job_calls_total", "9.0"), ("job_generated_tokens_total", "90.0")),
        *(("job_eligible_links_total", "6.0"), ("job_contiguous_links_total", "5.0")),
        *(("job_masked_rollouts", "2.0"), ("job_mean_reward", "0.5"), ("job_groups_built", "1.0")),
        ("job_failed_attempts_total", "1.0"),
    }
    states = {
        state: line.split()[-1]
        for line in samples
        for state in ("waiting", "running", "finished", "failed")
        if f'state="{state}"' in line
    }
    assert states == {"waiting": "2.0", "running": "1.0", "finished": "3.0", "failed": "1.0"}


async def weights_are_asked_for(tmp_path: Path) -> None:
    """Of a coordinator without a replica; what only updates that are applied export, is said beside it."""
    actor = start_coordinator(namespace="scraped", directory=str(tmp_path), trainer_timeout_s=60, step_timeout_s=60)
    with pytest.raises(StoreUnavailableError):
        await CoordinatorClient(actor).operate("start")
    beside = WeightMetrics(namespace="scraped")
    beside.was_paused(0.5)
    beside.over(Outcome.FAILED)
    beside.publish({"weight_version": "7", "replicas": ["a"], "waiting_replicas": [], "is_paused": False})


def a_job_plays() -> None:
    """Shown twice, as a view is: counters have the difference."""
    progress = JobProgress()
    metrics = JobMetrics(namespace="scraped", job_id="job-1")
    progress.begin(total=7, rows=[])
    for name in ("a", "b", "c"):
        progress.started(name)
        progress.stopped(name, RolloutCounts(3, 30, 2, 2 - (name == "c")))
        progress.settled(row(name, reward=0.5, flaws=int(name == "c")))
        metrics.show(progress.now())
    progress.started("d")
    progress.failed(failure("mine"))
    progress.stopped("d")
    progress.settled(row("d", reward=None))
    progress.started("e")
    progress.built(rollouts=2, masked=["c"], trajectories=2)
    metrics.show(progress.now())


@pytest.mark.usefixtures("cluster")
def test_actors_are_started_once_and_their_number_stays(tmp_path: Path) -> None:
    namespace = "twice"
    with pytest.raises(StoreUnavailableError):
        connect(namespace=namespace)
    start(tmp_path, shards=1, namespace=namespace)
    start(tmp_path, shards=1, namespace=namespace)
    with pytest.raises(ConfigError, match=r"state\.shards: the state actors of namespace 'twice' .* with 1, not 3"):
        start(tmp_path, shards=3, namespace=namespace)
    with pytest.raises(ConfigError, match=r"state\.replicas: must be 1, or 2 .*; it is 2 on 1"):
        start(tmp_path, shards=1, namespace="alone", replicas=2)
    # What they were started with holds: another folder would be one that nobody writes to.
    with pytest.raises(ConfigError, match=r"state\.directory: .* `gym-capture state stop`"):
        start(tmp_path / "elsewhere", shards=1, namespace=namespace)
    actors = ray.util.list_named_actors(all_namespaces=True)
    assert [actor["name"] for actor in actors if actor["namespace"] == namespace] == ["state-0"]
    assert stop_shards(namespace=namespace) == 1
    start(tmp_path / "elsewhere", shards=1, namespace=namespace)
