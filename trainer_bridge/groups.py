"""Groups as they are finished, for a trainer: bounded, as fresh as it asks for, each trained once.

Invariant: relative to the checkpoint that a trainer goes on from, no group is trained twice and none is lost. A group
that is in the checkpoint's `Position` never comes again; one that was handed out and is not in it does. No record is
dropped before the position that has its group is said to be durable.

Flow: a `GroupSource` builds groups, `ahead` of them at most before they are asked for -> those that are too old go, by
policy, at the moment they would be handed out -> the trainer's step -> `trained(groups)`, whose `Position` goes into
the checkpoint -> `acknowledge(position)` once that is written: the source may drop what it was built from.

`GroupStream` is for loops, `AsyncGroupStream` for coroutines. `group_sources.py` has the sources.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, Protocol, Self, TypeVar, overload

import pyarrow as pa
import pyarrow.compute as pc

from gym_capture.errors import ConfigError
from trainer_bridge.id_ranges import IdRanges, expanded
from trainer_bridge.stream import TrainRollout, read_rollouts

__all__ = ["AsyncGroupStream", "Group", "GroupSource", "GroupStream", "Position", "StreamCounts", "StreamOptions"]

_T = TypeVar("_T")

_FORMAT: Final = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Group(Sequence[TrainRollout]):
    """All rollouts of a task, with their advantages. They are read when they are looked at."""

    group_id: str
    table: pa.Table
    """Rows of `data.schema.SCHEMA`, some of its columns."""
    snapshots: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By rollout id, the snapshot that its rows were built from; empty: they were read from files."""

    def __len__(self) -> int:
        return len(self.table.column("rollout_id").unique())

    @overload
    def __getitem__(self, place: int) -> TrainRollout: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[TrainRollout]: ...

    def __getitem__(self, place: int | slice) -> TrainRollout | Sequence[TrainRollout]:
        return self.rollouts[place]

    @cached_property
    def rollouts(self) -> tuple[TrainRollout, ...]:
        """Raises `RecordError` for rows that are not aligned."""
        return tuple(read_rollouts([self.table]))

    @cached_property
    def weight_versions(self) -> frozenset[str | None]:
        """Versions of the weights that sampled what is trained; None: of some of it that is not known."""
        trained = self.table.filter(pc.invert(self.table.column("masked")))
        versions = [
            pc.struct_field(chunk.flatten(), "weight_version").unique() for chunk in trained.column("spans").chunks
        ]
        return frozenset(version for found in versions for version in found.to_pylist())


@dataclass(frozen=True, slots=True)
class Position:
    """How far a trainer is in a stream: the groups that are settled, i.e. trained or dropped as too old.

    A value. It is of no one source: what was streamed from a job can go on from the files that the job wrote.
    """

    settled: frozenset[str] = frozenset()
    _ranges: IdRanges | None = field(default=None, init=False, repr=False, compare=False)
    """Of `settled`, once they were asked for: a step adds to them."""

    def including(self, ids: Iterable[str]) -> Position:
        """This, and these groups."""
        new = frozenset(ids) - self.settled
        position = Position(self.settled | new)
        object.__setattr__(position, "_ranges", self._in_ranges().including(new))
        return position

    def as_json(self) -> dict[str, Any]:
        """To be stored in the trainer's checkpoint. Ids that are numbers of one series are ranges in it."""
        single, ranges = self._in_ranges().compact()
        return {"format": _FORMAT, "settled": single, "ranges": ranges}

    @classmethod
    def from_json(cls, found: Any) -> Position:
        """What `as_json` gave. Raises `ConfigError` for anything else."""
        match found:
            case {"format": 1, "settled": [*ids]} if all(isinstance(each, str) for each in ids):
                return cls(frozenset(ids))
            case {"format": 2, "settled": [*ids], "ranges": dict(ranges)} if _are_ids(ids, ranges):
                return cls(expanded(ids, ranges))
            case {"format": version} if version not in (1, _FORMAT):
                raise ConfigError(f"the position is of format {version!r}, this version reads {_FORMAT}: upgrade")
        raise ConfigError("this is no position in a stream of groups: give what `Position.as_json` gave")

    def _in_ranges(self) -> IdRanges:
        if self._ranges is None:
            object.__setattr__(self, "_ranges", IdRanges.of(self.settled))
        assert self._ranges is not None
        return self._ranges


