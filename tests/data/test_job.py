"""The job on a real Ray: every rollout asked for once, in order, whatever happens to the workers."""

from __future__ import annotations

import json
import pickle
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray.data

from gym_capture.data import groups, job, parts
from gym_capture.data.copies import check_schema
from gym_capture.data.job import JobOptions, build_trajectories, write_trajectories
from gym_capture.data.parts import Part, RowOptions
from gym_capture.data.requests import groups_of, request_table
from gym_capture.data.schema import SCHEMA
from gym_capture.data.sources import SourceSpec
from gym_capture.data.staged_files import Staging
from gym_capture.data.trajectory_files import REPORT_FILE, Work
from gym_capture.data.watch import start_watch
from gym_capture.errors import ConfigError, JobError
from trainer_bridge.stream import parquet_batches, read_rollouts

from . import made_rollouts

SOURCE = SourceSpec(import_path=made_rollouts.IMPORT_PATH)
pytestmark = pytest.mark.usefixtures("cluster")

SMALL_PARTS = JobOptions(rollouts_per_part=3, workers=2, scale="none")


def asked(*rollout_ids: str, groups: int = 2) -> pa.Table:
    return request_table(
        {"rollout_id": rollout_id, "group_id": f"g{i % groups}", "reward": float(i)}
        for i, rollout_id in enumerate(rollout_ids)
    )


def block(number: int, *rollout_ids: str) -> pa.Table:
    """A part as its task gets it."""
    part = Part(number=number, groups=tuple(groups_of(asked(*rollout_ids, groups=1))))
    return pa.table({"part": [pickle.dumps(part)]})


def work(directory: Path, out: str) -> Work:
    return Work(
        source=SOURCE, options=RowOptions(), staging=Staging(out=out, what="trajectories", uri=directory.as_uri())
    )


