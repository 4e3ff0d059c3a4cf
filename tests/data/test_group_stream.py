"""Groups that are built while their job runs: each as soon as it is complete, once, whatever the job dies of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture.data.group_files import WrittenGroup, write_groups
from gym_capture.data.group_stream import BuiltGroup, Play, Tell, stream_groups
from gym_capture.data.local_runner import LocalRunner
from gym_capture.data.parts import RowOptions
from gym_capture.data.report import BuildReport
from gym_capture.data.requests import Request, read_group
from gym_capture.data.sources import SourceSpec
from gym_capture.data.trajectory_files import write_files
from gym_capture.errors import ConfigError, RecordError
from trainer_bridge.finished import read_finished
from trainer_bridge.stream import parquet_batches, read_rollouts

from . import made_rollouts

SOURCE = SourceSpec(import_path=made_rollouts.IMPORT_PATH)
JOB = {"job_id": "job"}
UNSCALED = RowOptions(scale="none")


def row(group: str, sample: int, **said: Any) -> dict[str, Any]:
    """As a rollout job tells of it."""
    return {
        "rollout_id": f"{group}.{sample}",
        "group_id": group,
        "status": "finished",
        "reward": float(sample),
        "reward_components": {"answer": float(sample)},
        "n_calls": 2,
    } | said


def telling(*rows: Mapping[str, Any]) -> Play:
    async def play(tell: Tell) -> None:
        for each in rows:
            tell(each)
            await asyncio.sleep(0)

    return play


TWO_GROUPS = (row("a", 0), row("b", 0), row("b", 1), row("a", 1))


def built_at_once(groups: tuple[tuple[Request, ...], ...], out: Path) -> BuildReport:
    return write_files([groups], source=SOURCE, out=out, options=RowOptions(), runner=LocalRunner(workers=1))


def table_of(out: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(out.glob("part-*.parquet")))


async def test_groups_come_when_they_are_complete_with_advantages() -> None:
    told, goes_on = asyncio.Event(), asyncio.Event()

    async def play(tell: Tell) -> None:
        for each in TWO_GROUPS[:3]:
            tell(each)
        told.set()
        await goes_on.wait()
        tell(TWO_GROUPS[3])

    found: list[BuiltGroup] = []
    async for group in stream_groups(play, source=SOURCE, group_size=2, options=UNSCALED):
        if not found:
            assert told.is_set()  # and the job still plays
            assert not goes_on.is_set()
            goes_on.set()
        found.append(group)
        rollouts = list(read_rollouts(group.table.to_batches()))
        assert {rollout.group_id for rollout in rollouts} == {group.group_id}
        assert [(rollout.reward, rollout.advantage) for rollout in rollouts] == [(0.0, -0.5), (1.0, 0.5)]
    assert [group.group_id for group in found] == ["b", "a"]
    assert [len(group.summaries) for group in found] == [2, 2]


async def test_an_incomplete_group_is_never_built() -> None:
    found = [group.group_id async for group in stream_groups(telling(row("a", 0)), source=SOURCE, group_size=2)]
    assert found == []


async def test_what_ends_the_job_comes_after_the_groups_that_were_complete() -> None:
    async def play(tell: Tell) -> None:
        tell(row("a", 0))
        raise ConfigError("the disk is full")

    groups = stream_groups(play, source=SOURCE, group_size=1)
    assert (await anext(groups)).group_id == "a"
    with pytest.raises(ConfigError, match="the disk is full"):
        await anext(groups)


async def test_a_trainer_that_leaves_ends_the_job() -> None:
    ended = asyncio.Event()

    async def play(tell: Tell) -> None:
        tell(row("a", 0))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with aclosing(stream_groups(play, source=SOURCE, group_size=1)) as groups:
        async for _ in groups:
            break
    assert ended.is_set()


async def test_a_rollout_that_cannot_be_read_or_failed_is_masked_in_its_group() -> None:
    rows = (
        row("g", 0),
        row("g", 1),
        row("g", 2, rollout_id="corrupt-1"),
        row("g", 3, status="failed", error="rollout_timeout", reward=None, reward_components={}),
    )
    (group,) = [group async for group in stream_groups(telling(*rows), source=SOURCE, group_size=4, options=UNSCALED)]
    assert [rollout.mask_reasons for rollout in read_rollouts(group.table.to_batches())] == [
        (),
        (),
        ("no_calls", "unreadable"),
        ("incomplete:rollout_timeout",),
    ]
    assert [rollout.advantage for rollout in read_rollouts(group.table.to_batches())][:2] == [-0.5, 0.5]


async def test_a_call_that_its_agent_left_has_a_moment_to_end() -> None:
    play = telling(*(row(f"ending-{number}", 0) for number in range(2)), row("dangling-a", 0))
    found = [group async for group in stream_groups(play, source=SOURCE, group_size=1)]
    assert [[each.mask_reasons for each in group.summaries] for group in found] == [
        [()],
        [()],
        [("dangling_intent:call-1",)],
    ]


def test_a_rollout_that_nothing_can_be_said_of_is_refused() -> None:
    with pytest.raises(RecordError, match="reward must be a number"):
        read_group([row("g", 0, reward="much")])


async def test_each_group_is_readable_while_the_job_runs(tmp_path: Path) -> None:
    goes_on = asyncio.Event()
    seen: list[tuple[str, int]] = []

    async def play(tell: Tell) -> None:
        for each in TWO_GROUPS[:3]:
            tell(each)
        await goes_on.wait()
        tell(TWO_GROUPS[3])

    def on_written(group: WrittenGroup) -> None:
        seen.append((group.part, len(list(read_rollouts(parquet_batches(tmp_path / "out"))))))
        goes_on.set()

    done = await write_groups(play, source=SOURCE, out=tmp_path / "out", group_size=2, job=JOB, on_written=on_written)
    assert seen == [("part-00000.parquet", 2), ("part-00001.parquet", 4)]
    assert (done.built.requested, done.built.complete, done.built.groups, done.kept) == (4, 4, 2, 0)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


async def test_the_rows_are_those_of_a_build_of_the_whole_job(tmp_path: Path) -> None:
    streamed = await write_groups(telling(*TWO_GROUPS), source=SOURCE, out=tmp_path / "streamed", group_size=2, job=JOB)
    groups = tuple(read_group(each for each in TWO_GROUPS if each["group_id"] == group) for group in ("b", "a"))
    whole = await asyncio.to_thread(built_at_once, groups, tmp_path / "whole")
    assert table_of(tmp_path / "streamed").equals(table_of(tmp_path / "whole"), check_metadata=True)
    assert streamed.built == whole
    reports = [(tmp_path / out / "_report.json").read_bytes() for out in ("streamed", "whole")]
    assert reports[0] == reports[1]


async def test_a_job_that_goes_on_writes_no_group_twice(tmp_path: Path) -> None:
    async def dies(tell: Tell) -> None:
        for each in TWO_GROUPS[:3]:
            tell(each)
        await appeared.wait()
        raise ConfigError("the disk is full")

    appeared = asyncio.Event()
    with pytest.raises(ConfigError, match="disk is full"):
        await write_groups(
            dies, source=SOURCE, out=tmp_path, group_size=2, job=JOB, on_written=lambda group: appeared.set()
        )
    first = (tmp_path / "part-00000.parquet").stat()
    assert not (tmp_path / "_report.json").exists()

    new: list[str] = []
    done = await write_groups(
        telling(*TWO_GROUPS),
        source=SOURCE,
        out=tmp_path,
        group_size=2,
        job=JOB,
        on_written=lambda group: new.append(group.group_id),
    )
    assert (new, done.kept, done.changed) == (["a"], 1, ())
    after = (tmp_path / "part-00000.parquet").stat()
    assert (after.st_ino, after.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert sorted(table_of(tmp_path).column("rollout_id").to_pylist()) == ["a.0", "a.1", "b.0", "b.1"]
    assert done.built.requested == 4


async def test_a_job_that_goes_on_has_no_report_until_it_ends(tmp_path: Path) -> None:
    """Whoever follows the directory takes the report for its end."""
    await write_groups(telling(*TWO_GROUPS[:2]), source=SOURCE, out=tmp_path, group_size=2, job=JOB)
    first = (tmp_path / "_report.json").read_text()
    found: list[bool] = []

    async def play(tell: Tell) -> None:
        found.append((tmp_path / "_report.json").exists())
        await telling(*TWO_GROUPS)(tell)

    await write_groups(play, source=SOURCE, out=tmp_path, group_size=2, job=JOB)
    assert found == [False]
    assert (tmp_path / "_report.json").read_text() != first


async def test_a_part_that_did_not_appear_is_written_by_the_next_run(tmp_path: Path) -> None:
    """The job was killed between the account of a group and its part."""
    await write_groups(telling(*TWO_GROUPS), source=SOURCE, out=tmp_path, group_size=2, job=JOB)
    (tmp_path / "part-00001.parquet").unlink()
    done = await write_groups(telling(*TWO_GROUPS), source=SOURCE, out=tmp_path, group_size=2, job=JOB)
    assert done.kept == 1
    assert sorted(table_of(tmp_path).column("group_id").to_pylist()) == ["a", "a", "b", "b"]


async def test_a_group_that_was_played_again_keeps_its_part_and_is_named(tmp_path: Path) -> None:
    await write_groups(telling(*TWO_GROUPS), source=SOURCE, out=tmp_path, group_size=2, job=JOB)
    before = (tmp_path / "part-00000.parquet").read_bytes()
    again = [*TWO_GROUPS[:2], row("b", 1, rollout_id="b.1.second"), TWO_GROUPS[3]]
    done = await write_groups(telling(*again), source=SOURCE, out=tmp_path, group_size=2, job=JOB)
    assert (done.kept, done.changed) == (2, ("b",))
    assert (tmp_path / "part-00000.parquet").read_bytes() == before


async def test_trajectories_of_another_job_or_by_other_rules_are_not_mixed_in(tmp_path: Path) -> None:
    async def played(tell: Tell) -> None:
        pytest.fail("nothing is played")

    await write_groups(telling(*TWO_GROUPS), source=SOURCE, out=tmp_path / "one", group_size=2, job=JOB)
    with pytest.raises(ConfigError, match=r'job: {"job_id": "job"} -> {"job_id": "other"}'):
        await write_groups(played, source=SOURCE, out=tmp_path / "one", group_size=2, job={"job_id": "other"})
    with pytest.raises(ConfigError, match="options: "):
        await write_groups(played, source=SOURCE, out=tmp_path / "one", group_size=2, job=JOB, options=UNSCALED)
    groups = (read_group(TWO_GROUPS[:1]),)
    await asyncio.to_thread(built_at_once, groups, tmp_path / "two")
    with pytest.raises(ConfigError, match=r"already holds trajectories \(part-00000.parquet\)"):
        await write_groups(played, source=SOURCE, out=tmp_path / "two", group_size=2, job=JOB)
    (tmp_path / "one" / "_group-00000.json").unlink()
    with pytest.raises(ConfigError, match=r"_group-00000.json beside it"):
        await write_groups(played, source=SOURCE, out=tmp_path / "one", group_size=2, job=JOB)
    stream = json.loads((tmp_path / "one" / "_stream.json").read_text())
    assert stream["options"]["scale"] == "population_std"


async def test_a_directory_that_cannot_be_written_to_is_said_before_anything_is_played(tmp_path: Path) -> None:
    async def played(tell: Tell) -> None:
        pytest.fail("nothing is played")

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write trajectories"):
        await write_groups(played, source=SOURCE, out=tmp_path / "file", group_size=2, job=JOB)


async def test_RA_04_rewards_of_calls_are_kept_by_call_and_one_of_no_call_masks() -> None:
    rows = (row("g", 0, call_rewards={"call-0": 0.5}), row("g", 1, call_rewards={"call-9": 1.0}))
    (group,) = [group async for group in stream_groups(telling(*rows), source=SOURCE, group_size=2)]
    first, second = read_finished([group.table])
    assert first.call_rewards == {"call-0": 0.5}
    assert first.call_rewards.keys() < {span.call_id for span in first.trajectories[0].spans}
    assert (first.reward, first.masked) == (0.0, False)
    assert second.mask_reasons == ("reward_of_unknown_call:call-9",)
