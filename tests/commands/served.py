"""`gym-capture serve` as a user has it: from nothing to a graph, a rollout, and the end. `make test-serve` runs it.

It takes a minute and more each time, most of it vLLM's; `make test` has the parts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from gym_capture.cluster.env import private_cluster_env
from gym_capture.demo.processes import free_port

CLI = [sys.executable, "-m", "gym_capture.cli"]


def private_environment() -> dict[str, str]:
    first = free_port()
    ports = private_cluster_env(
        metrics_port=free_port(), stats_port=free_port(), fallback_port=free_port(), replica_ports=(first, first + 50)
    )
    del ports["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]  # which the command has to set
    return {**os.environ, **ports, "RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_serves_and_ends_with_all_that_it_started(tmp_path: Path, number: signal.Signals, code: int) -> None:
    environment = private_environment()
    options = ["--model", "tiny", "--port", str(free_port()), "--ray-address", "local", "--json"]
    process = subprocess.Popen(
        [*CLI, "serve", *options, "--set", f"state.directory={tmp_path / 'records'}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    said = (tmp_path / "stderr").read_text
    assert line, said()
    where = json.loads(line)
    url = where["openai"].replace("ROLLOUT_ID", "one")
    asked = {"model": where["model"], "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{url}/chat/completions", json=asked, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text

    # A second one is refused, and changes nothing; a job plays, and says nothing of Ray's.
    second = run("serve", "--model", "tiny", "--port", str(free_port()), "--ray-address", where["ray_address"])
    assert (second.returncode, "serve shutdown -y" in second.stderr) == (2, True), second.stderr
    job = (
        "rollouts",
        "run",
        "--out",
        str(tmp_path / "job"),
        "--url",
        where["url"],
        "--generate",
        "1",
        "--samples",
        "1",
    )
    played = run(*job, "--ray-address", where["ray_address"])
    assert played.returncode == 0, played.stderr
    lines = played.stderr.splitlines()
    assert [text for text in lines if not text.startswith(("rollouts ", "1 of 1 "))] == []

    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(timeout=180) == code, said()
    assert [child for child in below if child.is_running()] == []
    assert not {"Traceback", "WARNING"} & set(said().split())
    listed = run("records", "list", str(tmp_path / "records"))
    assert listed.stdout.splitlines()[1].startswith("job-") or "one\t1\t4" in listed.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    return subprocess.run([*CLI, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False)
