"""What `serve` makes of a command line, and what it refuses before anything is started. `make test-serve` serves."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from gym_capture import cli
from gym_capture.cluster.env import CLUSTER_ENV
from gym_capture.commands import serve
from gym_capture.commands.check_configs import check_config
from gym_capture.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "serve_configs/cpu_demo.yaml"


def test_a_model_alone_makes_a_config_that_serve_takes(tmp_path: Path) -> None:
    served = serve.configured(None, {"model": "tiny"}, ["engine_args.max_num_seqs=4"], port=8123)
    (application,) = served["applications"]
    assert application["args"]["engine_args"]["max_num_seqs"] == 4
    assert served["http_options"] == {"host": "127.0.0.1", "port": 8123}
    assert check_config(yaml.safe_dump(served), {}) == []


def test_options_win_over_the_config() -> None:
    overrides = {"model": "tiny", "tool_parser": "mistral", "secret_file": None}
    served = serve.configured(CONFIG, overrides, ["state.shards=3"], host="0.0.0.0")
    args = served["applications"][0]["args"]
    assert (args["model"], args["tool_parser"], args["state"]) == ("tiny", "mistral", {"shards": 3})
    assert args["engine_args"]["dtype"] == "float32"
    assert "secret_file" not in args
    assert served["http_options"] == {"host": "0.0.0.0", "port": 8000}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("applications: [{import_path: other:app}]", "serves no graph"),
        ("- a", "no `applications`"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_no_graph_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        serve.configured(file, {}, [])


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", *arguments])
    assert stop.value.code == 2
    line: str = capsys.readouterr().err.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


def test_nothing_is_started_for_what_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(serve, "_serve", started)
    assert "name a Serve config, or a model" in refused([], capsys)
    assert refused(["--model", "/nowhere"], capsys).endswith(
        "is neither a model folder (with a config.json) nor smollm2 or tiny"
    )
    assert "`hf download Qwen/Qwen3-0.6B --local-dir FOLDER` first" in refused(["--model", "Qwen/Qwen3-0.6B"], capsys)
    assert "did you mean `engine_args`?" in refused(["--model", "tiny", "--set", "engine_arg.x=1"], capsys)
    assert "has no 'x'" in refused(["--model", "tiny", "--set", "model.x=1"], capsys)
    assert "cannot read the secret" in refused(["--model", "tiny", "--secret-file", "/nowhere"], capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}: cannot listen there" in refused(["--model", "tiny", "--port", port], capsys)


def test_cluster_env_in_code_is_that_of_the_file() -> None:
    """What `serve` sets is what a person would source."""
    assert set(CLUSTER_ENV) <= set((CONFIG.parent / "cluster.env").read_text().replace("=", " ").split())
