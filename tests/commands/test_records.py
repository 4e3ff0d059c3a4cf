"""`gym-capture records` over state directories of a graph, while a store has them open and after."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gym_capture import cli
from gym_capture.build.builder import build
from gym_capture.capture.operations import Begin, Clear, Commit, Drop
from gym_capture.capture.records import Continues, TokenEntry
from gym_capture.commands.records import log_directories
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.conformance.support import run_call
from gym_capture.data.schema import SCHEMA, rows, to_table
from gym_capture.errors import ConfigError
from gym_capture.serving.config import StateArgs
from gym_capture.stores.inspect import read_snapshots
from gym_capture.stores.log import LogStore
from gym_capture.stores.replay import read_segments
from gym_capture.stores.segments import segment_path


def records(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["records", *map(str, arguments)])
    return int(stop.value.code or 0)


async def continue_call(store: LogStore, parent: TokenEntry, call_id: str) -> TokenEntry:
    epoch = await store.write(Begin(sample_intent(parent.rollout_id, call_id)))
    entry = sample_entry(
        parent.rollout_id,
        call_id,
        prompt=[*parent.cumulative_ids().tolist(), 7],
        parent=Continues(parent.model_call_id, parent.cum_len),
    )
    await store.write(Commit(entry, epoch=epoch))
    return entry


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two shards: r1 has two calls, r2 lost one, r3 is as it should be, r4 was consumed and kept."""

    async def write() -> None:
        first = await LogStore.open(tmp_path / "state" / "shard-0000", keep_records=True)
        entry, _ = await run_call(first, "r1", "c1")
        await continue_call(first, entry, "c2")
        await run_call(first, "r2", "c1")
        for lost in ("x", "y"):
            await first.write(Begin(sample_intent("r2", lost)))
        await run_call(first, "r4", "c1")
        snapshot = await first.freeze("r4")
        await first.write(Drop("r4", snapshot.snapshot_id, snapshot.version))
        await first.close()
        second = await LogStore.open(tmp_path / "state" / "shard-0001")
        await run_call(second, "r3", "c1")
        await second.close()

    asyncio.run(write())
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def damage(shard: Path, frame: int) -> None:
    (segment,) = read_segments(shard)
    data = bytearray(segment.path.read_bytes())
    data[segment.frames[frame].offset + segment.frames[frame].size - 10] ^= 1
    segment.path.write_bytes(data)


# --- list --------------------------------------------------------------------------------------------------------


def test_rollouts_are_listed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert records("list", state) == 0
    shown = capsys.readouterr()
    assert [line.split("\t") for line in shown.out.splitlines()] == [
        ["rollout", "calls", "generated ids", "version", "incomplete", "problems", "last call"],
        ["r1", "2", "4", "4", "", "", "2023-11-14 22:13:20+00:00"],
        ["r2", "1", "2", "4", "dangling_intent 2x", "", "2023-11-14 22:13:20+00:00"],
        ["r3", "1", "2", "2", "", "", "2023-11-14 22:13:20+00:00"],
    ]
    assert shown.err.startswith("3 rollouts, 1 consumed and kept; 2 logs")
    assert f"`gym-capture inspect r2 {state}` says what is amiss" in shown.err


