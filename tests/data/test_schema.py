"""One schema for every table of trajectories, and what a reader refuses."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gym_capture.build.builder import BuildOptions, BuiltRollout, build
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import Continues, Root, Snapshot
from gym_capture.data import schema
from gym_capture.data.copies import check_schema
from gym_capture.data.schema import SCHEMA, read_pairs, read_tensor, rows, to_table, with_advantages
from gym_capture.errors import RecordError, SchemaVersionError
from tests.calls import ALL_CHAINS, call, entry_of
from tests.calls import snapshot as calls_of

from .made_rollouts import snapshot


def built(rollout_id: str = "r1", **kwargs: Any) -> BuiltRollout:
    return build(snapshot(rollout_id, **kwargs), BuildOptions())


def test_a_row_holds_the_trajectory_and_the_account_of_its_rollout() -> None:
    rollout = built(turns=2, tokens=4)
    table = to_table(rows(rollout, group_id="g", reward=1.5, reward_components={"a": 1.0, "b": 0.5}, advantage=0.25))
    (row,) = table.to_pylist()
    (trajectory,) = rollout.trajectories
    assert row["trajectory_id"] == trajectory.trajectory_id == "r1/call-1"
    assert row["call_ids"] == ["call-0", "call-1"]
    assert row["token_ids"] == trajectory.token_ids.tolist()
    assert row["loss_mask"] == [0] * 3 + [1] * 4 + [0] * 3 + [1] * 4
    assert row["log_probs"] == trajectory.log_probs.tolist()
    assert row["spans"] == [
        {"start": 3, "end": 7, "call_id": "call-0", "weight_version": "0"},
        {"start": 10, "end": 14, "call_id": "call-1", "weight_version": "1"},
    ]
    assert (row["reward"], row["advantage"], row["finish_reason"]) == (1.5, 0.25, "stop")
    assert read_pairs(row["reward_components"]) == {"a": 1.0, "b": 0.5}
    assert (row["masked"], row["mask_reasons"]) == (False, [])
    assert (row["n_calls"], row["contiguous_links"], row["eligible_links"]) == (2, 1, 1)
    assert row["generated_tokens_captured"] == row["generated_tokens_delivered"] == 8


def test_a_rollout_with_nothing_to_train_on_keeps_a_row() -> None:
    (row,) = to_table(rows(built(turns=0), group_id="g", reward=None)).to_pylist()
    assert (row["rollout_id"], row["trajectory_id"], row["masked"]) == ("r1", "r1", True)
    assert row["token_ids"] == row["loss_mask"] == row["log_probs"] == row["spans"] == row["call_ids"] == []
    assert row["mask_reasons"] == ["no_calls"]
    assert row["advantage"] is None


def test_reasons_times_trajectories_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of one wrong parent is a trajectory of its own, and a reason: 50,000 were 2.5 billion strings."""
    calls = [call("p", [1], [2])] + [call(f"c{n}", [9, n], [3], parent=Continues("p", 2)) for n in range(4)]
    wrong = build(calls_of(*calls), ALL_CHAINS)
    reasons = list(wrong.mask_reasons)
    assert (len(wrong.trajectories), len(reasons)) == (5, 4)
    assert [row["mask_reasons"] for row in rows(wrong, group_id="g", reward=0.0)] == [reasons] * 5
    monkeypatch.setattr(schema, "_MOST_REPEATED_REASONS", 15)
    assert [row["mask_reasons"] for row in rows(wrong, group_id="g", reward=0.0)] == [reasons] + [
        ["parent_mismatch"]
    ] * 4


def test_reasons_from_outside_of_the_records_mask_too() -> None:
    (row,) = rows(built(), group_id="g", reward=0.0, extra_mask_reasons=["incomplete:agent_crashed"])
    assert row["masked"]
    assert row["mask_reasons"] == ["incomplete:agent_crashed"]
    assert row["loss_mask"].sum() == 8  # as built: it is `masked` that keeps it out


