"""Rows become the rollouts they were built from, however batches cut them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.build.sampling import Sampling
from gym_capture.commands.train_groups import epochs_of
from gym_capture.data.schema import SCHEMA, TRAJECTORY_SCHEMA_VERSION, VERSION_KEY
from gym_capture.errors import ConfigError, RecordError, SchemaVersionError
from trainer_bridge.stream import TrainRollout, parquet_batches, read_rollouts, steps


def row(rollout_id: str, number: int = 0, *, group_id: str = "g", tokens: int = 3, **changes: Any) -> dict[str, Any]:
    counts = {field.name: 0 for field in SCHEMA if not field.nullable and field.type in (pa.int64(), pa.float64())}
    return (
        counts
        | {
            "rollout_id": rollout_id,
            "trajectory_id": f"{rollout_id}/{number}",
            "group_id": group_id,
            "is_main": number == 0,
            "call_ids": ["c"],
            "token_ids": list(range(tokens)),
            "loss_mask": [False] + [True] * (tokens - 1) if tokens else [],
            "log_probs": [0.0] + [-0.5] * (tokens - 1) if tokens else [],
            "spans": [{"start": 1, "end": tokens, "call_id": "c", "weight_version": "7"}] if tokens else [],
            "finish_reason": "stop",
            "reward": 1.0,
            "advantage": 0.5,
            "masked": False,
            "mask_reasons": [],
            "excluded_tokens": [],
        }
        | changes
    )


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def shape(rollouts: list[TrainRollout]) -> list[tuple[str, list[str]]]:
    return [(rollout.rollout_id, [s.trajectory_id for s in rollout.sequences]) for rollout in rollouts]


ROWS = [row("a"), row("a", 1, tokens=5), row("b"), row("c", masked=True, tokens=0), row("d"), row("d", 1), row("d", 2)]


@settings(deadline=None)  # the first example imports
@given(cuts=st.lists(st.integers(0, len(ROWS)), max_size=5))
def test_batches_may_be_cut_anywhere(cuts: list[int]) -> None:
    whole = table(*ROWS)
    edges = [0, *sorted(cuts), len(ROWS)]
    batches = [whole.slice(start, end - start) for start, end in pairwise(edges)]
    assert shape(list(read_rollouts(batches))) == [
        ("a", ["a/0", "a/1"]),
        ("b", ["b/0"]),
        ("c", []),
        ("d", ["d/0", "d/1", "d/2"]),
    ]


def test_arrays_have_the_types_and_values_of_the_row() -> None:
    (rollout,) = read_rollouts([table(row("a"))])
    (sequence,) = rollout.sequences
    assert sequence.token_ids.dtype == np.int32
    assert sequence.token_ids.tolist() == [0, 1, 2]
    assert sequence.loss_mask.tolist() == [False, True, True]
    assert sequence.log_probs.dtype == np.float32
    assert sequence.weight_versions == {"7"}
    assert (rollout.advantage, rollout.reward, rollout.masked) == (0.5, 1.0, False)


def test_TR_06_a_log_probability_that_is_missing_is_not_zero() -> None:
    (rollout,) = read_rollouts([table(row("a", log_probs=[0.0, -0.5, None]))])
    assert np.array_equal(rollout.sequences[0].log_probs, np.float32([0.0, -0.5, np.nan]), equal_nan=True)


@pytest.mark.parametrize(("finish_reason", "truncated"), [("length", True), ("stop", False), (None, False)])
def test_TR_08_a_rollout_is_truncated_if_its_last_call_was(finish_reason: str | None, truncated: bool) -> None:
    (rollout,) = read_rollouts([table(row("a", finish_reason=finish_reason), row("a", 1, finish_reason="length"))])
    assert rollout.truncated == truncated  # the second row is not of the main chain


def test_TR_10_a_rollout_that_outgrew_the_context_is_truncated_and_older_tables_do_not_say_so(tmp_path: Path) -> None:
    whole = table(row("a", truncated=True), row("b", truncated=False), row("c", truncated=None))
    older = whole.drop_columns(["truncated"])
    for name, rows, truncated in (("new", whole, [True, False, False]), ("old", older, [False] * 3)):
        assert [rollout.truncated for rollout in read_rollouts([rows])] == truncated
        (tmp_path / name).mkdir()
        pq.write_table(rows, tmp_path / name / "part-00000.parquet")
        assert [rollout.truncated for rollout in read_rollouts(parquet_batches(tmp_path / name))] == truncated


def test_how_it_was_sampled_and_played_comes_along_and_older_tables_do_not_say_it() -> None:
    how = {"temperature": 0.5, "top_p": 0.9, "constrained": True}
    said = {"sample": 3, "attempt": 2, "call_rewards": [("c", 0.25)]}
    whole = table(row("a", span_sampling=[how], **said))
    (rollout,) = read_rollouts([whole])
    (span,) = rollout.sequences[0].spans
    assert (span.start, span.end, span.call_id, span.weight_version) == (1, 3, "c", "7")
    assert span.sampling == Sampling(temperature=0.5, top_p=0.9, constrained=True)
    assert (rollout.sample, rollout.attempt, rollout.call_rewards) == (3, 2, {"c": 0.25})
    older = whole.drop_columns(["span_sampling", *said, "prefix_trajectory_id", "prefix_length"])
    (rollout,) = read_rollouts([older])
    assert rollout.sequences[0].spans[0].sampling is None
    assert (rollout.sample, rollout.attempt, rollout.call_rewards) == (None, None, {})
    with pytest.raises(RecordError, match="span_sampling must align with spans: got 2 and 1"):
        list(read_rollouts([table(row("a", span_sampling=[how, how]))]))


def test_rows_of_a_rollout_that_do_not_stand_together_are_an_error() -> None:
    with pytest.raises(RecordError, match="must stand together"):
        list(read_rollouts([table(row("a"), row("b"), row("a", 1))]))


@pytest.mark.parametrize("changes", [{"loss_mask": [True]}, {"log_probs": [0.0]}, {"token_ids": [1, None, 3]}])
def test_arrays_that_are_not_aligned_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="must align with token_ids"):
        list(read_rollouts([table(row("a", **changes))]))


def test_steps_hold_whole_groups() -> None:
    rows = [row(f"r{i}", group_id=group) for i, group in enumerate("aabbbc")]
    found = [
        [rollout.group_id for rollout in step] for step in steps(read_rollouts([table(*rows)]), rollouts_per_step=3)
    ]
    assert found == [["a", "a", "b", "b", "b"], ["c"]]


def test_a_group_that_does_not_stand_together_is_refused_before_its_second_piece(tmp_path: Path) -> None:
    """As in a copy that `repartition` of Ray Data dealt out anew: each row of a group may be in another file."""
    for number, group in enumerate("abca"):
        pq.write_table(table(row(f"r{number}", group_id=group)), tmp_path / f"part-{number:05d}.parquet")
    for groups in (
        epochs_of(str(tmp_path), epochs=1),
        steps(read_rollouts(parquet_batches(tmp_path)), rollouts_per_step=1),
    ):
        given: list[str] = []
        with pytest.raises(RecordError, match="group a do not stand together: sort them by group_id") as raised:
            given.extend(group[0].group_id for group in groups)
        assert (given, raised.value.field) == (["a", "b", "c"], "group_id")


def test_each_epoch_has_all_groups(tmp_path: Path) -> None:
    pq.write_table(table(*(row(f"r{group}", group_id=group) for group in "ab")), tmp_path / "part-00000.parquet")
    assert [group[0].group_id for group in epochs_of(str(tmp_path), epochs=2)] == ["a", "b", "a", "b"]


def test_parquet_is_read_file_by_file_in_order_and_a_few_rows_at_a_time(tmp_path: Path) -> None:
    pq.write_table(table(*ROWS[4:]), tmp_path / "part-00001.parquet")
    pq.write_table(table(*ROWS[:4]), tmp_path / "part-00000.parquet")
    (tmp_path / "_report.json").write_text("{}")
    batches = list(parquet_batches(tmp_path, rows_per_batch=2))
    assert [batch.num_rows for batch in batches] == [2, 2, 2, 1]
    assert [rollout.rollout_id for rollout in read_rollouts(batches)] == ["a", "b", "c", "d"]


def test_a_directory_without_trajectories_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Parquet files"):
        list(parquet_batches(tmp_path))


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    newer = {VERSION_KEY: str(TRAJECTORY_SCHEMA_VERSION + 1).encode()}
    pq.write_table(table(*ROWS).replace_schema_metadata(newer), tmp_path / "part-00000.parquet")
    with pytest.raises(SchemaVersionError, match="upgrade the reader"):
        list(parquet_batches(tmp_path))
