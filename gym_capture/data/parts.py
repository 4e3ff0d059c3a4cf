"""One part of a build: some rollouts of whole groups, from records to a file of trajectories.

Invariant: whoever runs a part - this process, another one, a task on a cluster - does it by these functions, so the
rows are the same. At most one rollout is in memory - encoded, the few that an `AheadSource` fetches with it - and the
rows of one row group. Every rollout of the part has a row: one that cannot be read or built, or that kills whoever
builds it, has a masked one that says why.

Flow: the worker's source -> freeze, build, compare, group by group (`groups.build_groups`) -> `built_part` gives the
rows, `write_part` writes them as one Parquet file with row
groups of one rollout, or of several that together are small.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from gym_capture.build.builder import BuildOptions
from gym_capture.capture.protocols import TokenSource
from gym_capture.capture.records import Snapshot
from gym_capture.data.advantages import Scale
from gym_capture.data.groups import RolloutSummary, build_groups, unusable
from gym_capture.data.nemo_gym import shown_id
from gym_capture.data.requests import Request
from gym_capture.data.schema import SCHEMA
from gym_capture.data.sources import AheadSource, SourceSpec
from gym_capture.data.staged_files import Staging
from gym_capture.errors import JobError, RecordError, StoreError, StoreUnavailableError
from gym_capture.reasons import ProblemReason

_T = TypeVar("_T")

MOST_DEATHS: Final = 3
"""Workers that may die of one rollout before it is given up."""

_ROW_GROUP_BYTES: Final = 8 * 2**20
_TEXTS: Final = [field.name for field in SCHEMA if pa.types.is_string(field.type)]
"""Columns of which a file has a dictionary. One of ids or log probabilities takes time and makes files larger."""
RETRY_AFTER_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits between attempts at a source that cannot answer now, e.g. while its actor restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The groups that one worker builds, and the number of their file."""

    number: int
    groups: tuple[tuple[Request, ...], ...]

    @property
    def rollouts(self) -> int:
        return sum(map(len, self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How records become rows."""

    build: BuildOptions = field(default_factory=BuildOptions)
    scale: Scale = "population_std"
    """The divisor of a group's centered rewards."""


@dataclass(frozen=True, slots=True)
class Written:
    """Rollouts whose rows went to a file, which is whole once its part is over."""

    part: int
    file: str
    """Its name, which is another one each time the part is written."""
    summaries: tuple[RolloutSummary, ...]


class Post(Protocol):
    """Where a worker notes what it is at, so that it is known what it died of."""

    def enter(self, what: str) -> int:
        """Begins with `what`. Returns how many workers have died of that."""
        ...

    def leave(self) -> None:
        """The part is over."""
        ...


class Unwatched:
    """The post of a worker that nobody replaces if it dies."""

    def enter(self, what: str) -> int:
        return 0

    def leave(self) -> None:
        """Nobody listens."""


class WorkerSource:
    """The source of one worker, and the event loop that it lives on, for all rollouts and parts of the worker.

    A context manager. It is opened when it is first needed: by then the worker has noted that it is at work.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._runner = asyncio.Runner()
        self._opened: TokenSource | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._opened is not None:
                self.run(self._opened.close())
        finally:
            self._runner.close()

    def rollout_ids(self) -> Sequence[str]:
        """See `TokenSource`."""
        return self.run(self.opened().rollout_ids())

    def opened(self) -> TokenSource:
        """Raises what `SourceSpec.open` raises."""
        if self._opened is None:
            self._opened = self.run(self._spec.open())
        return self._opened

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """On the source's loop."""
        # Not `Runner.run`: for Ctrl-C it sets a handler and takes it back each time, and `signal` then writes the task
        # out as text, with the snapshot that it returns: ten times the time of building it.
        return self._runner.get_loop().run_until_complete(work)


def built_part(
    part: Part, *, source: WorkerSource, options: RowOptions, post: Post
) -> Generator[tuple[tuple[RolloutSummary, ...], pa.Table]]:
    """The rollouts of a part, some at a time.

    Raises `ConfigError` for a source that cannot be opened, `StoreUnavailableError` if it is down for longer than a
    restart takes, `JobError` if workers die of something else than a rollout.
    """
    whole = f"part {part.number}"

    def enter_whole() -> int:
        deaths = post.enter(whole)
        if deaths >= MOST_DEATHS:
            raise JobError(f"workers died {deaths} times while they read, compared or wrote {whole}, of no one rollout")
        return deaths

    async def freeze(rollout_id: str) -> Snapshot:
        # To note each rollout costs as much as to build a small one: only where something has died already.
        deaths = post.enter(f"rollout {rollout_id}") if is_suspect else 0
        if deaths < MOST_DEATHS:
            return await _freeze(opened, rollout_id)
        enter_whole()
        detail = f"{deaths} workers died while they built it, most likely for want of memory"
        return unusable(shown_id(rollout_id), ProblemReason.WORKER_DIED, detail)

    def on_built() -> None:
        if is_suspect:
            enter_whole()

    is_suspect = enter_whole() > 0
    opened = source.opened()
    if isinstance(opened, AheadSource):
        opened.ahead([request.rollout_id for group in part.groups for request in group])
    built = build_groups(part.groups, freeze, options=options.build, scale=options.scale, on_built=on_built)
    try:
        while (some := source.run(_next(built))) is not None:
            yield some
    finally:
        source.run(built.aclose())
    post.leave()


def write_part(
    part: Part, *, source: WorkerSource, options: RowOptions, post: Post, staging: Staging
) -> Generator[Written]:
    """Writes the file of a part; says what is written, some rollouts at a time."""
    name = f"part-{part.number}.{uuid.uuid4().hex}"
    with (
        closing(built_part(part, source=source, options=options, post=post)) as built,
        staging.create(name) as stream,
        pq.ParquetWriter(stream, SCHEMA, compression="zstd", use_dictionary=_TEXTS) as writer,
    ):
        waiting: list[pa.Table] = []
        waiting_bytes = 0
        for summaries, table in built:
            if waiting and waiting_bytes + table.nbytes > _ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(waiting))
                waiting, waiting_bytes = [], 0
            waiting.append(table)
            waiting_bytes += table.nbytes
            yield Written(part.number, name, summaries)
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


async def _next(items: AsyncGenerator[_T]) -> _T | None:
    """A step into the loop for each batch, not for each rollout: that would take a tenth of the time of small ones."""
    return await anext(items, None)


async def _freeze(source: TokenSource, rollout_id: str) -> Snapshot:
    """The snapshot. A rollout that cannot be read gets one that says so; a source that is down ends the job."""
    try:
        for wait_s in RETRY_AFTER_S:
            try:
                return await source.freeze(rollout_id)
            except StoreUnavailableError:
                await asyncio.sleep(wait_s)
        return await source.freeze(rollout_id)
    except StoreUnavailableError:
        raise
    except (StoreError, RecordError) as error:
        return unusable(shown_id(rollout_id), ProblemReason.UNREADABLE, str(error), call_id=error.call_id)
    except OSError as error:
        return unusable(shown_id(rollout_id), ProblemReason.UNREADABLE, str(error))