def test_DJ_03_one_block_or_two_gives_the_same_table() -> None:
    nothing = rows(built("none", turns=0), group_id="g", reward=None)
    something = rows(built("some"), group_id="g", reward=1.0, reward_components={"a": 1.0}, advantage=0.5)
    two_blocks = pa.concat_tables([to_table(nothing), to_table(something)])
    assert two_blocks.schema.equals(SCHEMA, check_metadata=True)
    assert two_blocks.combine_chunks().equals(to_table([*nothing, *something]).combine_chunks())


def test_DJ_05_no_list_has_offsets_that_overflow_at_two_thousand_million_ids() -> None:
    def lists(kind: pa.DataType) -> list[pa.DataType]:
        own = [kind] if pa.types.is_list(kind) else []
        return own + [found for i in range(kind.num_fields) for found in lists(kind.field(i).type)]

    assert [found for field in SCHEMA for found in lists(field.type)] == []
    assert SCHEMA.field("token_ids").type == pa.large_list(pa.int32())
    assert SCHEMA.field("log_probs").type == pa.large_list(pa.float32())


def test_the_version_survives_parquet_and_arrow_streams() -> None:
    table = to_table(rows(built(), group_id="g", reward=1.0))
    parquet, stream = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    check_schema(pq.read_table(parquet).schema)
    check_schema(pa.ipc.open_stream(stream.getvalue()).schema)
    assert pq.read_table(parquet).equals(table)


def test_a_newer_version_is_refused_and_says_what_to_do() -> None:
    newer = SCHEMA.with_metadata({schema.VERSION_KEY: b"3"})
    with pytest.raises(SchemaVersionError, match=r"schema version 3 .* reads up to 2: upgrade the reader"):
        check_schema(newer)


def test_tables_that_are_not_of_trajectories_are_refused() -> None:
    with pytest.raises(RecordError, match=r"no schema version, and .* no column 'rollout_id'"):
        check_schema(pa.schema([("x", pa.int64())]))
    with pytest.raises(RecordError, match="its schema version is b'one'"):
        check_schema(SCHEMA.with_metadata({schema.VERSION_KEY: b"one"}))
    with pytest.raises(RecordError, match="no column 'token_ids'"):
        check_schema(SCHEMA.remove(SCHEMA.get_field_index("token_ids")))
    texts = SCHEMA.set(SCHEMA.get_field_index("token_ids"), pa.field("token_ids", pa.list_(pa.string())))
    with pytest.raises(RecordError, match=r"'token_ids' must be large_list<item: int32>: got list<item: string>"):
        check_schema(texts)


def test_DJ_09_a_table_that_lost_its_metadata_is_known_by_its_columns() -> None:
    check_schema(SCHEMA.remove_metadata())
    bare = io.BytesIO()  # as other writers leave it: without Arrow's own account of the types
    table = to_table(rows(built(), group_id="g", reward=1.0, reward_components={"a": 1.0}))
    pq.write_table(table.replace_schema_metadata(None), bare, store_schema=False)
    read = pq.read_table(bare)
    assert read.schema.field("token_ids").type != SCHEMA.field("token_ids").type
    check_schema(read.schema)
    assert read.to_pylist() == table.to_pylist()
    other = SCHEMA.set(SCHEMA.get_field_index("reward"), pa.field("reward", pa.string())).remove_metadata()
    with pytest.raises(RecordError, match="no schema version, and column 'reward' must be double: got string"):
        check_schema(other)


def test_a_column_of_somebody_elses_is_left_alone() -> None:
    check_schema(SCHEMA.append(pa.field("judge_notes", pa.string())))


def test_arrays_that_are_not_aligned_are_refused() -> None:
    (row,) = rows(built(), group_id="g", reward=1.0)
    with pytest.raises(RecordError, match="must align with token_ids"):
        to_table([row | {"log_probs": row["log_probs"][:-1]}])


