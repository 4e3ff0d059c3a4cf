"""`gym-capture train`: a run over built trajectories, gone on with when it is started again."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from gym_capture.build.builder import build
from gym_capture.commands.fence import Fence
from gym_capture.commands.train import command
from gym_capture.commands.training_options import progress_bar
from gym_capture.data.schema import rows, to_table
from gym_capture.data.sources import SourceSpec
from gym_capture.demo.processes import free_port
from gym_capture.errors import ConfigError, WeightsFailedError
from gym_capture.models import tiny_dir
from gym_capture.rollouts.progress import uncounted
from gym_capture.stores.memory import MemoryStore
from tests.data import made_rollouts
from tests.data.made_rollouts import snapshot
from tests.rollouts.scripted_server import serving, solve
from tests.rollouts.unseen import Unseen
from trainer_bridge.grpo import GrpoTrainer, StepMetrics


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for group in range(3):
        made = [
            *rows(build(snapshot(f"{group}-a")), group_id=f"g{group}", reward=1.0, advantage=1.0),
            *rows(build(snapshot(f"{group}-b")), group_id=f"g{group}", reward=0.0, advantage=-1.0),
        ]
        pq.write_table(to_table(made), directory / f"part-{group:05d}.parquet")
    return directory


def train(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, ["--model", str(tiny_dir()), *map(str, arguments)])


def test_a_run_started_again_goes_on_and_ends(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    options = ["--data", data, "--out", out, "--rollouts-per-step", 2, "--epochs", 2, "--layout", "tree"]
    first = train(*options, "--steps", 2)
    assert first.exit_code == 0, first.output
    assert "step 2, reward 0.5, loss" in first.stdout
    again = train(*options, "--json")
    assert again.exit_code == 0, again.output
    assert "going on behind step 2" in again.stderr
    written = (out / "metrics.jsonl").read_text().splitlines()
    assert again.stdout.splitlines() == written[2:]
    lines = [json.loads(line) for line in written]
    assert [(line["step"], line["groups_trained"]) for line in lines] == [(n, n) for n in range(1, 7)]
    assert (out / "metrics.png").exists()
    newest = out / "checkpoints" / "step-00000006"
    assert (newest / "tokenizer.json").exists()
    assert "nothing to do" in train(*options).stdout
    over = train(*options, "--epochs", 3, "--steps", 20)
    assert "there are no more rollouts: 9 of 20 steps were made (--epochs" in over.stdout
    assert "nothing to do" in train(*options).stdout
    assert train(*options, "--json").stdout == ""
    shutil.copytree(data, tmp_path / "other")
    other = train("--data", tmp_path / "other", "--out", out)
    assert isinstance(other.exception, ConfigError)
    assert f"was begun with --data {data}" in str(other.exception)


def test_a_folder_is_followed_until_its_job_has_ended_and_a_run_goes_on_with_what_it_was_begun_with(
    tmp_path: Path, data: Path
) -> None:
    parts = sorted(data.iterdir())
    out, later = tmp_path / "run", tmp_path / "later"
    later.mkdir()
    for part in parts[1:]:
        part.rename(later / part.name)
    options = ["--data", data, "--out", out, "--follow", "--rollouts-per-step", 2]
    first = train(*options, "--steps", 1)
    assert first.exit_code == 0, first.output
    for part in parts[1:]:
        (later / part.name).rename(part)
    (data / "_report.json").write_text("{}")
    again = train(*options)
    assert again.exit_code == 0, again.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["groups_trained"]) for line in lines] == [(n, n) for n in range(1, 4)]
    other = train("--data", data, "--out", out)
    assert isinstance(other.exception, ConfigError)
    assert f"was begun with --follow --data {data}, not --data {data}" in str(other.exception)


@contextmanager
def solving() -> Iterator[str]:
    """The URL of a server, in a thread, on which every rollout goes well: the command has the main one, for signals."""
    ready: Queue[str] = Queue()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving(solve) as server:
            ready.put(server.url)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield ready.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_job_is_played_and_trained_and_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SourceSpec(import_path=made_rollouts.IMPORT_PATH)
    monkeypatch.setattr("gym_capture.commands.cluster.join_cluster", lambda *_, **__: None)
    monkeypatch.setattr("gym_capture.commands.fence.fence_of", lambda *_: Fence(MemoryStore()))
    monkeypatch.setattr("gym_capture.commands.playing.recorded", lambda *_: (uncounted, Unseen()))
    monkeypatch.setattr("gym_capture.commands.playing.records_of", lambda namespace: made)
    job, out = tmp_path / "job.yaml", tmp_path / "run"
    with solving() as url:
        job.write_text(f"{{format_version: 1, out: {tmp_path}/job, endpoint: {{url: '{url}'}}, tasks: {{count: 9}}}}")
        options = [
            "--play",
            job,
            "--set",
            "tasks.count=3",
            "--set",
            "samples=2",
            "--out",
            out,
            "--rollouts-per-step",
            2,
        ]
        first = train(*options, "--ahead", 1, "--steps", 1)
        assert first.exit_code == 0, first.output
        played = (tmp_path / "job" / "rollouts.jsonl").read_text().splitlines()
        assert len(played) <= 4  # one group was trained, one was under way
        again = train(*options)
        assert again.exit_code == 0, again.output
        assert "going on behind step 1" in again.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["groups_trained"], line["stream/handed_out"]) for line in lines] == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 3, 2),
    ]


def test_a_log_has_a_line_now_and_then_where_a_terminal_has_a_bar() -> None:
    written = Written()
    with progress_bar(Console(file=written, width=200), every_s=0.001) as bar:
        task = bar.add_task("loading the model", total=None)
        assert written.seen("loading the model\n")
        bar.update(task, description="step 1", completed=2, total=40)
        assert written.seen("step 1: 2 of 40\n")


class Written(io.StringIO):
    """What a thread writes."""

    def __init__(self) -> None:
        super().__init__()
        self.news = threading.Condition()

    def write(self, text: str) -> int:
        with self.news:
            self.news.notify_all()
            return super().write(text)

    def seen(self, text: str) -> bool:
        with self.news:
            return self.news.wait_for(lambda: text in self.getvalue(), timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_up_the_step_under_way_and_leaves_a_checkpoint(
    tmp_path: Path, data: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = GrpoTrainer._backward
    passes: list[int] = []

    def signalled(self: GrpoTrainer, *arguments: Any) -> Any:
        passes.append(1)
        if len(passes) == 2:
            signal.raise_signal(number)
        return backward(self, *arguments)

    monkeypatch.setattr(GrpoTrainer, "_backward", signalled)
    out = tmp_path / "run"
    handler = signal.getsignal(number)
    stopped = train("--data", data, "--out", out, "--rollouts-per-step", 2)
    assert stopped.exit_code == 128 + number
    assert f"stopped by {number.name}: a checkpoint of step 1 is in {out}" in stopped.stdout
    assert signal.getsignal(number) is handler
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
    again = train("--data", data, "--out", out, "--rollouts-per-step", 2)
    assert again.exit_code == 0, again.output
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0"], "must be positive"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--aggregation", "dr_grpo"], "set tokens_per_rollout"),
        (["--reference", ".", "--kl", "0.1"], "not a model folder"),
        (["--reference", "."], "say --kl"),
        (["--weights-folder", "."], "say --push"),
        (["--device", "abacus"], "torch cannot use it"),
        (["--play", "job.yaml"], "--data a folder of trajectories, or --play a job file"),
        (["--ahead", "3"], "--ahead is for groups that come while the run trains"),
        (["--follow", "--epochs", "2"], "are trained once"),
        (["--follow", "--max-lag", "1"], "--max-lag counts versions"),
        (["--set", "samples=2"], "--set is for the job of --play"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(
    tmp_path: Path, data: Path, arguments: list[str], message: str
) -> None:
    failed = train("--data", data, "--out", tmp_path / "run", *arguments)
    assert isinstance(failed.exception, ConfigError)
    assert message in str(failed.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("url", "kind"), [("http://127.0.0.1:9", WeightsFailedError), ("http://here:port", ConfigError)]
)
def test_weights_that_would_go_nowhere_are_said_before_anything_is_made(
    tmp_path: Path, data: Path, url: str, kind: type[Exception]
) -> None:
    failed = train("--data", data, "--out", tmp_path / "run", "--push", url)
    assert isinstance(failed.exception, kind), failed.output
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, data: Path) -> None:
    failed = train("--data", data, "--out", data)
    assert isinstance(failed.exception, ConfigError)
    assert "holds something else" in str(failed.exception)


def test_a_run_can_be_scraped_while_it_trains(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    scraped: list[str] = []
    steps = GrpoTrainer.step

    def scraping(trainer: GrpoTrainer, *given: Any, **options: Any) -> StepMetrics:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            scraped.append(reply.read().decode())
        return steps(trainer, *given, **options)

    monkeypatch.setattr(GrpoTrainer, "step", scraping)
    out = tmp_path / "run"
    done = train("--data", data, "--out", out, "--rollouts-per-step", 2, "--steps", 2, "--metrics-port", port)
    assert done.exit_code == 0, done.output
    assert scraped[0] == ""
    assert 'gym_capture_trainer_step{run="run"} 1\n' in scraped[1]
    assert "gym_capture_trainer_token_mult_prob_error" in scraped[1]
