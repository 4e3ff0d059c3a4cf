"""Exported records say what the log says: the same trajectories come of both, and every field of a call is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions, build
from gym_capture.capture.record_fields import FIELDS, with_values
from gym_capture.capture.records import Continues, RecordProblem, Snapshot, Unresolved, suffix_of
from gym_capture.capture.suffixes import StoredRecord, complete
from gym_capture.conformance import sample_entry
from gym_capture.data.nemo_gym import read_rollout
from gym_capture.data.record_files import CALL_SCHEMA, ROLLOUT_SCHEMA, Format, open_files
from gym_capture.data.schema import rows, to_table
from gym_capture.errors import ConfigError
from tests.rollout_strategies import Rollout, honest_rollouts

FORMATS: tuple[Format, ...] = ("nemo-gym", "parquet", "jsonl")


def snapshot(*records: StoredRecord, rollout_id: str = "r1", **fields: Any) -> Snapshot:
    entries, orphans = complete(records)
    return Snapshot(rollout_id=rollout_id, snapshot_id="s", version=3, entries=entries, orphans=orphans, **fields)


def export(out: Path, format_: Format, *snapshots: Snapshot) -> None:
    with open_files(format_, out) as files:
        for each in snapshots:
            files.add(each)


def there_and_back(original: Snapshot) -> Snapshot:
    with TemporaryDirectory() as directory:
        export(Path(directory), "nemo-gym", original)
        return read_rollout(Path(directory), original.rollout_id)


def trajectories(of: Snapshot, options: BuildOptions) -> pa.Table:
    return to_table(rows(build(of, options), group_id="g", reward=1.0))


OPTIONS = [
    BuildOptions(strategy=strategy, delivery=delivery)
    for strategy in ("prefix_merging", "per_request")
    for delivery in ("main_chain", "all_chains")
]


# --- NeMo Gym's files --------------------------------------------------------------------------------------------


@given(honest_rollouts(), st.sampled_from(OPTIONS))
def test_the_same_trajectories_come_of_the_export(rollout: Rollout, options: BuildOptions) -> None:
    original = snapshot(*(suffix_of(entry) for entry in rollout.entries))
    exported = there_and_back(original)
    assert (exported.snapshot_id, exported.version, exported.problems) == ("s", 3, ())
    assert trajectories(exported, options).equals(trajectories(original, options))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0), min_size=1, max_size=20))
def test_log_probs_come_back_bit_for_bit(log_probs: list[float]) -> None:
    values = np.array(log_probs, dtype=np.float32)
    entry = with_values(
        sample_entry("r1", "c", generation=range(values.size)), generation_log_probs=values, weight_versions=()
    )
    (read,) = there_and_back(snapshot(entry)).entries
    assert read.generation_log_probs.tobytes() == values.tobytes()


def test_every_field_that_the_format_has_comes_back() -> None:
    first = sample_entry("r1", "c1")
    second = with_values(
        sample_entry("r1", "c2", prompt=(1, 2, 3, 4, 5, 6), parent=Continues("c1", 5)),
        routed_experts=np.arange(16, dtype=np.uint8).reshape(8, 2, 1)[:, ::-1],
        sampling_mask=np.array([[True, False], [False, True]]),
        stop_reason="7",
        delivered=False,
        prefix_requested=True,
        prefix_supplied=True,
    )
    third = replace(sample_entry("r1", "c3"), parent=Unresolved("ambiguous"))
    read = there_and_back(snapshot(first, second, third))
    for got, expected in zip(read.entries, (first, second, third), strict=True):
        # Theirs is another digest, and they have no place for the key that lineage goes by.
        expected = with_values(expected, digest=None, turn_key=None)
        for field in FIELDS:
            value, original = attrgetter(field.path)(got), attrgetter(field.path)(expected)
            np.testing.assert_array_equal(value, original, err_msg=field.name)


@pytest.mark.parametrize("text", ["\ud83d", "a\udc80b", "\ud83d\ude00", "\0\x1b\u2028", "😀 日本", '"\\'])
def test_strange_text_neither_fails_nor_masks(text: str) -> None:
    entry = with_values(
        sample_entry("r1", "c", text=text), requested_model=f"m{text}", sampling={"seed": 2**70, text: 1}
    )
    read = there_and_back(snapshot(entry))
    assert read.problems == ()
    whole = text.replace("\ud83d\ude00", "😀")
    expected = whole.replace("\ud83d", "\ufffd").replace("\udc80", "\ufffd")
    assert read.entries[0].reply.output_items[0]["content"][0]["text"] == expected
    assert read.entries[0].request.requested_model == f"m{expected}"


PROBLEM = RecordProblem(reason="corrupt_log", call_id=None, field=None, detail="bytes 1 to 2")
CONFLICT = RecordProblem(reason="conflicting_call_id", call_id="c", field=None, detail="twice")


@pytest.mark.parametrize(
    ("incomplete", "problems", "expected"),
    [
        (["capture_failed:x"], [], ["capture_failed:x"]),
        (["dangling_intent:x"], [], ["dangling_intent:x"]),
        (["dangling_intent:-x"], [], ["capture_failed:dangling_intent:-x"]),
        (["dangling_intent:\ud83d\nx"], [], ["capture_failed:dangling_intent:\ufffd x"]),
        (["client_gone", "dangling_intent:x"], [], ["capture_failed:client_gone", "dangling_intent:x"]),
        ([], [PROBLEM], ["capture_failed:corrupt_log"]),
        (["client_gone"], [CONFLICT], ["capture_failed:client_gone", "capture_failed:conflicting_call_id:c"]),
    ],
)
def test_whatever_masks_a_rollout_masks_its_export(
    incomplete: Sequence[str], problems: Sequence[RecordProblem], expected: Sequence[str]
) -> None:
    original = snapshot(sample_entry("r1", "c"), incomplete=tuple(incomplete), problems=tuple(problems))
    read = there_and_back(original)
    assert list(read.incomplete) == expected
    assert build(read).masked


def test_a_digest_that_was_wrong_stays_wrong() -> None:
    wrong = replace(sample_entry("r1", "c"), digest="0" * 64)
    assert [problem.reason for problem in there_and_back(snapshot(wrong)).problems] == ["digest_mismatch"]


def test_a_delta_whose_parent_is_lost_is_written_as_it_is() -> None:
    child = suffix_of(sample_entry("r1", "c2", prompt=(1, 2, 3, 4, 5, 6), parent=Continues("gone", 5)))
    original = snapshot(child)
    read = there_and_back(original)
    assert [(suffix.parent, suffix.new_prompt_ids.tolist()) for suffix in read.orphans] == [(Continues("gone", 5), [6])]
    assert build(read).mask_reasons == build(original).mask_reasons


# --- rows --------------------------------------------------------------------------------------------------------


def two_rollouts() -> tuple[Snapshot, Snapshot]:
    first = sample_entry("r1", "c1", text="half \ud83d")
    second = with_values(
        sample_entry("r1", "c2", prompt=(1, 2, 3, 4, 5, 6), parent=Continues("c1", 5)),
        routed_experts=np.arange(16, dtype=np.uint8).reshape(8, 2, 1)[:, ::-1],
        delivered=True,
        normalized=("date",),
    )
    empty = snapshot(rollout_id="r2", incomplete=("dangling_intent:x",), problems=(PROBLEM,))
    return snapshot(first, second), empty


def test_parquet_has_a_row_for_each_call_and_each_rollout(tmp_path: Path) -> None:
    export(tmp_path, "parquet", *two_rollouts())
    calls, rollouts = pq.read_table(tmp_path / "calls.parquet"), pq.read_table(tmp_path / "rollouts.parquet")
    assert calls.schema.equals(CALL_SCHEMA)
    assert rollouts.schema.equals(ROLLOUT_SCHEMA)
    assert calls.schema.metadata == rollouts.schema.metadata == CALL_SCHEMA.metadata
    assert calls.schema.field("prompt_token_ids").type == pa.list_(pa.int32())
    assert calls.schema.field("generation_log_probs").type == pa.list_(pa.float32())
    first, second = calls.to_pylist()
    assert (first["parent"], first["prompt_offset"], first["prompt_token_ids"]) == ("root", 0, [1, 2, 3])
    assert json.loads(first["output_items"])[0]["content"][0]["text"] == "half \ufffd"
    assert (second["parent"], second["parent_call_id"], second["parent_cum_len"]) == ("continues", "c1", 5)
    assert (second["prompt_offset"], second["prompt_token_ids"], second["generation_token_ids"]) == (5, [6], [4, 5])
    assert second["generation_log_probs"] == [-0.5, -1.5]
    assert (second["delivered"], second["normalized"], json.loads(second["sampling"])["top_p"]) == (True, ["date"], 1.0)
    experts = second["routed_experts"]
    array = np.frombuffer(experts["values"], dtype=experts["dtype"]).reshape(experts["shape"])
    assert array[0].tolist() == [[1], [0]]
    assert [(row["rollout_id"], row["calls"], row["generated_ids"]) for row in rollouts.to_pylist()] == [
        ("r1", 2, 4),
        ("r2", 0, 0),
    ]
    assert rollouts.to_pylist()[1]["incomplete"] == ["dangling_intent:x"]
    assert rollouts.to_pylist()[1]["problems"][0]["reason"] == "corrupt_log"


def test_json_lines_have_the_same_names(tmp_path: Path) -> None:
    export(tmp_path, "jsonl", *two_rollouts())
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_bytes().splitlines()]
    assert [list(call) for call in calls] == [CALL_SCHEMA.names] * 2
    assert calls[1]["prompt_token_ids"] == [6]
    assert calls[1]["routed_experts"][0] == [[1], [0]]
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_bytes().splitlines()]
    assert [list(rollout) for rollout in rollouts] == [ROLLOUT_SCHEMA.names] * 2


def test_a_large_rollout_is_a_row_group_of_its_own(tmp_path: Path) -> None:
    large = [sample_entry(f"r{n}", "c", prompt=range(3_000_000)) for n in range(2)]
    export(tmp_path, "parquet", *(snapshot(entry, rollout_id=entry.rollout_id) for entry in large))
    assert pq.ParquetFile(tmp_path / "calls.parquet").num_row_groups == 2


# --- the directory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", FORMATS)
def test_an_export_is_not_replaced_by_accident(format_: Format, tmp_path: Path) -> None:
    one, other = two_rollouts()
    export(tmp_path, format_, one)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="--overwrite"):
        export(tmp_path, format_, other)
    assert sorted(tmp_path.iterdir()) == before
    with open_files(format_, tmp_path, overwrite=True) as files:
        files.add(replace(other, rollout_id="r3"))
    assert not any(path.name.startswith("r1.") for path in tmp_path.iterdir())


@pytest.mark.parametrize("format_", FORMATS)
def test_an_export_that_breaks_off_leaves_what_was_there(format_: Format, tmp_path: Path) -> None:
    def break_off(out: Path) -> None:
        with open_files(format_, out, overwrite=True) as files:
            files.add(other)
            raise RuntimeError

    one, other = two_rollouts()
    export(tmp_path / "old", format_, one)
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    for name in ("old", "new"):
        with pytest.raises(RuntimeError):
            break_off(tmp_path / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write an export to"):
        export(tmp_path / "file", "jsonl")
