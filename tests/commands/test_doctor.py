"""What `doctor` finds on machines that have something wrong with them, and that it says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gym_capture import cli
from gym_capture.cluster.env import CLUSTER_ENV
from gym_capture.commands import doctor_machine as machine
from gym_capture.commands import doctor_model
from gym_capture.commands.doctor_machine import Finding
from gym_capture.commands.doctor_model import check_model
from gym_capture.models import tiny_dir


def states(findings: Iterable[Finding]) -> dict[str, str]:
    found = {finding.what: finding.state for finding in findings}
    assert found
    return found


def test_this_machine_is_looked_at_and_lines_of_json_say_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o644)
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", "--json", "--secret-file", str(secret), "--records", str(tmp_path / "records")])
    assert stop.value.code == 1
    found = {line["what"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (found["secret"]["state"], found["secret"]["todo"]) == ("mend", f"chmod 600 {secret}")
    assert "ray 2.60" in found["packages"]["found"]
    assert found["HAProxy"]["found"].startswith("HAProxy version")
    assert "ms" in found["records: fsync"]["found"]
    assert not (tmp_path / "records").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


def test_a_secret_that_is_private_and_long_is_right(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o600)
    assert states(machine.secret(secret)) == {"secret": "mend"}
    secret.write_text("x" * 32)
    assert states(machine.secret(secret)) == {"secret": "ok"}
    assert states(machine.secret(None)) == {"secret": "note"}
    os.mkfifo(tmp_path / "fifo")  # nobody waits for who may write to it
    assert states(machine.secret(tmp_path / "fifo")) == {"secret": "mend"}


def test_the_environment_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert states(machine.ray_environment(CLUSTER_ENV)) == {"cluster.env": "ok"}
    assert states(machine.ray_environment({})) == {"cluster.env": "note"}
    assert states(machine.ray_environment({"RAY_SERVE_ENABLE_HA_PROXY": "1"})) == {"cluster.env": "mend"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert states(machine.ray_environment(CLUSTER_ENV))["Ray's token"] == "note"
    assert "Ray's token" not in states(machine.ray_environment({**CLUSTER_ENV, "RAY_AUTH_MODE": "token"}))


def test_a_haproxy_that_does_not_run(tmp_path: Path) -> None:
    nothing = str(tmp_path / "haproxy")
    named = {"RAY_SERVE_HAPROXY_BINARY_PATH": nothing}
    assert states(machine.proxy(named)) == {"HAProxy": "note"}
    assert states(machine.proxy({**named, "RAY_SERVE_ENABLE_HA_PROXY": "1"})) == {"HAProxy": "mend"}


def test_a_port_that_something_else_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        assert states(machine.listening(port)) == {f"port {port}": "ok"}
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert states(machine.listening(port)) == {f"port {port}": "mend"}


def test_a_port_that_a_graph_has() -> None:
    class Stats(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"capture": {}}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Stats) as graph:
        threading.Thread(target=graph.serve_forever, daemon=True).start()
        (found,) = machine.listening(graph.server_port)
        graph.shutdown()
    assert (found.state, found.found) == ("note", "a graph serves here")


def test_records_in_memory_or_open_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert states(machine.disk(tmp_path))["records: mode"] == "note"
    tmp_path.chmod(0o700)
    assert "records: mode" not in states(machine.disk(tmp_path))
    if machine._file_system(Path("/dev/shm")) == "tmpfs":
        assert states(machine.disk(Path("/dev/shm/records")))["records: disk"] == "mend"


def test_a_model_that_is_right_and_models_that_are_not(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in check_model("tiny", "hermes", "quen3")}
    assert (found["model: weights"].state, found["model: template"].state) == ("ok", "ok")
    assert found["model: tool parser"].state == "ok"
    assert "did you mean `qwen3`" in found["model: reasoning parser"].found
    guessed = {finding.what: finding for finding in check_model("tiny", None, None)}
    assert "hermes" in guessed["model: tool parser"].found
    assert states(check_model(str(tmp_path), None, None)) == {"model": "mend"}
    folder = tmp_path / "model"
    shutil.copytree(tiny_dir(), folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert states(check_model(str(folder), None, None))["model: weights"] == "mend"
    for text in ("[1", "[]", '{"weight_map": []}', "\x00"):
        (folder / "model.safetensors.index.json").write_text(text)
        (folder / "tokenizer_config.json").write_text(text)
        assert doctor_model._weights(folder).state == "mend"
    assert "mend" in states(check_model(str(folder), None, None)).values()
