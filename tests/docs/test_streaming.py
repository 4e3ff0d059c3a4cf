"""The loop of docs/streaming.md, taken out of the page: it trains each group once, and goes on where it stopped."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.docs.pages import ROOT, blocks_of
from tests.trainer_bridge.made import model
from tests.trainer_bridge.test_stream import row, table
from trainer_bridge.grpo import GrpoTrainer

SIZE = 32
"""Rollouts of a group: two groups are a step."""


def write(out: Path, number: int) -> None:
    rows = [row(f"{number}.{n}", group_id=f"g{number}", advantage=1.0 - 2.0 * (n % 2)) for n in range(SIZE)]
    pq.write_table(table(*rows), out / f"part-{number:05d}.parquet")


def test_the_loop_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = [
        each.text for each in blocks_of(ROOT / "docs" / "streaming.md") if each.text.startswith("# train_stream")
    ]
    (tmp_path / "train_stream.py").write_text(text)
    assert len(text.splitlines()) <= 24
    model().save_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    (data / "_report.json").write_text("{}")
    trained: list[list[str]] = []
    steps = GrpoTrainer.step

    def noted(trainer: GrpoTrainer, rollouts: Any, **options: Any) -> Any:
        trained.append(sorted({rollout.group_id for rollout in rollouts}))
        return steps(trainer, rollouts, **options)

    monkeypatch.setattr(GrpoTrainer, "step", noted)
    monkeypatch.setattr(sys, "argv", ["train_stream.py", *(str(tmp_path / name) for name in ("model", "data", "run"))])
    torch.set_num_threads(1)
    for parts in (range(3), range(3, 5), ()):
        for number in parts:
            write(data, number)
        runpy.run_path(str(tmp_path / "train_stream.py"))
    assert trained == [["g0", "g1"], ["g2"], ["g3", "g4"]]
