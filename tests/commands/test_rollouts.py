"""`rollouts run`: what it would run, what it says while it runs and when it ends, whoever ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from openai.types.responses import Response

from gym_capture import cli
from gym_capture.commands.fence import Fence
from gym_capture.commands.playing import id_of
from gym_capture.commands.rollouts import built_line, summarized
from gym_capture.data.group_files import StreamReport
from gym_capture.data.groups import RolloutSummary
from gym_capture.data.report import report
from gym_capture.data.sources import SourceSpec
from gym_capture.errors import RecordError
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollouts.job import JobSummary
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.stores.memory import MemoryStore
from tests.data import made_rollouts
from tests.rollouts.scripted_server import Call, serving, solve
from tests.rollouts.unseen import Unseen
from trainer_bridge.finished import FinishedRollout
from trainer_bridge.nemo_rl import contiguity_walk, project_group
from trainer_bridge.stream import parquet_batches, read_rollouts


def row(sample: int, *, failed: bool = False) -> RolloutRow:
    return RolloutRow(
        rollout_id=f"j.t.{sample}",
        task_id="t",
        group_id="t",
        sample=sample,
        status="failed" if failed else "finished",
        reward=None if failed else 0.5,
        n_calls=3,
        attempt=1,
        error="connection" if failed else None,
        detail="nobody\nthere" if failed else None,
        started_at=0.0,
        wall_s=1.0,
    )


def test_a_job_that_ended_is_told_in_one_line() -> None:
    rows = (row(0), row(1, failed=True), row(2))
    summary = JobSummary(rows, resumed=0, failures=Counter(connection=3), left_running=1)
    assert summarized(summary, "http://here") == (
        "2 of 3 rollouts finished; 1 failed for good; failed attempts: connection 3x; "
        "the first to fail, j.t.1: nobody there; calls could not connect to http://here: is `serve run` still up?; "
        "1 agents or environments did not end when they were cancelled"
    )


def test_a_job_of_which_everything_failed_before_says_what_to_do() -> None:
    line = summarized(JobSummary((row(0, failed=True),), resumed=1, failures=Counter(refused=1)), "http://here")
    assert line == (
        "0 of 1 rollouts finished; 1 failed for good; 1 were over before this run; failed attempts: refused 1x; "
        "the first to fail, j.t.0: nobody there; nothing was left to play: name another --out to start anew"
    )


@pytest.mark.parametrize(("out", "where"), [("job/trajectories", "job"), ("elsewhere", "elsewhere")])
def test_what_was_masked_is_named_with_the_command_that_says_why(out: str, where: str) -> None:
    masks = (("j.t.1", ("incomplete:failed",)), ("j.t.2", ("no_calls",)), ("j.t.3", ("no_calls",)), ("j.t.0", ()))
    built = report([name for name, _ in masks], [summary(name, reasons) for name, reasons in masks])
    line = built_line(StreamReport(built=built, kept=0, changed=()), out, Path("job"))
    assert "1 of 4 rollouts to train on; masked: no_calls 2x, incomplete 1x; " in line
    assert f"`gym-capture inspect j.t.2 {where}` says why" in line


def summary(rollout_id: str, mask_reasons: tuple[str, ...]) -> RolloutSummary:
    return RolloutSummary(
        rollout_id=rollout_id,
        group_id="t",
        masked=bool(mask_reasons),
        mask_reasons=mask_reasons,
        missing=False,
        trajectories=1,
        token_ids=9,
        generated_tokens_captured=4,
        generated_tokens_delivered=4,
        excluded_tokens={},
        first_prompt=None,
        snapshot_id="s",
        snapshot_version=1,
    )


def test_a_resumed_job_says_so() -> None:
    assert summarized(JobSummary((row(0), row(1)), resumed=1, failures=Counter()), "http://here") == (
        "2 of 2 rollouts finished; 1 were over before this run"
    )


def test_jobs_in_folders_of_one_name_have_rollouts_of_their_own_and_a_resumed_one_keeps_its(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "job", tmp_path / "b" / "job"
    ids = [id_of(first), id_of(second)]
    assert ids[0] != ids[1]
    assert all(job_id.startswith("job-") for job_id in ids)
    first.mkdir(parents=True)
    (first / "job.json").write_text(json.dumps({"job_id": ids[0], "format_version": 2}), encoding="utf-8")
    assert id_of(first) == ids[0]


# --- the command, against a scripted server --------------------------------------------------------------------------

JOB = """
format_version: 1
out: job
environment: {name: register}
tasks: {count: 2}
samples: 2
harness: {name: tool-loop, max_tokens: 64}
limits: {retry_wait_s: 0}
"""


async def counted(rollout_ids: Sequence[str]) -> list[RolloutCounts]:
    """The same of each rollout."""
    return [RolloutCounts(3, 30, 2, 2, flaws=int(rollout_id.endswith("1.1-a1"))) for rollout_id in rollout_ids]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a job file; state actors that have nothing to clear and nothing to close."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gym_capture.commands.fence.connected_fence", lambda *_: Fence(MemoryStore()))
    monkeypatch.setattr("gym_capture.commands.playing.recorded", lambda *_: (counted, Unseen()))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def run_command(*arguments: str, script: Callable[[Call], Awaitable[Any]] = solve) -> int:
    """The exit code of `rollouts run job.yaml` at a server that plays `script`."""

    async def run() -> int:
        async with serving(script) as server:
            command = ["rollouts", "run", "job.yaml", "--url", server.url, *arguments]
            return await asyncio.to_thread(ended, command)

    return asyncio.run(run())


def ended(command: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    return int(stop.value.code or 0)


@pytest.fixture
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own signals need the main thread, which the server has."""
    monkeypatch.setattr("gym_capture.cli._terminate_like_an_interrupt", lambda: lambda: False)


