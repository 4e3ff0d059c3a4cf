"""Tables that other tools copied, or an earlier version wrote, are read like those that a build writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture.build.builder import build
from gym_capture.data.copies import check_schema, conformed
from gym_capture.data.schema import SCHEMA, VERSION_KEY, Row, read_pairs, rows, to_table
from gym_capture.errors import RecordError
from trainer_bridge.finished import COLUMNS, FinishedRollout, read_finished
from trainer_bridge.stream import TRAIN_COLUMNS, parquet_batches, read_rollouts

from .made_rollouts import snapshot


def rows_of(rollout_id: str, *, turns: int, **said: Any) -> list[Row]:
    frozen = snapshot(rollout_id, turns=turns)
    return rows(build(frozen), snapshot=frozen, group_id="g", **{"reward": None, **said})


FULL = to_table(
    [
        *rows_of("r1", turns=2, reward=0.1, reward_components={"a": 0.1}, advantage=0.5, call_rewards={"call-0": 2.0}),
        *rows_of("r2", turns=3, truncated=True),
        *rows_of("r3", turns=0),
    ]
)
EMPTY = to_table(rows_of("r3", turns=0))


def as_before(table: pa.Table) -> pa.Table:
    """As version 1 wrote it."""
    for index, field in enumerate(SCHEMA):
        if field.name in ("reward_components", "call_rewards", "excluded_tokens"):
            value = field.type.value_type.field("value").type
            said = [None if each is None else list(read_pairs(each).items()) for each in table[field.name].to_pylist()]
            kind = pa.map_(pa.string(), value)
            table = table.set_column(
                index, pa.field(field.name, kind, nullable=field.nullable), pa.array(said, type=kind)
            )
    return table.replace_schema_metadata({VERSION_KEY: b"1"})


def through_pandas(table: pa.Table) -> pa.Table:
    return pa.Table.from_pandas(table.to_pandas())


def through_python(table: pa.Table) -> pa.Table:
    return pa.Table.from_pylist(table.to_pylist())


def seen(rollout: FinishedRollout) -> dict[str, Any]:
    """A rollout in values that compare."""
    arrays = [
        (t.trajectory_id, t.token_ids.tolist(), t.loss_mask.tolist(), t.log_probs.tolist(), t.spans)
        for t in rollout.trajectories
    ]
    return {name: getattr(rollout, name) for name in FinishedRollout.__slots__ if name != "trajectories"} | {
        "trajectories": arrays
    }


def read_back(directory: Path, table: pa.Table) -> list[dict[str, Any]]:
    directory.mkdir()
    pq.write_table(table, directory / "part-00000.parquet")
    assert list(map(_train, read_rollouts(parquet_batches(directory)))) == list(map(_train, read_rollouts([table])))
    return list(map(seen, read_finished(parquet_batches(directory, columns=COLUMNS))))


def _train(rollout: Any) -> tuple[Any, ...]:
    return (rollout.rollout_id, rollout.reward, rollout.advantage, [s.token_ids.tolist() for s in rollout.sequences])


@pytest.mark.parametrize("table", [FULL, EMPTY], ids=["full", "empty"])
@pytest.mark.parametrize("copy", [as_before, through_pandas, through_python])
def test_DJ_08_a_copy_of_another_tool_is_read_like_the_original(
    tmp_path: Path, table: pa.Table, copy: Callable[[pa.Table], pa.Table]
) -> None:
    copied = copy(table)
    assert copied.schema != SCHEMA
    check_schema(copied.schema)
    assert read_back(tmp_path / "copy", copied) == read_back(tmp_path / "original", table)


def test_DJ_08_no_column_has_a_type_that_datasets_cannot_have() -> None:
    """Hugging Face's `datasets` has no maps, and refuses a file that has one."""

    def kinds(kind: pa.DataType) -> list[pa.DataType]:
        return [kind] + [found for i in range(kind.num_fields) for found in kinds(kind.field(i).type)]

    assert not [kind for field in SCHEMA for kind in kinds(field.type) if pa.types.is_map(kind)]


def test_DJ_08_datasets_loads_what_a_build_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))  # which it reads when it is imported
    import datasets

    pq.write_table(FULL, tmp_path / "part-00000.parquet")
    files = str(tmp_path / "part-*.parquet")
    for streaming in (False, True):
        loaded = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=streaming, cache_dir=str(tmp_path / "cache")
        )
        assert [row["token_ids"] for row in loaded] == FULL["token_ids"].to_pylist()
        assert [row["advantage"] for row in loaded] == FULL["advantage"].to_pylist()


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("n_calls", pa.float64(), 1.5),
        ("token_ids", pa.large_list(pa.int64()), [2**40]),
        ("token_ids", pa.large_list(pa.float64()), [0.5]),
        ("token_item_indices", pa.list_(pa.float64()), [0.5]),
    ],
)
def test_a_value_that_its_column_cannot_have_is_refused_and_never_rounded(
    name: str, kind: pa.DataType, value: object
) -> None:
    index = SCHEMA.get_field_index(name)
    odd = FULL.slice(0, 1).set_column(index, name, pa.array([value], type=kind)).replace_schema_metadata(None)
    check_schema(odd.schema)
    with pytest.raises(RecordError, match=f"column '{name}' must be "):
        conformed(odd)


def test_a_number_that_became_nan_is_missing_again_but_a_log_probability_stays_what_it_is() -> None:
    values = FULL["log_probs"].to_pylist()
    values[0][-1] = float("nan")
    odd = FULL.set_column(
        SCHEMA.get_field_index("log_probs"), "log_probs", pa.array(values, type=pa.list_(pa.float64()))
    ).set_column(SCHEMA.get_field_index("reward"), "reward", pa.array([1.0, float("nan"), None]))
    assert np.isnan(conformed(odd)["reward"][1].as_py())  # as it was built
    odd = odd.replace_schema_metadata(None)
    assert conformed(odd)["reward"].to_pylist() == [1.0, None, None]
    first = next(read_rollouts([odd]))
    assert np.isnan(first.sequences[0].log_probs[-1])
    assert first.sequences[0].log_probs.dtype == np.float32


def test_what_ray_data_pickles_is_refused_and_said_how_to_keep() -> None:
    pickled = pa.opaque(pa.binary(), "ray.data.arrow_pickled_object", "ray")
    odd = SCHEMA.set(SCHEMA.get_field_index("call_ids"), pa.field("call_ids", pickled)).remove_metadata()
    with pytest.raises(RecordError, match=r"'call_ids' must be .*; give steps of Ray Data `batch_format='pyarrow'`"):
        check_schema(odd)


def test_a_table_that_a_build_wrote_is_not_copied() -> None:
    batch = FULL.select(TRAIN_COLUMNS).to_batches()[0]
    same = conformed(batch)
    assert same.column("token_ids").buffers()[-1].address == batch.column("token_ids").buffers()[-1].address
