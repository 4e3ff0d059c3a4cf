"""Every answer of the inspector, over a real log."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from gym_capture.auth import Keyring
from gym_capture.capture.operations import Complete, Drop, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.data.annotations import Annotation, Annotator
from gym_capture.inspector import app as app_module
from gym_capture.inspector import table as table_module
from gym_capture.inspector.app import OnlyThisHost, build_inspector
from gym_capture.inspector.library import Library
from gym_capture.inspector.log_source import LogSource
from gym_capture.inspector.source import Basics
from gym_capture.inspector.table import Table
from gym_capture.stores.segments import lock_directory
from tests.inspector.world import (
    HOSTILE,
    VOCABULARY,
    client_of,
    conversation,
    inspector,
    record,
    write_closed_world,
    write_world,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_closed_world(tmp_path_factory.mktemp("log"))


@pytest.fixture
def log(written: Path, tmp_path: Path) -> Iterator[Path]:
    """A log that a graph has open."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    lock = lock_directory(tmp_path)
    yield tmp_path
    os.close(lock)


@pytest.fixture
def client(log: Path) -> TestClient:
    return inspector(LogSource(log))


def get(client: TestClient, path: str, **params: Any) -> Any:
    answer = client.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    columns = answer["columns"]
    return {
        name: {column: values[n] for column, values in columns.items()} for n, name in enumerate(columns["rollout"])
    }


def test_what_is_looked_into(client: TestClient, tmp_path: Path) -> None:
    found = get(client, "source")
    assert (found["kind"], found["title"], found["live"]) == ("log", str(tmp_path), True)
    assert found["kinds"] == ["prompt", "trained", "not_trained", "inserted_close", "not_told"]
    assert found["reasons"]["not_main_chain"].keys() == {"title", "meaning", "what_to_do"}


def test_the_table(client: TestClient) -> None:
    found = rows(get(client, "rollouts"))
    assert found.keys() == {"one", "two", "three", "alone"}
    one = found["one"]
    assert (one["group"], one["sample"], one["state"], one["reward"]) == ("group/1", 0, "finished", 1.0)
    assert (one["calls"], one["turns"], one["chains"]) == (2, 2, 1)
    assert (one["prompt_tokens"], one["generated_tokens"], one["trained_tokens"]) == (15, 5, 5)
    assert (one["eligible_links"], one["exact_links"], one["finished_at"]) == (1, 1, 103.0)
    assert (one["weight_version_min"], one["weight_version_max"], one["staleness"]) == ("4", "5", 1)
    assert (found["two"]["state"], found["two"]["exact_links"], found["two"]["chains"]) == ("failed", 0, 2)
    assert (found["three"]["state"], found["alone"]["state"], found["alone"]["group"]) == ("live", "live", "alone")


async def test_the_table_grows(tmp_path: Path) -> None:
    store = await write_world(tmp_path)
    library = Library(LogSource(tmp_path), clock=lambda: 0.0)  # what is live is never quiet for long enough to be read
    library.settle()
    client = client_of(build_inspector(library))
    before = get(client, "rollouts")
    assert before["is_all"]
    cursor = get(client, "rollouts/three")["cursor"]
    assert get(client, "rollouts/three", since=cursor)["unchanged"]
    await store.write(Complete("three", Outcome(reward=0.5)))
    library.settle()
    after = get(client, "rollouts", since=before["cursor"])
    assert not after["is_all"]
    assert {name: row["reward"] for name, row in rows(after).items()} == {"three": 0.5}
    grown = get(client, "rollouts/three", since=cursor)
    assert (grown["state"], len(grown["calls"])) == ("finished", 2)
    frozen = await store.freeze("alone")
    await store.write(Drop("alone", frozen.snapshot_id, frozen.version))
    library.settle()
    assert get(client, "rollouts", since=after["cursor"])["gone"] == ["alone"]
    assert get(client, "rollouts", since="of-another.7")["is_all"]
    await store.close()