@pytest.mark.usefixtures("in_a_thread")
def test_a_job_file_is_played_and_goes_on_with_other_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--set", "samples=1", "--json") == 0
    output = capsys.readouterr()
    last = json.loads(output.out.splitlines()[-1])
    assert (last["total"], last["done"], last["failed"], last["mean_reward"]) == (2, 2, 0, 1.0)
    assert (last["calls"], last["generated_tokens"]) == (6, 60)
    assert (last["eligible_links"], last["contiguous_links"], last["masked"], last["built"]) == (4, 4, 0, None)
    recorded = [json.loads(line)["recorded"] for line in (here / "job" / "rollouts.jsonl").read_text().splitlines()]
    links = {"eligible_links": 2, "contiguous_links": 2}
    counts = {"calls": 3, "generated_tokens": 30, **links, "flaws": 0, "timed_puts": 0, "put_s": 0.0}
    assert recorded == [counts, counts]
    assert output.err.startswith("2 of 2 rollouts finished")
    settings = json.loads((here / "job" / "job.json").read_text())
    assert settings["harness"] == {"name": "tool-loop", "max_tokens": 64}
    # Where the graph is and how many play at a time decide nothing of what is played.
    assert run_command("--set", "samples=1", "--set", "limits.concurrency=2") == 0
    assert "2 were over before this run" in capsys.readouterr().err
    assert run_command("--set", "samples=1", "--max-tokens", "65") == 2
    assert "job holds another job: harness.max_tokens: 64 -> 65" in capsys.readouterr().err