def test_every_row_gets_its_advantage() -> None:
    table = pa.concat_tables([to_table(rows(built(), group_id="g", reward=1.0))] * 3)
    found = with_advantages(table, np.array([0.5, -1.0, 0.0]))
    assert found.column("advantage").to_pylist() == [0.5, -1.0, 0.0]
    assert found.schema.equals(SCHEMA, check_metadata=True)


@given(
    prompt=hnp.arrays(np.int32, st.integers(1, 20), elements=st.integers(0, 2**31 - 1)),
    generated=hnp.arrays(np.int32, st.integers(1, 20), elements=st.integers(0, 2**31 - 1)),
    data=st.data(),
)
def test_ids_log_probs_and_arrays_that_ride_along_come_back_bit_for_bit(
    prompt: np.ndarray, generated: np.ndarray, data: st.DataObject
) -> None:
    log_probs = data.draw(hnp.arrays(np.float32, generated.size, elements=st.floats(-20, 0, width=32)))
    experts = data.draw(hnp.arrays(np.uint8, (prompt.size + generated.size - 1, 2, 3)))
    entry = entry_of(
        rollout_id="r",
        model_call_id="c",
        model="policy",
        requested_model="policy",
        has_tools=True,
        prompt_token_ids=prompt,
        generation_token_ids=generated,
        generation_log_probs=log_probs,
        parent=Root(),
        finish_reason="stop",
        routed_experts=experts,
    )
    rollout = build(Snapshot(rollout_id="r", snapshot_id="s", version=1, entries=(entry,)))
    buffer = io.BytesIO()
    pq.write_table(to_table(rows(rollout, group_id="g", reward=1.0)), buffer)
    (row,) = pq.read_table(buffer).to_pylist()
    assert row["token_ids"] == [*prompt.tolist(), *generated.tolist()]
    assert np.array_equal(np.array(row["log_probs"], dtype=np.float32)[prompt.size :], log_probs)
    ridden = read_tensor(row["routed_experts"])
    assert ridden is not None
    assert ridden.dtype == experts.dtype
    assert np.array_equal(ridden, experts)
    assert read_tensor(row["sampling_mask"]) is None


def test_several_trajectories_make_several_rows_of_one_rollout() -> None:
    rollout = built()
    two = replace(rollout, trajectories=rollout.trajectories * 2)
    assert [row["rollout_id"] for row in rows(two, group_id="g", reward=1.0)] == ["r1", "r1"]


def test_a_row_holds_the_turns_that_go_with_its_ids() -> None:
    whole = snapshot("r1", turns=2)
    said = {"call-0": "h\u00e9", "call-1": "half \ud83d"}
    entries = [
        with_values(e, output_items=({"type": "message", "content": said[e.model_call_id]},), token_item_index=0)
        for e in whole.entries
    ]
    whole = replace(whole, entries=tuple(entries))
    rollout = build(whole)
    made = rows(rollout, snapshot=whole, group_id="g", reward=1.0, agent_name="coder", input_json='"go"')
    (row,) = to_table(made).to_pylist()
    assert [json.loads(items)[0]["content"] for items in row["output_items"]] == ["h\u00e9", "half \ufffd"]
    assert row["token_item_indices"] == [0, 0]
    assert (row["model"], row["agent_name"], row["input"], row["lost_tries"]) == ("policy", "coder", '"go"', 0)
    assert schema.row_nbytes(made[0]) > schema.row_nbytes(rows(rollout, group_id="g", reward=1.0)[0])


def test_a_table_of_before_the_columns_for_exporters_is_read() -> None:
    older = [field for field in SCHEMA if field.name not in schema.OPTIONAL]
    check_schema(pa.schema(older, metadata=SCHEMA.metadata))
    odd = SCHEMA.set(SCHEMA.get_field_index("input"), pa.field("input", pa.int64()))
    with pytest.raises(RecordError, match="column 'input' must be string"):
        check_schema(odd)
