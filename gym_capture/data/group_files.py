"""The trajectories of a rollout job as files that appear while it runs, a part for each group.

Invariant: whatever instant the job dies at, the directory holds whole parts only, and a group has at most one. Started
again, the job adds the groups that have none. Parts of another job, or built by other rules, are never mixed in. When
all groups are there, the directory is what a build of the whole job leaves: the same columns, the same report.

Flow: groups as they become complete (`group_stream`) -> those that have no part yet -> the thread writes one
(`parts.write_part`) where readers do not look -> its account and then the part appear -> `_report.json` in the end,
and not before: that of an earlier run goes as the job begins.

Files: `part-<number>.parquet` of `schema.SCHEMA`, numbered as the groups became complete; `_group-<number>.json`, what
became of the rollouts of that part; `_stream.json`, what is built here and how; `_report.json` (`BuildReport`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs

from gym_capture.data.group_stream import BuildThread, Play, complete_groups
from gym_capture.data.groups import RolloutSummary
from gym_capture.data.parts import Part, RowOptions, Unwatched, WorkerSource, write_part
from gym_capture.data.report import BuildReport, report
from gym_capture.data.sources import SourceSpec
from gym_capture.data.staged_files import StagedFiles, staged_files
from gym_capture.data.trajectory_files import REPORT_FILE
from gym_capture.errors import ConfigError

STREAM_FILE: Final = "_stream.json"
_FORMAT_VERSION: Final = 1
_PART: Final = re.compile(r"part-\d+\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenGroup:
    """A group whose part is there."""

    group_id: str
    part: str
    """The name of its file."""
    summaries: tuple[RolloutSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """How a job's files ended."""

    built: BuildReport
    """Of all groups that have a part."""
    kept: int
    """Groups whose part an earlier run wrote."""
    changed: tuple[str, ...]
    """Of those, groups of which this run brought other rollouts than their part has, e.g. one that was played again
    after it had failed. The part stays, since a trainer may have used it. Sorted."""


async def write_groups(
    play: Play,
    *,
    source: SourceSpec,
    out: str | Path,
    group_size: int,
    job: Mapping[str, Any],
    options: RowOptions | None = None,
    on_written: Callable[[WrittenGroup], None] = lambda written: None,
    on_kept: Callable[[WrittenGroup], None] = lambda kept: None,
    on_left: Callable[[tuple[str, ...]], None] = lambda names: None,
) -> StreamReport:
    """Plays a job and writes the trajectories of each of its groups into the directory `out` (a path or URI).

    `job` says which job that is, as JSON: `out` is for this one alone. `on_written` gets each new group once its part
    can be read, `on_kept` each that the job tells of again and that has its part already, `on_left` what
    `trajectory_files.write_files` says of it.

    Raises `ConfigError` if `out` holds anything else or cannot be written to, and what `stream_groups` raises. The
    parts that are there by then stay, and the job can go on from them.
    """
    rows = options or RowOptions()
    asked = json.loads(json.dumps({"format_version": _FORMAT_VERSION, "job": job, "options": asdict(rows)}))
    with staged_files(out, (REPORT_FILE,), what="trajectories", overwrite=True) as staged:
        if staged.left:
            on_left(staged.left)
        there = _Directory(out)
        there.check(asked, staged)
        there.is_unfinished()
        written = there.groups()
        kept = len(written)
        by_id = {group.group_id: group for group in written}
        changed: set[str] = set()
        number = 1 + max((_number(group.part) for group in written), default=-1)
        async with complete_groups(play, group_size=group_size) as complete, BuildThread(source) as thread:
            while (group := await complete.get()) is not None:
                group_id = group[0].group_id
                if group_id in by_id:
                    before = {summary.rollout_id for summary in by_id[group_id].summaries}
                    if before != {request.rollout_id for request in group}:
                        changed.add(group_id)
                    on_kept(by_id[group_id])
                    continue
                one = Part(number=number, groups=(group,))
                new = await thread.run(partial(_write, one, options=rows, staged=staged))
                by_id[group_id] = new
                written.append(new)
                number += 1
                on_written(new)
        summaries = [summary for group in written for summary in group.summaries]
        built = report((summary.rollout_id for summary in summaries), summaries)
        with staged.staging.create(REPORT_FILE) as stream:
            stream.write(json.dumps(asdict(built), indent=2).encode() + b"\n")
        staged.add(REPORT_FILE, REPORT_FILE)
    return StreamReport(built=built, kept=kept, changed=tuple(sorted(changed)))


