"""One group of rollouts into rows, one rollout at a time.

Invariant: at most one rollout is in memory, whatever the size of its group; the rows that come out are final - masked
where they must be, with the advantage that the whole group gives them - and each rollout that was asked for has some.

Flow: freeze -> build -> rows without an advantage into a spool (memory up to a limit, then a file of this machine) ->
once every rollout of the group is known, the advantages -> the rows again out of the spool, rollout by rollout.

A rollout that cannot be built is data, not the end of a job: `_build_one` is the one boundary where whatever its
records bring about becomes a masked row (`build_failed`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from gym_capture.builder import BuildOptions, BuiltRollout, build
from gym_capture.data.advantages import Scale, group_advantages
from gym_capture.data.requests import Request
from gym_capture.data.schema import SCHEMA, reward_problems, rows, to_table, with_advantage
from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.reasons import MaskReason, ProblemReason, join_reason
from gym_capture.records import RecordProblem, Snapshot, digest_ids

_SPOOL_BYTES: Final = 16 * 2**20


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
) -> Iterator[tuple[RolloutSummary, pa.Table]]:
    """Each rollout of one group: its summary, and its rows as a table of `SCHEMA`. In the order of `requests`.

    `on_built` is called when all of them are built, before the first comes out.
    """
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        with pa.ipc.new_stream(spool, SCHEMA) as writer:
            summaries = [_build_one(request, freeze, options, writer) for request in requests]
        on_built()
        advantages = group_advantages(
            [math.nan if request.reward is None else request.reward for request in requests],
            groups=[request.group_id for request in requests],
            masked=[summary.masked for summary in summaries],
            scale=scale,
        )
        spool.seek(0)
        for summary, batch, advantage in zip(summaries, pa.ipc.open_stream(spool), advantages, strict=True):
            yield summary, with_advantage(pa.Table.from_batches([batch]), float(advantage))


def _build_one(
    request: Request,
    freeze: Callable[[str], Snapshot],
    options: BuildOptions,
    writer: pa.ipc.RecordBatchStreamWriter,
) -> RolloutSummary:
    """Writes the rows of one rollout, still without an advantage, as one batch."""
    try:
        summary, batch = _rows_of(request, freeze(request.rollout_id), options)
    except (ConfigError, StoreUnavailableError):  # of the source, whatever the rollout
        raise
    except Exception as error:  # noqa: BLE001 - the boundary
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        summary, batch = _rows_of(request, unusable(request.rollout_id, ProblemReason.BUILD_FAILED, detail), options)
    # Outside: a spool that cannot be written is no fault of the rollout's.
    writer.write_batch(batch)
    return summary


def unusable(rollout_id: str, reason: ProblemReason, detail: str, *, call_id: str | None = None) -> Snapshot:
    """What stands for the snapshot of a rollout that cannot be had: it masks it, and nothing can be dropped by it."""
    problem = RecordProblem(reason=reason, call_id=call_id, field=None, detail=detail)
    return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=(), problems=(problem,))


def _rows_of(request: Request, snapshot: Snapshot, options: BuildOptions) -> tuple[RolloutSummary, pa.RecordBatch]:
    built = build(snapshot, options)
    extra_reasons = list(reward_problems(request.reward))
    if request.failure is not None:
        extra_reasons.append(join_reason(MaskReason.INCOMPLETE, request.failure))
    table = to_table(
        rows(
            built,
            group_id=request.group_id,
            reward=request.reward,
            reward_components=request.reward_components,
            extra_mask_reasons=extra_reasons,
        )
    )
    (batch,) = table.to_batches()
    return summarize(request, snapshot, built, (*built.mask_reasons, *extra_reasons)), batch


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
