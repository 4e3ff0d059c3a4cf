"""The recipes of docs/extending.md, taken out of the page and used as a reader would use them."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import gym_capture.dialects
from gym_capture import cli
from gym_capture.capture.operations import Clear, Operation
from gym_capture.capture.records import Continues, Root
from gym_capture.commands import fence, playing
from gym_capture.dialects.registry import DIALECTS
from gym_capture.engines.base import EngineFactory
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.imports import load
from gym_capture.models import tiny_dir
from gym_capture.rollouts.harness import Endpoint
from gym_capture.rollouts.progress import uncounted
from gym_capture.serving import gateway
from tests.docs.pages import ROOT, applied, blocks_of, target
from tests.rollouts.scripted_server import Call, Server, completion, serving, tool_call
from tests.rollouts.unseen import Unseen
from tests.serving.replica import PLAIN, Replica, always, says

PAGE = ROOT / "docs" / "extending.md"


def written(name: str) -> str:
    """The file of that name, as the page has it."""
    (text,) = [block.text for block in blocks_of(PAGE) if block.file == name]
    return text


def patched(name: str) -> str:
    """A file of this package with the page's change in it."""
    (diff,) = [block.text for block in blocks_of(PAGE) if block.language == "diff" and target(block.text) == name]
    return applied(diff, (ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path, as a reader's own is, with the page's files in it."""
    for block in blocks_of(PAGE):
        if block.file is not None and "/" not in block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(scope="module")
def template() -> HfChatTemplate:
    return HfChatTemplate.from_model_dir(tiny_dir())


# --- a dialect -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dialects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The gateway with the dialect in the package, and the registry as the page changes it."""
    (tmp_path / "ask.py").write_text(written("gym_capture/dialects/ask.py"), encoding="utf-8")
    (tmp_path / "registry.py").write_text(patched("gym_capture/dialects/registry.py"), encoding="utf-8")
    monkeypatch.setattr(gym_capture.dialects, "__path__", [*gym_capture.dialects.__path__, str(tmp_path)])
    changed = runpy.run_path(str(tmp_path / "registry.py"))["DIALECTS"]
    assert [type(one) for one in changed[:-1]] == [type(one) for one in DIALECTS]
    monkeypatch.setattr(gateway, "DIALECTS", changed)
    yield
    del sys.modules["gym_capture.dialects.ask"]
    del gym_capture.dialects.ask  # type: ignore[attr-defined]


@pytest.mark.usefixtures("dialects")
async def test_a_dialect_is_served_described_and_continued(template: HfChatTemplate) -> None:
    replica = Replica(template, says(template, "four", "eight"))
    path, texts = "/ng-rollout/r1/v1/ask", ["2 + 2?"]
    first = await replica.http.post(path, json={"model": "policy", "texts": texts})
    assert (first.json()["answer"], first.json()["finish_reason"]) == ("four", "stop")
    texts += ["four", "and twice that?"]
    second = await replica.http.post(path, json={"model": "policy", "texts": texts, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in second.text.split("\n\n") if line]
    assert "".join(event.get("text", "") for event in events) == "eight"
    assert events[-1] == {"finish_reason": "stop"}
    asked, continued = await replica.state.entries()
    assert (type(asked.parent), type(continued.parent)) == (Root, Continues)
    assert continued.prompt_token_ids.tolist()[: asked.cum_len] == asked.cumulative_ids().tolist()
    assert "/v1/ask" in replica.app.openapi()["paths"]


@pytest.mark.usefixtures("dialects")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "policy", "texts": []}, "texts must end with a question"),
        ({"model": "policy", "texts": ["a", "b"]}, "texts must end with a question"),
        ({"model": "policy", "texts": [1]}, "texts.0 must be an array, not a number"),
        ({"model": "policy"}, "texts must be an array, not null"),
        ({"texts": ["a"]}, "model is missing"),
    ],
)
async def test_a_dialect_names_what_is_wrong(body: dict[str, Any], said: str, template: HfChatTemplate) -> None:
    refused = await Replica(template, always(PLAIN)).http.post("/v1/ask", json=body)
    assert (refused.status_code, refused.json()) == (400, {"error": said})


# --- an engine -------------------------------------------------------------------------------------------------------