@pytest.mark.usefixtures("in_a_thread")
def test_groups_are_built_while_the_job_plays_and_once(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SourceSpec(import_path=made_rollouts.IMPORT_PATH)
    monkeypatch.setattr("gym_capture.commands.playing.records_of", lambda namespace: made)
    called: list[str] = []

    async def looking(call: Call) -> Any:
        called.append(call.rollout_id)
        while len(set(called)) == 3 and not list(here.glob("out/part-*.parquet")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the first group appears while the second plays, or never
        return await solve(call)

    assert run_command("--build", "out", "--concurrency", "1", "--json", script=looking) == 0
    output = capsys.readouterr()
    assert "built into out: 2 groups, 4 trajectories; 4 of 4 rollouts to train on\n" in output.err
    built = {"groups": 2, "rollouts": 4, "masked": 0, "trajectories": 4}
    assert json.loads(output.out.splitlines()[-1])["built"] == built
    rollouts = list(read_rollouts(parquet_batches(here / "out")))
    assert len({rollout.group_id for rollout in rollouts}) == 2
    assert all(rollout.advantage is not None for rollout in rollouts)
    rows = [json.loads(line) for line in (here / "job" / "rows.jsonl").read_text().splitlines()]
    assert {row["rollout_id"] for row in rows} == {rollout.rollout_id for rollout in rollouts}
    indices = {(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows}
    assert indices == {(0, 0), (0, 1), (1, 0), (1, 1)}
    over_at = {
        row["rollout_id"]: row["started_at"] + row["wall_s"]
        for row in map(json.loads, (here / "job" / "rollouts.jsonl").read_text().splitlines())
    }
    for row in rows:
        Response.model_validate(row["response"])
        assert row["response"]["created_at"] == int(over_at[row["rollout_id"]]) > 0
        assert row["agent_ref"]["name"] == "tool-loop"
        assert row["responses_create_params"]["input"][-1]["role"] == "user"
        assert {tool["name"] for tool in row["responses_create_params"]["tools"]} == {"add", "multiply"}
        assert row["_ng_token_capture"]["output"] == "merged"
        contiguity_walk(row["response"]["output"])
    table = pq.read_table(here / "job" / "rows.parquet")
    assert table.column("rollout_id").to_pylist() == [row["rollout_id"] for row in rows]
    (here / "job" / "rows.jsonl").unlink()  # as if it had been killed before they were written
    parts = {path: path.stat().st_mtime_ns for path in here.glob("out/part-*")}
    assert run_command("--build", "out", "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1])["built"] == built
    again = [json.loads(line) for line in (here / "job" / "rows.jsonl").read_text().splitlines()]
    assert sorted(again, key=lambda row: row["rollout_id"]) == sorted(rows, key=lambda row: row["rollout_id"])
    assert "2 groups were built before this run\n" in output.err
    assert {path: path.stat().st_mtime_ns for path in here.glob("out/part-*")} == parts


@pytest.mark.usefixtures("in_a_thread")
def test_a_group_whose_rows_cannot_be_made_costs_no_other_its_rows(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SourceSpec(import_path=made_rollouts.IMPORT_PATH)
    monkeypatch.setattr("gym_capture.commands.playing.records_of", lambda namespace: made)
    left: list[str] = []

    def projected(finished: Sequence[FinishedRollout]) -> list[dict[str, Any]]:
        left.append(finished[0].group_id)
        if len(left) == 1:
            raise RecordError("is not to be projected", field="reward", rollout_id=finished[0].rollout_id)
        return project_group(finished)

    monkeypatch.setattr("gym_capture.commands.job_rows.project_group", projected)
    assert run_command("--build", "out") == 0
    rows = [json.loads(line) for line in (here / "job" / "rows.jsonl").read_text().splitlines()]
    assert {row["group_id"] for row in rows} == {left[1]}
    assert f"warning: group {left[0]} has its trajectories, and no rows: is not to be" in capsys.readouterr().err
    assert len(list(here.glob("out/part-*"))) == 2
    assert run_command("--build", "out") == 0  # and gets them, once that can be done
    rows = [json.loads(line) for line in (here / "job" / "rows.jsonl").read_text().splitlines()]
    assert Counter(row["group_id"] for row in rows) == dict.fromkeys(left[:2], 2)


@pytest.mark.usefixtures("in_a_thread")
def test_failed_rollouts_have_no_reward_and_the_command_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from aiohttp import web

    async def second_call_refused(call: Call) -> web.Response:
        if any(message["role"] == "tool" for message in call.body["messages"]):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return await solve(call)

    assert run_command(script=second_call_refused) == 1
    rows = [json.loads(line) for line in (here / "job" / "rollouts.jsonl").read_text().splitlines()]
    assert {(each["reward"], each["error"], each["attempt"], each["failed_call"]) for each in rows} == {
        (None, "refused", 1, 2)
    }
    error = capsys.readouterr().err
    assert "4 failed (masked)" in error
    assert "failed attempts: refused 4x" in error


def test_a_dry_run_says_what_would_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*arguments: str) -> dict[str, str]:
        assert ended(["rollouts", "run", "job.yaml", "--dry-run", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:12].strip(): line[13:] for line in lines}

    plan = planned("--set", "samples=8", "--job-id", "mine")
    assert plan["out"] == "job: a new job"
    assert plan["rollouts"] == "16: 2 tasks made up with seed 0 x 8 samples"
    assert plan["ids"] == "mine.register-0-0.0-a1, mine.register-0-0.1-a1, mine.register-0-0.2-a1, ..."
    assert plan["endpoint"] == "http://127.0.0.1:8000, no token, Ray at auto"
    assert plan["environment"] == "register"
    assert plan["harness"] == "tool-loop max_tokens=64"
    assert plan["limits"].startswith("concurrency 8, max_attempts 3, rollout_timeout_s 600, close_timeout_s 10")
    assert "XXXXXXXX: a random part" in planned()["ids"]
    assert not (here / "job").exists()

    (here / "job").mkdir()
    (here / "job" / "job.json").write_text(json.dumps({"job_id": "job-1", "format_version": 2}))
    assert planned()["out"].startswith("job: REFUSED, it holds another job: environment.name: nothing -> ")


@pytest.mark.parametrize("options", [["--out", "file/job"], ["--build", "file/built"], ["--out", "/proc/job"]])
def test_a_dry_run_says_that_a_directory_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    (here / "file").touch()
    assert ended(["rollouts", "run", "job.yaml", "--dry-run", *options]) == 2
    assert options[1] in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["file", "job.yaml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_job_that_is_interrupted_says_in_one_line_what_is_kept_and_how_to_go_on(
    here: Path, number: signal.Signals
) -> None:
    script = """
        import sys
        from gym_capture import cli
        from gym_capture.commands import fence, playing
        from gym_capture.stores.memory import MemoryStore
        from tests.commands.test_rollouts import counted
        from tests.rollouts.unseen import Unseen

        fence.connected_fence = lambda *_: fence.Fence(MemoryStore())
        playing.recorded = lambda *_: (counted, Unseen())
        cli.main(["rollouts", "run", "job.yaml", "--concurrency", "1", "--url", sys.argv[1]])
    """

    async def run() -> tuple[int | None, str]:
        reached = asyncio.Event()

        async def third_hangs(call: Call) -> Any:
            if len({each.rollout_id for each in server.calls}) == 3:
                reached.set()
                await asyncio.Event().wait()
            return await solve(call)

        async with serving(third_hangs) as server:
            job = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", textwrap.dedent(script), server.url),
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            await reached.wait()
            job.send_signal(number)
            _, said = await job.communicate()
            return job.returncode, said.decode()

    code, said = await run()
    assert code == (130 if number == signal.SIGINT else 143)
    *_, last = said.splitlines()
    assert last == "interrupted: 2 of 4 rollouts are over and kept in job; the same command goes on with the others"
    assert "Traceback" not in said
    assert (here / "job" / "rollouts.jsonl").read_bytes().count(b"\n") == 2