def test_a_cursor_that_nobody_gave_is_none(client: TestClient) -> None:
    name = get(client, "rollouts")["cursor"].partition(".")[0]
    for cursor in ("", f"{name}.", f"{name}.-1", f"{name}.{'9' * 5_000}", f"{name}.\u0663\x00"):
        assert client.get("/api/rollouts", params={"since": cursor}).status_code == 200


def test_who_has_not_seen_what_went_long_ago_begins_anew(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_MOST_GONE", 2)
    table = Table()
    for n in range(4):
        table.put(Basics(rollout_id=str(n), group="g"))
    seen = table.number
    for n in range(4):
        table.drop(str(n))
    assert table.forgotten > seen
    assert table.columns(table.forgotten)[1] == ["2", "3"]
    assert table.group("g") == []
    library = Library(LogSource(log))
    library.settle()
    cursor = library.table()["cursor"]
    assert not library.table(cursor)["is_all"]
    library._table.forgotten = 10**6
    assert library.table(cursor)["is_all"]


def workers() -> int:
    """Threads of libraries; those of the server's pool come and go."""
    return [each.name for each in threading.enumerate()].count("inspector")


def test_of_many_that_ask_at_once_one_looks(log: Path) -> None:
    before = workers()
    library = Library(LogSource(log))
    ready = threading.Barrier(8)

    def ask(_: int) -> None:
        ready.wait()
        library.wake()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    assert workers() == before + 1
    library.close()


def test_a_rollout(client: TestClient) -> None:
    found = get(client, "rollouts/two")
    assert (found["state"], found["reward"], found["mask_reason"], found["trajectories"]) == (
        *("failed", 0.0, "incomplete:agent_failed", 2),
    )
    assert found["trained_tokens"] == 0
    first, second = found["calls"]
    assert (first["started_at"], first["seconds"], first["finish"]) == (100.5, 0.5, "stop")
    assert first["link"]["kind"] == "none"
    assert second["link"]["kind"] == "split"
    assert second["link"]["reason"] == "tail_differs"
    assert second["link"]["words"].endswith(".")
    assert (second["role"], first["role"], first["excluded"]) == ("unresolved", "main", None)
    assert second["excluded"] == "not_main_chain"


def test_a_call_is_shown_as_its_agent_saw_it(client: TestClient) -> None:
    found = get(client, "rollouts/one/calls/c2")
    assert [(each["role"], each["text"], each["new"]) for each in found["messages"]] == [
        ("user", "<b>hi</b>", False),
        ("assistant", HOSTILE, False),
        ("user", "<b>hi</b>", True),
    ]
    assert found["reply"]["text"] == "yes"
    assert found["tokens"] == {"prompt": 18, "generated": 2}
    assert get(client, "rollouts/one/calls/c1")["sampling"] == {"temperature": 1.0, "max_tokens": 8}


def test_without_a_vocabulary_there_are_ids_and_the_texts_on_record(log: Path) -> None:
    client = inspector(LogSource(log), vocabulary=None)
    sent, *_ = get(client, "rollouts/one/calls/c1")["messages"]
    assert (sent["role"], sent["text"], sent["tokens"]) == ("prompt", None, 7)
    assert get(client, "rollouts/one/trajectories/0/tokens", **{"from": 0, "to": 2})["texts"] == [None, None]
    (hit,) = [each for each in get(client, "search", q="onerror")["hits"] if each["rollout"] == "one"]
    assert hit["call"] == "c1"


def test_tokens(client: TestClient) -> None:
    (whole,) = get(client, "rollouts/one/trajectories")
    assert (whole["tokens"], whole["trained_tokens"], whole["calls"]) == (20, 5, ["c1", "c2"])
    assert whole["segments"] == [[0, 7, 0, 0], [7, 10, 0, 1], [10, 18, 1, 0], [18, 20, 1, 1]]
    found = get(client, "rollouts/one/trajectories/0/tokens", **{"from": 6, "to": 12})
    assert (found["from"], found["to"], found["total"]) == (6, 12, 20)
    assert found["ids"] == [5, 6, 7, 9, 8, 1]
    assert found["texts"] == ["assistant\n", "\x07", "yes", "<|im_end|>", "\n", "<|im_start|>"]
    assert found["kinds"] == [0, 1, 1, 1, 0, 0]
    assert found["calls"] == [0, 0, 0, 0, 1, 1]
    assert found["logprobs"] == [None, -0.1, -0.2, -0.3, None, None]
    assert found["versions"] == [None, "4", "4", "4", None, None]
    assert (found["why"], found["whys"]) == ([-1] * 6, [])
    beyond = get(client, "rollouts/one/trajectories/0/tokens", **{"from": 50, "to": 60})
    assert (beyond["from"], beyond["ids"]) == (20, [])


def test_where_a_link_parts_and_why_tokens_are_not_trained(client: TestClient) -> None:
    main, other = get(client, "rollouts/two/trajectories")
    assert (main["delivered"], other["delivered"], main["splits"]) == (True, False, [])
    (split,) = other["splits"]
    assert (split["call"], split["parent"], split["at"]) == ("c2", "c1", 7)
    assert (split["a"]["ids"], split["b"]["ids"][:2]) == ([6, 7, 9], [7, 9])
    assert split["a"]["texts"] == ["\x07", "yes", "<|im_end|>"]
    found = get(client, "rollouts/two/trajectories/1/tokens")
    assert [found["whys"][n] for n in found["why"] if n >= 0] == ["not_main_chain"] * 2


def test_a_group(client: TestClient) -> None:
    found = get(client, "groups/group%2F1")
    assert [each["rollout"] for each in found["rollouts"]] == ["one", "two", "three"]
    assert found["rollouts"][0]["first_prompt"] == {
        "tokens": 7,
        "text": VOCABULARY.text(conversation("r")[0].prompt_token_ids),
    }
    assert (found["first_prompts_equal"], found["differences"]) == (True, [])


async def test_first_prompts_that_differ(tmp_path: Path) -> None:
    store = await write_world(tmp_path)
    first, _ = conversation("four")
    await store.write(Register("four", Registration(group_id="group/1")))
    prompt = np.array([1, 2, 7, 9, 8, 1, 5], dtype=np.int32)
    await record(store, [replace(first, prompt_token_ids=prompt)])
    await store.close()
    found = get(inspector(LogSource(tmp_path)), "groups/group/1")
    (difference,) = found["differences"]
    assert (difference["rollout"], difference["at"], found["first_prompts_equal"]) == ("four", 2, False)
    assert (difference["a"]["texts"][0], difference["b"]["texts"][0]) == ("<b>hi</b>", "yes")


def test_searching(client: TestClient) -> None:
    found = get(client, "search", q="<b>hi")
    assert found["complete"]
    assert {(hit["rollout"], hit["trajectory"], hit["token"]) for hit in found["hits"]} >= {
        ("one", 0, 2),
        ("one", 0, 13),
    }
    ids = get(client, "search", q="6, 7 9", where="id")["hits"]
    assert {(hit["rollout"], hit["token"], hit["call"]) for hit in ids if hit["trajectory"] == 0} == {
        (name, 7, "c1") for name in ("one", "two", "three", "alone")
    }
    reasons = get(client, "search", q="tail_differs", where="reason")["hits"]
    assert [(hit["rollout"], hit["call"]) for hit in reasons] == [("two", "c2")]
    first = get(client, "search", q="<b>hi", limit=1)
    assert (len(first["hits"]), first["complete"]) == (1, False)
    rest = get(client, "search", q="<b>hi", after=first["after"])
    assert {hit["rollout"] for hit in rest["hits"]} == {"one", "two", "three", "alone"} - {first["after"]}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("rollouts/nobody", 404, "no such rollout"),
        ("rollouts/..", 404, ""),
        ("rollouts/a%2Fb", 404, ""),
        ("rollouts/..%2F..%2Fetc%2Fpasswd", 404, ""),
        ("rollouts/%00", 404, "invalid rollout id"),
        ("rollouts/one/calls/none", 404, "no call 'none'"),
        ("rollouts/one/trajectories/9/tokens", 404, "1 trajectories"),
        ("rollouts/one/trajectories/x/tokens", 400, "number"),
        ("rollouts/one/trajectories/0/tokens?from=x", 400, "from"),
        ("groups/none", 404, "no group"),
        ("search", 400, "q"),
        ("search?q=%20", 400, "nothing to search for"),
        ("search?q=a&where=id", 400, "ids are numbers"),
        ("search?q=a&where=there", 400, "where"),
        ("annotations", 400, "rollout"),
        ("annotations?rollout=../x", 404, "invalid rollout id"),
        ("nothing", 404, "Not Found"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(client: TestClient, path: str, status: int, words: str) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["status"] == status
    assert words in error["message"]


# --- annotations -----------------------------------------------------------------------------------------------------


def test_notes_and_values_are_overlays(client: TestClient, tmp_path: Path) -> None:
    made = [
        Annotation(rollout="one", call="c2", name="entropy", values=[0.5, None], by="trainer"),
        Annotation(rollout="one", call="c1", name="difference", value=-0.25),
        Annotation(rollout="one", call="c1", name="difference", token=1, value=0.5),
        Annotation(rollout="one", call="gone", name="difference", value=3.0),
    ]
    Annotator(tmp_path).add(made)
    note = {"rollout": "one", "call": "c1", "token": 2, "name": "note", "note": HOSTILE, "by": "ada"}
    assert client.post("/api/annotations", json=note).status_code == 201
    found = get(client, "rollouts/one/trajectories/0/tokens", **{"from": 6, "to": 20})
    assert found["overlays"]["entropy"] == [None] * 12 + [0.5, None]
    assert found["overlays"]["difference"] == [None, -0.25, 0.5, -0.25, *[None] * 10]
    assert [(each["token"], each["note"], each["by"]) for each in found["notes"]] == [(9, HOSTILE, "ada")]
    assert len(get(client, "annotations", rollout="one")["annotations"]) == 5
    assert len(get(client, "rollouts/one/calls/c1")["annotations"]) == 3
    assert rows(get(client, "rollouts"))["one"]["logprob_diff"] == pytest.approx((0.25 + 0.5 + 3.0) / 3)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ([], 400),
        ({"rollout": "one", "call": "c1", "name": "n"}, 400),
        ({"rollout": "one", "call": "c1", "name": "n", "value": "1"}, 400),
        ({"rollout": "one", "call": "c1", "name": "n", "value": 1, "note": "both"}, 400),
        ({"rollout": "one", "call": "c1", "name": "n", "note": "x" * 5_000}, 400),
        ({"rollout": "one", "call": "c1", "name": "n", "value": 1, "token": 3}, 400),
        ({"rollout": "one", "call": "c1", "name": "n", "value": 1, "token": -1}, 400),
        ({"rollout": "one", "call": "c1", "name": "n", "value": 1, "more": 1}, 400),
        ({"rollout": "one", "call": "none", "name": "n", "value": 1}, 404),
        ({"rollout": "../x", "call": "c1", "name": "n", "value": 1}, 404),
        ({"rollout": "nobody", "call": "c1", "name": "n", "value": 1}, 404),
        ({"rollout": "one", "call": "c1", "name": "n", "note": "x" * 100_000}, 413),
    ],
)
def test_what_is_no_annotation_is_refused(client: TestClient, tmp_path: Path, body: object, status: int) -> None:
    assert client.post("/api/annotations", json=body).status_code == status
    assert not (tmp_path / "_annotations.jsonl").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/json", "origin": "http://evil.example"},
        {"content-type": "application/json", "origin": "null"},
        {"content-type": "application/json", "origin": "http://[half"},
        {"content-type": "application/json", "origin": "http://127.0.0.1:2"},
        {"content-type": "application/json", "sec-fetch-site": "cross-site"},
    ],
)
def test_a_page_of_elsewhere_adds_nothing(client: TestClient, tmp_path: Path, headers: dict[str, str]) -> None:
    answer = client.post(
        "/api/annotations", content=b'{"rollout":"one","call":"c1","name":"n","value":1}', headers=headers
    )
    assert answer.status_code in (400, 403)
    assert not (tmp_path / "_annotations.jsonl").exists()