def test_an_engine_keeps_the_contract(folder: Path) -> None:
    done = python("check_engine.py", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass - ") == len(done.stdout.splitlines()) > 10


@pytest.mark.usefixtures("folder")
async def test_an_engine_serves_conversations_that_continue(template: HfChatTemplate) -> None:
    start: EngineFactory = load("uniform_engine:start_engine")
    engine = start(
        model=str(tiny_dir()), name="policy", tool_parser=None, reasoning_parser=None, engine_args={"seed": 3}
    )

    replica = Replica(template, always(PLAIN), engine=engine)
    said = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        reply = (await replica.chat(*said, max_tokens=12)).json()["choices"][0]
        assert reply["finish_reason"] == "length"
        said += [reply["message"], {"role": "user", "content": "go on"}]
    calls = await replica.state.entries()
    assert [type(call.parent) for call in calls] == [Root, Continues, Continues]
    for before, call in pairwise(calls):
        assert call.prompt_token_ids.tolist()[: before.cum_len] == before.cumulative_ids().tolist()
    refused = await replica.chat(top_p=0.5)
    assert refused.json()["error"]["param"] == "top_p"


# --- an environment and a harness ------------------------------------------------------------------------------------


async def knows_peru(call: Call) -> web.Response:
    """A policy that looks up what it is asked for, and says what it found; without an atlas it says Lima."""
    question, *rest = call.body["messages"]
    found = [message["content"] for message in rest if message["role"] == "tool"]
    if "tools" in call.body and not found:
        country = question["content"].removeprefix("What is the capital of ").split("?")[0]
        return completion(
            {"content": None, "tool_calls": [tool_call("atlas", json.dumps({"country": country}))]},
        )
    return completion({"content": found[0] if found else "Lima"})


@contextmanager
def served() -> Iterator[Server]:
    """The scripted server, on a thread of its own: commands run event loops of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = serving(knows_peru)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(timeout=30)
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)
        loop.close()


class State:
    """Stands for the state actors: what they were told."""

    def __init__(self) -> None:
        self.told: list[Operation] = []

    async def write(self, operation: Operation) -> int:
        self.told.append(operation)
        return 0


@pytest.mark.usefixtures("folder")
def test_an_environment_is_played_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    monkeypatch.setattr(fence, "connected_fence", lambda address, namespace: fence.Fence(state))
    monkeypatch.setattr(playing, "recorded", lambda namespace, job_id: (uncounted, Unseen()))
    (line,) = [line for block in blocks_of(PAGE) for line in block.text.splitlines() if "--environment cap" in line]
    *words, _, _ = line.split()  # all but --out
    with served() as server, pytest.raises(SystemExit) as stop:
        cli.main([*words[1:], "--url", server.url, "--out", str(tmp_path / "job")])
    assert stop.value.code == 0
    rows = [json.loads(line) for line in (tmp_path / "job" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 8 * 4
    assert {row["reward"] for row in rows} == {0.5}
    assert sorted(each.rollout_id for each in state.told) == sorted(row["rollout_id"] for row in rows)


async def test_an_environment_tells_a_model_what_is_wrong(folder: Path) -> None:
    capitals = load("capitals:Capitals")
    assert capitals.tasks(3, seed=5) == capitals.tasks(8, seed=5)[:3]

    environment = capitals()
    await environment.reset(capitals.tasks(1, seed=0)[0])
    for name, arguments in (("map", {"country": "Peru"}), ("atlas", {"country": "Atlantis"}), ("atlas", {})):
        assert (await environment.call_tool(name, arguments)).startswith("Error: ")


def test_a_harness_is_played_by_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    monkeypatch.setattr("ray.init", lambda address: None)
    monkeypatch.setattr("gym_capture.serving.state.connect", lambda *, namespace: state)
    with served() as server:
        monkeypatch.setattr("sys.argv", ["play.py", server.url, str(folder / "job")])
        runpy.run_path(str(folder / "play.py"), run_name="__main__")
        asked = [call.body["messages"] for call in server.calls]
    rows = [json.loads(line) for line in (folder / "job" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 8 * 4
    assert {*state.told} == {Clear(row["rollout_id"]) for row in rows}
    assert {row["n_calls"] for row in rows} == {2}
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    assert sorted(map(len, asked)) == [1] * 32 + [3] * 32


async def test_a_harness_says_why_there_is_no_answer(folder: Path) -> None:
    harness = load("second_thoughts:SecondThoughts")()
    environment = load("capitals:Capitals")()

    async def run() -> Any:
        observation = await environment.reset(load("capitals:Capitals").tasks(1, seed=0)[0])
        nowhere = Endpoint("http://127.0.0.1:9/v1")
        return await harness.run(endpoint=nowhere, observation=observation, environment=environment)

    assert (await run()).reason == "connection"


# --- an exporter -----------------------------------------------------------------------------------------------------


def captured(call_id: str, prompt: list[int], generation: list[int], **parent: Any) -> dict[str, Any]:
    """A line of NeMo Gym's token files."""
    return {
        "schema_version": 3,
        "model_call_id": call_id,
        "model": "policy",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
        "parent_resolution": "root",
        **parent,
    }


def built(folder: Path, *rollouts: dict[str, Any]) -> Path:
    """Trajectories of two rollouts: of two calls, and of one."""
    second = captured("b", [1, 2, 3, 4], [5], parent_resolution="resolved", parent_call_id="a")
    calls = {"r1": [captured("a", [1, 2], [3]), second], "r2": [captured("c", [1, 2], [7, 8])]}
    (folder / "captures").mkdir()
    for rollout_id, lines in calls.items():
        text = "".join(json.dumps({"rollout_id": rollout_id, **line}) + "\n" for line in lines)
        (folder / "captures" / f"{rollout_id}.tokens.jsonl").write_text(text, encoding="utf-8")
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rollouts), encoding="utf-8")
    listed = ["--rollouts", str(folder / "rollouts.jsonl")] if rollouts else []
    with pytest.raises(SystemExit) as stop:
        cli.main(["build", str(folder / "captures"), *listed, "--out", str(folder / "built")])
    assert stop.value.code == 0
    return folder / "built"


