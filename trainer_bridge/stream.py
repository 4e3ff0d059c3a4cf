"""Trajectories as a trainer takes them: whole rollouts, from Parquet files or from Arrow batches as they come.

Invariant: rows are put together into the rollouts they were built from, however batches cut them; ids, mask and log
probabilities are aligned; a log probability that is missing is NaN, never 0. Memory is bounded by one batch and what
the caller keeps, whatever the size of the data.

Flow: `parquet_batches(directory)` or the batches of a Ray dataset -> `read_rollouts` -> `groups_of`, or `steps` of
whole groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq

from gym_capture.build.trajectories import Span
from gym_capture.capture.records import IdArray, LogProbArray
from gym_capture.data.copies import check_schema, conformed
from gym_capture.data.schema import read_pairs, read_spans
from gym_capture.errors import ConfigError, RecordError

__all__ = [
    "TRAIN_COLUMNS",
    "TrainRollout",
    "TrainSequence",
    "count_rows",
    "groups_of",
    "parquet_batches",
    "read_rollouts",
    "steps",
]

Batch: TypeAlias = pa.Table | pa.RecordBatch

TRAIN_COLUMNS: Final = (
    *("trajectory_id", "is_main", "token_ids", "loss_mask", "log_probs", "spans", "finish_reason"),
    *("rollout_id", "group_id", "reward", "advantage", "masked", "mask_reasons", "truncated"),
    *("span_sampling", "sample", "attempt", "call_rewards"),
)
"""The columns of a table of trajectories that a training loop reads."""
MAY_LACK: Final = frozenset({"truncated", "span_sampling", "sample", "attempt", "call_rewards"})
"""Columns that can be done without, in tables that were built before them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSequence:
    """One trajectory. Shapes: T ids."""

    trajectory_id: str
    is_main: bool
    token_ids: IdArray
    """int32 [T]."""
    loss_mask: npt.NDArray[np.bool_]
    """bool [T]. True on the ids that the policy sampled and that are trained here."""
    log_probs: LogProbArray
    """float32 [T]. As sampled where `loss_mask` is true; NaN there if it is not known."""
    finish_reason: str | None
    spans: tuple[Span, ...] = ()
    """The segments with loss: the call, the version of the weights and the sampling parameters of each."""
    routed_experts: npt.NDArray[Any] | None = None
    """[T - 1 or T, layers, topk]. None: not recorded, or not read."""
    sampling_mask: npt.NDArray[Any] | None = None
    """[ids with loss, ...], as recorded (`capture.sampling_masks`). None: not recorded, or not read."""

    @property
    def weight_versions(self) -> frozenset[str]:
        """Versions of the weights that sampled, where they are known."""
        return frozenset(span.weight_version for span in self.spans if span.weight_version is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRollout:
    """One rollout with all of its trajectories. Those of a masked one are not for training."""

    rollout_id: str
    group_id: str
    sequences: tuple[TrainSequence, ...]
    reward: float | None
    advantage: float | None
    masked: bool
    mask_reasons: tuple[str, ...]
    outgrown: bool = False
    """Its conversation outgrew the model's context: a further call was refused."""
    sample: int | None = None
    attempt: int | None = None
    """Which sample of its task it is, from 0, and which attempt at it, from 1. None: nobody said."""
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """The agent's own rewards of single calls, by call id as in `spans`: no part of the reward or the advantage."""

    @property
    def truncated(self) -> bool:
        """Whether it ended at a length limit: that of the context, or that of its main chain's last call."""
        return self.outgrown or any(
            sequence.is_main and sequence.finish_reason == "length" for sequence in self.sequences
        )


def parquet_batches(
    directory: str | Path, *, rows_per_batch: int = 16, columns: Sequence[str] = TRAIN_COLUMNS
) -> Iterator[pa.RecordBatch]:
    """The rows of a directory of Parquet files (a path or URI), in the order of the files' names.

    Raises `ConfigError`, naming the file, if there are none or one cannot be read, `RecordError` for one that lacks
    `columns`, and what `check_schema` raises.
    """
    dataset = _dataset(directory)
    for path in sorted(dataset.files):
        with opened(dataset.filesystem, path) as file:
            yield from file.iter_batches(rows_per_batch, columns=present(file, path, columns))


def count_rows(directory: str | Path) -> int:
    """How many rows `parquet_batches` gives. Raises what it raises."""
    dataset = _dataset(directory)
    rows = 0
    for path in dataset.files:
        with opened(dataset.filesystem, path) as file:
            rows += file.metadata.num_rows
    return rows


def _dataset(directory: str | Path) -> pa.dataset.FileSystemDataset:
    try:
        dataset = pa.dataset.dataset(str(directory), format="parquet")
    except FileNotFoundError:
        raise ConfigError(f"{directory} does not exist: build trajectories into it first") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{directory} is not a directory of Parquet files: {one_line(error)}") from None
    if not dataset.files:
        raise ConfigError(f"{directory} has no Parquet files: build trajectories into it first")
    return dataset


@contextmanager
def opened(filesystem: pa.fs.FileSystem, path: str) -> Iterator[pq.ParquetFile]:
    """A file of trajectories. Raises `ConfigError` for one that cannot be read, and what `check_schema` raises; both
    name the file."""
    try:
        with filesystem.open_input_file(path) as source:
            file = pq.ParquetFile(source)
            try:
                check_schema(file.schema_arrow)
            except RecordError as error:
                raise type(error)(f"{path}: {error.message}", field=error.field) from None
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from None


def present(file: pq.ParquetFile, path: str, columns: Sequence[str]) -> list[str]:
    """The `columns` that a file has. Raises `RecordError` if it lacks one that cannot be done without."""
    names = file.schema_arrow.names
    lacking = [name for name in columns if name not in {*names, *MAY_LACK}]
    if lacking:
        raise RecordError(
            f"{path} has no column {lacking[0]!r}: it was built by an earlier version; build it again",
            field=lacking[0],
        )
    return [name for name in columns if name in names]


def one_line(error: Exception) -> str:
    """What a library says, for a message of one line."""
    return " ".join(str(error).split())


def read_rollouts(batches: Iterable[Batch]) -> Iterator[TrainRollout]:
    """The rollouts of `batches`, in order. Raises `RecordError` if the rows of one do not stand together."""
    return map(_rollout, rows_by_rollout(batches, TRAIN_COLUMNS))


def rows_by_rollout(batches: Iterable[Batch], columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each rollout, in order, `columns` of them; ids, mask and log probabilities as Arrow arrays.

    Raises `RecordError` if the rows of one do not stand together, or their arrays are not aligned.
    """
    finished: set[str] = set()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for row in _rows(batch, columns):
            if rows and row["rollout_id"] != rows[0]["rollout_id"]:
                finished.add(rows[0]["rollout_id"])
                yield rows
                rows = []
            if row["rollout_id"] in finished:
                raise RecordError(
                    "rows of one rollout must stand together", field="rollout_id", rollout_id=row["rollout_id"]
                )
            _check_aligned(row)
            rows.append(row)
    if rows:
        yield rows


def groups_of(rollouts: Iterable[TrainRollout]) -> Iterator[tuple[TrainRollout, ...]]:
    """Whole groups. Raises `RecordError` if the rollouts of one do not stand together, as in a copy that was
    repartitioned, before a second piece of it is given."""
    given: set[str] = set()
    for group_id, group in itertools.groupby(rollouts, key=lambda rollout: rollout.group_id):
        if group_id in given:
            raise RecordError(
                f"the rows of group {group_id} do not stand together: sort them by group_id and rollout_id, or build "
                "them again",
                field="group_id",
            )
        given.add(group_id)
        yield tuple(group)


def steps(rollouts: Iterable[TrainRollout], *, rollouts_per_step: int) -> Iterator[tuple[TrainRollout, ...]]:
    """Batches to train on at once: whole groups, until there are `rollouts_per_step` rollouts or none left. Raises what
    `groups_of` raises."""
    waiting: list[TrainRollout] = []
    for group in groups_of(rollouts):
        waiting.extend(group)
        if len(waiting) >= rollouts_per_step:
            yield tuple(waiting)
            waiting = []
    if waiting:
        yield tuple(waiting)


def _rows(batch: Batch, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    # Lists of ids become arrays, all else is small.
    present = [name for name in columns if name in batch.schema.names or name not in MAY_LACK]
    batch = conformed(batch.select(present))
    arrays = {name: batch.column(name) for name in ("token_ids", "loss_mask", "log_probs")}
    others = [name for name in present if name not in arrays]
    for index, row in enumerate(batch.select(others).to_pylist()):
        yield row | {name: column[index].values for name, column in arrays.items()}


def _rollout(rows: Sequence[dict[str, Any]]) -> TrainRollout:
    first = rows[0]
    return TrainRollout(
        rollout_id=first["rollout_id"],
        group_id=first["group_id"],
        sequences=tuple(_sequence(row) for row in rows if len(row["token_ids"])),
        reward=first["reward"],
        advantage=first["advantage"],
        masked=first["masked"],
        mask_reasons=tuple(first["mask_reasons"]),
        outgrown=bool(first.get("truncated")),
        sample=first.get("sample"),
        attempt=first.get("attempt"),
        call_rewards=read_pairs(first.get("call_rewards") or ()),
    )


def _check_aligned(row: dict[str, Any]) -> None:
    ids, mask, log_probs = row["token_ids"], row["loss_mask"], row["log_probs"]
    if not (len(ids) == len(mask) == len(log_probs)) or ids.null_count or mask.null_count:
        raise RecordError(
            f"loss_mask and log_probs must align with token_ids, without gaps: got {len(mask)}, {len(log_probs)} and "
            f"{len(ids)}",
            field="token_ids",
            rollout_id=row["rollout_id"],
        )


def _sequence(row: dict[str, Any]) -> TrainSequence:
    return TrainSequence(
        trajectory_id=row["trajectory_id"],
        is_main=row["is_main"],
        token_ids=row["token_ids"].to_numpy(),
        loss_mask=row["loss_mask"].to_numpy(zero_copy_only=False),
        log_probs=row["log_probs"].to_numpy(zero_copy_only=False),
        finish_reason=row["finish_reason"],
        spans=read_spans(row["spans"], row.get("span_sampling")),
    )
