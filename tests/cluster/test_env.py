"""The environment of a cluster is the same in a shell and in a program, and a proxy without it is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gym_capture.cluster.env import CLUSTER_ENV
from gym_capture.serving import app
from gym_capture.serving.app import build_app
from gym_capture.serving.config import GraphArgs

ENV_FILE = Path(__file__).parents[2] / "serve_configs" / "cluster.env"
BALANCE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"


def test_the_file_to_source_says_the_same() -> None:
    said = subprocess.run(
        ["bash", "-c", f"source '{ENV_FILE}' && env -0"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    entries = dict(entry.split("=", 1) for entry in said.stdout.decode().split("\0") if entry)
    assert {name: value for name, value in entries.items() if name.startswith("RAY_")} == CLUSTER_ENV


@pytest.mark.parametrize(
    ("ha_proxy", "balance", "is_warned"),
    [
        (True, CLUSTER_ENV[BALANCE], False),
        (True, "leastconn", True),
        (True, "hash path,field(3,/)\n    hash-type consistent", True),
        (False, "leastconn", False),
    ],
    ids=["as told", "by hand", "without a part", "no HAProxy"],
)
def test_a_graph_says_at_its_start_what_its_proxy_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ha_proxy: bool,
    balance: str,
    is_warned: bool,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(app, "RAY_SERVE_ENABLE_HA_PROXY", ha_proxy)
    monkeypatch.setattr(app, BALANCE, balance)
    build_app(GraphArgs(model=str(tmp_path)))
    warned = [record.message for record in caplog.records if "clients that leave will not be noticed" in record.message]
    assert len(warned) == is_warned
    assert all("serve_configs/cluster.env" in message for message in warned)
