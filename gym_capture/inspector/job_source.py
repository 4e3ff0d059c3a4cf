"""A rollout job: its ledger, what was built of it, and its records if they are at hand.

Invariant: the ledger says which rollouts there are and what became of them. A rollout is shown from its records, else
from what was built; with neither, by its row alone.

Flow: lines that were added to the ledger -> `Basics`; the other sources add what they know of the same rollouts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gym_capture.data.added_lines import AddedLines
from gym_capture.errors import GymCaptureError
from gym_capture.inspector.log_source import is_locked
from gym_capture.inspector.parquet_source import ParquetSource, parquet_files
from gym_capture.inspector.seen import Role, SeenRollout, with_outcome
from gym_capture.inspector.source import NOTHING_KNOWN, Basics, Look, Options, Shows, Source, State
from gym_capture.reasons import AttemptFailure, CaptureMark, MaskReason, join_reason, split_reason
from gym_capture.regular_files import open_regular
from gym_capture.rollouts.ledger import ATTEMPTS_FILE, FAILURES_FILE, ROWS_FILE, read_job

METRICS_FILE: Final = "metrics.jsonl"
_LONGEST_LINE: Final = 32 << 20
_MOST_TEXT: Final = 400
"""Characters of what a row of the table says."""
_RECORDED_SINCE: Final = "the call was still under way when this was built; its record came later: build again"
_MOST_STEPS_BYTES: Final = 64 * 2**20
_MOST_INTEGER: Final = 1 << 63


class JobSource(Source):
    """A job's directory."""

    kind = "job"

    def __init__(self, directory: Path, options: Options = NOTHING_KNOWN, *, records: Source | None = None) -> None:
        """Raises `ConfigError` or `RecordError` for a job that cannot be read."""
        job = read_job(directory) or {}
        self.directory = directory
        self._job_id = str(job.get("job_id", ""))
        self.title = f"{self._job_id} ({directory})"
        self._harness = _name_of(job.get("harness"))
        self._rows, self._failures, self._attempts = (
            _Lines(directory / name) for name in (ROWS_FILE, FAILURES_FILE, ATTEMPTS_FILE)
        )
        self._options = options
        self._records = records
        self._built = _built_in(directory, options)
        self._playing: dict[str, dict[str, Any]] = {}
        """Attempts that have begun, and have neither row nor failure."""
        self._known: dict[str, Basics] = {}
        self._over: set[str] = set()
        """Rollouts that have a row."""
        self._said: dict[str, str] = {}
        """Of failed ones, in words."""
        self.is_read_whole = records is not None

    @property
    def shows(self) -> Shows:  # type: ignore[override]
        return Shows(records=self._records is not None, trajectories=self._built is not None, job=True)

    @property
    def is_live(self) -> bool:
        assert self.directory is not None
        return is_locked(self.directory)

    def found(self) -> str:
        beside = [] if self._records is None else [self._records.found()]
        beside += [] if self._built is None else [self._built.found()]
        return "; ".join((f"the job {self._job_id} in {self.directory}", *beside))

    def look(self) -> Look:
        changed: dict[str, Basics] = {}
        is_live = self.is_live
        attempts, rows, failures = (each.new() for each in (self._attempts, self._rows, self._failures))
        self._playing |= {row["rollout_id"]: row for row in attempts}
        for row in (*failures, *rows):
            self._playing.pop(row["rollout_id"], None)
        for row in rows:
            changed[row["rollout_id"]] = _basics(row, self._harness)
            if (said := _said(row)) is not None:
                self._said[row["rollout_id"]] = said
        self._over.update(changed)
        for rollout_id, row in self._playing.items():
            now = _playing(row, self._harness, State.LIVE if is_live else State.FAILED)
            if self._known.get(rollout_id) != now:
                self._known[rollout_id] = changed[rollout_id] = now
        is_more = False
        problem: str | None = None
        others: list[Basics] = []
        for source in (self._built_now(), self._records):
            if source is not None:
                look = source.look()
                is_more = is_more or look.is_more
                problem = problem or look.problem
                others += [each for each in look.changed if self._is_own(each.rollout_id)]
        # What the ledger says comes last, and stands.
        self._known |= changed
        stands = [self._known[each.rollout_id] for each in others if each.rollout_id in self._known]
        # Of attempts that failed only the one that counts is shown: the one that has a row.
        gone = [row["rollout_id"] for row in failures if row["rollout_id"] not in self._over]
        return Look(changed=[*others, *changed.values(), *stands], gone=gone, is_more=is_more, problem=problem)

    def _is_own(self, rollout_id: str) -> bool:
        return rollout_id in self._known or rollout_id in self._playing

    def _built_now(self) -> ParquetSource | None:
        if self._built is None:  # a job may build while it plays
            assert self.directory is not None
            self._built = _built_in(self.directory, self._options)
        return self._built

    def read(self, rollout_id: str) -> SeenRollout | None:
        known = self._known.get(rollout_id)
        rows = [] if self._built is None else self._built.rows(rollout_id)
        seen = None if self._records is None else self._records.read(rollout_id)
        masks = () if known is None or known.mask_reason is None else (known.mask_reason,)
        details = {reason: (said,) for reason in masks if (said := self._said.get(rollout_id))}
        if seen is None and rows and self._built is not None and (built := self._built.read(rollout_id)) is not None:
            return replace(built, mask_details={**built.mask_details, **details})
        if seen is None and known is None:
            return None
        if seen is None:
            return SeenRollout(
                rollout_id=rollout_id, calls=(), trajectories=(), mask_reasons=masks, mask_details=details
            )
        advantage = rows[0]["advantage"] if rows else None
        reasons = rows[0]["mask_reasons"] if rows else masks
        details |= {reason: (_RECORDED_SINCE,) for reason in reasons if _is_recorded(reason, seen)}
        return with_outcome(seen, mask_reasons=reasons, mask_details=details, advantage=advantage)

    def annotated(self) -> Sequence[Path]:
        """A trainer's stand beside what it was given."""
        beside = (source.directory for source in (self._records, self._built) if source is not None)
        return [path for path in (*beside, self.directory) if path is not None]

    def steps(self) -> Sequence[dict[str, Any]]:
        assert self.directory is not None
        return steps_in(self.directory)

    def close(self) -> None:
        for source in (self._records, self._built):
            if source is not None:
                source.close()


