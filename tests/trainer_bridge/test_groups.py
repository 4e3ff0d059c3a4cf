"""A stream of groups: bounded, fresh, and nothing trained twice or lost, wherever the trainer is killed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.capture.operations import Complete, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.conformance.support import run_call
from gym_capture.data import parts, recorded_groups
from gym_capture.data.group_stream import Tell
from gym_capture.data.schema import TRAJECTORY_SCHEMA_VERSION, VERSION_KEY
from gym_capture.data.sources import SourceSpec
from gym_capture.durable_files import replace_file
from gym_capture.errors import (
    ConfigError,
    RecordError,
    SchemaVersionError,
    StoreUnavailableError,
    StreamLostError,
)
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore
from tests.data import made_rollouts
from tests.rollouts import scripted_job
from trainer_bridge import id_ranges
from trainer_bridge.group_sources import ParquetGroups, PlayedGroups, RecordedGroups, Room
from trainer_bridge.groups import AsyncGroupStream, Group, GroupSource, GroupStream, Position, StreamOptions

from .test_stream import row, table

MADE = SourceSpec(import_path=made_rollouts.IMPORT_PATH)


def write_part(out: Path, number: int, *groups: str, samples: int = 2, **changes: Any) -> None:
    """A file of whole groups, as a job leaves it: it appears when it is whole."""
    rows = [row(f"{group}.{sample}", group_id=group, **changes) for group in groups for sample in range(samples)]
    pq.write_table(table(*rows), out / "new")
    (out / "new").rename(out / f"part-{number:05d}.parquet")


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.group_id for group in groups]


class Listed:
    """A source of groups that are there, which notes what is asked of it."""

    def __init__(self, *groups: Group, fails: Exception | None = None) -> None:
        self._groups = groups
        self._fails = fails
        self.late: list[str] = []
        self.built: list[str] = []
        self.retired: list[str] = []
        self.closed = False

    async def groups(self, settled: Set[str]) -> AsyncGenerator[Group]:
        for group in self._groups:
            if group.group_id not in settled:
                self.built.append(group.group_id)
                yield group
        if self._fails is not None:
            raise self._fails

    async def retire(self, consumed: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        self.retired += consumed
        return ()

    async def close(self) -> None:
        self.closed = True


def group(name: str, *, versions: Sequence[str | None] = ("7",), samples: int = 2) -> Group:
    spans = [{"start": 1, "end": 3, "call_id": "c", "weight_version": version} for version in versions]
    rows = [row(f"{name}.{sample}", group_id=name, spans=spans) for sample in range(samples)]
    return Group(group_id=name, table=table(*rows), snapshots={f"{name}.{n}": ("s", 1) for n in range(samples)})


# --- order, bounds, ends ---------------------------------------------------------------------------------------------


async def test_no_more_is_built_than_may_wait() -> None:
    source = Listed(*(group(f"g{n}") for n in range(9)))
    async with AsyncGroupStream(source, StreamOptions(ahead=3)) as stream:
        for taken in range(4):
            for _ in range(50):  # as often as the builder could want
                await asyncio.sleep(0)
            assert len(source.built) == taken + 3
            await anext(stream)
    assert source.closed


async def test_an_error_comes_behind_the_groups_before_it_and_stays() -> None:
    source = Listed(group("a"), group("b"), fails=ConfigError("the disk is full"))
    async with AsyncGroupStream(source) as stream:
        assert [(await anext(stream)).group_id, (await anext(stream)).group_id] == ["a", "b"]
        for _ in range(2):
            with pytest.raises(ConfigError, match="disk is full"):
                await anext(stream)
    assert source.closed


def test_a_loop_takes_the_same_groups_as_a_coroutine_and_ends_what_it_began() -> None:
    source = Listed(*(group(f"g{n}") for n in range(5)))
    threads = threading.active_count()
    with GroupStream(source) as stream:
        assert [ids(step) for step in stream.steps(4)] == [["g0", "g1"], ["g2", "g3"], ["g4"]]
        assert list(stream) == []
        assert stream.counts.handed_out == 5
    assert threading.active_count() == threads
    with pytest.raises(ConfigError, match="within `with stream`"):
        next(stream)


def test_a_step_has_the_rollouts_of_its_groups_with_their_advantages() -> None:
    with GroupStream(Listed(group("a"))) as stream:
        (step,) = stream.steps(1)
    assert [(each.rollout_id, each.advantage) for each in step[0].rollouts] == [("a.0", 0.5), ("a.1", 0.5)]


@pytest.mark.parametrize("options", [{"ahead": 0}, {"max_lag": -1}])
def test_options_that_cannot_work_are_named(options: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be at least"):
        StreamOptions(**options)
    with pytest.raises(ConfigError, match="give the stream `version`"):
        AsyncGroupStream(Listed(), StreamOptions(max_lag=1))


# --- age -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stale", "handed_out"), [("drop", ["new", "fresh"]), ("keep", ["old", "new", "mixed", "fresh"])]
)
def test_groups_that_are_too_old_are_dropped_or_kept_and_counted(stale: Any, handed_out: list[str]) -> None:
    at = 5
    groups = (
        group("old", versions=["3"]),
        group("new", versions=["4", "5"]),
        group("mixed", versions=["3", "5"]),
        group("fresh", versions=["6"]),
    )
    source = Listed(*groups)
    with GroupStream(source, StreamOptions(max_lag=1, stale=stale), version=lambda: at) as stream:
        found = list(stream)
        position = stream.trained(found)
        assert ids(found) == handed_out
        assert (stream.counts.dropped_as_stale, stream.counts.kept_although_stale) == (
            (2, 0) if stale == "drop" else (0, 2)
        )
        # What was dropped is settled, too: it does not come again, and its records go with the others'.
        assert position.settled == {"old", "new", "mixed", "fresh"}
        stream.acknowledge(position)
        assert sorted(source.retired) == sorted(f"{each.group_id}.{n}" for each in groups for n in range(2))


def test_age_is_that_of_the_moment_in_which_a_group_is_handed_out() -> None:
    at = [5]
    with GroupStream(
        Listed(*(group(f"g{n}") for n in range(3))), StreamOptions(ahead=3, max_lag=0), version=lambda: at[0]
    ) as stream:
        at[0] = 7
        assert next(stream).group_id == "g0"
        at[0] = 8  # the other two were built before
        assert list(stream) == []
        assert stream.counts.dropped_as_stale == 2


@pytest.mark.parametrize("versions", [[None], ["main"], []])
def test_groups_of_unknown_age_are_handed_out_and_counted(versions: list[str | None]) -> None:
    source = Listed(group("a", versions=versions))
    with GroupStream(source, StreamOptions(max_lag=0), version=lambda: 9) as stream:
        assert ids(list(stream)) == ["a"]
        assert stream.counts.of_unknown_age == len(versions)


# --- position --------------------------------------------------------------------------------------------------------


def test_records_go_when_a_position_that_has_their_group_is_acknowledged_and_not_before() -> None:
    source = Listed(group("a"), group("b"), group("c"))
    with GroupStream(source) as stream:
        first = stream.trained([next(stream)])
        second = stream.trained([next(stream)])
        assert source.retired == []
        stream.acknowledge(first)
        assert source.retired == ["a.0", "a.1"]
        stream.acknowledge(second)
        stream.acknowledge(second)
        assert source.retired == ["a.0", "a.1", "b.0", "b.1"]
        assert stream.counts.retired == 4


def test_what_was_trained_is_not_in_memory_until_it_is_acknowledged() -> None:
    """A checkpoint may be a thousand steps away."""
    with GroupStream(Listed(group("a"))) as stream:
        taken = next(stream)
        stream.trained([taken])
        (kept,) = stream._stream._to_retire.values()
        assert kept.snapshots == taken.snapshots
        nothing = taken.table.schema.empty_table().get_total_buffer_size()
        assert kept.table.get_total_buffer_size() == nothing < taken.table.get_total_buffer_size()


def test_a_group_is_trained_once() -> None:
    with GroupStream(Listed(group("a"))) as stream:
        (taken,) = stream
        stream.trained([taken])
        for again in (taken, group("other")):
            with pytest.raises(ConfigError, match="was not handed out by this stream, or was trained already"):
                stream.trained([again])


def test_a_position_is_json_and_anything_else_is_refused() -> None:
    position = Position(frozenset({"b", "a"}))
    assert Position.from_json(json.loads(json.dumps(position.as_json()))) == position
    assert Position.from_json({"format": 1, "settled": ["a", "b"]}) == position
    with pytest.raises(ConfigError, match="format 3, this version reads 2"):
        Position.from_json({"format": 3, "settled": []})
    for wrong in (
        *(None, [], {}, {"format": 1}, {"format": 1, "settled": [1]}, {"format": 1, "settled": "ab"}),
        *({"format": 2, "settled": [], "ranges": wrong} for wrong in ([], {"a": [[1]]}, {"a": [[2, 1]]}, {"a": "b"})),
    ):
        with pytest.raises(ConfigError, match="no position"):
            Position.from_json(wrong)


def test_a_position_of_tasks_in_a_row_stays_small() -> None:
    ids = [f"task-{number}" for number in range(100_000) if number != 5_000]
    position = Position(frozenset(ids))
    stored = json.dumps(position.as_json())
    assert len(stored) < 200
    assert Position.from_json(json.loads(stored)) == position


@given(st.lists(st.frozensets(st.from_regex(r"(a|b1|)[0-9]{0,3}", fullmatch=True) | st.text(max_size=3)), min_size=1))
def test_whatever_ids_are_a_position_keeps_them(steps: list[frozenset[str]]) -> None:
    """However it came to them."""
    position = Position(steps[0])
    for some in steps[1:]:
        position = position.including(some)
    stored = json.dumps(position.as_json())
    assert Position.from_json(json.loads(stored)) == position == Position(frozenset().union(*steps))
    assert stored == json.dumps(Position(position.settled).as_json())


def test_a_step_looks_at_its_own_ids_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    class Numbered:
        def fullmatch(self, text: str) -> re.Match[str] | None:
            looked_at.append(text)
            return numbered.fullmatch(text)

    numbered = id_ranges._NUMBERED
    monkeypatch.setattr(id_ranges, "_NUMBERED", Numbered())
    source = Listed(group("a"), group("b"))
    before = Position(frozenset(f"task-{number}" for number in range(1000)))
    before.as_json()
    looked_at.clear()
    with GroupStream(source, position=before) as stream:
        for each in stream:
            assert each.group_id in stream.trained([each]).as_json()["settled"]
    assert looked_at == ["a", "b"]


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_directory_is_read_file_by_file_and_goes_on_from_a_position(tmp_path: Path) -> None:
    write_part(tmp_path, 1, "c")
    write_part(tmp_path, 0, "a", "b")
    with GroupStream(ParquetGroups(tmp_path)) as stream:
        groups = list(stream)
        position = stream.trained(groups[:2])
    assert ids(groups) == ["a", "b", "c"]
    assert [len(each.rollouts) for each in groups] == [2, 2, 2]
    with GroupStream(ParquetGroups(tmp_path), position=position) as stream:
        assert ids(list(stream)) == ["c"]


def test_a_file_of_settled_groups_is_not_read(tmp_path: Path) -> None:
    write_part(tmp_path, 0, "a")
    write_part(tmp_path, 1, "b")
    damaged = tmp_path / "part-00000.parquet"
    content = bytearray(damaged.read_bytes())
    start = pq.ParquetFile(damaged).metadata.row_group(0).column(5).data_page_offset
    content[start : start + 40] = bytes(40)
    damaged.write_bytes(content)
    with GroupStream(ParquetGroups(tmp_path), position=Position(frozenset({"a"}))) as stream:
        assert ids(list(stream)) == ["b"]


def test_groups_are_whole_however_rows_are_cut_over_row_groups_and_files(tmp_path: Path) -> None:
    rows = [row(f"{name}.{n}", group_id=name) for name in "abc" for n in range(100)]
    pq.write_table(table(*rows[:150]), tmp_path / "0.parquet", row_group_size=7)
    pq.write_table(table(*rows[150:]), tmp_path / "1.parquet", row_group_size=70)
    with GroupStream(ParquetGroups(tmp_path)) as stream:
        assert [(each.group_id, len(each)) for each in stream] == [("a", 100), ("b", 100), ("c", 100)]


async def test_a_directory_that_a_job_still_writes_into_is_followed_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with AsyncGroupStream(ParquetGroups(out, follow=True, poll_s=0.01)) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        out.mkdir()
        write_part(out, 0, "a")
        assert (await waiting).group_id == "a"
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        write_part(out, 1, "b")
        assert (await waiting).group_id == "b"
        write_part(out, 2, "c")
        (out / "_report.json").write_text("{}")
        assert [each.group_id async for each in stream] == ["c"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    def message(kind: type[Exception]) -> str:
        with GroupStream(ParquetGroups(tmp_path)) as stream, pytest.raises(kind) as raised:
            list(stream)
        return str(raised.value)

    assert "no Parquet files" in message(ConfigError)
    newer = {VERSION_KEY: str(TRAJECTORY_SCHEMA_VERSION + 1).encode()}
    pq.write_table(table(row("a")).replace_schema_metadata(newer), tmp_path / "part-00000.parquet")
    found = message(SchemaVersionError)
    assert "part-00000.parquet" in found
    assert "upgrade the reader" in found
    pq.write_table(table(row("a")).drop_columns(["token_ids"]), tmp_path / "part-00000.parquet")
    assert "has no column 'token_ids'" in message(RecordError)
    rows = [row("a.0", group_id="a"), row("b.0", group_id="b"), row("a.1", group_id="a")]
    pq.write_table(table(*rows), tmp_path / "part-00000.parquet")
    assert "the rows of group a" in message(RecordError)
    (tmp_path / "part-00000.parquet").write_bytes(b"PAR1")
    assert "part-00000.parquet cannot be read" in message(ConfigError)
    (tmp_path / "part-00000.parquet").unlink()
    tmp_path.rmdir()
    assert "does not exist" in message(ConfigError)


# --- a job that plays ------------------------------------------------------------------------------------------------


def told(name: str, sample: int) -> dict[str, Any]:
    return {"rollout_id": f"{name}.{sample}", "group_id": name, "status": "finished", "reward": float(sample)}


def test_a_job_is_played_in_a_thread_and_ends_with_the_stream() -> None:
    ended = threading.Event()

    async def play(tell: Tell) -> None:
        try:
            for each in (told("a", 0), told("b", 0), told("b", 1), told("a", 1), told("c", 0)):
                tell(each)
            await asyncio.Event().wait()
        finally:
            ended.set()

    with GroupStream(PlayedGroups(play, source=MADE, group_size=2)) as stream:
        found = [next(stream), next(stream)]
        assert not ended.is_set()
    assert ended.is_set()
    assert ids(found) == ["b", "a"]
    assert [each.advantage for each in found[0].rollouts] == pytest.approx([-1.0, 1.0], abs=1e-3)
    assert found[0].snapshots == {name: (f"snapshot-of-{name}", 2) for name in ("b.0", "b.1")}


async def test_a_job_goes_on_while_its_trainer_is_slow() -> None:
    played = asyncio.Event()

    async def play(tell: Tell) -> None:
        for name in "abcdef":
            tell(told(name, 0))
            await asyncio.sleep(0)
        played.set()

    async with AsyncGroupStream(PlayedGroups(play, source=MADE, group_size=1), StreamOptions(ahead=1)) as stream:
        await played.wait()
        assert ids([each async for each in stream]) == list("abcdef")


async def test_a_job_waits_for_room_that_its_trainer_makes(tmp_path: Path) -> None:
    """One group is played that the trainer has not taken, and no rollout of another one begins."""
    room, begun, beyond = Room(1), set[str](), list[int]()

    async def well(rollout_id: str, environment: Any) -> Any:
        begun.add(rollout_id.rsplit(".", 1)[0])
        beyond.append(len(begun) - stream.counts.handed_out)
        return await scripted_job.well(rollout_id, environment)

    job = replace(scripted_job.make(tmp_path, scripted_job.Scripted(well)), may_begin=room.enter)

    async def play(tell: Tell) -> None:
        await job.run(on_row=lambda row: tell(asdict(row)), on_kept=lambda row: tell(asdict(row)))

    source = PlayedGroups(play, source=MADE, group_size=2, room=room)
    async with AsyncGroupStream(source, StreamOptions(ahead=1)) as stream:
        assert len([each async for each in stream]) == len(scripted_job.TASKS)
    assert len(beyond) == 2 * len(scripted_job.TASKS)
    assert set(beyond) == {1}


async def test_a_trained_group_that_is_played_again_takes_no_room_for_good() -> None:
    room = Room(1)

    async def play(tell: Tell) -> None:
        for name in ("trained", "b"):
            await room.enter(name)
            tell(told(name, 0))

    source = PlayedGroups(play, source=MADE, group_size=1, room=room)
    settled = Position(frozenset({"trained"}))
    async with AsyncGroupStream(source, StreamOptions(ahead=1), position=settled) as stream:
        assert ids([each async for each in stream]) == ["b"]


def test_a_stream_that_is_ended_lets_go_of_whoever_waits() -> None:
    async def play(tell: Tell) -> None:
        tell(told("a", 0))
        await asyncio.Event().wait()

    with GroupStream(PlayedGroups(play, source=MADE, group_size=1)) as stream:
        assert next(stream).group_id == "a"
        timer = threading.Timer(0.05, stream.end)
        timer.start()
        assert list(stream) == []
        timer.join()
        assert list(stream) == []


def test_to_end_a_stream_that_is_closed_is_nothing() -> None:
    """A signal may come at any moment, also while the trainer is on its way out."""
    stream = GroupStream(Listed(group("a")))
    with stream:
        assert ids(list(stream)) == ["a"]
    stream.end()


def test_a_job_that_is_resumed_builds_no_group_that_is_settled() -> None:
    async def play(tell: Tell) -> None:
        for name in ("poison-a", "b"):  # to build the first ends the process
            tell(told(name, 0))

    source = PlayedGroups(play, source=MADE, group_size=1)
    with GroupStream(source, position=Position(frozenset({"poison-a"}))) as stream:
        assert ids(list(stream)) == ["b"]


async def test_a_graph_that_goes_while_a_job_plays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(tell: Tell) -> None:
        tell(told("a", 0))
        tell(told("down-b", 0))

    monkeypatch.setattr(parts, "RETRY_AFTER_S", ())
    async with AsyncGroupStream(PlayedGroups(play, source=MADE, group_size=1)) as stream:
        assert (await anext(stream)).group_id == "a"
        with pytest.raises(StreamLostError, match="graph of this stream is gone: its actor restarts"):
            await anext(stream)


def test_a_rollout_job_that_its_trainer_left_goes_on_with_the_groups_that_are_not_settled(tmp_path: Path) -> None:
    def played() -> PlayedGroups:
        job = scripted_job.make(tmp_path, scripted_job.Scripted(scripted_job.well))

        async def play(tell: Tell) -> None:
            await job.run(on_row=lambda row: tell(asdict(row)), on_kept=lambda row: tell(asdict(row)))

        return PlayedGroups(play, source=MADE, group_size=2)

    position, trained = None, list[str]()
    for _ in range(3):
        with GroupStream(played(), position=position) as stream:
            taken = next(stream)
            trained.append(taken.group_id)
            position = stream.trained([taken])
    assert sorted(trained) == sorted(task.task_id for task in scripted_job.TASKS)
    with GroupStream(played(), position=position) as stream:
        assert list(stream) == []


# --- a graph on which others play ------------------------------------------------------------------------------------

_stores: dict[str, MemoryStore] = {}


def shared_store(*, name: str) -> MemoryStore:
    """A source of this process."""
    return _stores[name]


class KeptStore(MemoryStore):
    """As the actors of a graph, which outlive their clients."""

    async def close(self) -> None:
        pass


class GoneStore(MemoryStore):
    """A graph that is there when it is connected to, and gone then."""

    async def rollout_ids(self) -> Sequence[str]:
        raise StoreUnavailableError("the state actor does not answer")


@pytest.fixture
async def store(request: pytest.FixtureRequest) -> MemoryStore:
    _stores[request.node.name] = await KeptStore.open()
    return _stores[request.node.name]


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> SourceSpec:
    return SourceSpec(import_path=f"{__name__}:shared_store", kwargs={"name": request.node.name})


async def play(store: Any, rollout_id: str, *, group: str, reward: float | None = None) -> None:
    await store.write(Register(rollout_id, Registration(group_id=group)))
    await run_call(store, rollout_id, f"call-{rollout_id}")
    if reward is not None:
        await store.write(Complete(rollout_id, Outcome(reward=reward)))


async def test_a_group_comes_when_all_who_registered_in_it_are_through(store: MemoryStore, spec: SourceSpec) -> None:
    async with AsyncGroupStream(RecordedGroups(spec, group_size=2, poll_s=0.01)) as stream:
        await play(store, "a.0", group="a", reward=0.0)
        await play(store, "b.0", group="b", reward=0.0)
        await play(store, "a.1", group="a")
        await run_call(store, "unregistered", "call")
        waiting = asyncio.ensure_future(anext(stream))
        await play(store, "b.1", group="b", reward=1.0)
        found = await waiting
        assert (found.group_id, [each.reward for each in found.rollouts]) == ("b", [0.0, 1.0])
        await play(store, "b.2", group="b", reward=1.0)  # too late
        await store.write(Complete("a.1", Outcome(reward=1.0)))
        assert (await anext(stream)).group_id == "a"
        assert stream.late == ("b.2",)


async def test_a_graph_that_goes_is_named_and_one_that_was_not_there_too(
    request: pytest.FixtureRequest, spec: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_groups, "RETRY_AFTER_S", (0.0,))
    _stores[request.node.name] = await GoneStore.open()
    async with AsyncGroupStream(RecordedGroups(spec, group_size=1)) as stream:
        with pytest.raises(StreamLostError, match="the graph of this stream is gone: the state actor does not answer"):
            await anext(stream)


async def test_what_was_trained_is_retired_and_the_rest_stays(store: MemoryStore, spec: SourceSpec) -> None:
    for name in "abc":
        for sample in range(2):
            await play(store, f"{name}.{sample}", group=name, reward=float(sample))
    async with AsyncGroupStream(RecordedGroups(spec, group_size=2, retire=True, follow=False)) as stream:
        groups = [each async for each in stream]
        position = stream.trained(groups[:1])
        assert len(await store.rollout_ids()) == 6
        assert await stream.acknowledge(position) == ()
    assert list(await store.rollout_ids()) == ["b.0", "b.1", "c.0", "c.1"]
    # A trainer that was killed between its checkpoint and the acknowledgement.
    settled = Position(position.settled | {"b"})
    async with AsyncGroupStream(
        RecordedGroups(spec, group_size=2, retire=True, follow=False), position=settled
    ) as stream:
        assert ids([each async for each in stream]) == ["c"]
    assert list(await store.rollout_ids()) == ["c.0", "c.1"]


# --- killed anywhere -------------------------------------------------------------------------------------------------

_GROUPS = tuple(f"g{number}" for number in range(5))
_POINTS = ("taken", "trained", "saved", "acknowledged")


def opened_log(*, directory: str) -> Any:
    return LogStore.open(Path(directory))


def log_source(directory: Path) -> GroupSource:
    spec = SourceSpec(import_path=f"{__name__}:opened_log", kwargs={"directory": str(directory)})
    return RecordedGroups(spec, group_size=2, retire=True, follow=False)


def file_source(directory: Path) -> GroupSource:
    return ParquetGroups(directory)


def train(make: Callable[[Path], GroupSource], data: Path, run: Path, die_at: int) -> None:
    """A trainer that is killed at the `die_at`th point. Its weights are the list of groups that they were moved by."""
    passed = 0

    def point() -> None:
        nonlocal passed
        passed += 1
        if passed == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = run / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    weights = [] if state is None else state["weights"]
    position = None if state is None else Position.from_json(state["position"])
    with GroupStream(make(data), position=position) as stream:
        for step in stream.steps(4):
            point()
            weights += ids(step)
            position = stream.trained(step)
            point()
            replace_file(checkpoint, json.dumps({"weights": weights, "position": position.as_json()}).encode())
            point()
            stream.acknowledge(position)
            point()


@pytest.fixture(scope="module")
def processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def fill_files(directory: Path) -> None:
    for number, name in enumerate(_GROUPS):
        write_part(directory, number, name)


def fill_log(directory: Path) -> None:
    async def fill() -> None:
        store = await LogStore.open(directory)
        for name in _GROUPS:
            for sample in range(2):
                await play(store, f"{name}.{sample}", group=name, reward=float(sample))
        await store.close()

    asyncio.run(fill())


@pytest.mark.parametrize("die_at", range(1, 3 * len(_POINTS) + 1))
@pytest.mark.parametrize(("make", "fill"), [(file_source, fill_files), (log_source, fill_log)])
def test_a_trainer_killed_between_any_two_steps_trains_each_group_once(
    make: Callable[[Path], GroupSource], fill: Callable[[Path], None], die_at: int, tmp_path: Path, processes: Any
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    fill(data)
    for dies, ended in ((die_at, -signal.SIGKILL), (0, 0)):
        process = processes.Process(target=train, args=(make, data, tmp_path, dies))
        process.start()
        process.join()
        assert process.exitcode == ended
    state = json.loads((tmp_path / "checkpoint.json").read_text())
    assert sorted(state["weights"]) == sorted(_GROUPS)
    if make is log_source:
        assert asyncio.run(left(data)) == []


async def left(directory: Path) -> list[str]:
    store = await LogStore.open(directory)
    try:
        return list(await store.rollout_ids())
    finally:
        await store.close()
