"""What a trainer refuses to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gym_capture.errors import WeightsRefusedError
from trainer_bridge.weight_client import WeightClient
from trainer_bridge.weight_sync import WeightSync

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


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
