"""Where groups come from: files, a job that plays, or a graph on which others play.

Invariant: a group is given once, whole, with the advantages that a build of all of it gives. Trajectories of another
schema, and a graph that is gone, are errors that name what to do.

    ParquetGroups    a directory of trajectories; with `follow`, one that a job with `--build` still writes into
    PlayedGroups     a job in this process, as its groups become complete
    RecordedGroups   registered rollouts of a graph, as the last of each group is completed

Flow: `group_stream` or files -> `Group` -> `groups.GroupStream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from gym_capture.data.copies import conformed
from gym_capture.data.group_stream import BuildThread, BuiltGroup, Play, Tell, played_groups
from gym_capture.data.parts import RowOptions
from gym_capture.data.recorded_groups import asked, recorded_groups
from gym_capture.data.sources import SourceSpec, retire_from
from gym_capture.data.trajectory_files import REPORT_FILE
from gym_capture.errors import ConfigError, RecordError
from trainer_bridge.groups import Group
from trainer_bridge.stream import TRAIN_COLUMNS, one_line, opened, present

_ROWS: Final = 64
"""That are read at a time; one may have a hundred thousand ids."""


class ParquetGroups:
    """The groups of a directory of trajectories (a path or URI), in the order of the files' names."""

    def __init__(
        self,
        directory: str | Path,
        *,
        columns: Sequence[str] = TRAIN_COLUMNS,
        follow: bool = False,
        poll_s: float = 1.0,
    ) -> None:
        """`follow`: wait for the directory, and for its files, until the job that writes them has ended. `columns`: the
        ones that the groups' tables have."""
        self._shown = str(directory)
        uri = self._shown if "://" in self._shown else Path(self._shown).absolute().as_uri()
        try:
            self._filesystem, self._path = fs.FileSystem.from_uri(uri)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{self._shown} is no directory that can be read: {one_line(error)}") from None
        self._columns = tuple(columns)
        self.late: list[str] = []
        self._follow = follow
        self._poll_s = poll_s

    async def groups(self, settled: Set[str]) -> AsyncGenerator[Group]:
        """Raises `ConfigError` for a directory or file that cannot be read, `SchemaVersionError` or `RecordError` for
        one that is not of trajectories, or in which the rows of a group do not stand together."""
        given: set[str] = set()
        async for paths in self._listings():
            tables = _whole_groups(self._batches(paths, settled))
            while (table := await asyncio.to_thread(next, tables, None)) is not None:
                group_id = table.column("group_id")[0].as_py()
                if group_id in settled:
                    continue
                if group_id in given:
                    raise RecordError(
                        f"the rows of group {group_id} in {self._shown} do not stand together: build them again",
                        field="group_id",
                    )
                given.add(group_id)
                yield Group(group_id=group_id, table=table)

    async def retire(self, consumed: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Files stay."""
        return ()

    async def close(self) -> None:
        """Nothing is open between groups."""

    async def _listings(self) -> AsyncGenerator[list[str]]:
        """The files that are new, each time that there are some. One without `follow`."""
        seen: set[str] = set()
        ended = not self._follow
        while True:
            names = await asyncio.to_thread(self._names)
            if not self._follow and not any(map(_is_part, names)):
                raise ConfigError(f"{self._shown} has no Parquet files: build trajectories into it first")
            new = sorted(name for name in names if _is_part(name) and name not in seen)
            seen.update(new)
            if new:
                yield [f"{self._path}/{name}" for name in new]
            if ended:
                return
            # The report appears behind the last part; a listing that was made meanwhile may lack that part.
            ended = REPORT_FILE in names
            if not new and not ended:
                await asyncio.sleep(self._poll_s)

    def _names(self) -> list[str]:
        try:
            entries = self._filesystem.get_file_info(fs.FileSelector(self._path, allow_not_found=self._follow))
        except FileNotFoundError:
            raise ConfigError(f"{self._shown} does not exist: build trajectories into it first") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{self._shown} is not a directory of Parquet files: {one_line(error)}") from None
        return [entry.base_name for entry in entries if entry.type == fs.FileType.File]

    def _batches(self, paths: Iterable[str], settled: Set[str]) -> Iterator[pa.RecordBatch]:
        for path in paths:
            with opened(self._filesystem, path) as file:
                names = present(file, path, self._columns)
                if settled and settled >= set(file.read(["group_id"]).column("group_id").to_pylist()):
                    continue
                for batch in file.iter_batches(_ROWS, columns=names, use_threads=False):
                    yield conformed(batch)


class _Recorded:
    """What both sources of records have: one thread that builds and retires."""

    def __init__(self, source: SourceSpec, *, group_size: int, options: RowOptions | None, retire: bool) -> None:
        self._thread = BuildThread(source, options)
        self._group_size = group_size
        self._retires = retire
        self._left: set[str] = set()
        """Rollouts of groups that an earlier process settled, and may not have retired."""
        self.late: list[str] = []

    async def retire(self, consumed: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Raises `StreamLostError` if the graph is gone."""
        if not self._retires or not consumed:
            return ()
        return await asked(self._thread, lambda source: source.run(retire_from(source.opened(), consumed)))

    async def close(self) -> None:
        await self._thread.close()

    async def _given(self, built: AsyncGenerator[BuiltGroup]) -> AsyncGenerator[Group]:
        async with aclosing(built) as groups:
            async for group in groups:
                await self._retire_left()
                snapshots = {each.rollout_id: (each.snapshot_id, each.snapshot_version) for each in group.summaries}
                yield Group(group_id=group.group_id, table=group.table, snapshots=snapshots)
        await self._retire_left()

    async def _retire_left(self) -> None:
        left, self._left = self._left, set()
        if self._retires and left:
            frozen = await asked(
                self._thread, lambda source: [source.run(source.opened().freeze(each)) for each in left]
            )
            await self.retire({each.rollout_id: (each.snapshot_id, each.version) for each in frozen if each.version})


class Room:
    """How many groups of a job may be under way that its trainer has not taken yet: what holds a job back.

    The job asks by `enter` before each rollout, one group's rollouts behind another's. So no rollout waits for room
    that a group has which waits for it.
    """

    def __init__(self, groups: int) -> None:
        """Raises `ConfigError` for fewer than one."""
        if groups < 1:
            raise ConfigError(f"there must be room for at least 1 group: got {groups}")
        self._groups = groups
        self._under_way: set[str] = set()
        self._changed = asyncio.Event()

    async def enter(self, group_id: str) -> None:
        """Returns once a rollout of this group may be played: it is under way, or there is room for another one."""
        while group_id not in self._under_way and len(self._under_way) >= self._groups:
            self._changed.clear()
            await self._changed.wait()
        self._under_way.add(group_id)

    def leave(self, group_id: str) -> None:
        """The trainer has taken it."""
        self._under_way.discard(group_id)
        self._changed.set()


class PlayedGroups(_Recorded):
    """The groups of a job that this process plays. The job begins with the stream and ends with it."""

    def __init__(
        self,
        play: Play,
        *,
        source: SourceSpec,
        group_size: int,
        options: RowOptions | None = None,
        retire: bool = False,
        room: Room | None = None,
    ) -> None:
        """`play`: see `group_stream`; it tells of earlier runs' rollouts too. `source`: where the records are.
        `retire`: drop what a trainer has acknowledged. `room`: that which the job asks for. A group leaves it as the
        stream asks for the next one, so a stream that is to count has `ahead=1`."""
        super().__init__(source, group_size=group_size, options=options, retire=retire)
        self._play = play
        self._room = room

    def groups(self, settled: Set[str]) -> AsyncGenerator[Group]:
        """Raises what `stream_groups` raises; `StreamLostError` if the graph goes."""

        async def play(tell: Tell) -> None:
            def heard(row: Mapping[str, Any]) -> None:
                if row["group_id"] in settled:
                    self._left.add(row["rollout_id"])
                    self._leave(row["group_id"])
                tell(row)

            await self._play(heard)

        return self._leaving(self._given(played_groups(play, self._thread, self._group_size, settled=settled)))

    async def _leaving(self, given: AsyncGenerator[Group]) -> AsyncGenerator[Group]:
        async with aclosing(given) as groups:
            async for group in groups:
                yield group
                self._leave(group.group_id)

    def _leave(self, group_id: str) -> None:
        if self._room is not None:
            self._room.leave(group_id)


class RecordedGroups(_Recorded):
    """The groups of a graph whose rollouts are registered by others, as all of a group are completed."""

    def __init__(
        self,
        source: SourceSpec,
        *,
        group_size: int,
        options: RowOptions | None = None,
        retire: bool = False,
        follow: bool = True,
        poll_s: float = 1.0,
    ) -> None:
        """`group_size`: rollouts that are registered in a group before it may be complete. `follow`: go on asking; the
        stream then has no end of its own. `retire`: drop what a trainer has acknowledged."""
        super().__init__(source, group_size=group_size, options=options, retire=retire)
        self._follow = follow
        self._poll_s = poll_s

    def groups(self, settled: Set[str]) -> AsyncGenerator[Group]:
        """Raises what `recorded_groups` raises."""
        return self._given(
            recorded_groups(
                self._thread,
                self._group_size,
                settled=settled,
                on_settled=self._left.add,
                on_late=self.late.append,
                follow=self._follow,
                poll_s=self._poll_s,
            )
        )


def _is_part(name: str) -> bool:
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def _whole_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows of each group, wherever batches cut them; nothing is copied."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        start = 0
        runs = pc.run_end_encode(batch.column("group_id"))
        for group_id, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            if waiting and waiting[-1].column("group_id")[0].as_py() != group_id:
                yield pa.Table.from_batches(waiting)
                waiting = []
            waiting.append(batch.slice(start, end - start))
            start = end
    if waiting:
        yield pa.Table.from_batches(waiting)