def test_a_page_of_elsewhere_has_nothing_read(client: TestClient) -> None:
    for path in ("search?q=yes", "rollouts", "source"):
        assert client.get(f"/api/{path}", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get(f"/api/{path}", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_annotations_that_cannot_be_read_hide_nothing_else(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "_annotations.jsonl").mkdir()
    found = get(client, "rollouts")
    assert "is a directory" in found["problem"]
    assert rows(found).keys() == {"one", "two", "three", "alone"}
    assert get(client, "rollouts/one/trajectories/0/tokens")["total"] > 0
    assert client.get("/api/annotations", params={"rollout": "one"}).status_code == 500


def test_annotations_may_have_very_many_names_and_very_large_values(client: TestClient, tmp_path: Path) -> None:
    with (tmp_path / "_annotations.jsonl").open("w") as file:
        for n in range(1_000):
            file.write(f'{{"rollout":"one","call":"c1","name":"n{n}","value":1e308}}\n')
    overlays = get(client, "rollouts/one/trajectories/0/tokens")["overlays"]
    assert len(overlays) == 32
    assert 1e308 in overlays["n999"]


def test_searches_that_wait_hold_up_nothing_else(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def searching(*arguments: object, **options: object) -> dict[str, Any]:
        assert over.wait(60)
        return {}

    monkeypatch.setattr(app_module, "search", searching)
    client = inspector(LogSource(log))
    with ThreadPoolExecutor(5) as threads:
        searches = [threads.submit(client.get, "/api/search?q=yes") for _ in range(5)]
        (refused,), waiting = wait(searches, return_when=FIRST_COMPLETED)
        assert refused.result().status_code == 503
        assert client.get("/api/source").status_code == 200
        over.set()
        assert [each.result().status_code for each in waiting] == [200] * 4


# --- what guards it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/source", "/api/rollouts/nobody", "/nothing", "/"])
def test_every_answer_says_what_the_page_may_do(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert not path.startswith("/api") or headers["cache-control"] == "no-store"


def test_hostile_text_leaves_as_json(client: TestClient) -> None:
    answer = client.get("/api/rollouts/one/calls/c1")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["reply"]["text"] == HOSTILE


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:80", 200), ("localhost", 200), ("[::1]:99", 200), ("evil.example", 421), ("", 421), ("[::1", 421)],
)
def test_only_its_own_names_are_answered(client: TestClient, host: str, status: int) -> None:
    guarded = TestClient(OnlyThisHost(client.app, {"127.0.0.1", "localhost", "::1"}))
    answer = guarded.get("/api/source", headers={"host": host})
    assert answer.status_code == status


def test_the_read_token_opens_the_data_and_not_the_page(log: Path) -> None:
    keyring = Keyring(b"0123456789abcdef")
    app = build_inspector(Library(LogSource(log)), admit=keyring.admit_reader)
    client = client_of(app)
    assert client.get("/").status_code == 200
    assert client.get("/api/source").status_code == 401
    assert client.get("/api/source", headers={"x-api-key": keyring.rollout_token("one")}).status_code == 403
    with_token = {"authorization": f"Bearer {keyring.read_token()}"}
    assert client.get("/api/source", headers=with_token).status_code == 200
    assert "content-security-policy" in client.get("/api/source").headers
