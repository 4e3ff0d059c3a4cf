"""What TRL's asynchronous trainer is given, without TRL: groups once, versions as it counts them, and weights served.

TRL itself takes it in `tests/trainers/with_trl.py` and `with_trl_graph.py`: `make test-trainers`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
import torch

from gym_capture.auth import Keyring
from gym_capture.errors import AuthenticationError, ConfigError, WeightsRefusedError
from tests.serving.weight_replicas import served
from tests.weight_folders import moved
from trainer_bridge.group_sources import ParquetGroups
from trainer_bridge.trl_weights import GraphWeights
from trainer_bridge.trl_worker import GroupWorker, HandedOver, StreamOverError
from trainer_bridge.weight_client import WeightClient
from trainer_bridge.weight_sync import WeightSync

from .test_groups import Listed, group, write_part

WAIT_S = 60.0


@dataclass
class Sample:
    """TRL's `RolloutSample`, as far as it is looked at here."""

    prompt: list[Any]
    completion: list[Any]
    input_ids: npt.NDArray[Any]
    completion_mask: npt.NDArray[Any]
    old_log_probs: npt.NDArray[Any]
    advantage: float
    model_version: int
    group_id: int
    metrics: Mapping[str, float]
    enqueued_at: float


def names(groups: HandedOver) -> list[str]:
    return [each.group_id for each in groups]


def test_no_later_run_gets_a_group_again(tmp_path: Path) -> None:
    position = tmp_path / "run" / "groups.json"
    for number, name in enumerate("abc"):
        write_part(tmp_path, number, name)
    first = iter(HandedOver(ParquetGroups(tmp_path), position))
    assert [next(first).group_id, next(first).group_id] == ["a", "b"]
    write_part(tmp_path, 3, "d")
    assert names(HandedOver(ParquetGroups(tmp_path), position)) == ["c", "d"]
    assert names(HandedOver(ParquetGroups(tmp_path), position)) == []


def test_records_go_as_soon_as_their_group_cannot_come_again(tmp_path: Path) -> None:
    source = Listed(group("a"), group("b"))
    groups = iter(HandedOver(source, tmp_path / "groups.json"))
    next(groups)
    assert (tmp_path / "groups.json").exists()
    assert source.retired == ["a.0", "a.1"]


@pytest.mark.parametrize("text", ["", "{", '{"format": 0}', "[]"])
def test_another_file_is_no_position(tmp_path: Path, text: str) -> None:
    (tmp_path / "groups.json").write_text(text)
    with pytest.raises(ConfigError, match="position"):
        HandedOver(Listed(group("a")), tmp_path / "groups.json")


def test_a_worker_that_stops_ends_what_it_began(tmp_path: Path) -> None:
    source = Listed(*(group(f"g{n}") for n in range(9)))
    threads = threading.active_count()
    worker = GroupWorker(HandedOver(source, tmp_path / "groups.json"), Sample, queue_size=1)
    worker.start()
    worker.rollout_buffer.get(timeout=WAIT_S)
    worker.stop()
    assert source.closed
    assert len(source.built) < 9
    assert threading.active_count() == threads


def test_a_worker_stops_though_no_group_comes(tmp_path: Path) -> None:
    """Of a job that died, say, before it wrote that it is over."""
    write_part(tmp_path, 0, "a")
    worker = GroupWorker(HandedOver(ParquetGroups(tmp_path, follow=True), tmp_path / "groups.json"), Sample)
    worker.start()
    for _ in range(2):
        worker.rollout_buffer.get(timeout=WAIT_S)
    worker.stop()
    with pytest.raises(StreamOverError):
        worker.check_health(1.0)


def test_a_worker_may_stop_before_it_has_begun(tmp_path: Path) -> None:
    source = Listed(group("a"))
    groups = HandedOver(source, tmp_path / "groups.json")
    groups.end()
    assert names(groups) == []
    assert not (tmp_path / "groups.json").exists()


async def test_the_graph_has_a_new_version_after_every_send_and_samples_are_as_old_as_trl_counts(
    tmp_path: Path,
) -> None:
    """A trainer that counts from 0 on a graph that serves version 6 already."""
    worker = GroupWorker([group("a", versions=("7", "8")), group("b", versions=("6",))], Sample)
    async with served(tmp_path, "a", "b") as (cluster, http):
        weights = GraphWeights(str(http.base_url), tmp_path / "weights", worker)

        def sync(tensors: dict[str, torch.Tensor]) -> None:
            """As TRL does it."""
            weights.pause()
            weights.send_weights(iter(tensors.items()))
            weights.resume()
            worker.update_model_version(worker.model_version + 1)

        before = WeightSync(WeightClient(str(http.base_url)), tmp_path / "weights")
        await asyncio.to_thread(before.push, 6, moved(6))
        await asyncio.to_thread(weights.init_weight_transfer)
        for version in (7, 8):
            await asyncio.to_thread(sync, moved(version))
            await cluster.settled(str(version))
        assert worker.model_version == 2
        with pytest.raises(WeightsRefusedError, match=r"it lacks model\.norm\.weight"):
            await asyncio.to_thread(sync, {k: v for k, v in moved(9).items() if k != "model.norm.weight"})
        await cluster.settled("8")
        assert worker.model_version == 2
        await asyncio.to_thread(weights.destroy)
    worker.start()
    found = [worker.rollout_buffer.get(timeout=WAIT_S).model_version for _ in range(4)]
    assert found == [1, 1, 0, 0]
    worker.stop()


async def test_a_graph_with_a_secret_wants_the_token_of_its_weights(tmp_path: Path) -> None:
    keyring = Keyring(b"a secret of tests")
    worker = GroupWorker([], Sample)
    async with served(tmp_path, "a", keyring=keyring) as (_, http):
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(GraphWeights(str(http.base_url), tmp_path, worker).init_weight_transfer)
        allowed = GraphWeights(str(http.base_url), tmp_path, worker, token=keyring.weights_token())
        await asyncio.to_thread(allowed.init_weight_transfer)
