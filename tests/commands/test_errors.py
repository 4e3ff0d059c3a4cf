"""What a person can put right is one line that names it, whichever command finds it: never a traceback."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture import cli
from gym_capture.build.builder import build
from gym_capture.commands.fence import Fence
from gym_capture.data.schema import rows, to_table
from gym_capture.models import tiny_dir
from gym_capture.rollouts.ledger import Ledger
from gym_capture.rollouts.progress import uncounted
from gym_capture.stores.memory import MemoryStore
from tests.data.made_rollouts import snapshot
from tests.rollouts.unseen import Unseen

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in a directory of its own; the exit code and the one line on stderr that says why."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return int(stop.value.code or 0), lines[0].removeprefix("error: ")

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model folder to break."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_dir(), folder)
    return folder


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# --- audit-template ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "nowhere does not exist: name a model folder, a chat template file (.jinja), or one of"),
        ("t.jinja", b"\xff\xfe", "t.jinja is no chat template: it is not UTF-8 text"),
        ("t.jinja", b"a: 1", "t.jinja is no chat template: it does not read `messages`"),
        ("t.jinja", b"{% for m in messages %}", "the chat template cannot be compiled: line 1: Unexpected end"),
    ],
)
def test_a_template_that_is_none(run: Run, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, line = run("audit-template", name)
    assert code == 2
    assert line.startswith(message)


def test_a_folder_without_a_tokenizer(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, line = run("audit-template", "empty")
    assert (code, line[:60]) == (2, "empty is not a model folder: it has no tokenizer (tokenizer.")


@pytest.mark.parametrize("broken", ["{", '{"version": "1.0"}', "[]"])
def test_a_broken_tokenizer(run: Run, tiny: Path, broken: str) -> None:
    (tiny / "tokenizer.json").write_text(broken)
    code, line = run("audit-template", tiny)
    assert code == 2
    assert line.startswith(f"cannot load the tokenizer of {tiny}: ")


def test_a_broken_model_config_of_a_tokenizer(run: Run, tiny: Path) -> None:
    (tiny / "config.json").write_text("{")
    (tiny / "tokenizer_config.json").write_text("{}")
    code, line = run("audit-template", tiny)
    assert code == 2
    assert "config.json" in line


def test_a_template_for_a_folder_is_read_as_strictly(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("no template")
    assert run("audit-template", tiny_dir(), "--chat-template", "t.jinja")[1].startswith("t.jinja is no chat template")
    (tmp_path / "m.jinja").write_text("{{ messages }}")
    _, line = run("audit-template", "m.jinja", "--chat-template", "t.jinja")
    assert line == "--chat-template goes with a model folder: m.jinja is a file"


def test_template_arguments_that_are_none(run: Run) -> None:
    _, line = run("audit-template", tiny_dir(), "--chat-template-kwargs", "[" * 100_000)
    assert line.startswith("--chat-template-kwargs is not JSON")


def test_small_models_are_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit-template", "tiny"])
    assert stop.value.code == 0
    assert "exact" in capsys.readouterr().out


# --- train-step --------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    pq.write_table(
        to_table(rows(build(snapshot("r")), group_id="g", reward=1.0, advantage=1.0)), directory / "part-00000.parquet"
    )
    return directory


def test_data_that_is_not_there(run: Run) -> None:
    code, line = run("train-step", "--model", tiny_dir(), "--data", "nowhere")
    assert (code, line) == (2, "nowhere does not exist: build trajectories into it first")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"not parquet", "data is not a directory of Parquet files: "), (b"", "data is not a directory of Parquet files")],
)
def test_data_that_is_not_parquet(run: Run, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part-00000.parquet").write_bytes(content)
    code, line = run("train-step", "--model", tiny_dir(), "--data", "data")
    assert code == 2
    assert line.startswith(message)


def test_data_of_which_a_later_file_is_damaged(run: Run, data: Path) -> None:
    (data / "part-00001.parquet").write_bytes((data / "part-00000.parquet").read_bytes()[:-20])
    code, line = run("train-step", "--model", tiny_dir(), "--data", "data")
    assert code == 2
    assert "part-00001.parquet cannot be read: " in line


def test_data_of_another_kind(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "data" / "part-00000.parquet")
    assert run("train-step", "--model", tiny_dir(), "--data", "data")[1].startswith(
        "data/part-00000.parquet: not a table of trajectories"
    )


def test_data_at_an_address_that_nobody_knows(run: Run) -> None:
    _, line = run("train-step", "--model", tiny_dir(), "--data", "foo://data")
    assert line.startswith("foo://data is not a directory of Parquet files: Unrecognized filesystem")


@pytest.mark.parametrize(("device", "said"), [("cuda", "CUDA"), ("cuda:99", ""), ("gpu", "gpu")])
def test_a_device_that_is_not_there(run: Run, data: Path, device: str, said: str) -> None:
    code, line = run("train-step", "--model", tiny_dir(), "--data", data, "--device", device)
    assert code == 2
    assert line.startswith(f"--device {device}: torch cannot use it here: ")
    assert said in line


@pytest.mark.parametrize(
    "broken",
    [
        lambda model: (model / "config.json").write_text("{"),
        lambda model: change(model / "config.json", model_type="nonesuch"),
        lambda model: change(model / "config.json", hidden_size="wide"),
        lambda model: (model / "model.safetensors").unlink(),
        lambda model: (model / "model.safetensors").write_bytes(b"short"),
    ],
)
def test_a_broken_model(run: Run, data: Path, tiny: Path, broken: Callable[[Path], object]) -> None:
    broken(tiny)
    code, line = run("train-step", "--model", tiny, "--data", data)
    assert code == 2
    assert line.startswith(f"cannot load the model of {tiny}: ")


def test_a_place_that_is_taken_is_said_before_training(run: Run, data: Path) -> None:
    code, line = run("train-step", "--model", tiny_dir(), "--data", data, "--out", data)
    assert (code, line) == (2, f"--out {data} is there already: choose another place for the trained model")


# --- check-configs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: \xe9\n", "not UTF-8 text: invalid continuation byte at byte 3"),
        (b"a: " + b"[" * 5_000 + b"]" * 5_000, "nested too deeply"),
        ("\n".join(" " * depth + "a:" for depth in range(3_000)).encode(), "nested too deeply"),
        (b"applications: &a [*a]\n", "an alias stands inside of what it refers to"),
        (b"a: \x00", "not valid YAML: unacceptable character"),
    ],
)
def test_a_config_that_is_none_is_a_problem_of_that_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, problem: str
) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    (tmp_path / "worse.yaml").write_bytes(b"-")
    with pytest.raises(SystemExit) as stop:
        cli.main(["check-configs", str(tmp_path / "bad.yaml"), str(tmp_path / "worse.yaml")])
    assert stop.value.code == 1
    shown = capsys.readouterr().out
    assert problem in shown
    assert f"wrong {tmp_path / 'worse.yaml'}" in shown


# --- build, build-job --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"rollout_id": "r", "group_id": "g", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        (
            r'{"rollout_id": "r", "group_id": "\ud83d"}',
            "group_id must be text: it has half a surrogate pair, '\\ud83d'",
        ),
        (r'{"rollout_id": "r", "group_id": "g", "failure": "\udc80"}', "failure must be text: it has half"),
        (
            r'{"rollout_id": "r", "group_id": "g", "reward_components": {"\udc80": 1}}',
            "reward_components must be text: it has half",
        ),
        ('{"rollout_id": "r", "group_id": "g", "failure": 3}', "failure must be a string: got 3"),
        ('{"rollout_id": "r", "group_id": "g", "reward": 1' + "0" * 400 + "}", "reward must be a number that float64"),
    ],
)
@pytest.mark.parametrize("command", [("build", "captures", "--rollouts"), ("build-job",)])
def test_rollouts_that_cannot_be_read(
    run: Run, tmp_path: Path, command: tuple[str, ...], line: str, message: str
) -> None:
    (tmp_path / "captures").mkdir()
    (tmp_path / "rollouts.jsonl").write_text(f'{{"rollout_id": "r0", "group_id": "g"}}\n{line}\n')
    code, said = run(*command, "rollouts.jsonl", "--out", "out")
    assert code == 2
    assert said.startswith(f"rollouts.jsonl, line 2: {message}")
    assert not (tmp_path / "out").exists()


def test_trajectories_that_are_there_are_replaced_by_an_option(run: Run, tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir()
    (tmp_path / "captures" / "r.tokens.jsonl").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-00000.parquet").touch()
    _, line = run("build", "captures", "--out", "out")
    assert line == "out already holds trajectories (part-00000.parquet): choose another --out, or pass --overwrite"


# --- rollouts run ------------------------------------------------------------------------------------------------


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that answers as a graph does, and state actors that are not asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {
                "/stats": (200, b'{"capture": true}'),
                "/vllm/stats": (404, b'{"capture": "of another kind"}'),
                "/other/stats": (200, b'{"requests": 3}'),
                "/list/stats": (200, b"[1]"),
                "/text/stats": (200, b"capture"),
                "/number/stats": (200, b"3"),
            }
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    # Nothing is played, so nothing is asked of it.
    monkeypatch.setattr("gym_capture.commands.fence.connected_fence", lambda *_: Fence(MemoryStore()))
    monkeypatch.setattr("gym_capture.commands.playing.recorded", lambda *_: (uncounted, Unseen()))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "http://127.0.0.1:1",
            "no graph answers at http://127.0.0.1:1 ([Errno 111] Connection refused): is `serve run`",
        ),
        ("localhost:8000", "--url localhost:8000 is not a URL such as http://127.0.0.1:8000"),
        ("::", "--url :: is not a URL such as"),
    ],
)
def test_a_graph_that_does_not_answer(run: Run, tmp_path: Path, address: str, message: str) -> None:
    code, line = run("rollouts", "run", "--out", "job", "--url", address)
    assert code == 2
    assert line.startswith(message)
    assert not (tmp_path / "job").exists()


def test_a_job_is_resumed_with_the_same_options(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    started_with = {
        "format_version": 2,
        "job_id": "job-1",
        "samples": 4,
        "tasks": "the digest of others",
        "harness": {"name": "mine"},
    }
    (tmp_path / "job" / "job.json").write_text(json.dumps(started_with))
    code, line = run("rollouts", "run", "--out", "job", "--url", url, "--samples", "3")
    assert (code, line) == (
        2,
        'job holds another job: environment.name: nothing -> "register"; harness.name: "mine" -> "tool-loop"; '
        "limits.rollout_timeout_s: nothing -> 600.0; samples: 4 -> 3; tasks: other ones (count, seed, file, or an "
        "option of the environment). Its rows do not count for this one: give what differs the values that it "
        "was started with to resume it, or choose another directory with --out",
    )
    _, line = run("rollouts", "run", "--out", "job", "--url", url, "--job-id", "mine")
    assert 'job_id: "job-1" -> "mine"' in line
    assert (tmp_path / "job" / "job.json").read_text() == json.dumps(started_with)


@pytest.mark.parametrize(
    ("at", "status"), [("v1", 404), ("vllm", 404), ("other", 200), ("list", 200), ("text", 200), ("number", 200)]
)
def test_what_answers_is_no_graph(run: Run, url: str, tmp_path: Path, at: str, status: int) -> None:
    code, line = run("rollouts", "run", "--out", "job", "--url", f"{url}/{at}")
    assert code == 2
    starting = f"; or the graph is starting: wait until {url}/{at}/healthz answers" if status == 404 else ""
    assert line == (
        f"what answers at {url}/{at} is no gym-capture graph: HTTP {status} from {url}/{at}/stats. Name scheme, host "
        f"and port only, without /v1{starting}"
    )
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("version", [None, 3])
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_job_of_another_version_is_refused(
    run: Run, url: str, tmp_path: Path, version: int | None, dry_run: tuple[str, ...]
) -> None:
    (tmp_path / "job").mkdir()
    kept = {"job_id": "job-1", "samples": 4} | ({} if version is None else {"format_version": version})
    (tmp_path / "job" / "job.json").write_text(json.dumps(kept))
    assert run("rollouts", "run", "--out", "job", "--url", url, *dry_run) == (
        2,
        f"job holds a job of another version of gym-capture: its format is {version or 1}, this one plays 2. Play in "
        "another directory; the rollouts.jsonl in it can be built as it is",
    )


@pytest.mark.parametrize("content", ["{", "[]", "{}", "[" * 100_000])
def test_a_damaged_job(run: Run, url: str, tmp_path: Path, content: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text(content)
    code, line = run("rollouts", "run", "--out", "job", "--url", url)
    assert code == 2
    assert line.startswith("job/job.json cannot be read: ")
    assert "choose another directory" in line


def test_a_job_directory_that_is_in_use_or_is_none(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, line = run("rollouts", "run", "--out", "file", "--url", url)
    assert line == "a rollout job cannot be kept in file: File exists"
    with Ledger(tmp_path / "job", {"job_id": "j"}):
        _, line = run("rollouts", "run", "--out", "job", "--url", url)
    assert line == "job: another rollout job is writing here; wait for it, or choose another --out"


@pytest.mark.parametrize("line", [b'{"task_id": "\xe9"}', b'{"task_id": ' + b"[" * 100_000])
def test_tasks_that_cannot_be_read(run: Run, url: str, tmp_path: Path, line: bytes) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(line)
    code, said = run("rollouts", "run", "--out", "job", "--tasks", "tasks.jsonl", "--url", url)
    assert code == 2
    assert said.startswith("tasks.jsonl, line 1: not a task: ")
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--environment", "regster"), "there is no environment 'regster' (did you mean 'register'?)"),
        (("--harness", "tool-lop"), "there is no harness 'tool-lop' (did you mean 'tool-loop'?)"),
        (("--set", "harness.max_cals=3"), "harness 'tool-loop' has no option 'max_cals' (did you mean 'max_calls'?)"),
        (("--set", "environment.bonus=3"), "environment 'register' has no option 'bonus'"),
        (("--tasks", "nowhere.jsonl"), "nowhere.jsonl: the tasks cannot be read: No such file or directory"),
        (("--samples", "0"), "--samples 0: samples: Input should be greater than 0"),
        (("--rollout-timeout-s", "nan"), "--rollout-timeout-s nan: limits.rollout_timeout_s: Input should be"),
        (("--secret-file", "nowhere"), "nowhere"),
        (("--set", "smaples=3"), "--set smaples=3: smaples: unknown key, did you mean `samples`?"),
        (("--set", "samples"), "--set samples: write it as key=value"),
        (("--set", "samples.more=3"), "the job: samples: "),
        (("--set", "out.more=3"), "out.more cannot be set: out is "),
    ],
)
def test_a_job_that_cannot_work_is_refused_before_anything_runs(
    run: Run, url: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, said = run("rollouts", "run", "--out", "job", "--url", url, *arguments)
    assert code == 2
    assert message in said
    assert not (tmp_path / "job").exists()


def test_a_job_needs_its_directory(run: Run, url: str) -> None:
    assert run("rollouts", "run", "--url", url) == (2, "the job: out: Field required")


# --- learn -------------------------------------------------------------------------------------------------------


def test_learn_says_before_it_runs_anything_what_it_cannot_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "serve.yaml"
    for text, message in (("applications: [", "cannot be read: "), ("{}", "is no Serve config: it has no")):
        config.write_text(text)
        status, said = run("learn", "--config", config, "--out", "out")
        assert (status, said.startswith(f"{config} {message}")) == (2, True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, said = run("learn", "--out", "out")
    assert (status, "pip install 'gym-capture[plots]'" in said) == (2, True)
    assert not (tmp_path / "out").exists()