def _write(part: Part, source: WorkerSource, *, options: RowOptions, staged: StagedFiles) -> WrittenGroup:
    file, summaries = "", list[RolloutSummary]()
    for some in write_part(part, source=source, options=options, post=Unwatched(), staging=staged.staging):
        file = some.file
        summaries += some.summaries
    new = WrittenGroup(
        group_id=part.groups[0][0].group_id, part=f"part-{part.number:05d}.parquet", summaries=tuple(summaries)
    )
    account = f"{file}.json"
    with staged.staging.create(account) as stream:
        stream.write(json.dumps(asdict(new)).encode())
    # A part without its account would be built again; an account without its part says nothing.
    staged.appear(account, _account_of(new.part))
    staged.appear(file, new.part)
    return new


class _Directory:
    """The groups that are there already."""

    def __init__(self, out: str | Path) -> None:
        self._shown = str(out)
        uri = self._shown if "://" in self._shown else Path(self._shown).absolute().as_uri()
        self._filesystem, self._path = fs.FileSystem.from_uri(uri)
        entries: Sequence[fs.FileInfo] = self._filesystem.get_file_info(fs.FileSelector(self._path))
        self._names = {entry.base_name for entry in entries}
        self._parts = sorted(filter(_PART.fullmatch, self._names))

    def check(self, asked: Mapping[str, Any], staged: StagedFiles) -> None:
        """Notes what is built here, or compares it with what was. Raises `ConfigError`."""
        if STREAM_FILE not in self._names:
            if self._parts:
                raise ConfigError(
                    f"{self._shown} already holds trajectories ({self._parts[0]}) that no running job wrote: choose "
                    "another directory"
                )
            with staged.staging.create(STREAM_FILE) as stream:
                stream.write(json.dumps(asked, indent=2).encode() + b"\n")
            staged.appear(STREAM_FILE, STREAM_FILE)
            return
        found = self._read(STREAM_FILE)
        differing = [key for key in asked if found.get(key) != asked[key]]
        if differing:
            old, new = (json.dumps(each.get(differing[0])) for each in (found, asked))
            raise ConfigError(
                f"{self._shown} holds the trajectories of another job, or by other rules ({differing[0]}: {old} -> "
                f"{new}): choose another directory"
            )

    def is_unfinished(self) -> None:
        """Removes the report of an earlier run: whoever follows the directory would take it for the end of this one."""
        if REPORT_FILE in self._names:
            try:
                self._filesystem.delete_file(f"{self._path}/{REPORT_FILE}")
            except OSError as error:
                raise ConfigError(f"{self._shown}/{REPORT_FILE} cannot be removed: {error}") from None

    def groups(self) -> list[WrittenGroup]:
        """The groups that have a part, in the order of their numbers. Raises `ConfigError` if one has no account."""
        groups = []
        for part in self._parts:
            if _account_of(part) not in self._names:
                raise ConfigError(
                    f"{self._shown}/{part} has no {_account_of(part)} beside it, so that nobody knows which group it "
                    "holds: remove the part, or choose another directory"
                )
            found = self._read(_account_of(part))
            summaries = tuple(map(_summary, found["summaries"]))
            groups.append(WrittenGroup(group_id=found["group_id"], part=part, summaries=summaries))
        return groups

    def _read(self, name: str) -> dict[str, Any]:
        try:
            with self._filesystem.open_input_stream(f"{self._path}/{name}") as stream:
                found: dict[str, Any] = json.loads(stream.read())
        except (OSError, pa.ArrowInvalid, ValueError) as error:
            raise ConfigError(f"{self._shown}/{name} cannot be read: {error}") from None
        return found


def _account_of(part: str) -> str:
    return f"_group-{_number(part):05d}.json"


def _number(part: str) -> int:
    return int(part.removeprefix("part-").removesuffix(".parquet"))


def _summary(found: Mapping[str, Any]) -> RolloutSummary:
    lists = {name: tuple(found[name]) for name in ("mask_reasons", "details")}
    return RolloutSummary(**{**found, **lists})
