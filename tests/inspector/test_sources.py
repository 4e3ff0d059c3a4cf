"""What the inspector finds where it is pointed at, and what it says where it finds nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture.build.builder import BuildOptions
from gym_capture.capture.operations import Begin, Commit, Complete, Register
from gym_capture.capture.outcomes import Outcome, Registration, Standing
from gym_capture.capture.records import WeightSpan
from gym_capture.conformance import sample_intent
from gym_capture.data.annotations import Annotation, Annotator
from gym_capture.data.directory import build_directory
from gym_capture.data.record_files import open_files
from gym_capture.errors import ConfigError, GymCaptureError
from gym_capture.inspector.find import open_path
from gym_capture.inspector.job_source import JobSource
from gym_capture.inspector.library import Library
from gym_capture.inspector.log_source import LogSource
from gym_capture.inspector.parquet_source import ParquetSource
from gym_capture.inspector.seen import SeenRollout, TokenKind
from gym_capture.inspector.source import Basics, Look, Shows, Source, State
from gym_capture.inspector.state_source import StateSource
from gym_capture.inspector.table import Row
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.rollouts.ledger import AttemptRow, FailureRow, Ledger, RolloutRow
from gym_capture.stores.base import counts_of, standings_of
from gym_capture.stores.inspect import read_snapshots
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore
from gym_capture.stores.segments import segment_path
from tests.inspector.world import conversation, inspector, library_of, record, write_closed_world, write_world


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_closed_world(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def parquet(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "trajectories"
    build_directory(log, out=out, options=BuildOptions())
    return out


def table(source: Source) -> dict[str, Row]:
    return {row.rollout: row for row in library_of(source).rows()}


# --- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_shows_what_the_log_shows(log: Path, parquet: Path) -> None:
    source = open_path(parquet)
    assert isinstance(source, ParquetSource)
    assert source.found().startswith("4 trajectories in 1 Parquet files")
    by_rows, by_log = table(source), table(LogSource(log))
    same = ("group", "calls", "turns", "chains", "generated_tokens", "eligible_links", "exact_links", "reward")
    for name in ("one", "alone"):
        one, other = by_rows[name], by_log[name]
        assert [getattr(one, each) for each in same] == [getattr(other, each) for each in same]
        assert (one.prompt_tokens, one.weight_version_max) == (other.prompt_tokens, other.weight_version_max)
    # What is masked over how it ended is so in both.
    said = ("mask_reason", "trained_tokens", "generated_tokens")
    for name in ("one", "two", "three", "alone"):
        assert [getattr(by_rows[name], each) for each in said] == [getattr(by_log[name], each) for each in said]
    # Nobody said how it ended: it is compared with none, and masked.
    assert (by_rows["three"].mask_reason, by_rows["three"].trained_tokens) == ("missing_reward", 0)
    assert by_rows["two"].mask_reason == "incomplete:agent_failed"
    client = inspector(open_path(parquet))
    tokens = client.get("/api/rollouts/three/trajectories/0/tokens").json()
    assert {tokens["whys"][n] for n in tokens["why"] if n >= 0} == {"missing_reward"}
    assert client.get("/api/rollouts/one/calls/c2").json()["reply"]["text"] == "yes"
    assert client.get("/api/rollouts/one/trajectories").json()[0]["advantage"] is not None


def test_files_that_come_and_go_are_seen(parquet: Path, tmp_path: Path) -> None:
    (file,) = parquet.glob("*.parquet")
    (tmp_path / "part-00000.parquet").write_bytes(file.read_bytes())
    library = Library(open_path(tmp_path))
    (tmp_path / "part-00001.parquet").write_bytes(b"not yet whole")
    library.settle()
    assert len(library.rows()) == 4
    (tmp_path / "part-00000.parquet").unlink()
    library.settle()
    assert library.rows() == []
    assert library.rollout("one") is None
    (tmp_path / "part-00001.parquet").write_bytes(file.read_bytes())
    library.settle()
    assert len(library.rows()) == 4


def test_parquet_that_is_of_something_else_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["hi"]}), tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match="not a table of trajectories"):
        open_path(tmp_path)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"data\.parquet cannot be read"):
        open_path(tmp_path)


# --- NeMo Gym's captures ---------------------------------------------------------------------------------------------


def test_captures_of_nemo_gym(log: Path, tmp_path: Path) -> None:
    with open_files("nemo-gym", tmp_path, overwrite=False) as files:
        for snapshot in read_snapshots(log):
            files.add(snapshot)
    source = open_path(tmp_path)
    assert source.found() == f"4 rollouts that NeMo Gym captured, in {tmp_path}"
    found = table(source)
    assert (found["one"].trained_tokens, found["one"].calls, found["one"].state) == (5, 2, "finished")
    seen = source.read("one")
    assert seen is not None
    assert seen.trajectories[0].token_ids.size == 20
    assert source.read("../one") is None
    (tmp_path / "two.tokens.jsonl").write_bytes(b'{"broken\n')
    library = library_of(open_path(tmp_path))
    broken = library.row("two")
    assert broken is not None
    assert broken.mask_reason is not None
    assert broken.mask_reason.startswith("malformed_record")
    seen = library.rollout("two")
    assert seen is not None
    ((reason, (detail,)),) = seen.mask_details.items()
    assert reason in seen.mask_reasons
    assert detail.startswith("line 1 of two.tokens.jsonl: ")
    assert detail.count("line") == 1  # not the line of a parser, to which each line is a text of its own


def test_captures_that_are_compressed_are_not_passed_over_in_silence(log: Path, tmp_path: Path) -> None:
    with open_files("nemo-gym", tmp_path, overwrite=False) as files:
        for snapshot in read_snapshots(log):
            files.add(snapshot)
    (tmp_path / "five.tokens.jsonl.gz").touch()
    assert "1 files are compressed, and not read" in open_path(tmp_path).found()


@pytest.mark.parametrize(
    ("file", "named", "said"),
    [
        ("r.capture.jsonl", ".", "without token ids"),
        ("r.tokens.jsonl.gz", ".", "gunzip"),
        ("run/captures/r.tokens.jsonl", "run", "did you mean .*captures?"),
        ("r.tokens.jsonl", "r.tokens.jsonl", "name its directory"),
    ],
)
def test_who_names_what_is_beside_captures_is_told_what_to_name(
    tmp_path: Path, file: str, named: str, said: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=said):
        open_path(tmp_path / named)


def test_a_parent_that_a_record_names_is_what_its_prompt_is_compared_with(tmp_path: Path) -> None:
    lines = [
        capture("a", [1, 2], [3], parent_resolution="root"),
        capture("b", [9, 2, 3, 4], [5], parent_resolution="resolved", parent_call_id="a"),
    ]
    (tmp_path / "r.tokens.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    seen = library_of(open_path(tmp_path)).rollout("r")
    assert seen is not None
    (split,) = seen.splits
    assert (split.call_id, split.before, split.at, split.reason) == ("b", "a", 0, "parent_mismatch")
    assert (split.held.ids.tolist(), split.sent.ids.tolist()) == ([1, 2, 3], [9, 2, 3, 4])


def capture(call_id: str, prompt: list[int], generation: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "rollout_id": "r",
        "model_call_id": call_id,
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
        **fields,
    }


# --- jobs ------------------------------------------------------------------------------------------------------------


def row(rollout_id: str, sample: int, **fields: Any) -> RolloutRow:
    made = {"status": "finished", "reward": 1.0, "n_calls": 2, "attempt": 1, "started_at": 100.0, "wall_s": 5.0}
    return RolloutRow(rollout_id=rollout_id, task_id="t", group_id="t", sample=sample, **{**made, **fields})


async def begun(ledger: Ledger, rollout_id: str, sample: int, attempt: int = 1) -> None:
    await ledger.begin(AttemptRow(rollout_id=rollout_id, task_id="t", sample=sample, attempt=attempt, at=100.0))


async def test_a_job_its_records_and_what_was_built(log: Path, parquet: Path, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    with Ledger(directory, {"job_id": "job", "harness": {"name": "tool_agent"}}) as ledger:
        await begun(ledger, "one", 0)
        ledger.add_row(row("one", 0, recorded={"calls": 2, "timed_puts": 2, "put_s": 0.5}))
        await begun(ledger, "two-a1", 1)
        failure = FailureRow(
            rollout_id="two-a1", task_id="t", sample=1, attempt=1, reason="connection", detail="", retryable=True,
            n_calls=0, at=101.0,
        )  # fmt: skip
        ledger.add_failure(failure)
        await begun(ledger, "two", 1, attempt=2)
        source = open_path(directory, records=log)
        assert isinstance(source, JobSource)
        library = library_of(source)
        assert {each.rollout: each.state for each in library.rows()} == {"one": "finished", "two": "live"}
        assert source.is_live
        ledger.add_row(
            row(
                "two",
                1,
                status="failed",
                reward=None,
                error="agent_timeout",
                attempt=2,
                detail="no reply",
                failed_call="c3",
            )
        )
        library.settle()
    assert not source.is_live
    one, two = (library.row(name) for name in ("one", "two"))
    assert one is not None
    assert two is not None
    assert (one.harness, one.reward, one.finished_at, one.trained_tokens) == ("tool_agent", 1.0, 105.0, 5)
    assert (one.put_ms, two.put_ms) == (250.0, None)
    assert (two.state, two.mask_reason, two.attempt) == ("failed", "incomplete:agent_timeout", 2)
    seen = library.rollout("two")
    assert seen is not None
    assert seen.mask_details["incomplete:agent_timeout"] == ("no reply (call c3)",)
    assert seen.mask_reasons == ("incomplete:agent_timeout",)  # the ledger's word, and not that of the records
    assert not any((each.kinds == TokenKind.TRAINED).any() for each in seen.trajectories)
    # Without records: what was built, and of what was not, the row.
    (directory / "trajectories").mkdir()
    for file in parquet.glob("*.parquet"):
        (directory / "trajectories" / file.name).write_bytes(file.read_bytes())
    # A trainer's annotations are beside what it trained on.
    Annotator(directory / "trajectories").add(
        [Annotation(rollout="one", call="c1", name="difference", values=[0.5, -0.25], by="trainer")]
    )
    (directory / "run").mkdir()
    (directory / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "left_out/masked": 2}\nbroken\n')
    client = inspector(open_path(directory))
    found = client.get("/api/rollouts").json()["columns"]
    assert sorted(found["rollout"]) == ["one", "two"]
    differences = dict(zip(found["rollout"], found["logprob_diff"], strict=True))
    assert differences == {"one": 0.375, "two": None}
    assert client.get("/api/rollouts/one").json()["put_ms"] == 250.0
    assert client.get("/api/rollouts/one/trajectories").json()[0]["tokens"] == 20
    assert client.get("/api/source").json()["shows"] == {
        "records": False,
        "trajectories": True,
        "job": True,
        "annotations": True,
        "texts": True,
    }
    series = client.get("/api/series").json()["series"]
    assert (series["trainer/loss"]["x"], series["trainer/loss"]["y"]) == ([1], [0.5])


async def test_attempts_that_were_cut_with_their_job_are_not_live(tmp_path: Path) -> None:
    with Ledger(tmp_path / "job", {"job_id": "job"}) as ledger:
        await begun(ledger, "r", 0)
    found = table(open_path(tmp_path / "job"))
    assert (found["r"].state, found["r"].mask_reason) == ("failed", "incomplete:node_lost")
    answer = inspector(open_path(tmp_path / "job")).get("/api/rollouts/r")
    assert (answer.status_code, answer.json()["calls"]) == (200, [])


def test_a_ledger_with_odd_values_is_shown(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"job_id": "job", "format_version": 2}')
    odd = {"rollout_id": "odd", "group_id": 3, "sample": "x", "reward": "y", "started_at": [], "wall_s": None}
    lines = [odd, {"rollout_id": 7}, {"rollout_id": "more", "recorded": [], "reward": 1}, []]
    lines += [{"rollout_id": "timed", "recorded": {"timed_puts": 0, "put_s": 0.5}}]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "broken\n{")
    found = table(open_path(tmp_path))
    assert {name: (each.group, each.reward, each.finished_at) for name, each in found.items()} == {
        "odd": ("odd", None, None),
        "more": ("more", 1.0, None),
        "timed": ("timed", None, None),
    }
    assert [each.put_ms for each in found.values()] == [None, None, None]


def test_a_ledger_with_numbers_and_texts_without_end_is_shown(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"job_id": "job", "format_version": 2}')
    lines = [
        {"rollout_id": "a", "reward": 10**400, "sample": 10**40, "wall_s": float("inf"), "started_at": float("nan")},
        {"rollout_id": "b", "status": "failed", "error": "x" * 10_000, "recorded": {"calls": 10**60}},
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": "x", "a": 1}\n{"step": 2, "a": 3, "b": NaN}\n{"step": 1%s}\n' % ("0" * 400)
    )
    client = inspector(open_path(tmp_path))
    answer = client.get("/api/rollouts").json()
    assert answer["problem"] is None
    assert answer["columns"]["reward"] == [None, None]
    assert len(answer["columns"]["mask_reason"][1]) < 1_000
    assert {name: each["x"] for name, each in client.get("/api/series").json()["series"].items()} == {"trainer/a": [2]}


async def test_a_shard_that_is_new_is_followed_and_one_that_is_broken_holds_up_none(tmp_path: Path) -> None:
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / "segment-0000000001.log").mkdir()
    await (await write_world(tmp_path / "shard-1")).close()
    library = library_of(LogSource(tmp_path))
    first = library.table()
    assert len(first["columns"]["rollout"]) == 4
    assert "is a directory" in first["problem"]
    store = await LogStore.open(tmp_path / "shard-2")
    await record(store, conversation("fresh"))
    await store.close()
    library.settle()
    assert library.table(first["cursor"])["columns"]["rollout"] == ["fresh"]


async def test_a_log_that_was_begun_again_is_shown_and_the_old_one_is_gone(tmp_path: Path) -> None:
    await (await write_world(tmp_path)).close()
    library = library_of(LogSource(tmp_path))
    before = library.table()["cursor"]
    for path in tmp_path.iterdir():
        path.unlink()
    store = await LogStore.open(tmp_path)
    await record(store, conversation("fresh"))
    await store.close()
    library.settle()
    after = library.table(before)
    assert after["columns"]["rollout"] == ["fresh"]
    assert set(after["gone"]) == {"one", "two", "three", "alone"}


def test_records_go_with_a_job(log: Path) -> None:
    with pytest.raises(ConfigError, match="--records goes with a job's directory"):
        open_path(log, records=log)


# --- a graph ---------------------------------------------------------------------------------------------------------


class OneShard(MemoryStore):
    """A store that has the answers of the state actors."""

    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]:
        return [each._replace(timed_puts=each.calls, put_s=0.5) for each in await counts_of(self, rollout_ids)]

    async def standings(self) -> Sequence[Standing]:
        return await standings_of(self)


async def test_a_graph_is_asked_on_its_own_loop() -> None:
    state = OneShard()
    await state.write(Register("one", Registration(group_id="g")))
    for entry in conversation("one"):
        epoch = await state.write(Begin(sample_intent("one", entry.model_call_id)))
        await state.write(Commit(entry, epoch=epoch))
    times = iter([0.0, 0.5, 10.0])
    source = StateSource(state, asyncio.get_running_loop(), title="graph", clock=lambda: next(times))
    first = await asyncio.to_thread(source.look)
    (one,) = first.changed
    assert (one.group, one.state, one.calls, one.generated_tokens, one.exact_links) == ("g", "live", 2, 5, 1)
    assert one.put_ms == 250.0
    await state.write(Complete("one", Outcome(reward=1.0)))
    assert (await asyncio.to_thread(source.look)).changed == ()
    assert [each.state for each in (await asyncio.to_thread(source.look)).changed] == ["finished"]
    seen = await asyncio.to_thread(source.read, "one")
    assert seen is not None
    assert len(seen.calls) == 2
    assert await asyncio.to_thread(source.read, "nobody") is None


# --- what is not there, and what is damaged --------------------------------------------------------------------------


def test_what_is_nothing_to_look_into_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        open_path(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds nothing to look into"):
        open_path(tmp_path)
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(ConfigError, match=r"part-\*\.parquet"):
        open_path(tmp_path)
    with pytest.raises(ConfigError, match="holds nothing"):
        open_path(tmp_path / "notes.txt")
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(GymCaptureError, match=r"job\.json"):
        open_path(tmp_path)


async def test_a_damaged_log_is_shown_and_says_what_it_masks(tmp_path: Path) -> None:
    await (await write_world(tmp_path)).close()
    path = segment_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[data.rindex(b'"two"')] ^= 0xFF
    path.write_bytes(data)
    found = table(LogSource(tmp_path))
    masked = [name for name, each in found.items() if (each.mask_reason or "").startswith("corrupt_log")]
    assert masked == ["two"]


def test_a_log_that_cannot_be_read_is_said_and_does_not_end_the_inspector(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "segment-0000000001.log")
    client = inspector(LogSource(tmp_path))
    answer = client.get("/api/rollouts").json()
    assert "is a FIFO" in answer["problem"]
    assert answer["columns"]["rollout"] == []
    assert client.get("/api/rollouts/r").status_code == 404


class Failing(Source):
    """A source of which one rollout cannot be read."""

    kind = title = "failing"
    shows = Shows()

    def look(self) -> Look:
        return Look(changed=[Basics(rollout_id="bad", state=State.FINISHED), Basics(rollout_id="good")])

    def read(self, rollout_id: str) -> None:
        if rollout_id == "bad":
            raise ConfigError("it cannot be read")


def test_one_rollout_that_cannot_be_read_is_its_own_concern() -> None:
    library = Library(Failing())
    library.look()
    library.read_some()
    bad = library.row("bad")
    assert bad is not None
    assert bad.mask_reason == "unreadable"
    assert json.dumps(asdict(bad))


class GrowsWhileRead(Source):
    """What is added while a rollout is read for the first time is looked at before that read is over."""

    kind, title, shows, is_read_whole = "log", "growing", Shows(), False

    def __init__(self) -> None:
        self.library = Library(self)
        self.calls = 1

    def look(self) -> Look:
        return Look(changed=[Basics(rollout_id="r", state=State.FINISHED, calls=self.calls)])

    def read(self, rollout_id: str) -> SeenRollout:
        seen = SeenRollout(rollout_id=rollout_id, calls=(), trajectories=(), generated_tokens=self.calls)
        if self.calls == 1:
            self.calls = 2
            self.library.look()
        return seen


def test_a_rollout_that_grew_while_it_was_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    library = GrowsWhileRead().library
    monkeypatch.setattr(library, "wake", lambda: None)
    library.look()
    first, second = library.rollout("r"), library.rollout("r")
    assert first is not None
    assert second is not None
    assert (first.generated_tokens, second.generated_tokens) == (1, 2)
    row = library.row("r")
    assert row is not None
    assert row.generated_tokens == 2


async def test_a_weight_version_of_many_digits_is_a_name(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path)
    for rollout_id, version in (("r", "9" * 5_000), ("s", "7")):
        first = conversation(rollout_id)[0]
        policy = replace(first.policy, weight_versions=(WeightSpan(0, 3, version),))
        await record(store, [replace(first, policy=policy)])
    await store.close()
    found = inspector(LogSource(tmp_path)).get("/api/rollouts").json()["columns"]
    assert (found["rollout"], found["staleness"]) == (["r", "s"], [None, 0])
