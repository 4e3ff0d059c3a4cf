"""A rollout job that is built while it plays: parts of trajectories, and the rows of each group beside the job's files.

Invariant: every rollout of a built group has one row, however often the job was started; a group whose part was written
and whose rows were not gets them in the next run. Rows are written beside the job, in order, and hold up neither its
rollouts nor its parts. A group that cannot be projected has none, which is said in the end; the others have theirs.

Flow: a part appears -> `GroupRows.written` queues it -> a thread reads it back, projects its rollouts
(`trainer_bridge.nemo_rl`), joins what the job knows of each (`rollouts.rows`) and adds the lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from rich.console import Console
from rich.markup import escape

from gym_capture.commands.building import warn_of_left
from gym_capture.data.group_files import StreamReport, WrittenGroup, write_groups
from gym_capture.data.group_stream import Tell
from gym_capture.data.row_files import RowFile, write_table
from gym_capture.data.sources import SourceSpec
from gym_capture.errors import RecordError
from gym_capture.reasons import MaskReason
from gym_capture.rollouts.environment import Task
from gym_capture.rollouts.exchanges import Exchanges
from gym_capture.rollouts.job import JobOptions
from gym_capture.rollouts.jobfile import JobFile
from gym_capture.rollouts.ledger import RolloutRow
from gym_capture.rollouts.progress import JobProgress
from gym_capture.rollouts.rows import Exchange, row
from trainer_bridge.finished import COLUMNS, read_finished
from trainer_bridge.nemo_rl import contiguity_walk, project_group


async def build_while_playing(
    play: Callable[[Callable[[RolloutRow], None]], Awaitable[None]],
    *,
    job: JobFile,
    options: JobOptions,
    tasks: Sequence[Task],
    source: SourceSpec,
    exchanges: Exchanges,
    out: str,
    console: Console,
    progress: JobProgress,
) -> StreamReport:
    """Plays by `play`, which is given what to tell of each rollout that is over. Raises what `write_groups` raises."""
    agent_name = job.harness.name
    task_ids = [task.task_id for task in tasks]
    rows = GroupRows(directory=job.out, out=out, agent_name=agent_name, task_ids=task_ids, exchanges=exchanges)

    async def telling(tell: Tell) -> None:
        def over(outcome: RolloutRow) -> None:
            rows.over(outcome)
            task = exchanges.get(outcome.rollout_id).input or None
            tell({**asdict(outcome), "agent_name": agent_name, "input": task})

        await play(over)

    def built(group: WrittenGroup) -> None:
        rows.written(group)
        progress.built(
            rollouts=len(group.summaries),
            masked=[summary.rollout_id for summary in group.summaries if summary.masked],
            trajectories=sum(summary.trajectories for summary in group.summaries),
        )

    progress.builds()
    async with rows.writing():
        report = await write_groups(
            telling,
            source=source,
            out=out,
            group_size=options.samples,
            job={"job_id": options.job_id, "samples": options.samples},
            on_written=built,
            on_kept=built,
            on_left=warn_of_left(console, out),
        )
    for group_id, why in rows.failed.items():
        text = f"group {group_id} has its trajectories, and no rows: {why}"
        console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
    return report


class GroupRows:
    """Writes the rows of groups as they are built."""

    def __init__(
        self, *, directory: Path, out: str, agent_name: str, task_ids: Sequence[str], exchanges: Exchanges
    ) -> None:
        self._directory = directory
        self._out = out
        self._agent_name = agent_name
        self._task_index = {task_id: index for index, task_id in enumerate(task_ids)}
        self._exchanges = exchanges
        self._outcomes: dict[str, RolloutRow] = {}
        self._queue: asyncio.Queue[WrittenGroup | None] = asyncio.Queue()
        self.failed: dict[str, str] = {}
        """Groups that have no rows, because of what is in them, and why."""

    def over(self, outcome: RolloutRow) -> None:
        """A rollout is over: its row is made once its group is built."""
        self._outcomes[outcome.rollout_id] = outcome

    def written(self, group: WrittenGroup) -> None:
        """The part of a group is there."""
        self._queue.put_nowait(group)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """For the time of the job; leaving it writes what waits, and then the table. Raises `ConfigError`."""
        writer = asyncio.create_task(self._write())
        try:
            yield
        finally:
            self._queue.put_nowait(None)
            await writer

    async def _write(self) -> None:
        first = await self._queue.get()  # by then the job's directory is locked
        if first is None:
            return
        file = await asyncio.to_thread(RowFile, self._directory)
        try:
            group: WrittenGroup | None = first
            while group is not None:
                outcomes = {
                    summary.rollout_id: self._outcomes.pop(summary.rollout_id)
                    for summary in group.summaries
                    if summary.rollout_id in self._outcomes
                }
                try:
                    await asyncio.to_thread(self._add, file, group, outcomes)
                except RecordError as error:  # of this group's own: the others have theirs
                    self.failed[group.group_id] = error.message
                group = await self._queue.get()
        finally:
            file.close()
        await asyncio.to_thread(write_table, self._directory)

    def _add(self, file: RowFile, group: WrittenGroup, outcomes: Mapping[str, RolloutRow]) -> None:
        if all(rollout_id in file.rollout_ids for rollout_id in outcomes):
            return
        filesystem, path = fs.FileSystem.from_uri(
            self._out if "://" in self._out else Path(self._out).absolute().as_uri()
        )
        try:
            with filesystem.open_input_file(f"{path}/{group.part}") as stream:
                table = pq.read_table(stream, columns=list(COLUMNS))
        except (OSError, pa.ArrowException) as error:  # somebody took it away, or damaged it
            why = f"{group.part} cannot be read: {' '.join(str(error).split())}"
            raise RecordError(why, field=group.part) from None
        finished = [replace(each, agent_name=each.agent_name or self._agent_name) for each in read_finished([table])]
        file.add(
            self._row(outcomes[rollout.rollout_id], record)
            for rollout, record in zip(finished, project_group(finished), strict=True)
            if rollout.rollout_id in outcomes
        )

    def _row(self, outcome: RolloutRow, record: Mapping[str, Any]) -> dict[str, Any]:
        exchange = self._exchanges.get(outcome.rollout_id)
        task_index = self._task_index[outcome.task_id]
        return row(outcome, exchange, record, task_index=task_index, native_problem=_native_problem(exchange))


def _native_problem(exchange: Exchange) -> str | None:
    """Why a trainer could not read the ids of an output that is left alone."""
    if exchange.output != "native" or exchange.response is None:
        return None
    try:
        contiguity_walk(exchange.response.get("output") or [])
    except (RecordError, KeyError, TypeError):
        return MaskReason.NO_TRAINABLE_TOKENS
    return None
