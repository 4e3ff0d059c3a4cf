"""Groups that are built while their rollouts are still played: what a trainer consumes as it goes.

Invariant: a group is built once, as soon as all of its rollouts are over, and never before: its advantages compare
the whole group. Its rows are those that a build of the whole job gives (`parts`). What ends the job ends the stream,
after the groups that were complete by then; what ends the stream ends the job.

Flow: the job tells of each rollout that is over -> its group is complete -> a thread, with a `TokenSource` of its own,
freezes, builds and compares it (`BuildThread`), again if a call was about to end -> `stream_groups` hands it out, or
`group_files` writes it. Where no job tells, `recorded_groups` asks what is on record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa

from gym_capture.data.groups import RolloutSummary
from gym_capture.data.parts import Part, RowOptions, Unwatched, WorkerSource, built_part
from gym_capture.data.requests import Request, read_group
from gym_capture.data.sources import SourceSpec
from gym_capture.errors import ConfigError, StoreUnavailableError, StreamLostError
from gym_capture.reasons import CaptureMark, reason_name

__all__ = ["BuiltGroup", "stream_groups"]

_ENDS_WITHIN_S: Final = 2.0
_LOOKS_EVERY_S: Final = 0.2

_T = TypeVar("_T")

Tell: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Called with each rollout that is over: an object under the names of `requests.read_requests`."""

Play: TypeAlias = Callable[[Tell], Awaitable[object]]
"""Plays a job. It tells of each rollout once, those of earlier runs included, and returns when all are over."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltGroup:
    """A group that can be trained on."""

    group_id: str
    summaries: tuple[RolloutSummary, ...]
    """The accounts of the rollouts, in the order in which they ended."""
    table: pa.Table
    """Rows of `schema.SCHEMA` with their advantages: what `trainer_bridge` reads batches of."""


async def stream_groups(
    play: Play, *, source: SourceSpec, group_size: int, options: RowOptions | None = None
) -> AsyncGenerator[BuiltGroup]:
    """The groups of the job that `play` plays, each as soon as it is complete.

    A group is built when it is asked for, so a slow trainer holds up nothing and one group is in memory. To leave the
    loop - within `contextlib.aclosing` - cancels the job. Raises what `play` raises, `ConfigError` for a source that
    cannot be opened, and `StreamLostError` if it is down for longer than a restart takes.
    """
    async with BuildThread(source, options) as thread, aclosing(played_groups(play, thread, group_size)) as groups:
        async for group in groups:
            yield group


async def played_groups(
    play: Play, thread: BuildThread, group_size: int, *, settled: Set[str] = frozenset()
) -> AsyncGenerator[BuiltGroup]:
    """As `stream_groups`, on a thread that outlives it. Groups of the ids `settled` are not built."""
    async with complete_groups(play, group_size=group_size) as complete:
        while (group := await complete.get()) is not None:
            if group[0].group_id not in settled:
                yield await thread.build(group)


class BuildThread:
    """One thread, and its source, for the time of a job. The loop that plays goes on while it builds."""

    def __init__(self, source: SourceSpec, options: RowOptions | None = None) -> None:
        self._source = WorkerSource(source)
        self._options = options or RowOptions()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="build-groups")
        self._built = 0

    async def run(self, work: Callable[[WorkerSource], _T]) -> _T:
        """The result of `work` on the source."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._source)

    async def build(self, group: tuple[Request, ...]) -> BuiltGroup:
        """Raises `ConfigError` for a source that cannot be opened, `StreamLostError` for one that is gone."""
        part = Part(number=self._built, groups=(group,))
        self._built += 1
        return await answered(self.run(partial(_built, part, options=self._options)))

    async def close(self) -> None:
        """Behind what it is at."""
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._source.__exit__)
        self._executor.shutdown(wait=False)
        await closing

    async def __aenter__(self) -> BuildThread:
        # What pyarrow loads for its first list takes long: better while agents play than while a group waits.
        self._executor.submit(pa.array, [[0]])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def answered(answer: Awaitable[_T]) -> _T:
    """The answer. Raises `StreamLostError` where the source cannot give one any more."""
    try:
        return await answer
    except StoreUnavailableError as error:
        raise StreamLostError(
            f"the graph of this stream is gone: {error.message}. What was trained and saved stays so; once the graph "
            "serves again, go on from the position of the last checkpoint"
        ) from error


def _built(part: Part, source: WorkerSource, *, options: RowOptions) -> BuiltGroup:
    """The group, built again while a call of it may still be ending."""
    give_up = time.monotonic() + _ENDS_WITHIN_S
    while True:
        group = _built_now(part, source, options=options)
        if not _may_be_ending(group) or time.monotonic() > give_up:
            return group
        time.sleep(_LOOKS_EVERY_S)


def _may_be_ending(group: BuiltGroup) -> bool:
    """Whether a rollout is masked for calls without a record alone: of one that was left, it comes soon."""
    return any(
        each.masked and all(reason_name(reason) == CaptureMark.DANGLING_INTENT for reason in each.mask_reasons)
        for each in group.summaries
    )


def _built_now(part: Part, source: WorkerSource, *, options: RowOptions) -> BuiltGroup:
    summaries: list[RolloutSummary] = []
    tables: list[pa.Table] = []
    for some, table in built_part(part, source=source, options=options, post=Unwatched()):
        summaries += some
        tables.append(table)
    return BuiltGroup(group_id=part.groups[0][0].group_id, summaries=tuple(summaries), table=pa.concat_tables(tables))


class _Groups:
    """Rollouts that are over, by group, until the group is complete."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._waiting: dict[str, dict[str, Mapping[str, Any]]] = {}
        self.complete: asyncio.Queue[tuple[Request, ...] | None] = asyncio.Queue()
        """Ends with None."""

    def add(self, row: Mapping[str, Any]) -> None:
        group_id = str(row["group_id"])
        rows = self._waiting.setdefault(group_id, {})
        rows[str(row["rollout_id"])] = row
        if len(rows) == self._group_size:
            del self._waiting[group_id]
            self.complete.put_nowait(read_group(rows.values()))


@asynccontextmanager
async def complete_groups(play: Play, *, group_size: int) -> AsyncGenerator[asyncio.Queue[tuple[Request, ...] | None]]:
    """Plays, and gives the groups that become complete: None is the last. Raises what `play` raises, at the end."""
    if group_size < 1:
        raise ConfigError(f"group_size must be at least 1: got {group_size}")
    groups = _Groups(group_size)

    async def playing() -> None:
        try:
            await play(groups.add)
        finally:
            groups.complete.put_nowait(None)

    player = asyncio.create_task(playing())
    try:
        yield groups.complete
        await player
    finally:
        player.cancel()
        await asyncio.wait([player])
        if not player.cancelled():
            player.exception()  # which was raised above, or comes second to what ended this
