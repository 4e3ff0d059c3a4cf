"""Jobs that a Ray cluster runs: submitted, watched, stopped, and submitted again, over its real dashboard."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.job_submission import JobSubmissionClient

from gym_capture import cli
from gym_capture.serving.state import start_shards
from tests.rollouts.nodes import NAMESPACE, Nodes, nodes, until
from tests.rollouts.scripted_server import Call, serving, solve


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """With a dashboard, and the state actors of a graph."""
    with nodes(dashboard=True) as started:
        records = str(tmp_path_factory.mktemp("records"))
        start_shards(
            namespace=NAMESPACE, shards=1, store="gym_capture.stores.log:open_log", store_kwargs={}, directory=records
        )
        _take_jobs(JobSubmissionClient(started.address()))
        yield started


def _take_jobs(client: JobSubmissionClient) -> None:
    """Waits for the agents of a dashboard: a cluster starts without them."""
    deadline = time.monotonic() + 60
    while True:
        try:
            client.submit_job(entrypoint="true")
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


@pytest.fixture(autouse=True)
def _in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own signals need the main thread, which the server has. And this process is a driver itself."""
    monkeypatch.setattr("gym_capture.cli._terminate_like_an_interrupt", lambda: lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@dataclass
class Commands:
    """`gym-capture rollouts ...` against a cluster."""

    address: str
    capsys: pytest.CaptureFixture[str]

    async def __call__(self, *words: str, code: int = 0) -> str:
        """What it printed; of one that fails, what it said."""
        ended = await asyncio.to_thread(_code_of, ["rollouts", *words, "--ray-address", self.address])
        said = self.capsys.readouterr()
        assert ended == code, said
        return said.err if code else said.out

    async def state(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self("status", job_id, "--json"))
        return found

    async def over(self, job_id: str) -> dict[str, Any]:
        while True:
            found = await self.state(job_id)
            if found["state"] not in ("PENDING", "RUNNING"):
                return found
            await asyncio.sleep(0.3)


async def exported_rollouts() -> dict[str, str]:
    """Those of jobs by their states, as Prometheus would scrape them."""
    found = {}
    async with httpx.AsyncClient(trust_env=False) as http:
        for node in ray.nodes():
            text = (await http.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")).text
            for line in text.splitlines():
                if line.startswith("ray_gym_capture_job_rollouts{") and f'namespace="{NAMESPACE}"' in line:
                    found[line.partition('state="')[2].partition('"')[0]] = line.split()[-1]
    return found


def _code_of(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    return int(stop.value.code or 0)


async def test_a_job_is_submitted_watched_stopped_and_goes_on_when_it_is_submitted_again(
    cluster: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIAL", "do-not-tell")
    command = Commands(cluster.address(), capsys)
    out = tmp_path / "job"
    go, two_wait = asyncio.Event(), asyncio.Event()
    waiting: set[str] = set()

    async def half_waits(call: Call) -> Any:
        if not go.is_set() and call.rollout_id.endswith((".2-a1", ".3-a1")):
            waiting.add(call.rollout_id)
            if len(waiting) == 2:
                two_wait.set()
            await go.wait()
        return await solve(call)

    async with serving(half_waits) as server, asyncio.timeout(180):
        tasks = tmp_path / "mine.jsonl"
        tasks.write_text('{"task_id": "mine", "data": {"start": 2, "steps": [["add", 3]]}}\n')
        job = {
            "format_version": 1,
            "out": "elsewhere",
            "endpoint": {"url": server.url, "namespace": NAMESPACE},
            "tasks": {"file": str(tasks)},
            "limits": {"concurrency": 4, "close_timeout_s": 1},
            "ray": {"num_cpus": 0.1},
        }
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        built = tmp_path / "built here"
        submitting = ("submit", str(file), "--out", str(out), "--set", "samples=4", "--env", "CREDENTIAL")
        submitting += ("--build", str(built))
        job_id = (await command(*submitting)).strip()
        tasks.unlink()  # they have travelled
        while not two_wait.is_set():
            state = (await command.state(job_id))["state"]
            assert state in ("PENDING", "RUNNING"), await command("logs", job_id)
            await asyncio.sleep(0.3)
        rows = out / "rollouts.jsonl"
        await until(lambda: rows.read_bytes().count(b"\n") == 2)

        found = await command.state(job_id)
        assert (found["state"], found["out"], found["env"]) == ("RUNNING", str(out), ["CREDENTIAL"])
        assert found["build"] == str(built)
        assert f"{job_id}  RUNNING  {out}" in await command("status")
        states = {"waiting": "0.0", "running": "2.0", "finished": "2.0", "failed": "0.0"}
        while await exported_rollouts() != states:  # noqa: ASYNC110
            await asyncio.sleep(0.3)
        tasks.write_text("")
        assert f"has a job that runs, {job_id}" in await command(*submitting, code=2)

        assert await command("stop", job_id) == f"{job_id} is being stopped\n"
        assert (await command.over(job_id))["state"] == "STOPPED"
        said = await command("logs", job_id)
        assert f"interrupted: 2 of 4 rollouts are over and kept in {out}" in said
        assert "Traceback" not in said
        assert cluster.workers() == []
        assert rows.read_bytes().count(b"\n") == 2
        assert await command("stop", job_id) == f"{job_id} was over before: STOPPED\n"

        go.set()
        before = len(server.calls)
        tasks.write_text('{"task_id": "mine", "data": {"start": 2, "steps": [["add", 3]]}}\n')
        again = json.loads(await command(*submitting, "--json"))["id"]
        said = await command("logs", "--follow", again)
        assert "4 of 4 rollouts finished; 2 were over before this run" in said
        assert (await command.over(again))["state"] == "SUCCEEDED"
        assert json.loads((built / "_report.json").read_text())["requested"] == 4
        assert (out / "rows.parquet").exists()
        assert {call.rollout_id for call in server.calls[before:]} == {name.replace("-a1", "-a2") for name in waiting}
    details = JobSubmissionClient(cluster.address()).get_job_info(again)
    assert "do-not-tell" not in json.dumps([details.metadata, details.entrypoint])
    assert "do-not-tell" not in await command("status", again, "--json")


async def test_a_job_that_cannot_be_played_says_why_in_its_log(
    cluster: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Commands(cluster.address(), capsys)
    file = tmp_path / "job.yaml"
    file.write_text(f"format_version: 1\nout: {tmp_path}/job\nendpoint: {{url: 'http://127.0.0.1:1'}}\n")
    job_id = (await command("submit", str(file))).strip()
    assert (await command.over(job_id))["state"] == "FAILED"
    assert "error: no graph answers at http://127.0.0.1:1" in await command("logs", job_id)
    assert "error: no graph answers at http://127.0.0.1:1" in await command("status", job_id)


async def test_what_is_wrong_is_said_in_one_line(
    cluster: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Commands(cluster.address(), capsys)
    for words in (["status", "nobody"], ["logs", "nobody"], ["logs", "-f", "nobody"], ["stop", "nobody"]):
        said = await command(*words, code=2)
        assert "Job nobody does not exist" in said
        assert said.count("\n") == 1
    said = await Commands("http://127.0.0.1:1", capsys)("status", code=2)
    assert said.startswith("error: no dashboard of a Ray cluster answers at http://127.0.0.1:1: ")
    file = tmp_path / "job.yaml"
    file.write_text("format_version: 1\nout: runs/here\n")
    assert "out: runs/here is relative" in await command("submit", str(file), code=2)
    absolute = ("submit", str(file), "--out", str(tmp_path / "job"))
    assert "--build: here is relative" in await command(*absolute, "--build", "here", code=2)
    assert "there is no such variable" in await command(*absolute, "--env", "NOT_THERE", code=2)
    assert "there is no such folder" in await command(*absolute, "--package", str(tmp_path / "no"), code=2)
    monkeypatch.setenv("RAY_ADDRESS", "http://another:8265")
    assert "RAY_ADDRESS is http://another:8265" in await command("status", code=2)
