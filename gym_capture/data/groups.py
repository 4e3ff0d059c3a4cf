"""One group of rollouts into rows, one rollout at a time.

Invariant: at most one rollout is in memory, and the rows of one batch, whatever the size of the group; the rows that
come out are final - masked where they must be, with the advantage that the whole group gives them - and each rollout
that was asked for has some.

Flow: freeze -> build -> rows without an advantage, in batches of several small rollouts, as to make a table costs as
much for one as for many -> a spool (memory up to a limit, then a file of this machine) -> once every rollout of the
group is known, the advantages -> the rows again out of the spool, batch by batch.

A rollout that cannot be built is data, not the end of a job: `built_or_masked` is the one boundary where whatever its
records bring about becomes a masked row (`build_failed`). One whose rows make no table takes no other with it: then the
rollouts of its batch go one by one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from gym_capture.builder import BuildOptions, BuiltRollout, build
from gym_capture.data.advantages import Scale, group_advantages, reward_problems
from gym_capture.data.collector import collector_paused
from gym_capture.data.requests import Request
from gym_capture.data.schema import SCHEMA, Row, row_nbytes, rows, to_table, with_advantages
from gym_capture.errors import ConfigError, RecordError, StoreUnavailableError
from gym_capture.reasons import MaskReason, ProblemReason, join_reason
from gym_capture.records import RecordProblem, Snapshot, digest_ids

_SPOOL_BYTES: Final = 16 * 2**20
_BATCH_BYTES: Final = 2**20

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """What became of one rollout. Small: a job keeps one for each rollout where it never keeps rows."""

    rollout_id: str
    group_id: str
    masked: bool
    mask_reasons: tuple[str, ...]
    missing: bool
    """The source knows nothing of it: not a record, not an intent, not a problem."""
    trajectories: int
    token_ids: int
    """Ids of all trajectories, prompts included."""
    generated_tokens_captured: int
    generated_tokens_delivered: int
    excluded_tokens: Mapping[str, int]
    """Generated ids that are captured and not delivered, by reason."""
    first_prompt: str | None
    """Digest of the main chain's first prompt: what trainers that group by prompt compare; None: no trajectory."""
    snapshot_id: str
    snapshot_version: int
    """The snapshot that the rows were built from: what may be dropped once they are safe."""
    details: tuple[str, ...] = ()
    """What is wrong with its records, in words."""


def build_group(
    requests: Sequence[Request],
    freeze: Callable[[str], Snapshot],
    *,
    options: BuildOptions,
    scale: Scale,
    on_built: Callable[[], None] = lambda: None,
) -> Iterator[tuple[tuple[RolloutSummary, ...], pa.Table]]:
    """The rollouts of one group, some at a time: their summaries, and their rows as a table of `SCHEMA`.

    In the order of `requests`; a table is of one rollout, or of several that together are small. `on_built` is called
    when all of them are built, before the first comes out.
    """
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
        with pa.ipc.new_stream(file, SCHEMA) as writer:
            spool = _Spool(writer, options)
            for request in requests:
                rows_of = partial(_rows_of, request, options)
                make = partial(_built, rows_of, freeze, request.rollout_id)
                spool.add(built_or_masked(request.rollout_id, make, rows_of))
            spool.write()
        on_built()
        advantages = group_advantages(
            [math.nan if request.reward is None else request.reward for request in requests],
            groups=[request.group_id for request in requests],
            masked=[summary.masked for summaries in spool.batches for summary in summaries],
            scale=scale,
        )
        file.seek(0)
        done = 0
        for summaries, batch in zip(spool.batches, pa.ipc.open_stream(file), strict=True):
            n_rows = [max(summary.trajectories, 1) for summary in summaries]
            of_rows = np.repeat(advantages[done : done + len(summaries)], n_rows)
            done += len(summaries)
            yield summaries, with_advantages(pa.Table.from_batches([batch]), of_rows)


@dataclass(frozen=True, slots=True)
class _Built:
    """One rollout, its rows still without an advantage."""

    request: Request
    summary: RolloutSummary
    rows: list[Row]


