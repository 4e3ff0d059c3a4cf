"""Whoever does the work, the files are the same: this process, some processes, tasks on Ray."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture.build.builder import BuildOptions
from gym_capture.data.directory import build_directory
from gym_capture.data.job import JobOptions, RayRunner, write_trajectories
from gym_capture.data.local_runner import LocalRunner
from gym_capture.data.log_source import opened_logs
from gym_capture.data.parts import RowOptions
from gym_capture.data.requests import groups_of, request_table, split_into_parts
from gym_capture.data.sources import SourceSpec
from gym_capture.data.trajectory_files import Runner, write_files
from gym_capture.errors import ConfigError, StoreError

from . import made_rollouts
from .test_log_source import record

SOURCE = SourceSpec(import_path=made_rollouts.IMPORT_PATH)


def asked(*rollout_ids: str) -> pa.Table:
    return request_table(
        {
            "rollout_id": rollout_id,
            "group_id": f"g{number % 2}",
            "reward": float(number),
            "reward_components": {"answer": float(number)},
            "agent_name": "coder",
            "input": '"go"',
        }
        for number, rollout_id in enumerate(rollout_ids)
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.usefixtures("cluster")
def test_every_runner_writes_the_same_files(tmp_path: Path) -> None:
    names = ("a-1", "a-2", "missing-1", "dangling-1", "corrupt-1", "denied-1", "defect-1", "a-3", "a-4")
    parts = split_into_parts(groups_of(asked(*names)), rollouts_per_part=3)
    assert len(parts) == 2
    runners: dict[str, Runner] = {
        "here": LocalRunner(workers=1),
        "processes": LocalRunner(workers=2),
        "ray": RayRunner(JobOptions(workers=2)),
    }
    built = {
        name: write_files(parts, source=SOURCE, out=tmp_path / name, options=RowOptions(scale="none"), runner=runner)
        for name, runner in runners.items()
    }
    assert built["here"] == built["processes"] == built["ray"]
    here = contents(tmp_path / "here")
    assert sorted(here) == ["_report.json", "part-00000.parquet", "part-00001.parquet"]
    assert contents(tmp_path / "processes") == contents(tmp_path / "ray") == here
    assert built["here"].mask_reasons == {"no_calls": 4, "unreadable": 2, "build_failed": 1, "dangling_intent": 1}


@pytest.mark.usefixtures("cluster")
def test_a_log_gives_the_same_files_with_and_without_ray(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path / "records" / "shard-0000", "a", "b"))
    asyncio.run(record(tmp_path / "records" / "shard-0001", "c"))
    rollouts = asked("a", "b", "c", "gone")
    here = build_directory(tmp_path / "records", out=tmp_path / "here", options=BuildOptions(), requests=rollouts)
    with opened_logs(tmp_path / "records") as source:
        on_ray = write_trajectories(rollouts, source=source, out=tmp_path / "ray")
    assert here == on_ray
    assert (here.complete, here.missing) == (3, ("gone",))
    assert contents(tmp_path / "here") == contents(tmp_path / "ray")


def test_all_rollouts_of_a_log_are_built_if_none_are_named(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path / "records", "b", "a"))  # a build runs a loop of its own
    built = build_directory(tmp_path / "records", out=tmp_path / "out", options=BuildOptions())
    assert (built.requested, built.complete) == (2, 2)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [(row["rollout_id"], row["group_id"], row["advantage"], row["masked"]) for row in rows] == [
        ("a", "a", None, False),
        ("b", "b", None, False),
    ]


async def test_a_build_works_without_ray(tmp_path: Path) -> None:
    await record(tmp_path / "records", "a")
    (tmp_path / "captures").mkdir()
    (tmp_path / "captures" / "r.tokens.jsonl").touch()
    script = (
        "import sys\n"
        "sys.modules['ray'] = None\n"  # whoever imports it fails
        "from gym_capture import cli\n"
        "cli.main(['build', *sys.argv[1:]])\n"
    )
    for source in ("records", "captures"):
        command = [sys.executable, "-c", script, tmp_path / source, "--out", tmp_path / f"out-{source}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert pq.read_table(tmp_path / f"out-{source}").num_rows == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_cannot_be_opened_is_one_error_and_leaves_nothing(tmp_path: Path, workers: int) -> None:
    parts = split_into_parts(groups_of(asked("a", "b")), rollouts_per_part=1)
    source = SourceSpec(import_path="no.such:thing")
    with pytest.raises(ConfigError, match=r"cannot load 'no\.such:thing'"):
        write_files(
            parts, source=source, out=tmp_path / "out", options=RowOptions(), runner=LocalRunner(workers=workers)
        )
    assert list(tmp_path.iterdir()) == []


def test_a_worker_process_that_dies_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    parts = split_into_parts(groups_of(asked("a-1", "poison-1")), rollouts_per_part=1)
    with pytest.raises(StoreError, match="a worker process died"):
        write_files(parts, source=SOURCE, out=tmp_path / "out", options=RowOptions(), runner=LocalRunner(workers=2))
    assert list(tmp_path.iterdir()) == []


def test_token_files_are_only_read(tmp_path: Path) -> None:
    from gym_capture.data.directory import NemoGymDirectory

    (tmp_path / "r.tokens.jsonl").touch()
    source = asyncio.run(NemoGymDirectory.spec(tmp_path).open())
    assert list(asyncio.run(source.rollout_ids())) == ["r"]
    asyncio.run(source.freeze("r"))
    asyncio.run(source.close())
    assert [file.name for file in tmp_path.iterdir()] == ["r.tokens.jsonl"]