@pytest.mark.parametrize("force_color", [{}, {"FORCE_COLOR": "1"}])
async def test_an_id_is_never_cut_short(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    force_color: dict[str, str],
) -> None:
    ids = [f"{'long-job-name-' * 8}{sample}" for sample in range(2)]

    async def write() -> None:
        store = await LogStore.open(tmp_path / "shard-0000")
        for rollout_id in ids:
            await run_call(store, rollout_id, "c1")
        await store.close()

    await write()
    for name, value in ({"COLUMNS": "40"} | force_color).items():
        monkeypatch.setenv(name, value)
    assert records("list", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [sum(rollout_id in line for line in lines) for rollout_id in ids] == [1, 1]
    assert any("│" in line for line in lines) == bool(force_color)


async def test_without_a_directory_the_records_of_a_graph_that_names_none_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert records("list") == 2
    assert "does not exist" in capsys.readouterr().err
    store = await LogStore.open(StateArgs().directory.expanduser() / "shard-0000")
    await run_call(store, "r1", "c1")
    await store.close()
    assert records("list") == records("verify") == records("export", "--out", tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("r1\t1\t")
    assert records("list", "--help") == 0
    assert "[default: (~/.cache/gym-capture/records)]" in " ".join(capsys.readouterr().out.split())


def test_one_shard_is_a_log_of_its_own_and_json_is_for_machines(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert records("list", state / "shard-0000", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "rollout_id": "r1",
        "calls": 2,
        "generated_ids": 4,
        "version": 4,
        "incomplete": [],
        "problems": [],
        "last_call_at": 1_700_000_000.25,
    }
    assert second["incomplete"] == ["dangling_intent:x", "dangling_intent:y"]


def test_a_damaged_log_is_listed_and_says_so(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(state / "shard-0000", 1)
    assert records("list", state) == 0
    shown = capsys.readouterr()
    assert "corrupt_log" in shown.out
    assert f"damaged: `gym-capture records verify {state}` says where" in shown.err


async def test_shards_without_records_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await (await LogStore.open(tmp_path / "shard-0000")).close()
    assert records("list", tmp_path) == records("verify", tmp_path) == 0
    assert "0 rollouts; 1 log" in capsys.readouterr().err


# --- verify ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_log_that_may_not_be_read_is_not_called_sound(
    command: str, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listdir = os.listdir

    def refused(directory: Path) -> list[str]:
        if Path(directory).name == "shard-0001":
            raise PermissionError(13, "Permission denied", str(directory))
        return listdir(directory)

    monkeypatch.setattr(os, "listdir", refused)  # the tests may run as root, whom no mode refuses
    assert records(command, state) == 2
    assert "shard-0001 cannot be read: [Errno 13] Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list"], ["verify"], ["export", "--out", "out"]])
def test_a_fifo_among_the_segments_is_one_line_and_nobody_waits(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(state)
    os.mkfifo(segment_path(state / "shard-0000", 9_999))
    (state / "shard-0000" / "segment-of-mine.log").touch()  # somebody's own
    assert records(*arguments, state) == 2
    assert "is a FIFO, not a regular file" in capsys.readouterr().err
    assert not (state / "out").exists()


def test_a_sound_state_is_verified(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert records("verify", state) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in lines] == [
        ["sound", str(state / "shard-0000")],
        ["sound", str(state / "shard-0001")],
    ]


def test_damage_is_found_and_exits_with_1(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(state / "shard-0000", 1)
    with segment_path(state / "shard-0001", 1).open("ab") as file:
        file.write(b"torn")
    assert records("verify", state) == 1
    shown = capsys.readouterr().out
    assert "corrupt: segment 1, bytes " in shown
    assert "(rollout r1, call c1)" in shown
    assert "masks 1 rollouts: r1" in shown
    assert "torn_tail: segment 1, bytes " in shown
    assert records("verify", state, "--json") == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["is_sound"], first["findings"][0]["kind"], first["masked_rollouts"]) == (False, "corrupt", ["r1"])
    assert second["findings"][0]["kind"] == "torn_tail"


# --- export ------------------------------------------------------------------------------------------------------


def test_building_the_export_gives_the_trajectories_of_the_log(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert records("export", state, "--out", tmp_path / "captures") == 0
    assert "3 rollouts (1 of them incomplete or with problems), 4 calls, 8 generated ids" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["build", str(tmp_path / "captures"), "--out", str(tmp_path / "built")])
    from_log = [
        to_table(rows(build(snapshot), snapshot=snapshot, group_id=snapshot.rollout_id, reward=None))
        for shard in sorted(state.iterdir())
        for snapshot in read_snapshots(shard)
    ]
    built = pq.read_table(tmp_path / "built" / "part-00000.parquet")
    assert built.schema.equals(SCHEMA)
    said_of_groups = ["prefix_trajectory_id", "prefix_length"]  # which `rows` of one rollout does not know
    assert built.drop_columns(said_of_groups).equals(pa.concat_tables(from_log).drop_columns(said_of_groups))


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_calls_are_exported_as_rows(format_: str, state: Path, tmp_path: Path) -> None:
    assert records("export", state, "--format", format_, "--out", tmp_path / "out", "--rollout", "r1, r3") == 0
    if format_ == "parquet":
        calls = pq.read_table(tmp_path / "out" / "calls.parquet").to_pylist()
    else:
        calls = [json.loads(line) for line in (tmp_path / "out" / "calls.jsonl").read_text().splitlines()]
    assert [(call["rollout_id"], call["model_call_id"], call["prompt_offset"]) for call in calls] == [
        ("r1", "c1", 0),
        ("r1", "c2", 5),
        ("r3", "c1", 0),
    ]


def test_a_running_store_is_exported(state: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await LogStore.open(state / "shard-0001")
        await run_call(store, "r5", "c1")
        before = files(state)
        arguments = ("export", state, "--out", tmp_path / "out", "--rollout", "r5")
        assert await asyncio.to_thread(records_in_thread, *arguments) == 0
        assert files(state) == before
        await run_call(store, "r6", "c1")
        await store.close()

    asyncio.run(scenario())
    assert [path.name for path in (tmp_path / "out").glob("*.jsonl")] == ["r5.tokens.jsonl"]


def records_in_thread(*arguments: object) -> int:
    """The command without the signal handlers, which only the main thread can set."""
    from typer.testing import CliRunner

    from gym_capture.commands.records import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code


def test_what_goes_away_meanwhile_is_left_out_and_counted(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gym_capture.data.record_files import _NemoGymFiles

    add = _NemoGymFiles.add

    async def consume() -> None:
        store = await LogStore.open(state / "shard-0001")
        await store.write(Clear("r3"))
        await store.close()

    def add_and_consume(self: _NemoGymFiles, *arguments: object) -> None:
        add(self, *arguments)  # type: ignore[arg-type]
        asyncio.run(consume())

    monkeypatch.setattr(_NemoGymFiles, "add", add_and_consume)
    assert records("export", state, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "2 rollouts (1 of them" in shown
    assert "warning: 1 rollouts were consumed or cleared meanwhile and are left out" in shown


async def test_a_segment_that_compaction_deletes_meanwhile_is_no_error(tmp_path: Path) -> None:
    from gym_capture.commands.records import live_snapshots, scan_logs

    async def scenario() -> list[str]:
        store = await LogStore.open(tmp_path / "shard-0000", segment_bytes=1)
        for rollout_id in ("a", "b", "c", "d"):
            await run_call(store, rollout_id, "c1")
        reading: Iterator[object] = live_snapshots(scan_logs(tmp_path))
        first = next(reading)
        for path in sorted((tmp_path / "shard-0000").glob("segment-*")):
            # As compaction does it: what stood there is written behind everything else, and the segment goes.
            if path.name < "segment-0000000005.log":
                newest = 100 + int(path.stem[-10:])
                path.rename(segment_path(tmp_path / "shard-0000", newest))
        rest = list(reading)
        await store.close()
        return [snapshot.rollout_id for snapshot in (first, *rest)]  # type: ignore[attr-defined]

    assert await scenario() == ["a", "b", "c", "d"]


# --- what cannot work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "nowhere"], "'nowhere' does not exist"),
        (["list", "empty"], "empty is not a log"),
        (["verify", "empty"], "empty is not a log"),
        (["export", "empty", "--out", "out"], "empty is not a log"),
        (["export", "state"], "--out"),
        (["export", "state", "--out", "out", "--format", "csv"], "'csv' is not one of"),
        (["export", "state", "--out", "out", "--rollout", "r11"], "no such rollout: 'r11'; did you mean 'r1'?"),
        (["export", "state", "--out", "out", "--rollout", "r4"], "no such rollout: 'r4'; it was consumed."),
        (["export", "state", "--out", "out", "--rollout", "x,y", "--rollout", "z"], "'x' and 2 more"),
        (["export", "state", "--out", "full"], "full already holds an export (r.tokens.jsonl)"),
        (["list", "newer"], "newer: a log segment has format version 9"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    arguments: list[str],
    message: str,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "full", "newer"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "r.tokens.jsonl").touch()
    header = segment_path(state / "shard-0000", 1).read_bytes()[:32]
    segment_path(tmp_path / "newer", 1).write_bytes(newer(header))
    assert records(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def newer(header: bytes) -> bytes:
    """A segment's header as version 9 would write it."""
    packed = header[:8] + (9).to_bytes(2, "little") + header[10:28]
    return (packed + struct.pack("<I", zlib.crc32(packed))) * 2


def test_a_newer_log_is_a_finding_of_verify(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segment_path(state / "shard-0001", 1)
    data = path.read_bytes()
    path.write_bytes(newer(data[:32]) + data[64:])
    assert records("verify", state) == 1
    assert "newer_version: segment 1" in capsys.readouterr().out


async def test_a_rollout_in_two_logs_is_not_written_twice(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await LogStore.open(state / "shard-0001")
    await run_call(store, "r1", "c1")
    await store.close()
    assert records("export", state, "--out", tmp_path / "out") == 2
    assert "'r1' is in two logs" in capsys.readouterr().err
    assert records("export", state, "--out", tmp_path / "out", "--rollout", "r2,r3") == 0


def test_files_beside_segments_do_not_make_a_log(tmp_path: Path) -> None:
    (tmp_path / "segment-of-mine.log").touch()
    with pytest.raises(ConfigError, match="is not a log"):
        log_directories(tmp_path)
