"""What is finished is never played again, whatever ended the job; another job does not take over its rows."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gym_capture.errors import ConfigError, RecordError
from gym_capture.rollouts import patience
from gym_capture.rollouts.environment import Environment, Register, Score
from gym_capture.rollouts.harness import Completed, Outcome
from tests.rollouts.scripted_job import Scripted, make, recorded, well

SETTINGS = {
    "environment": {"name": "register"},
    "harness": {"name": "tool-loop", "model": "policy-1", "max_tokens": 48},
}


@pytest.mark.parametrize("torn", [b"", b'{"rollout_id":"job.regi'])
def test_a_killed_job_plays_only_what_was_not_over(tmp_path: Path, torn: bytes) -> None:
    directory = tmp_path / "job"
    killed = subprocess.Popen(
        [sys.executable, "-m", "tests.rollouts.scripted_job", str(directory), "3"], stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"hangs\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    before = (tmp_path / "played.txt").read_text().splitlines()
    over = [json.loads(line)["rollout_id"] for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    assert over == before[:3]
    with (directory / "rollouts.jsonl").open("ab") as file:
        file.write(torn)  # what a kill in the middle of a write leaves

    closed: list[str] = []

    async def close(rollout_id: str) -> None:
        closed.append(rollout_id)

    summary = patience.run(replace(recorded(directory), close=close).run())
    after = (tmp_path / "played.txt").read_text().splitlines()[len(before) :]
    assert set(after).isdisjoint(before)
    # The one that was under way is closed, and goes on as another attempt; the death of the job is no failure of it.
    under_way = before[3]
    assert closed == [under_way]
    assert after[0] == under_way.removesuffix("1") + "2"
    assert summary.failures == {}
    assert [row.attempt for row in summary.rows].count(2) == 1
    assert (summary.resumed, summary.finished) == (3, 6)
    written = [json.loads(line)["rollout_id"] for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(written) == Counter({row.rollout_id: 1 for row in summary.rows})


def test_RJ_03_a_job_that_samples_or_scores_otherwise_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    patience.run(make(tmp_path, Scripted(well), samples=4, settings=SETTINGS).run())
    other = {
        "environment": {"name": "my.module:Another", "bonus": 9},
        "harness": {"name": "tool-loop", "model": "policy-2", "max_tokens": 9999},
    }
    with pytest.raises(ConfigError) as refused:
        patience.run(make(tmp_path, Scripted(well), samples=4, settings=other, rollout_timeout_s=5.0).run())
    for difference in (
        "environment.bonus: nothing -> 9",
        'environment.name: "register" -> "my.module:Another"',
        "harness.max_tokens: 48 -> 9999",
        'harness.model: "policy-1" -> "policy-2"',
        "limits.rollout_timeout_s: 600.0 -> 5.0",
    ):
        assert difference in str(refused.value)
    assert "harness.name" not in str(refused.value)


def test_a_job_may_go_on_with_other_speed_and_patience(tmp_path: Path) -> None:
    patience.run(make(tmp_path, Scripted(well), settings=SETTINGS, concurrency=1, max_attempts=1).run())
    job = make(tmp_path, Scripted(well), settings=SETTINGS, concurrency=5, max_attempts=4, close_timeout_s=1.0)
    assert patience.run(job.run()).resumed == 6


# --- the disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full: longer files are refused (EFBIG)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up_ends_the_job_with_what_to_do_and_keeps_what_is_over(tmp_path: Path) -> None:
    job = make(tmp_path, Scripted(well), concurrency=1)
    with files_of_at_most(1000), pytest.raises(ConfigError) as full:
        patience.run(job.run())
    assert str(full.value) == (
        f"a rollout job cannot be kept in {tmp_path}: File too large. The rollouts that were over until now are kept: "
        "make room, and start the job again to go on"
    )
    kept = (tmp_path / "rollouts.jsonl").read_bytes()
    assert 0 < kept.count(b"\n") < 6
    assert kept.endswith(b"\n"), "half of a line would spoil the next one"
    summary = patience.run(job.run())
    assert (summary.resumed, summary.finished) == (kept.count(b"\n"), 6)


def test_a_disk_that_is_full_is_said_before_anything_is_played(tmp_path: Path) -> None:
    async def play(rollout_id: str, environment: Environment) -> Outcome:
        raise AssertionError("it was played")

    with files_of_at_most(0), pytest.raises(ConfigError, match=r"cannot be kept in .*: File too large"):
        patience.run(make(tmp_path, Scripted(play)).run())


@pytest.mark.parametrize("name", ["lock", "attempts.jsonl", "rollouts.jsonl", "failures.jsonl"])
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"a rollout job cannot be kept in {tmp_path}: Is a directory"):
        patience.run(make(tmp_path, Scripted(well)).run())


def test_a_job_that_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").mkdir()
    with pytest.raises(RecordError, match=f"{tmp_path}/job.json cannot be read: is a directory.* remove it"):
        patience.run(make(tmp_path, Scripted(well)).run())


# --- odd values -------------------------------------------------------------------------------------------------------


def test_what_is_no_json_does_not_end_the_job(tmp_path: Path) -> None:
    async def play(rollout_id: str, environment: Environment) -> Outcome:
        return Completed("0" if ".0-a" in rollout_id else b"bytes", n_calls=np.int64(1))  # type: ignore[arg-type]

    class Odd(Register):
        async def score(self, answer: str) -> Score:
            return Score({"answer": np.float32(0.5)})

    summary = patience.run(make(tmp_path, Scripted(play), environment=Odd, max_attempts=1).run())
    assert [row.error for row in summary.rows] == [None, "exception"] * 3
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["0", None] * 3
    assert [row["n_calls"] for row in rows] == [1, 0] * 3
    assert [row["reward_components"] for row in rows] == [{"answer": 0.5}, {}] * 3
