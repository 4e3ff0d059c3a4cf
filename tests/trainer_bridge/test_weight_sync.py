"""What a trainer refuses to write, and what it clears away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from gym_capture.errors import WeightsRefusedError
from gym_capture.weights import Payload, payload_at
from trainer_bridge import weight_sync
from trainer_bridge.weight_client import Pushed, WeightClient
from trainer_bridge.weight_sync import WeightSync

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Graph(WeightClient):
    """One that is not there, and takes what is whole."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_go_on = Event()
        self.may_go_on.set()

    def push(self, payload: Payload, **_: object) -> Pushed:
        assert self.may_go_on.wait(60)
        payload = payload_at(payload.folder)
        return Pushed(version=payload.version, folder=payload.folder, seconds=0.0, paused_s=0.0, replicas=1)

    def info(self) -> Mapping[str, Any]:
        return {"folder": None}


@pytest.fixture
def sync(tmp_path: Path) -> Iterator[WeightSync]:
    with WeightClient("http://127.0.0.1:9") as client:  # writing asks nobody
        yield WeightSync(client, tmp_path / "weights")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_single_value_that_is_not_finite_leaves_no_folder(
    sync: WeightSync, tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    tensor = torch.zeros(3, 1001, dtype=dtype)
    tensor[1, 7] = value
    with pytest.raises(WeightsRefusedError, match="w has values that are NaN or infinite"):
        sync.write(1, {"v": torch.ones(2, dtype=dtype), "w": tensor})
    assert list((tmp_path / "weights").iterdir()) == []
    sync.write(1, {"w": tensor}, allow_non_finite=True)


def test_numbers_of_every_type_and_the_largest_are_written(sync: WeightSync) -> None:
    weights = {str(dtype): torch.full((2,), torch.finfo(dtype).max, dtype=dtype) for dtype in FLOATS}
    weights |= {"empty": torch.zeros(0), "whole": torch.ones(2, dtype=torch.int64)}
    weights |= {"small": torch.ones(2).to(torch.float8_e4m3fn)}
    assert sync.write(1, weights).version == 1


def test_a_kill_while_old_weights_are_removed_leaves_no_half_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As a signal would."""

    def kill(folder: Path, **_: object) -> None:
        raise Killed

    with Graph("http://127.0.0.1:9") as client:
        sync = WeightSync(client, tmp_path, keep=1)
        sync.push(1, {"w": torch.zeros(1)})
        monkeypatch.setattr(weight_sync.shutil, "rmtree", kill)
        with pytest.raises(Killed):
            sync.push(2, {"w": torch.ones(1)})
        monkeypatch.undo()
        assert [path.name[:17] for path in tmp_path.glob("weights-*")] == ["weights-00000002-"]
        sync.push(3, {"w": torch.ones(1)})
    assert [path.name[:17] for path in tmp_path.iterdir()] == ["weights-00000003-"]


def test_folders_that_wait_for_their_push_stay_however_many(tmp_path: Path) -> None:
    with Graph("http://127.0.0.1:9") as client:
        sync = WeightSync(client, tmp_path, keep=1)
        client.may_go_on.clear()
        pushes = [sync.push_in_background(version, {"w": torch.full((1,), version)}) for version in range(1, 6)]
        pushes.append(sync.push_in_background(2, {"w": torch.full((1,), 2)}))  # the same once more
        client.may_go_on.set()
        assert [push.result().version for push in pushes] == [1, 2, 3, 4, 5, 2]
        sync.close()
    assert [path.name[:17] for path in tmp_path.iterdir()] == ["weights-00000002-"]