def _are_ids(single: Sequence[Any], ranges: Mapping[Any, Any]) -> bool:
    return all(isinstance(each, str) for each in [*single, *ranges]) and all(
        isinstance(each, list)
        and len(each) == 2
        and all(isinstance(number, int) for number in each)
        and 0 <= each[0] <= each[1]
        for every in ranges.values()
        for each in every
    )


class GroupSource(Protocol):
    """Where groups come from. Belongs to one stream."""

    late: list[str]
    """Rollouts that became part of a group after it had been given: in no group that is given."""

    def groups(self, settled: Set[str]) -> AsyncGenerator[Group]:
        """Each group once, complete, built when it is asked for; none of those whose ids are `settled`."""
        ...

    async def retire(self, consumed: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Drops the records behind these snapshots, where there are any and the source is to. Returns the rollouts
        that have changed since, which are kept."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How far a stream runs ahead, and how old a group may be."""

    ahead: int = 2
    """Groups that are built, and in memory, before they are asked for."""
    max_lag: int | None = None
    """How many versions a group's oldest weights may be behind the trainer's; None: any."""
    stale: Literal["drop", "keep"] = "drop"
    """What becomes of older ones; they are counted either way."""

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise ConfigError(f"ahead must be at least 1: got {self.ahead}")
        if self.max_lag is not None and self.max_lag < 0:
            raise ConfigError(f"max_lag must be at least 0: got {self.max_lag}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounts:
    """What a stream has done, since it was opened."""

    handed_out: int = 0
    """Groups."""
    dropped_as_stale: int = 0
    """Groups that were older than `max_lag`, and were not handed out."""
    kept_although_stale: int = 0
    """Groups that were older than `max_lag`, and were."""
    of_unknown_age: int = 0
    """Groups that were handed out although it is not known how old they are: no version, or one that is no number."""
    retired: int = 0
    """Rollouts whose records were dropped."""


class AsyncGroupStream:
    """An asynchronous iterator of `Group`, and a context manager. For one consumer."""

    def __init__(
        self,
        source: GroupSource,
        options: StreamOptions | None = None,
        *,
        position: Position | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        """`position`: the one in the checkpoint that the trainer goes on from. `version`: that of the trainer's weights
        now, counted as the graph counts them; asked for each group where `max_lag` is set."""
        self._source = source
        self._options = options or StreamOptions()
        self._position = position or Position()
        if self._options.max_lag is not None and version is None:
            raise ConfigError("max_lag compares with the version that the trainer is at: give the stream `version`")
        self._version = version
        self._handed_out: dict[str, Group] = {}
        self._to_retire: dict[str, Group] = {}
        self._room = asyncio.Semaphore(self._options.ahead)
        self._built: asyncio.Queue[Group | None] = asyncio.Queue()
        self._builder: asyncio.Task[None] | None = None
        self._ended = False
        self.counts = StreamCounts()

    @property
    def position(self) -> Position:
        """As of the last `trained`, with what was dropped since."""
        return self._position

    async def __aenter__(self) -> Self:
        self._builder = asyncio.create_task(self._build())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._builder is not None:
            self._builder.cancel()
            await asyncio.wait([self._builder])
            if not self._builder.cancelled():
                self._builder.exception()  # which was raised already, or comes second to what ended this
        await self._source.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        group = await self.next()
        if group is None:
            raise StopAsyncIteration
        return group

    @property
    def late(self) -> tuple[str, ...]:
        """Rollouts that were registered in a group after it had been built. They are not trained. Their
        records stay, until a stream with `retire` goes on from a position that has the group."""
        return tuple(self._source.late)

    async def next(self) -> Group | None:
        """The next group; None: there are no more. Raises what the source raises, behind the groups before that."""
        if self._builder is None:
            raise ConfigError("the stream is not open: iterate within `async with stream`")
        while (group := await self._built.get()) is not None and not self._ended:
            self._room.release()
            if self._may_go_out(group):
                self.counts = replace(self.counts, handed_out=self.counts.handed_out + 1)
                self._handed_out[group.group_id] = group
                return group
            self._settle([group])
        self._built.put_nowait(None)
        if not self._ended:
            await self._builder
        return None

    def end(self) -> None:
        """Hands out no more groups, as if there were none, also to whoever waits for one. For the stream's own loop."""
        self._ended = True
        self._built.put_nowait(None)

    async def steps(self, rollouts: int) -> AsyncGenerator[tuple[Group, ...]]:
        """Groups for a step each: whole ones, until they have `rollouts` rollouts, or none is left."""
        some: list[Group] = []
        async for group in self:
            some.append(group)
            if sum(map(len, some)) >= rollouts:
                yield tuple(some)
                some = []
        if some:
            yield tuple(some)

    def trained(self, groups: Iterable[Group]) -> Position:
        """These groups are in the trainer's weights. The position is for the checkpoint that has those weights.

        Raises `ConfigError` for a group that this stream did not hand out, or that is settled.
        """
        groups = tuple(groups)
        for group in groups:
            if self._handed_out.get(group.group_id) is not group:
                raise ConfigError(f"group {group.group_id} was not handed out by this stream, or was trained already")
        self._settle(groups)
        return self._position

    async def acknowledge(self, position: Position) -> tuple[str, ...]:
        """The checkpoint with this position is durable: its groups never come again, so their records may go.

        Returns the rollouts that have changed since they were built, whose records are kept.
        """
        done = [group for group_id, group in self._to_retire.items() if group_id in position.settled]
        consumed = {name: snapshot for group in done for name, snapshot in group.snapshots.items()}
        changed = await self._source.retire(consumed)
        for group in done:
            del self._to_retire[group.group_id]
        self.counts = replace(self.counts, retired=self.counts.retired + len(consumed) - len(changed))
        return changed

    def _settle(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._handed_out.pop(group.group_id, None)
            if group.snapshots:
                # Not a slice, which would keep all of its ids in memory until the next checkpoint.
                self._to_retire[group.group_id] = replace(group, table=group.table.schema.empty_table())
        self._position = self._position.including(group.group_id for group in groups)

    async def _build(self) -> None:
        try:
            async with aclosing(self._source.groups(self._position.settled)) as groups:
                while True:
                    await self._room.acquire()
                    group = await anext(groups, None)
                    if group is None:
                        return
                    self._built.put_nowait(group)
        finally:
            self._built.put_nowait(None)

    def _may_go_out(self, group: Group) -> bool:
        if self._options.max_lag is None or self._version is None:
            return True
        known = [int(version) for version in group.weight_versions if version is not None and version.isdecimal()]
        if not known or self._version() - min(known) <= self._options.max_lag:
            unknown = len(known) < len(group.weight_versions)
            self.counts = replace(self.counts, of_unknown_age=self.counts.of_unknown_age + unknown)
            return True
        if self._options.stale == "keep":
            self.counts = replace(self.counts, kept_although_stale=self.counts.kept_although_stale + 1)
            return True
        self.counts = replace(self.counts, dropped_as_stale=self.counts.dropped_as_stale + 1)
        return False


class GroupStream:
    """`AsyncGroupStream` for a trainer that has no event loop: groups are built, and jobs played, in a thread.

    An iterator of `Group` and a context manager; leaving it ends what builds and plays. For one thread.
    """

    def __init__(
        self,
        source: GroupSource,
        options: StreamOptions | None = None,
        *,
        position: Position | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        """As `AsyncGroupStream`."""
        self._stream = AsyncGroupStream(source, options, position=position, version=version)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="group-stream", daemon=True)

    @property
    def position(self) -> Position:
        """As `AsyncGroupStream.position`."""
        return self._stream.position

    @property
    def counts(self) -> StreamCounts:
        """As `AsyncGroupStream.counts`."""
        return self._stream.counts

    @property
    def late(self) -> tuple[str, ...]:
        """As `AsyncGroupStream.late`."""
        return self._stream.late

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._stream.__aexit__())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Group:
        group = self._run(self._stream.next())
        if group is None:
            raise StopIteration
        return group

    def steps(self, rollouts: int) -> Iterator[tuple[Group, ...]]:
        """As `AsyncGroupStream.steps`."""
        steps = self._stream.steps(rollouts)
        while (some := self._run(_next(steps))) is not None:
            yield some

    def trained(self, groups: Iterable[Group]) -> Position:
        """As `AsyncGroupStream.trained`."""
        return self._stream.trained(groups)

    def acknowledge(self, position: Position) -> tuple[str, ...]:
        """As `AsyncGroupStream.acknowledge`."""
        return self._run(self._stream.acknowledge(position))

    def end(self) -> None:
        """As `AsyncGroupStream.end`; of a stream that is closed, nothing. For any thread, and handlers of signals."""
        with suppress(RuntimeError):  # so asyncio says that the loop is closed, which may happen at any moment
            self._loop.call_soon_threadsafe(self._stream.end)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_alive():
            work.close()
            raise ConfigError("the stream is not open: iterate within `with stream`")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(items: AsyncGenerator[_T]) -> _T | None:
    return await anext(items, None)
