"""A rollout in the terminal: what is built of it, with reasons in words, and nothing that a terminal would obey."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from gym_capture import cli
from gym_capture.commands.inspect_view import visible
from gym_capture.inspector.log_source import LogSource
from gym_capture.reasons import AttemptFailure, MaskReason
from tests.inspector.world import inspector, write_world

Run = Any


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log")

    async def write() -> None:
        await (await write_world(directory)).close()

    asyncio.run(write())
    return directory


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["inspect", *map(str, arguments)])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return run


def test_the_tree_and_the_trajectory_of_a_log(log: Path, run: Run) -> None:
    code, out, err = run("one", log)
    assert code == 0
    assert "--model FOLDER spells them" in err
    assert "one  group group/1, sample 0" in out
    assert "└── #1 main  c1  7 (0 supplied) + 3  stop, weights 4" in out
    assert "    └── #2 main  c2  exact  18 (10 supplied) + 2  stop, weights 5" in out
    assert re.findall(r"^ *(\d+-\d+)  (\w+) +(#\d)", out, re.MULTILINE) == [
        ("0-7", "prompt", "#1"),
        ("7-10", "trained", "#1"),
        ("10-18", "prompt", "#2"),
        ("18-20", "trained", "#2"),
    ]


def test_where_a_prompt_parts_is_shown_with_its_reason_in_words(log: Path, run: Run) -> None:
    _, out, _ = run("two", log)
    assert "state failed" in out
    assert "tail_differs: " in out
    assert "#2 parts from #1 after 7 ids" in out


def test_what_masks_a_rollout_is_said_with_what_it_means_and_what_to_do(log: Path, run: Run, tmp_path: Path) -> None:
    _, out, _ = run("two", log)
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index("masked: incomplete:agent_failed")
    assert lines[at + 1 : at + 3] == [MaskReason.INCOMPLETE.means, f"agent_failed: {AttemptFailure.AGENT_FAILED.means}"]
    assert lines[at + 3] == f"What to do: {AttemptFailure.AGENT_FAILED.what_to_do}"
    # What is known beyond the name, whoever's words it is, and that there is no call.
    (tmp_path / "r.tokens.jsonl").write_bytes(b"\x1bdamage\n" * 9)
    code, out, _ = run("r", tmp_path)
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index("masked: malformed_record")
    assert [line.split(":")[0] for line in lines[at + 1 : at + 4]] == [f"line {n} of r.tokens.jsonl" for n in (1, 2, 3)]
    assert lines[at + 4] == "... and 6 more"
    assert (code, "no call of it is on record" in out, "--records" in out) == (0, True, False)


def test_no_text_of_an_agent_does_anything_to_a_terminal(log: Path, run: Run) -> None:
    _, out, _ = run("one", log)
    assert not any(character in out for character in "\x00\x1b\u202e")
    assert r"</script><img src=x onerror=alert(1)>\x00\x1b[31m\u202e" in out
    assert visible("a\nb\x9b\U000e0041\ud83d") == r"a↵b\x9b\U000e0041\ud83d"


def test_json_has_what_the_inspector_has(log: Path, run: Run) -> None:
    _, out, _ = run("one", log, "--json", "--full")
    found = json.loads(out)
    assert [(call["call"], call["role"]) for call in found["calls"]] == [("c1", "main"), ("c2", "main")]
    (trajectory,) = found["trajectories"]
    (page,) = trajectory["pages"]
    assert page["ids"][:10] == [1, 2, 3, 9, 8, 1, 5, 6, 7, 9]
    _, out, _ = run("one", log, "--json")
    assert "pages" not in json.loads(out)["trajectories"][0]


def test_a_graph_shows_the_same(log: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    client: TestClient = inspector(LogSource(log), vocabulary=None)

    def get(url: str, **_: object) -> httpx.Response:
        assert url.startswith("http://graph:8000/inspect/")
        return client.get(url.removeprefix("http://graph:8000/inspect"))

    monkeypatch.setattr("gym_capture.commands.inspect.httpx.get", get)
    of_log = run("one", log)[1].splitlines()
    of_graph = run("one", "http://graph:8000/")[1].splitlines()
    assert [line for line in of_log if "#" in line] == [line for line in of_graph if "#" in line]
    code, _, err = run("nobody", "http://graph:8000")
    assert (code, "HTTP 404" in err) == (2, True)


@pytest.mark.parametrize("said", ["[1]", "{}", "null", "<html>"])
def test_what_answers_and_is_no_graph_is_said_in_a_line(said: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_capture.commands.inspect.httpx.get", lambda *_, **__: httpx.Response(200, text=said))
    code, _, err = run("one", "http://other:8000")
    assert (code, err.count("\n"), "is no graph with an inspector" in err) == (2, 1, True)


def test_what_is_not_there_is_one_line(log: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run("on", log)
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'one'?" in err
    code, _, err = run("one", tmp_path / "nothing")
    assert (code, err.count("\n"), "or the URL of a graph" in err) == (2, 1, True)
    code, _, err = run("one", tmp_path)
    assert (code, err.count("\n"), "holds nothing to look into" in err) == (2, 1, True)
    code, _, err = run("one", "http://127.0.0.1:9")
    assert (code, "no graph answers" in err) == (2, True)
    assert "on disk" in run("one", "http://127.0.0.1:9", "--records", log)[2]