@pytest.fixture
def with_labels(tmp_path: Path) -> Path:
    """A copy of the packages with the exporter in it, as a reader's checkout is."""
    checkout = tmp_path / "checkout"
    for name in ("gym_capture", "trainer_bridge"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (
        ("trainer_bridge/labels.py", written("trainer_bridge/labels.py")),
        ("trainer_bridge/exporter.py", patched("trainer_bridge/exporter.py")),
    ):
        (checkout / name).write_text(text, encoding="utf-8")
    return checkout


def export(checkout: Path, data: Path, out: Path) -> subprocess.CompletedProcess[str]:
    (line,) = [line for block in blocks_of(PAGE) for line in block.text.splitlines() if "--to labels" in line]
    _, _, _, *options, _, _ = line.split()  # without the page's own folders
    return python("-m", "gym_capture.cli", "export", str(data), *options, "--out", str(out), cwd=checkout)


def test_an_exporter_labels_what_is_trained_and_nothing_of_a_masked_rollout(tmp_path: Path, with_labels: Path) -> None:
    data = built(
        tmp_path,
        {"rollout_id": "r1", "group_id": "g", "reward": 1.0},
        {"rollout_id": "r2", "group_id": "g", "reward": 0.5, "failure": "command_failed"},
    )
    done = export(with_labels, data, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 rollouts in 1 groups for labels, 1 of them masked")
    lines = (tmp_path / "out" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "group": "g",
            "rollout": "r1",
            "input_ids": [1, 2, 3, 4, 5],
            "labels": [-100, -100, 3, -100, 5],
            "old_log_probs": [0, 0, -0.5, 0, -0.5],
            "reward": 1.0,
        },
        {
            "group": "g",
            "rollout": "r2",
            "input_ids": [1, 2, 7, 8],
            "labels": [-100] * 4,
            "old_log_probs": [0] * 4,
            "reward": None,
        },
    ]


def test_an_exporter_refuses_what_its_trainer_could_not_read_and_leaves_nothing(
    tmp_path: Path, with_labels: Path
) -> None:
    done = export(with_labels, built(tmp_path), tmp_path / "out")
    assert done.returncode == 2
    assert "error: has no reward: build with --rollouts (rollout r1)" in done.stderr
    assert not (tmp_path / "out" / "trajectories.jsonl").exists()


# --- a reason --------------------------------------------------------------------------------------------------------


def test_a_reason_is_explained_and_in_the_docs(tmp_path: Path) -> None:
    for name in ("gym_capture", "trainer_bridge"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docs/reasons.md", "tests/test_reasons.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "gym_capture" / "reasons.py").write_text(patched("gym_capture/reasons.py"), encoding="utf-8")

    explained = python("-m", "gym_capture.cli", "explain", "too_short", "--json", cwd=tmp_path)
    assert json.loads(explained.stdout)["kind"] == "left_out"
    table = python("-m", "gym_capture.commands.explain", cwd=tmp_path)  # as `make reasons-table` does
    (tmp_path / "docs" / "reasons.md").write_text(table.stdout, encoding="utf-8")
    assert "| `too_short` | One of the rollout's sequences" in table.stdout
    checked = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_reasons.py", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python that finds this package, or the copy of it in `cwd`."""
    environment = {**os.environ, "PYTHONPATH": f"{cwd}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