def test_every_rollout_has_its_rows_and_the_report_adds_up(tmp_path: Path) -> None:
    progress: list[int] = []
    rollouts = asked("a-1", "a-2", "missing-1", "dangling-1", "corrupt-1", "down-1", "a-3", "a-4")
    found = write_trajectories(rollouts, source=SOURCE, out=tmp_path, options=SMALL_PARTS, on_progress=progress.append)
    assert (found.requested, found.complete) == (8, 5)
    assert found.incomplete == ("corrupt-1", "dangling-1")
    assert found.missing == ("missing-1",)
    assert found.mask_reasons == {"no_calls": 2, "dangling_intent": 1, "unreadable": 1}
    assert progress[-1] == 8
    table = pa.dataset.dataset(tmp_path).to_table()
    check_schema(table.schema)
    rows = {row["rollout_id"]: row for row in table.to_pylist()}
    assert rows.keys() == set(rollouts.column("rollout_id").to_pylist())
    # Group g0 has rewards 0 and 6 unmasked (a-1, a-3); corrupt-1 and missing-1 are outside of it.
    assert (rows["a-1"]["advantage"], rows["a-3"]["advantage"]) == (-3.0, 3.0)
    assert json.loads((tmp_path / REPORT_FILE).read_text())["complete"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [REPORT_FILE, "part-00000.parquet", "part-00001.parquet"]


def test_streamed_and_written_rows_are_the_same_whatever_the_parts(tmp_path: Path) -> None:
    rollouts = asked(*(f"a-{i}" for i in range(12)), groups=3)
    write_trajectories(rollouts, source=SOURCE, out=tmp_path, options=JobOptions(scale="none"))
    written = pa.dataset.dataset(tmp_path).to_table()
    dataset = build_trajectories(rollouts, source=SOURCE, options=SMALL_PARTS)
    streamed = pa.concat_tables(dataset.iter_batches(batch_size=5, batch_format="pyarrow"))
    assert streamed.schema.equals(SCHEMA, check_metadata=True)
    assert streamed.combine_chunks().equals(written.combine_chunks())
    groups = streamed.column("group_id").to_pylist()
    assert groups == sorted(groups)


def test_a_worker_that_dies_leaves_each_rollout_once(tmp_path: Path) -> None:
    source = SourceSpec(import_path=f"{made_rollouts.__name__}:opened", kwargs={"directory": str(tmp_path)})
    rollouts = asked("a-1", "a-2", "fatal-1", "a-3", groups=1)
    found = write_trajectories(rollouts, source=source, out=tmp_path / "out", options=SMALL_PARTS)
    assert found.complete == 4
    assert (tmp_path / "fatal-1").exists()  # a worker did die
    written = pa.dataset.dataset(tmp_path / "out").to_table().column("rollout_id").to_pylist()
    assert written == ["a-1", "a-2", "fatal-1", "a-3"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_rollouts_may_come_as_a_dataset_with_blocks_that_lack_values(tmp_path: Path) -> None:
    rollouts = ray.data.from_arrow(
        [
            pa.table({"rollout_id": ["a-1"], "group_id": ["g"], "reward": pa.nulls(1)}),
            pa.table({"rollout_id": ["a-2"], "group_id": ["g"], "reward": [1.0]}),
        ]
    )
    found = write_trajectories(rollouts, source=SOURCE, out=tmp_path)
    assert (found.complete, found.mask_reasons) == (1, {"missing_reward": 1})


def test_DJ_01_rows_pass_through_further_steps_unchanged() -> None:
    rollouts = asked("a-1", "missing-1", "a-2")
    dataset = build_trajectories(rollouts, source=SOURCE)
    expected = pa.concat_tables(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
    twice = dataset.map_batches(lambda t: t, batch_format="pyarrow").map_batches(lambda t: t, batch_format="pyarrow")
    found = pa.concat_tables(twice.iter_batches(batch_size=2, batch_format="pyarrow"))
    assert found.schema.equals(SCHEMA, check_metadata=True)
    assert found.combine_chunks().equals(expected.combine_chunks())


def test_DJ_09_trajectories_that_went_through_other_steps_can_be_read(tmp_path: Path) -> None:
    rollouts, raw = asked("a-1", "missing-1", "a-2", groups=1), JobOptions(scale="none")
    write_trajectories(rollouts, source=SOURCE, out=tmp_path / "built", options=raw)
    dataset = ray.data.read_parquet(str(tmp_path / "built"), file_extensions=["parquet"])
    unmasked = dataset.map_batches(lambda t: t.filter(pc.invert(t["masked"])), batch_format="pyarrow")
    kept = unmasked.map(lambda row: row).repartition(1)  # as Python values: types are guessed anew
    kept.write_parquet(str(tmp_path / "kept"))
    (path,) = (tmp_path / "kept").iterdir()
    check_schema(pq.read_schema(path))
    built, kept_ones = (list(read_rollouts(parquet_batches(tmp_path / name))) for name in ("built", "kept"))
    assert [(each.rollout_id, each.advantage) for each in kept_ones] == [("a-1", -1.0), ("a-2", 1.0)]
    for before, after in zip(built[::2], kept_ones, strict=True):
        assert after.sequences[0].token_ids.tolist() == before.sequences[0].token_ids.tolist()


def test_DJ_05_blocks_that_are_split_small_still_sort_and_group() -> None:
    dataset = build_trajectories(asked(*(f"a-{i}" for i in range(8))), source=SOURCE)
    dataset.context.target_max_block_size = 512
    counts = dataset.groupby("group_id").map_groups(
        lambda t: pa.table({"rows": [t.num_rows], "type": [str(t.schema.field("token_ids").type)]}),
        batch_format="pyarrow",
    )
    assert sorted((row["rows"], row["type"]) for row in counts.take_all()) == [(4, "large_list<item: int32>")] * 2


def test_row_groups_stay_small_so_that_readers_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(groups, "_BATCH_BYTES", 1)
    job._write_part(block(7, "a-1", "a-2", "a-3"), work=work(tmp_path, "out"), watch=start_watch())
    (path,) = tmp_path.iterdir()
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [1, 1, 1]


@pytest.mark.parametrize("killer", ["poison-1", "hungry-1"])
def test_a_rollout_that_kills_every_worker_is_masked_and_the_others_are_delivered(tmp_path: Path, killer: str) -> None:
    # All in one part, the killer in the middle of a group.
    rollouts = asked("a-1", killer, "a-2", "a-3", groups=1)
    found = write_trajectories(rollouts, source=SOURCE, out=tmp_path, options=JobOptions(scale="none"))
    assert (found.complete, found.incomplete, found.missing) == (3, (killer,), ())
    assert found.mask_reasons == {"no_calls": 1, "worker_died": 1}
    assert found.details[killer][0].startswith("3 workers died")
    assert killer not in found.snapshots  # there is none to drop
    rows = {row["rollout_id"]: row for row in pa.dataset.dataset(tmp_path).to_table().to_pylist()}
    assert list(rows) == ["a-1", killer, "a-2", "a-3"]
    assert [rows[name]["advantage"] for name in ("a-1", "a-2", "a-3")] == pytest.approx([-5 / 3, 1 / 3, 4 / 3])
    assert rows[killer]["mask_reasons"] == ["no_calls", "worker_died"]


def test_a_killer_that_is_streamed_has_its_row_in_its_place() -> None:
    rows = build_trajectories(asked("a-1", "poison-1", "a-2", groups=1), source=SOURCE).take_all()
    assert [(row["rollout_id"], row["masked"]) for row in rows] == [("a-1", False), ("poison-1", True), ("a-2", False)]


def test_workers_that_die_of_no_rollout_end_the_job(tmp_path: Path) -> None:
    source = SourceSpec(import_path=f"{made_rollouts.__name__}:dying")
    with pytest.raises(JobError, match="workers died 3 times"):
        write_trajectories(asked("a-1", "a-2"), source=source, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_that_cannot_be_read_or_built_is_masked_with_the_reason(tmp_path: Path) -> None:
    found = write_trajectories(asked("a-1", "denied-1", "defect-1", "a-2", groups=1), source=SOURCE, out=tmp_path)
    assert (found.complete, found.incomplete) == (2, ("defect-1", "denied-1"))
    assert found.mask_reasons == {"no_calls": 2, "build_failed": 1, "unreadable": 1}
    assert found.details == {
        "defect-1": ("KeyError: 'no such thing'",),
        "denied-1": ("[Errno 13] Permission denied: 'denied-1.jsonl'",),
    }


def test_a_full_disk_is_an_error_that_names_the_output(tmp_path: Path) -> None:
    watch = start_watch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        answer = job._write_part(block(0, "a-1", "a-2"), work=work(tmp_path, "full"), watch=watch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = pickle.loads(answer.column("answer")[0].as_py())
    assert isinstance(error, ConfigError)
    assert str(error).startswith("cannot write trajectories to full: [Errno 27]")


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write_trajectories(asked("b-1"), source=SOURCE, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="cannot load"):
        write_trajectories(asked("a-1"), source=SourceSpec(import_path="no.such:thing"), out=tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_output_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write trajectories to"):
        write_trajectories(asked("a-1"), source=SOURCE, out=tmp_path / "file" / "out")


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    rollouts = asked("a-1", "a-2", "a-3", "a-4")
    with pytest.raises(KeyboardInterrupt):
        write_trajectories(rollouts, source=SOURCE, out=tmp_path / "out", options=SMALL_PARTS, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_good_build_prints_nothing_alarming(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_trajectories(asked("a-1", "a-2"), source=SOURCE, out=tmp_path)
    with pytest.raises(ConfigError):
        write_trajectories(asked("a-1"), source=SourceSpec(import_path="no.such:thing"), out=tmp_path / "none")
    said = capfd.readouterr().err
    assert not [word for word in ("core_worker", "Traceback", "Deprecation", "ERROR") if word in said], said


def test_trajectories_that_are_there_are_not_mixed_with_others(tmp_path: Path) -> None:
    write_trajectories(asked("a-1", "a-2", "a-3", "a-4"), source=SOURCE, out=tmp_path, options=SMALL_PARTS)
    with pytest.raises(ConfigError, match="already holds trajectories"):
        write_trajectories(asked("b-1"), source=SOURCE, out=tmp_path)
    write_trajectories(asked("b-1"), source=SOURCE, out=tmp_path, overwrite=True)
    assert pa.dataset.dataset(tmp_path).to_table().column("rollout_id").to_pylist() == ["b-1"]


def test_a_source_that_cannot_be_opened_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load 'no\.such:thing'"):
        write_trajectories(asked("a-1"), source=SourceSpec(import_path="no.such:thing"), out=tmp_path)


def test_nothing_to_build_is_a_file_of_no_rows_with_every_column(tmp_path: Path) -> None:
    found = write_trajectories(asked(), source=SOURCE, out=tmp_path)
    assert (found.requested, found.complete, found.missing) == (0, 0, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == [REPORT_FILE, "part-00000.parquet"]
    assert pq.read_table(tmp_path / "part-00000.parquet").equals(SCHEMA.empty_table())
    check_schema(pq.read_schema(tmp_path / "part-00000.parquet"))
    streamed = build_trajectories(asked(), source=SOURCE)
    assert streamed.count() == 0
    assert streamed.schema().names == SCHEMA.names
