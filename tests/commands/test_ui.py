"""`gym-capture ui` finds what it is pointed at, serves it to this machine alone, and ends with Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from gym_capture.auth import Keyring
from gym_capture.cli import main
from gym_capture.errors import ConfigError
from gym_capture.inspector.app import build_inspector
from gym_capture.inspector.log_source import LogSource
from gym_capture.inspector.remote import Remote
from gym_capture.models import tiny_dir
from gym_capture.stores.segments import lock_directory
from tests.inspector.world import library_of, write_closed_world
from tests.serving.replica import listening

URL = re.compile(r"http://\S+/")
NOTHING_HEAVY = """
import sys
from gym_capture import cli
from gym_capture.inspector import serve
def served(app, listener, *, host, any_user):
    import httpx
    import starlette.testclient
    client = starlette.testclient.TestClient(app)
    assert client.get("/api/rollouts").status_code == 200
    loaded = {"ray", "vllm", "torch", "transformers"} & set(sys.modules)
    sys.exit(f"loads {loaded}" if loaded else 0)
serve.serve = served
cli.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_closed_world(tmp_path_factory.mktemp("log"))


@contextmanager
def running(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command, the URL that it names, and what it said before."""
    command = [sys.executable, "-m", "gym_capture.cli", "ui", "--port", "0", "--no-open", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said: list[str] = []
        try:
            for line in process.stdout:
                if found := URL.search(line):
                    yield process, found[0], said
                    break
                said.append(line)
            else:
                raise AssertionError(process.stderr.read())
        finally:
            process.kill()


def test_a_log_is_served_until_ctrl_c(log: Path) -> None:
    with running(log, "--model", tiny_dir()) as (process, url, said):
        assert said[0].startswith("1 log of ")
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert client.get("/api/rollouts").json()["columns"]["rollout"] == ["one", "two", "three", "alone"]
            assert client.get("/api/source").json()["shows"]["texts"]
            assert client.get("/api/source", headers={"host": "evil.example"}).status_code == 421
            assert client.get("/").status_code == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (130, "")


async def test_a_graph_is_looked_into_from_here(log: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    keyring = Keyring.from_file(tmp_path / "secret")
    graph = FastAPI()
    graph.mount("/inspect", build_inspector(library_of(LogSource(log)), admit=keyring.admit_reader))
    async with listening(graph) as server:
        root = str(server.base_url)

        def look() -> None:
            with running(root, "--secret-file", tmp_path / "secret") as (_, url, said):
                assert said[0].startswith(str(log)[:20])
                with httpx.Client(base_url=url, trust_env=False) as client:
                    assert client.get("/api/rollouts/one").json()["reward"] == 1.0
                    assert client.get("/api/groups/group%2F1").json()["group"] == "group/1"
                    assert client.get("/api/search", params={"q": "6 7", "where": "id"}).json()["hits"]
                    assert client.get("/api/rollouts/nobody").status_code == 404
                    for path in ("%2e%2e/source", "rollouts/..%2f..%2fsource", "rollouts//one", "%C3%A9/%2E"):
                        assert client.get(httpx.URL(url).copy_with(raw_path=f"/api/{path}".encode())).status_code == 404

        await asyncio.to_thread(look)
        with pytest.raises(ConfigError, match="read token"):
            await asyncio.to_thread(Remote(root, token=None).found)


def test_where_it_listens_is_a_line_of_json(log: Path) -> None:
    command = [sys.executable, "-m", "gym_capture.cli", "ui", str(log), "--port", "0", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert (said.keys(), said["kind"], said["pid"]) == ({"url", "kind", "pid"}, "log", process.pid)
            with httpx.Client(base_url=said["url"], trust_env=False) as client:
                assert client.get("/api/source").status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 130
        finally:
            process.kill()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says before it exits with 2, in one line."""
    with pytest.raises(SystemExit) as stopped:
        main(["ui", "--no-open", *map(str, arguments)])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_what_cannot_work_is_said_in_a_line(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds nothing to look into" in refused(capsys, tmp_path)
    assert "cannot be reached" in refused(capsys, "http://127.0.0.1:1")
    assert "tokenizer.json cannot be read" in refused(capsys, log, "--model", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host 127.0.0.1 --port {port}: " in refused(capsys, log, "--port", port)


@pytest.mark.parametrize("command", [["ui", "--no-open"], ["inspect", "one"]], ids=lambda command: command[0])
def test_an_option_that_does_not_go_with_the_source_is_refused_by_its_name(
    command: list[str], log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*command, *map(str, arguments)])
        assert stopped.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    url = "http://127.0.0.1:1"
    assert "--model is for what is on disk" in said(url, "--model", tmp_path)
    assert "--records is for what is on disk" in said(url, "--records", tmp_path)
    assert "--model and --records are for what" in said(url, "--records", tmp_path, "--model", tmp_path)
    assert f"--token is for a graph's URL: {log} is read" in said(log, "--token", "t")
    assert "--secret-file is for a graph's URL" in said(log, "--secret-file", tmp_path / "secret")
    assert "--secret-file and --token are for" in said(log, "--secret-file", tmp_path / "secret", "--token", "t")
    # That of the environment is there for other commands.
    monkeypatch.setenv("GYM_CAPTURE_SECRET_FILE", str(tmp_path / "secret"))
    assert "holds nothing to look into" in said(tmp_path)


def test_nothing_heavy_is_loaded_and_a_graph_that_runs_is_not_disturbed(log: Path) -> None:
    lock = lock_directory(log)
    try:
        done = subprocess.run(
            [sys.executable, "-c", NOTHING_HEAVY, "ui", str(log), "--port", "0", "--no-open"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "which a graph has open" in done.stdout
    finally:
        os.close(lock)