class _Spool:
    """Writes rows to a stream, the rollouts of a batch together."""

    def __init__(self, writer: pa.ipc.RecordBatchStreamWriter, options: BuildOptions) -> None:
        self.batches: list[tuple[RolloutSummary, ...]] = []
        """Of what was written: the rollouts of each batch."""
        self._writer = writer
        self._options = options
        self._waiting: list[_Built] = []
        self._nbytes = 0

    def add(self, built: _Built) -> None:
        nbytes = sum(map(row_nbytes, built.rows))
        if self._nbytes + nbytes > _BATCH_BYTES:
            self.write()
        self._waiting.append(built)
        self._nbytes += nbytes
        if nbytes > _BATCH_BYTES:  # is not to be there while the next one is built
            self.write()

    def write(self) -> None:
        """Writes what waits."""
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        if not waiting:
            return
        try:
            self._write_batch(waiting, to_table([row for built in waiting for row in built.rows]))
        except (RecordError, pa.ArrowException, ValueError, TypeError, OverflowError):  # of whose rows?
            for each in waiting:
                instead = partial(_rows_of, each.request, self._options)
                built = built_or_masked(each.request.rollout_id, partial(_tabular, each), instead)
                self._write_batch([built], to_table(built.rows))

    def _write_batch(self, some: Sequence[_Built], table: pa.Table) -> None:
        (batch,) = table.to_batches()
        self._writer.write_batch(batch)
        self.batches.append(tuple(built.summary for built in some))


def built_or_masked(rollout_id: str, make: Callable[[], _Made], instead: Callable[[Snapshot], _Made]) -> _Made:
    """What `make` makes of a rollout or, if the rollout is why that fails, `instead` of one that says so."""
    try:
        return make()
    except (ConfigError, StoreUnavailableError):  # of the source, whatever the rollout
        raise
    except Exception as error:  # noqa: BLE001 - the boundary
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        return instead(unusable(rollout_id, ProblemReason.BUILD_FAILED, detail))


def _tabular(built: _Built) -> _Built:
    """The same. Raises whatever its rows bring about when they become a table."""
    to_table(built.rows)
    return built


def unusable(rollout_id: str, reason: ProblemReason, detail: str, *, call_id: str | None = None) -> Snapshot:
    """What stands for the snapshot of a rollout that cannot be had: it masks it, and nothing can be dropped by it."""
    problem = RecordProblem(reason=reason, call_id=call_id, field=None, detail=detail)
    return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=(), problems=(problem,))


def _built(make: Callable[[Snapshot], _Built], freeze: Callable[[str], Snapshot], rollout_id: str) -> _Built:
    with collector_paused():
        return make(freeze(rollout_id))


def _rows_of(request: Request, options: BuildOptions, snapshot: Snapshot) -> _Built:
    built = build(snapshot, options)
    if request.failure is not None:
        # Which is also why it has no reward, if it has none.
        extra_reasons = [join_reason(MaskReason.INCOMPLETE, request.failure)]
    else:
        extra_reasons = list(reward_problems(request.reward))
    built_rows = rows(
        built,
        group_id=request.group_id,
        reward=request.reward,
        reward_components=request.reward_components,
        extra_mask_reasons=extra_reasons,
    )
    return _Built(request, summarize(request, snapshot, built, (*built.mask_reasons, *extra_reasons)), built_rows)


def summarize(
    request: Request, snapshot: Snapshot, built: BuiltRollout, mask_reasons: tuple[str, ...]
) -> RolloutSummary:
    """What became of a rollout that was built; `mask_reasons` are all of them, those of the build included."""
    first_prompt = None
    if built.trajectories:
        main = built.trajectories[0]
        lengths = {entry.model_call_id: entry.prompt_len for entry in snapshot.entries}
        first_prompt = digest_ids(main.token_ids[: lengths[main.call_ids[0]]])
    return RolloutSummary(
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        masked=bool(mask_reasons),
        mask_reasons=mask_reasons,
        missing=not (snapshot.entries or snapshot.incomplete or snapshot.problems),
        trajectories=len(built.trajectories),
        token_ids=sum(int(trajectory.token_ids.size) for trajectory in built.trajectories),
        generated_tokens_captured=built.counts.generated_tokens_captured,
        generated_tokens_delivered=built.counts.generated_tokens_delivered,
        excluded_tokens=dict(built.counts.excluded_tokens),
        first_prompt=first_prompt,
        snapshot_id=snapshot.snapshot_id,
        snapshot_version=snapshot.version,
        details=tuple(problem.detail for problem in snapshot.problems),
    )
