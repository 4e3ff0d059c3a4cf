"""What a run's lines say is what Prometheus gets, under the names that docs/metrics.md lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gym_capture.errors import ConfigError
from trainer_bridge.grpo import StepMetrics
from trainer_bridge.loss import Mismatch
from trainer_bridge.run_metrics import COUNTERS, GAUGES, LABELLED, PREFIX, RunMetrics, served

NO_METRIC = {"mismatch", "left_out", "temperatures", "weight_versions"}
"""Not numbers, or by label."""


def step(number: int, **more: Any) -> str:
    said = {
        "step": number,
        "loss": 0.5,
        "trained_tokens": 100,
        "seconds": 1.5,
        "left_out/masked": 2,
        "kl": None,
        **more,
    }
    return json.dumps(said) + "\n"


def samples(text: str) -> Mapping[tuple[str, str], float]:
    """By name and reason."""
    return {
        (sample.name.removeprefix(PREFIX), sample.labels.get("reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_number_of_a_step_is_exported() -> None:
    keys = {shown.key for shown in (*GAUGES.values(), *COUNTERS.values())}
    assert {item.name for item in (*fields(StepMetrics), *fields(Mismatch))} - keys == NO_METRIC
    assert {shown.key for _, shown in LABELLED.values()} == {"left_out/"}


def test_steps_add_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = RunMetrics(path, run='my "run"')
    assert metrics.text() == ""
    path.write_text(step(1) + step(2, loss=0.25, **{"left_out/too_long": 1})[:-1])
    assert samples(metrics.text())["step", ""] == 1
    path.write_text(step(1) + step(2, loss=0.25, **{"left_out/too_long": 1}))
    text = metrics.text()
    assert samples(text) == {
        ("step", ""): 2,
        ("loss", ""): 0.25,
        ("trained_tokens_total", ""): 200,
        ("step_seconds_total", ""): 3.0,
        ("left_out_rollouts_total", "masked"): 4,
        ("left_out_rollouts_total", "too_long"): 1,
    }
    assert 'run="my \\"run\\""' in text
    assert metrics.text() == text


def test_a_run_that_goes_back_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_text(step(1) + step(2) + step(3))
    metrics = RunMetrics(path, run="r")
    assert samples(metrics.text())["trained_tokens_total", ""] == 300
    other.write_text(step(1) + step(2))
    other.replace(path)
    assert samples(metrics.text())["trained_tokens_total", ""] == 200
    path.write_text(step(1))
    assert samples(metrics.text())["trained_tokens_total", ""] == 100


@pytest.mark.parametrize(
    "broken", ["{", "[]", "3", "{}", '{"step": "2"}', '{"step": 2, "seconds": []}', "\udcff", "[" * 10**5]
)
def test_a_broken_line_is_left_out_and_counted(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = RunMetrics(path, run="r")
    path.write_text(f"{broken}\n", errors="surrogateescape")
    assert samples(metrics.text()) == {("broken_lines_total", ""): 1}
    path.write_text(f"{broken}\n{step(1)}{broken}\n", errors="surrogateescape")
    found = samples(metrics.text())
    assert (found["step", ""], found["trained_tokens_total", ""], found["broken_lines_total", ""]) == (1, 100, 2)


def test_it_is_served_at_one_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step(1))
    with served(tmp_path, path, host="127.0.0.1", port=0) as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert samples(reply.read().decode())["step", ""] == 1
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{port}/metrics.jsonl", timeout=10)
        with (
            pytest.raises(ConfigError, match=f"--metrics-port {port}: Address already in use"),
            served(tmp_path, path, host="127.0.0.1", port=port),
        ):
            pass
