"""Groups of rollouts into rows, one rollout at a time.

Invariant: at most one rollout is in memory, and the rows of one batch, whatever the size of a group, beside the ids of
one group up to a limit (`prefixes`); the rows that
come out are final - masked where they must be, with the advantage that the whole group gives them - and each rollout
that was asked for has some.

Flow: freeze -> build -> rows without an advantage, in batches of several small rollouts, as to make a table costs as
much for one as for many -> a spool (memory up to a limit, then a file of this machine) -> once every rollout of a
group is known, or of several small groups, the advantages -> the rows again out of the spool, batch by batch.

A rollout that cannot be built is data, not the end of a job: `_failing_alone` is the one boundary where whatever its
records bring about becomes a masked row (`build_failed`). One whose rows make no table takes no other with it: then the
rollouts of its batch go one by one.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gym_capture.build.builder import BuildOptions, BuiltRollout, build
from gym_capture.capture.records import RecordProblem, Snapshot, digest_ids
from gym_capture.data.advantages import Scale, group_advantages, reward_problems
from gym_capture.data.collector import collector_paused
from gym_capture.data.nemo_gym import shown_id
from gym_capture.data.prefixes import GroupPrefixes
from gym_capture.data.requests import Request
from gym_capture.data.schema import SCHEMA, Row, row_nbytes, rows, to_table, with_advantages, with_prefixes
from gym_capture.errors import ConfigError, RecordError, StoreUnavailableError
from gym_capture.reasons import MaskReason, ProblemReason, join_reason

_SPOOL_BYTES: Final = 16 * 2**20
_BATCH_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The account of one rollout. Small: a job keeps one for each rollout where it never keeps rows."""

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
    truncated: bool = False
    """Its conversation outgrew the model's context."""
    details: tuple[str, ...] = ()
    """The faults of its records, in words."""


async def build_groups(
    groups: Iterable[Sequence[Request]],
    freeze: Callable[[str], Awaitable[Snapshot]],
    *,
    options: BuildOptions,
    scale: Scale,
    on_built: Callable[[], None] = lambda: None,
) -> AsyncGenerator[tuple[tuple[RolloutSummary, ...], pa.Table]]:
    """The rollouts of `groups`, some at a time: their summaries, and their rows as a table of `SCHEMA`.

    In the order of the requests; a table is of one rollout, or of several that together are small. `on_built` is called
    when whole groups are built, before the first of their rollouts comes out.
    """
    remaining = iter(groups)
    prefixes = GroupPrefixes()
    for first in remaining:
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
            requests: list[Request] = []
            with pa.ipc.new_stream(file, SCHEMA) as writer:
                spool = _Spool(writer, options)
                for group in itertools.chain([first], remaining):
                    for request in group:
                        spool.add(await _built(request, freeze, options))
                    requests += group
                    if spool.nbytes > _BATCH_BYTES:
                        break
                spool.write()
            on_built()
            advantages = _advantages(requests, [each for some in spool.batches for each in some], scale)
            file.seek(0)
            done = 0
            for summaries, batch in zip(spool.batches, pa.ipc.open_stream(file), strict=True):
                n_rows = [max(summary.trajectories, 1) for summary in summaries]
                of_rows = np.repeat(advantages[done : done + len(summaries)], n_rows)
                done += len(summaries)
                table = with_advantages(pa.Table.from_batches([batch]), of_rows)
                yield summaries, with_prefixes(table, *prefixes.columns(table))


def _advantages(
    requests: Sequence[Request], summaries: Sequence[RolloutSummary], scale: Scale
) -> npt.NDArray[np.float64]:
    """Of each rollout; NaN of one that is compared with none."""
    compared = np.array([request.compared for request in requests], dtype=np.bool_)
    advantages = group_advantages(
        [math.nan if request.reward is None else request.reward for request in requests],
        groups=[request.group_id for request in requests],
        masked=np.array([summary.masked for summary in summaries], dtype=np.bool_) | ~compared,
        scale=scale,
    )
    return np.where(compared, advantages, np.nan)


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
        self.nbytes = 0
        """Of the rows that were added, about."""
        self._writer = writer
        self._options = options
        self._waiting: list[_Built] = []
        self._waiting_nbytes = 0

    def add(self, built: _Built) -> None:
        nbytes = sum(map(row_nbytes, built.rows))
        if self._waiting_nbytes + nbytes > _BATCH_BYTES:
            self.write()
        self._waiting.append(built)
        self._waiting_nbytes += nbytes
        self.nbytes += nbytes
        if nbytes > _BATCH_BYTES:  # is not to be there while the next one is built
            self.write()

    def write(self) -> None:
        """Writes what waits."""
        waiting, self._waiting, self._waiting_nbytes = self._waiting, [], 0
        if not waiting:
            return
        try:
            self._write_batch(waiting, to_table([row for built in waiting for row in built.rows]))
        except (RecordError, pa.ArrowException, ValueError, TypeError, OverflowError):  # of whose rows?
            for each in waiting:
                self._write_alone(each)

    def _write_alone(self, built: _Built) -> None:
        with _failing_alone(built.request) as failed:
            table = to_table(built.rows)
        for instead in failed:
            built = _rows_of(built.request, self._options, instead)
            table = to_table(built.rows)
        self._write_batch([built], table)

    def _write_batch(self, some: Sequence[_Built], table: pa.Table) -> None:
        (batch,) = table.to_batches()
        self._writer.write_batch(batch)
        self.batches.append(tuple(built.summary for built in some))


