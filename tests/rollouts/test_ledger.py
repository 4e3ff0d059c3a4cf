"""The job directory: whatever instant the job dies at, opening it again gives the rows that were added."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.errors import ConfigError, RecordError
from gym_capture.rollouts.ledger import (
    ATTEMPTS_FILE,
    FAILURES_FILE,
    ROWS_FILE,
    AttemptRow,
    FailureRow,
    Ledger,
    RolloutRow,
)

JOB = {"job_id": "j", "samples": 2}


def row(sample: int, *, answer: str = "33", status: str = "finished") -> RolloutRow:
    assert status in ("finished", "failed")
    return RolloutRow(
        rollout_id=f"j.t.{sample}-a1",
        task_id="t",
        group_id="t",
        sample=sample,
        status="finished" if status == "finished" else "failed",
        reward=0.5,
        reward_components={"answer": 0.5},
        n_calls=3,
        attempt=1,
        answer=answer,
        started_at=1.5,
        wall_s=2.5,
    )


def failure(attempt: int) -> FailureRow:
    return FailureRow(
        rollout_id=f"j.t.0-a{attempt}",
        task_id="t",
        sample=0,
        attempt=attempt,
        reason="connection",
        detail="refused",
        retryable=True,
        n_calls=0,
        at=1.0,
    )


def began(attempt: int, *, sample: int = 0) -> AttemptRow:
    return AttemptRow(rollout_id=f"j.t.{sample}-a{attempt}", task_id="t", sample=sample, attempt=attempt, at=1.0)


async def test_an_attempt_is_on_disk_before_it_plays_and_those_that_begin_together_share_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(tmp_path, JOB) as ledger:
        synced: list[int] = []
        sync = os.fsync

        def watched(fd: int) -> None:
            sync(fd)
            synced.append(fd)

        monkeypatch.setattr(os, "fsync", watched)

        async def begin(sample: int) -> None:
            await ledger.begin(began(1, sample=sample))
            assert f'"sample":{sample},' in (tmp_path / ATTEMPTS_FILE).read_text()
            assert synced

        await asyncio.gather(*map(begin, range(50)))
        assert len(synced) == 1
        await ledger.begin(began(2, sample=7))
        assert len(synced) == 2
    with Ledger(tmp_path, JOB) as ledger:
        assert ledger.attempts == {("t", sample): 2 if sample == 7 else 1 for sample in range(50)}


async def test_no_attempt_plays_that_a_full_disk_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Ledger(tmp_path, JOB) as ledger:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", full)
            ended = await asyncio.gather(*(ledger.begin(began(1, sample=n)) for n in range(3)), return_exceptions=True)
        assert [type(each) for each in ended] == [ConfigError] * 3
        assert (tmp_path / ATTEMPTS_FILE).read_bytes() == b""


def test_rows_and_failures_come_back(tmp_path: Path) -> None:
    with Ledger(tmp_path, JOB) as ledger:
        ledger.add_row(row(0))
        ledger.add_failure(failure(1))
    with Ledger(tmp_path, JOB) as ledger:
        assert ledger.rows == {("t", 0): row(0)}
        assert ledger.failures == [failure(1)]


@settings(max_examples=40, deadline=None)
@given(answers=st.lists(st.text(max_size=12), min_size=1, max_size=4), data=st.data())
def test_a_file_cut_at_any_byte_keeps_every_whole_row(
    tmp_path_factory: pytest.TempPathFactory, answers: list[str], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("job")
    rows = [row(sample, answer=answer) for sample, answer in enumerate(answers)]
    with Ledger(directory, JOB) as ledger:
        for each in rows:
            ledger.add_row(each)
    path = directory / ROWS_FILE
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = rows[: whole[:cut].count(b"\n")]
    with Ledger(directory, JOB) as ledger:
        assert list(ledger.rows.values()) == kept
        ledger.add_row(row(99))
    with Ledger(directory, JOB) as ledger:
        assert list(ledger.rows.values()) == [*kept, row(99)]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"rollout_id": "x"}', '{"unknown": 1}'])
@pytest.mark.parametrize("file", [ROWS_FILE, FAILURES_FILE])
def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, file: str, line: str) -> None:
    with Ledger(tmp_path, JOB) as ledger:
        ledger.add_row(row(0))
        ledger.add_failure(failure(1))
    with (tmp_path / file).open("a") as damaged:
        damaged.write(f"{line}\n")
    with pytest.raises(RecordError, match=f"{file}, line 2"):
        Ledger(tmp_path, JOB)


@pytest.mark.parametrize("name", ["task_id", "sample", "attempt"])
async def test_a_line_that_says_of_no_rollout_which_it_is_is_damaged(tmp_path: Path, name: str) -> None:
    with Ledger(tmp_path, JOB) as ledger:
        await ledger.begin(began(1))
    begun = json.loads((tmp_path / ATTEMPTS_FILE).read_text())
    (tmp_path / ATTEMPTS_FILE).write_text(json.dumps({**begun, name: ["t"]}) + "\n")
    with pytest.raises(RecordError, match=f"{ATTEMPTS_FILE}, line 1: cannot be read: task_id must be"):
        Ledger(tmp_path, JOB)


def test_no_number_of_an_attempt_comes_twice_should_the_file_of_them_be_lost(tmp_path: Path) -> None:
    with Ledger(tmp_path, JOB) as ledger:
        ledger.add_failure(failure(4))
        ledger.add_row(row(1))
    (tmp_path / ATTEMPTS_FILE).unlink()
    with Ledger(tmp_path, JOB) as ledger:
        assert ledger.attempts == {("t", 0): 4, ("t", 1): 1}


async def test_rows_of_nobody_knows_which_job_count_for_none(tmp_path: Path) -> None:
    with Ledger(tmp_path / "rows", JOB) as ledger:
        ledger.add_row(row(0))
    with Ledger(tmp_path / "attempts", JOB) as ledger:
        await ledger.begin(began(1))
    with Ledger(tmp_path / "neither", JOB):
        pass
    for directory in ("rows", "attempts", "neither"):
        (tmp_path / directory / "job.json").unlink()
    for directory in ("rows", "attempts"):
        with pytest.raises(ConfigError, match=r"and no job\.json: nobody knows which job that is of"):
            Ledger(tmp_path / directory, JOB)
    with Ledger(tmp_path / "neither", JOB):
        pass


def test_forgotten_rows_leave_the_file_and_the_others_stay(tmp_path: Path) -> None:
    with Ledger(tmp_path, JOB) as ledger:
        for sample in range(3):
            ledger.add_row(row(sample))
        ledger.forget([("t", 1)])
        ledger.add_row(row(3))
    with Ledger(tmp_path, JOB) as ledger:
        assert list(ledger.rows) == [("t", 0), ("t", 2), ("t", 3)]


def test_another_job_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    with Ledger(tmp_path, JOB):
        pass
    with pytest.raises(ConfigError, match="samples: 2 -> 3"):
        Ledger(tmp_path, {**JOB, "samples": 3})
    with Ledger(tmp_path, JOB):
        pass


def test_one_directory_has_one_writer(tmp_path: Path) -> None:
    with Ledger(tmp_path, JOB), pytest.raises(ConfigError, match="another rollout job"):
        Ledger(tmp_path, JOB)
    with Ledger(tmp_path, JOB):
        pass


def test_a_job_s_files_are_listed_on_disk_before_it_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[set[str]] = []
    sync = os.fsync

    def watched(fd: int) -> None:
        sync(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            listed.append(set(os.listdir(fd)))

    monkeypatch.setattr(os, "fsync", watched)
    with Ledger(tmp_path / "job", JOB):
        assert listed[-1] == {"job.json", "attempts.jsonl", "rollouts.jsonl", "failures.jsonl", "lock"}
