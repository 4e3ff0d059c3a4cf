"""From token files to what a trainer reads, through the files of a build and through nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gym_capture import cli
from gym_capture.capture.record_rows import row_json
from gym_capture.data.schema import OPTIONAL
from trainer_bridge import verl
from trainer_bridge.exporter import EXPORTERS
from trainer_bridge.loop import groups_of
from trainer_bridge.nemo_rl import contiguity_walk
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import parquet_batches, read_rollouts


def line(call_id: str, prompt: list[int], generation: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "schema_version": 3,
        "model_call_id": call_id,
        "model": "served",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.25] * len(generation),
        "parent_resolution": "root",
        "output_items": [{"type": "message", "role": "assistant", "content": f"said by {call_id}"}],
        **fields,
    }


def write(directory: Path, rollout_id: str, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps({"rollout_id": rollout_id, **each}) + "\n" for each in lines)
    (directory / f"{rollout_id}.tokens.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture
def built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What a build wrote; the records are gone."""
    captures = tmp_path / "captures"
    captures.mkdir()
    second = line("b", [1, 2, 3, 4], [5, 6], parent_resolution="resolved", parent_call_id="a")
    write(captures, "r1", line("a", [1, 2], [3]), second)
    write(captures, "r2", line("a", [1, 2], [7]))
    (captures / "r3.tokens.jsonl").write_bytes(b"{\n")
    task = [{"role": "user", "content": "go"}]
    rollouts = [
        {"rollout_id": "r1", "group_id": "g", "reward": 1.0, "agent_name": "coder", "input": task},
        {"rollout_id": "r2", "group_id": "g", "reward": 0.0, "agent_name": "coder", "input": "go"},
        {"rollout_id": "r3", "group_id": "g", "reward": 0.0},
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rollouts), encoding="utf-8")
    assert gym_capture("build", captures, "--rollouts", tmp_path / "rollouts.jsonl", "--out", tmp_path / "built") == 0
    shutil.rmtree(captures)
    capsys.readouterr()
    return tmp_path / "built"


def gym_capture(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def test_nemo_rl_gets_each_rollout_from_the_files_of_a_build(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gym_capture("export", built, "--to", "nemo-rl", "--agent", "other", "--out", tmp_path / "nemo") == 0
    shown = capsys.readouterr()
    assert "3 rollouts in 1 groups for nemo-rl, 1 of them masked" in shown.out
    assert "of 1 rollouts nobody said what the agent was given" in shown.err
    first, second, third = map(json.loads, (tmp_path / "nemo" / "rollouts.jsonl").read_text().splitlines())
    assert [record["agent_ref"]["name"] for record in (first, second, third)] == ["coder", "coder", "other"]
    assert [record["responses_create_params"]["input"] for record in (first, second, third)] == [
        [{"role": "user", "content": "go"}],
        "go",
        [],
    ]
    assert [(record["reward"], record["mask_sample"]) for record in (first, second, third)] == [
        (1.0, False),
        (0.0, False),
        (0.0, True),
    ]
    contents = [item["content"] for item in first["response"]["output"]]
    assert [[part["text"] for part in content] for content in contents] == [["said by a"], ["said by b"]]
    assert first["response"]["model"] == "served"
    walked = contiguity_walk(first["response"]["output"])
    assert [(message.role, message.token_ids) for message in walked] == [
        ("user", (1, 2)),
        ("assistant", (3,)),
        ("user", (4,)),
        ("assistant", (5, 6)),
    ]
    # Nothing could be built of the third; it borrows the prompt of its group.
    assert contiguity_walk(third["response"]["output"])[0].token_ids == (1, 2)
    assert third["_ng_token_capture"]["mask_reasons"] == ["malformed_record", "no_calls"]


def test_an_agent_that_nobody_named_is_asked_for(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gym_capture("export", built, "--to", "nemo-rl", "--out", tmp_path / "nemo") == 2
    assert "nobody said which agent played it" in (said := capsys.readouterr().err)
    assert "(rollout r3)" in said
    assert not (tmp_path / "nemo").exists()


def test_an_export_is_not_replaced_by_accident(built: Path, tmp_path: Path) -> None:
    arguments = ("export", built, "--to", "nemo-rl", "--agent", "other", "--out", tmp_path / "nemo")
    assert gym_capture(*arguments) == 0
    assert gym_capture(*arguments) == 2
    assert gym_capture(*arguments, "--overwrite") == 0


@pytest.mark.parametrize(
    ("data", "to", "message"),
    [
        ("built", "nemo", "--to nemo: there is no such exporter; there are: nemo-rl"),
        ("nowhere", "nemo-rl", "nowhere does not exist: build trajectories into it first"),
    ],
)
def test_wrong_usage_is_one_line(
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
    to: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert gym_capture("export", data, "--to", to, "--out", "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_trajectories_of_before_exporters_say_what_to_do(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(built / "part-00000.parquet")
    pq.write_table(table.drop_columns(sorted(OPTIONAL)), built / "part-00000.parquet")
    assert gym_capture("export", built, "--to", "nemo-rl", "--agent", "a", "--out", tmp_path / "nemo") == 2
    assert "was built by an earlier version; build it again" in capsys.readouterr().err


def test_each_trainer_gets_a_file_and_is_told_what_is_not_in_it(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for exporter in EXPORTERS:
        out = tmp_path / exporter.name
        assert gym_capture("export", built, "--to", exporter.name, "--agent", "other", "--out", out) == 0
        shown = capsys.readouterr()
        rows = 3 if exporter.name == "nemo-rl" else 2  # its masked records are rows of it
        assert f"1 of them masked: {rows} rows, 4 ids to train on: {out}" in shown.out
        assert ("left out 1 rollouts: masked (gym-capture explain masked)" in shown.err) is (rows == 2)
        (file,) = [path for path in out.iterdir() if not path.name.startswith(("_", "."))]
        assert file.match(exporter.files[0])
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        assert len(lines) == (1 if exporter.name == "skyrl" else rows)
        if exporter.name == "tinker":
            assert [each["loss_fn_inputs"]["mask"]["data"] for each in lines] == [[0, 1, 0, 1, 1], [0, 1]]


def test_the_file_of_a_build_is_what_the_stream_gives(built: Path, tmp_path: Path) -> None:
    assert gym_capture("export", built, "--to", "verl", "--out", tmp_path / "verl") == 0
    streamed = [
        row for group in groups_of(read_rollouts(parquet_batches(built))) for row in verl.project(group, Delivery())
    ]
    written = (tmp_path / "verl" / verl.FILE).read_text().splitlines()
    assert [json.loads(row_json(row)) for row in streamed] == list(map(json.loads, written))