@contextmanager
def _failing_alone(request: Request) -> Iterator[list[Snapshot]]:
    """If the rollout is why what is done inside fails, the list has what stands for its snapshot and says so."""
    failed: list[Snapshot] = []
    try:
        yield failed
    except (ConfigError, StoreUnavailableError):  # of the source, whatever the rollout
        raise
    except Exception as error:  # noqa: BLE001 - the boundary
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        failed.append(unusable(shown_id(request.rollout_id), ProblemReason.BUILD_FAILED, detail))


def unusable(rollout_id: str, reason: ProblemReason, detail: str, *, call_id: str | None = None) -> Snapshot:
    """A stand-in for a snapshot that cannot be had: it masks the rollout, and nothing can be dropped by it."""
    problem = RecordProblem(reason=reason, call_id=call_id, field=None, detail=detail)
    return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=(), problems=(problem,))


async def _built(request: Request, freeze: Callable[[str], Awaitable[Snapshot]], options: BuildOptions) -> _Built:
    with _failing_alone(request) as failed, collector_paused():
        built = _rows_of(request, options, await freeze(request.rollout_id))
    for instead in failed:
        built = _rows_of(request, options, instead)
    return built


def _rows_of(request: Request, options: BuildOptions, snapshot: Snapshot) -> _Built:
    built = build(snapshot, options)
    if request.failure is not None:
        # Which is also why it has no reward, if it has none.
        extra_reasons = [join_reason(MaskReason.INCOMPLETE, request.failure)]
    else:
        extra_reasons = list(reward_problems(request.reward)) if request.compared else []
    extra_reasons += _call_reward_problems(request, snapshot)
    built_rows = rows(
        built,
        snapshot=snapshot,
        group_id=shown_id(request.group_id),
        reward=request.reward,
        reward_components=request.reward_components,
        agent_name=request.agent_name,
        input_json=request.input,
        truncated=request.truncated,
        call_rewards=request.call_rewards,
        sample=request.sample,
        attempt=request.attempt,
        extra_mask_reasons=extra_reasons,
    )
    return _Built(request, summarize(request, snapshot, built, (*built.mask_reasons, *extra_reasons)), built_rows)


def _call_reward_problems(request: Request, snapshot: Snapshot) -> list[str]:
    """Calls that got a reward and of which there is no record, or one that is no number."""
    if not request.call_rewards:
        return []
    recorded = {record.model_call_id for record in snapshot.records}
    unknown = [call_id for call_id in request.call_rewards if call_id not in recorded]
    wrong = [call_id for call_id, reward in request.call_rewards.items() if not math.isfinite(reward)]
    return [
        *(join_reason(MaskReason.REWARD_OF_UNKNOWN_CALL, shown_id(call_id)) for call_id in unknown),
        *(join_reason(MaskReason.NON_FINITE_REWARD, shown_id(call_id)) for call_id in wrong),
    ]


def summarize(
    request: Request, snapshot: Snapshot, built: BuiltRollout, mask_reasons: tuple[str, ...]
) -> RolloutSummary:
    """The account of a rollout that was built; `mask_reasons` are all of them, those of the build included."""
    first_prompt = None
    if built.trajectories:
        main = built.trajectories[0]
        lengths = {entry.model_call_id: entry.prompt_len for entry in snapshot.entries}
        first_prompt = digest_ids(main.token_ids[: lengths[main.call_ids[0]]])
    return RolloutSummary(
        rollout_id=shown_id(request.rollout_id),
        group_id=shown_id(request.group_id),
        masked=bool(mask_reasons),
        mask_reasons=mask_reasons,
        missing=not (snapshot.records or snapshot.incomplete or snapshot.problems),
        trajectories=len(built.trajectories),
        token_ids=sum(int(trajectory.token_ids.size) for trajectory in built.trajectories),
        generated_tokens_captured=built.counts.generated_tokens_captured,
        generated_tokens_delivered=built.counts.generated_tokens_delivered,
        excluded_tokens=dict(built.counts.excluded_tokens),
        first_prompt=first_prompt,
        snapshot_id=snapshot.snapshot_id,
        snapshot_version=snapshot.version,
        truncated=request.truncated,
        details=tuple(problem.detail for problem in snapshot.problems),
    )