def steps_in(directory: Path) -> list[dict[str, Any]]:
    """The steps of a training run in the directory, or in one below it."""
    for path in (directory / METRICS_FILE, *sorted(directory.glob(f"*/{METRICS_FILE}"))):
        try:
            fd = open_regular(path)
        except OSError:
            continue
        try:
            lines = os.pread(fd, _MOST_STEPS_BYTES, 0).split(b"\n")
        finally:
            os.close(fd)
        found = [step for step in map(_object, lines) if step is not None and "step" in step]
        if found:
            return found
    return []


class _Lines:
    """Rows that were added to a file behind the last look; all of it if it is another one."""

    def __init__(self, path: Path) -> None:
        self._found: list[dict[str, Any]] = []
        self._lines = AddedLines(path, self._note, longest=_LONGEST_LINE, begin_again=self._found.clear)

    def new(self) -> list[dict[str, Any]]:
        with suppress(OSError):
            self._lines.look()
        found = self._found[:]
        self._found.clear()
        return found

    def _note(self, begin: int, line: bytes) -> None:
        found = _object(line)
        if found is not None and isinstance(found.get("rollout_id"), str):
            self._found.append(found)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _built_in(directory: Path, options: Options) -> ParquetSource | None:
    """The trajectories below a job's directory, if there are any that can be read."""
    for path in (directory / "trajectories", *sorted(directory.glob("*/"))):
        if path.is_dir() and parquet_files(path):
            try:
                return ParquetSource(path, options)
            except GymCaptureError:
                continue
    return None


def _name_of(settings: object) -> str | None:
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    return name if isinstance(name, str) else None


def _is_recorded(reason: str, seen: SeenRollout) -> bool:
    """Whether a call that a build took for lost has a record by now."""
    name, call_id = split_reason(reason)
    return name == CaptureMark.DANGLING_INTENT and any(
        call.call_id == call_id and call.role != Role.OPEN for call in seen.calls
    )


def _said(row: Mapping[str, Any]) -> str | None:
    """How a rollout failed, in the words of its line."""
    detail, call = (_text(row.get(name)) for name in ("detail", "failed_call"))
    if row.get("status") != State.FAILED or not detail:
        return None
    return detail if not call else f"{detail} (call {call})"


def _basics(row: Mapping[str, Any], harness: str | None) -> Basics:
    said = row.get("recorded")
    recorded: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
    is_failed = row.get("status") == State.FAILED
    reason = join_reason(MaskReason.INCOMPLETE, _text(row.get("error")) or AttemptFailure.FAILED) if is_failed else None
    return Basics(
        rollout_id=row["rollout_id"],
        group=_text(row.get("group_id")),
        sample=_whole(row.get("sample")),
        attempt=_whole(row.get("attempt")),
        state=State.FAILED if is_failed else State.FINISHED,
        reward=_number(row.get("reward")),
        mask_reason=reason,
        harness=harness,
        calls=_whole(recorded.get("calls", row.get("n_calls"))),
        generated_tokens=_whole(recorded.get("generated_tokens")),
        eligible_links=_whole(recorded.get("eligible_links")),
        exact_links=_whole(recorded.get("contiguous_links")),
        put_ms=_mean_ms(_number(recorded.get("put_s")), _whole(recorded.get("timed_puts"))),
        finished_at=(_number(row.get("started_at")) or 0.0) + (_number(row.get("wall_s")) or 0.0) or None,
    )


def _playing(row: Mapping[str, Any], harness: str | None, state: State) -> Basics:
    cut = join_reason(MaskReason.INCOMPLETE, AttemptFailure.NODE_LOST) if state is State.FAILED else None
    return Basics(
        rollout_id=row["rollout_id"],
        group=_text(row.get("task_id")),
        sample=_whole(row.get("sample")),
        attempt=_whole(row.get("attempt")),
        state=state,
        mask_reason=cut,
        harness=harness,
    )


def _mean_ms(seconds: float | None, puts: int | None) -> float | None:
    return 1000 * seconds / puts if seconds is not None and puts else None


# Another version may have written the ledger, or somebody by hand: what is of another kind is not known.


def _text(value: object) -> str | None:
    return value[:_MOST_TEXT] if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int and abs(value) < _MOST_INTEGER else None


def _number(value: object) -> float | None:
    if type(value) is int:
        return float(value) if abs(value) < _MOST_INTEGER else None
    return value if isinstance(value, float) and math.isfinite(value) else None
