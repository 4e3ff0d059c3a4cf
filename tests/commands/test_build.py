"""Captures in a directory become Parquet files of trajectories, whatever is in the directory."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture import cli
from gym_capture.build.builder import BuildOptions
from gym_capture.capture.operations import Complete, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import Snapshot
from gym_capture.data import directory
from gym_capture.data.copies import check_schema
from gym_capture.data.directory import build_directory
from gym_capture.data.nemo_gym import read_rollout
from gym_capture.data.requests import read_requests
from gym_capture.data.schema import SCHEMA
from gym_capture.stores.log import LogStore
from tests.inspector.world import conversation, record


def line(call_id: str, prompt: list[int], generation: list[int], *, rollout_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "schema_version": 3,
        "rollout_id": rollout_id,
        "model_call_id": call_id,
        "model": "policy",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.25] * len(generation),
        "parent_resolution": "root",
        **fields,
    }


def write_rollout(directory: Path, rollout_id: str, *, first: int = 1) -> None:
    """A call, one that continues it, and a sub-agent's."""
    lines = [
        line("b", [first, 2, 3, 4], [5], rollout_id=rollout_id, parent_resolution="resolved", parent_call_id="a"),
        line("a", [first, 2], [3], rollout_id=rollout_id),
        line("s", [7], [8], rollout_id=rollout_id),
    ]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (directory / f"{rollout_id}.tokens.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    directory = tmp_path / "captures"
    directory.mkdir()
    for rollout_id in ("r1", "r2"):
        write_rollout(directory, rollout_id)
    return directory


def gym_capture(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def test_main_chains(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert gym_capture("build", captures, "--out", out) == 0
    table = pq.read_table(out / "part-00000.parquet")
    assert table.schema.equals(SCHEMA)
    check_schema(table.schema)
    first, second = table.to_pylist()
    assert (first["rollout_id"], second["rollout_id"]) == ("r1", "r2")
    assert first["call_ids"] == ["a", "b"]
    assert first["token_ids"] == [1, 2, 3, 4, 5]
    assert first["loss_mask"] == [False, False, True, False, True]
    assert first["log_probs"] == [0.0, 0.0, -0.25, 0.0, -0.25]
    assert [(span["start"], span["end"], span["call_id"]) for span in first["spans"]] == [(2, 3, "a"), (4, 5, "b")]
    assert (first["group_id"], first["reward"], first["advantage"]) == ("r1", None, None)
    assert (first["masked"], first["mask_reasons"]) == (False, [])
    assert (first["chains"], first["delivered_fraction"]) == (2, pytest.approx(2 / 3))
    shown = capsys.readouterr()
    assert "to train on" in shown.out
    assert "66.7%" in shown.out
    assert json.loads((out / "_report.json").read_text())["complete"] == 2


def test_all_chains_and_single_requests(captures: Path, tmp_path: Path) -> None:
    assert gym_capture("build", captures, "--delivery", "all_chains", "--out", tmp_path / "all") == 0
    chains = pq.read_table(tmp_path / "all").to_pylist()
    assert [row["call_ids"] for row in chains] == [["a", "b"], ["s"]] * 2
    assert [row["is_main"] for row in chains] == [True, False] * 2
    arguments = ("--delivery", "all_chains", "--strategy", "per_request", "--out", tmp_path / "each")
    assert gym_capture("build", captures, *arguments) == 0
    assert [row["call_ids"] for row in pq.read_table(tmp_path / "each").to_pylist()] == [["a"], ["b"], ["s"]] * 2


def test_who_is_shown_reasons_is_told_where_they_are_explained(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gym_capture("build", captures, "--out", tmp_path / "sound") == 0
    assert "explain" not in capsys.readouterr().err
    (captures / "r1.tokens.intents").write_text("x\n", encoding="utf-8")
    assert gym_capture("build", captures, "--out", tmp_path / "masked") == 0
    shown = capsys.readouterr()
    assert "masked: dangling_intent" in shown.out
    assert "`gym-capture explain REASON` says what" in shown.err
    # ... and which rollout to look into, with what.
    assert re.search(r"masked: dangling_intent +1 +r1 ", shown.out)
    assert f"`gym-capture inspect r1 {captures}` says why" in shown.err.replace("\n", "")
    assert json.loads((tmp_path / "masked" / "_report.json").read_text())["mask_examples"] == {
        "dangling_intent": ["r1"]
    }


def test_a_damaged_file_is_one_short_line_and_a_compressed_one_is_not_passed_over(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (captures / "r1.tokens.jsonl").write_bytes(b"damage\n" * 100)
    (captures / "r9.tokens.jsonl.gz").touch()
    assert gym_capture("build", captures, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().err
    (line,) = [each for each in said.splitlines() if "r1.tokens.jsonl" in each]
    assert line.startswith("warning: r1: line 1 of r1.tokens.jsonl: ")
    assert line.endswith("; ... and 99 more")
    assert "1 files are compressed, and were not read: gunzip r9.tokens.jsonl.gz" in said


def test_a_rollout_without_a_usable_record_has_a_row(captures: Path, tmp_path: Path) -> None:
    (captures / "r1.tokens.jsonl").write_bytes(b"{\n")
    (captures / "r3.tokens.intents").write_text("x\n", encoding="utf-8")
    (captures / "r4.tokens.jsonl").mkdir()
    report = build_directory(captures, out=tmp_path / "out", options=BuildOptions())
    rows = {row["rollout_id"]: row for row in pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()}
    assert {rollout_id: row["masked"] for rollout_id, row in rows.items()} == {
        "r1": True,
        "r2": False,
        "r3": True,
        "r4": True,
    }
    assert rows["r1"]["token_ids"] == rows["r1"]["loss_mask"] == rows["r1"]["call_ids"] == []
    assert rows["r1"]["mask_reasons"] == ["malformed_record", "no_calls"]
    assert "dangling_intent:x" in rows["r3"]["mask_reasons"]
    assert "unreadable" in rows["r4"]["mask_reasons"]
    assert (report.complete, report.incomplete) == (1, ("r1", "r3", "r4"))


def test_rewards_come_from_a_list_of_rollouts(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    named = [
        {"rollout_id": "r2", "group_id": "g", "reward": 1.0, "reward_components": {"answer": 1.0}},
        {"rollout_id": "r1", "group_id": "g", "reward": 0.0},
        {"rollout_id": "gone", "group_id": "h", "reward": 0.0},
    ]
    rollouts.write_text("".join(json.dumps(each) + "\n" for each in named) + '{"rollout_id', encoding="utf-8")
    assert gym_capture("build", captures, "--rollouts", rollouts, "--out", tmp_path / "out") == 0
    rows = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert [(row["rollout_id"], row["group_id"], row["reward"], row["advantage"]) for row in rows] == [
        ("r2", "g", 1.0, pytest.approx(1.0, abs=1e-3)),
        ("r1", "g", 0.0, pytest.approx(-1.0, abs=1e-3)),
        ("gone", "h", 0.0, 0.0),
    ]
    assert rows[0]["reward_components"] == [{"key": "answer", "value": 1.0}]
    assert rows[2]["masked"]
    assert "cut off" in capsys.readouterr().err


def test_any_number_of_workers_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_ALONE_PER_PART", 64)
    captures = tmp_path / "captures"
    captures.mkdir()
    for number in range(70):
        write_rollout(captures, f"r{number:02}", first=number)
    done: list[tuple[int, int]] = []
    alone = build_directory(captures, out=tmp_path / "1", options=BuildOptions(), workers=1)
    shared = build_directory(
        captures, out=tmp_path / "2", options=BuildOptions(), workers=2, on_progress=lambda *step: done.append(step)
    )
    assert alone == shared
    assert done == [(0, 70), (64, 70), (70, 70)]
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == ["_report.json", "part-00000.parquet", "part-00001.parquet"]
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_large_rollouts_are_written_in_several_row_groups(captures: Path, tmp_path: Path) -> None:
    for number in range(3):
        ids = list(range(700_000))
        text = json.dumps(line("a", ids, [1], rollout_id=f"x{number}"))
        (captures / f"x{number}.tokens.jsonl").write_text(text, encoding="utf-8")
    build_directory(captures, out=tmp_path / "out", options=BuildOptions())
    written = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet")
    assert [written.metadata.row_group(i).num_rows for i in range(written.num_row_groups)] == [3, 1, 1]


def test_trajectories_are_not_replaced_by_accident(captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gym_capture("build", captures, "--out", out) == 0
    (out / "part-00009.parquet").touch()
    assert gym_capture("build", captures, "--out", out) == 2
    assert gym_capture("build", captures, "--out", out, "--overwrite") == 0
    assert sorted(path.name for path in out.iterdir()) == ["_report.json", "part-00000.parquet"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "nowhere", "--out", "out"], "does not exist"),
        (["build", "captures"], "--out"),
        (["build", "captures", "--out", "out", "--delivery", "longest"], "'longest' is not one of"),
        (["build", "captures", "--out", "out", "--strategy", "guess"], "'guess' is not one of"),
        (["build", "captures", "--out", "captures/r1.tokens.jsonl"], "cannot write"),
        (["build", "captures", "--out", "out", "--rollouts", "bad.jsonl"], "line 1"),
        (["build", ".", "--out", "out"], "holds neither files named <rollout id>.tokens.jsonl nor a log: name the"),
        (["build", ".", "--out", "out", "--rollouts", "good.jsonl"], "holds neither files named <rollout id>.tokens."),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(
    captures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"rollout_id": 1}\n', encoding="utf-8")
    (tmp_path / "good.jsonl").write_text('{"rollout_id": "r1", "group_id": "g", "reward": 1.0}\n', encoding="utf-8")
    assert gym_capture(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_without_a_place_it_reads_where_a_graph_keeps_its_records(
    captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    records = tmp_path / ".cache/gym-capture/records"
    records.parent.mkdir(parents=True)
    captures.rename(records)
    assert gym_capture("build", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out/_report.json").is_file()


@pytest.mark.parametrize("rollouts", [[], ["--rollouts", "none.jsonl"]])
def test_nothing_to_build_gives_a_file_without_rows_and_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rollouts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").touch()
    assert gym_capture("build", "empty", *rollouts, "--out", "out") == 0
    assert "nothing to build in empty" in capsys.readouterr().err
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    check_schema(table.schema)
    assert (table.num_rows, table.schema.equals(SCHEMA)) == (0, True)
    assert json.loads((tmp_path / "out" / "_report.json").read_text())["requested"] == 0


# --- outputs that fail ------------------------------------------------------------------------------------------------


def run_apart(*arguments: object, stdout: int | IO[Any] = subprocess.PIPE, largest_file: int | None = None) -> Any:
    """The command in a process of its own, in which no file may grow beyond a size."""

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    command = [sys.executable, "-m", "gym_capture.cli", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, preexec_fn=limit)


def requests_for(count: int, file: Path) -> Path:
    """More than one part of rollouts of which nothing was recorded."""
    lines = [json.dumps({"rollout_id": f"x{n}", "group_id": f"g{n}", "reward": 0.0}) for n in range(count)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_nothing(captures: Path, tmp_path: Path, workers: int) -> None:
    arguments = ["--rollouts", requests_for(65, tmp_path / "rollouts.jsonl"), "--workers", workers]
    done = run_apart("build", captures, "--out", tmp_path / "out", *arguments, largest_file=4096)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot write trajectories to" in done.stderr
    assert "File too large" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_build_that_fails_leaves_the_one_that_was_there(captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gym_capture("build", captures, "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run_apart("build", captures, "--out", out, "--overwrite", largest_file=4096).returncode == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("arguments", [["build", "captures", "--out", "out"], ["--help"]])
def test_a_full_standard_output_is_one_line(
    captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parent.parent))
    with open("/dev/full", "w") as full:
        done = run_apart(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_build_leaves_nothing_and_no_process(captures: Path, tmp_path: Path, workers: int) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    requests = read_requests(requests_for(200, tmp_path / "rollouts.jsonl")).table
    with pytest.raises(KeyboardInterrupt):
        build_directory(
            captures,
            out=tmp_path / "out",
            options=BuildOptions(),
            requests=requests,
            workers=workers,
            on_progress=interrupt,
        )
    assert not (tmp_path / "out").exists()
    assert multiprocessing.active_children() == []


def test_a_fifo_among_the_captures_is_a_masked_row(captures: Path, tmp_path: Path) -> None:
    os.mkfifo(captures / "x.tokens.jsonl")
    os.mkfifo(captures / "r1.tokens.state.json")
    assert gym_capture("build", captures, "--out", tmp_path / "out") == 0
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert {row["rollout_id"]: row["mask_reasons"] for row in rows} == {
        "r1": ["unreadable"],
        "r2": [],
        "x": ["no_calls", "unreadable"],
    }


@pytest.mark.parametrize("with_requests", [False, True])
def test_a_rollout_whose_build_fails_is_a_masked_row(
    captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_requests: bool
) -> None:
    def fail_on_r1(path: Path, rollout_id: str) -> Snapshot:
        if rollout_id == "r1":
            raise MemoryError("too much")
        return read_rollout(path, rollout_id)

    monkeypatch.setattr(directory, "read_rollout", fail_on_r1)
    (tmp_path / "rollouts.jsonl").write_text(
        "".join(json.dumps({"rollout_id": each, "group_id": "g", "reward": 1.0}) + "\n" for each in ("r1", "r2"))
    )
    arguments = ["--rollouts", tmp_path / "rollouts.jsonl"] if with_requests else []
    assert gym_capture("build", captures, "--out", tmp_path / "out", *arguments) == 0
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert {row["rollout_id"]: row["mask_reasons"] for row in rows} == {"r1": ["build_failed", "no_calls"], "r2": []}
    assert json.loads((tmp_path / "out" / "_report.json").read_text())["details"] == {"r1": ["MemoryError: too much"]}


def test_a_build_of_which_everything_failed_is_a_failure(
    captures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, rollout_id: str) -> Snapshot:
        raise MemoryError("too much")

    monkeypatch.setattr(directory, "read_rollout", fail)
    assert gym_capture("build", captures, "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "not one of 2 rollouts could be built" in said
    assert "r1: MemoryError: too much" in said
    assert pq.read_table(tmp_path / "out").column("masked").to_pylist() == [True, True]


def test_a_file_that_is_called_what_no_text_is_has_a_row(captures: Path, tmp_path: Path) -> None:
    for name in (b"\xff.tokens.jsonl", b"\xfe.tokens.jsonl"):
        Path(os.fsdecode(os.fsencode(captures) + b"/" + name)).write_bytes(b"{\n")
    assert gym_capture("build", captures, "--out", tmp_path / "out") == 0
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row["rollout_id"] for row in rows] == ["r1", "r2", "\ufffd", "\ufffd"]
    assert "invalid_rollout_id:rollout_id" in rows[-1]["mask_reasons"]
    assert json.loads((tmp_path / "out" / "_report.json").read_text())["incomplete"] == ["\ufffd"]


def test_options_reach_the_build(captures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gym_capture("build", captures, "--out", out, "--side-model", "pol*", "--vocab-size", "4") == 0
    (row, _) = pq.read_table(out / "part-00000.parquet").to_pylist()
    assert row["side_calls_excluded"] == 3
    assert "all_side_calls" in row["mask_reasons"]
    assert any(reason.startswith("out_of_vocabulary") for reason in row["mask_reasons"])
    assert pa.types.is_large_list(pq.read_schema(out / "part-00000.parquet").field("token_ids").type)


def test_a_group_that_is_named_by_half_a_character_and_a_file_by_an_escape_sequence_harm_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def record_some() -> None:
        store = await LogStore.open(tmp_path / "log")
        for name, group in (("odd", "g\ud800"), ("fine", "h")):
            await store.write(Register(name, Registration(group_id=group, sample=0)))
            await record(store, conversation(name))
            await store.write(Complete(name, Outcome(reward=1.0)))
        await store.close()

    asyncio.run(record_some())
    with pytest.raises(SystemExit, match="0"):
        cli.main(["build", str(tmp_path / "log"), "--out", str(tmp_path / "out")])
    assert {row["group_id"] for row in pq.read_table(tmp_path / "out").to_pylist()} == {"g\ufffd", "h"}
    captures = tmp_path / "captures"
    captures.mkdir()
    write_rollout(captures, "r1")
    (captures / "a\x1b[31m.tokens.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["build", str(captures), "--out", str(tmp_path / "other")])
    said = capsys.readouterr()
    assert "\x1b[31m" not in said.out + said.err
    assert "a\\x1b[31m" in said.err
