"""Groups as tensors, for a trainer of any kind: rows one behind the other (packed), or padded on the right.

Invariant: ids, mask and log probabilities of a row are those of the table, in one batch, in order. A rollout that is
not trained - masked, without an advantage, with a row that is too long - is in no batch, whole, and is counted; so are
tokens without a finite log probability, which are not trained.

Tensors are views of Arrow's own memory where Arrow has values as torch wants them: ids and log probabilities. The mask
is bits, and is unpacked. A packed batch of rows that stand together in a table is a view of it; any other is one copy.

Flow: `Group.table` -> the rows that are trained -> `pack` or `pad`: batches of at most so many ids.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from gym_capture.data.copies import conformed
from gym_capture.errors import RecordError
from gym_capture.reasons import LeftOutReason
from trainer_bridge.layouts import best_fit, of_one_length
from trainer_bridge.stream import Batch

__all__ = ["COLLATED", "Collated", "PackedBatch", "PaddedBatch", "pack", "pad"]

COLLATED: Final = ("rollout_id", "trajectory_id", "token_ids", "loss_mask", "log_probs", "masked", "advantage")
"""The columns of a table of trajectories that are read here. A `Group` has them."""

_ARRAYS: Final = ("token_ids", "loss_mask", "log_probs")
_BatchT = TypeVar("_BatchT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """S rows one behind the other. Shapes: T ids. Tensors may be Arrow's own memory: not to be written to."""

    token_ids_T: torch.Tensor
    """int32."""
    loss_mask_T: torch.Tensor
    """bool."""
    log_probs_T: torch.Tensor
    """float32: as sampled, where the mask is true."""
    cu_seqlens: torch.Tensor
    """int32 [S + 1]: where each row begins, as attention over rows of several lengths takes it."""
    advantage_S: torch.Tensor
    """float32."""
    trajectory_ids: tuple[str, ...]

    def position_ids(self) -> torch.Tensor:
        """int32 [T]: 0, 1, 2... in each row."""
        lengths_S = self.cu_seqlens.diff()
        starts_T = torch.repeat_interleave(self.cu_seqlens[:-1], lengths_S)
        return torch.arange(self.token_ids_T.numel(), dtype=torch.int32) - starts_T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    """S rows of about one length. Shapes: T ids of the longest."""

    token_ids_S_T: torch.Tensor
    """int32."""
    attention_mask_S_T: torch.Tensor
    """bool: false on the padding."""
    loss_mask_S_T: torch.Tensor
    """bool."""
    log_probs_S_T: torch.Tensor
    """float32: as sampled, where the loss mask is true."""
    advantage_S: torch.Tensor
    """float32."""
    trajectory_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collated(Generic[_BatchT]):
    """The batches, and the account of what is in them."""

    batches: tuple[_BatchT, ...]
    efficiency: float
    """How much of the room in the batches is ids of rows, and not padding or left empty."""
    left_out: Mapping[str, int]
    """Rollouts that are in no batch, by why: a `LeftOutReason`."""
    tokens_without_log_prob: int
    """Sampled tokens that are not trained, since nobody knows how likely they were."""


def pack(tables: Iterable[Batch], *, tokens: int) -> Collated[PackedBatch]:
    """Batches of at most `tokens` ids, filled by best fit. A rollout with a longer row is left out."""
    rows = _read(tables, tokens)
    return rows.collated(best_fit(rows.sizes, tokens), rows.packed, lambda chosen: tokens)


def pad(tables: Iterable[Batch], *, tokens: int, pad_id: int = 0) -> Collated[PaddedBatch]:
    """Batches of at most `tokens` ids, padding included, of rows of about one length."""
    rows = _read(tables, tokens)
    return rows.collated(
        of_one_length(rows.sizes, tokens),
        lambda chosen: rows.padded(chosen, pad_id),
        lambda chosen: max(tokens, len(chosen) * rows.sizes[chosen[0]]),
    )


class _Chunk(NamedTuple):
    """The ids of some rows, one behind the other. Shapes: N ids."""

    token_ids_N: torch.Tensor
    loss_mask_N: torch.Tensor
    log_probs_N: torch.Tensor


class _Rows:
    """The rows that are trained. Shapes: R rows."""

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.chunk_of: list[int] = []
        self.starts: list[int] = []
        self.advantages: list[float] = []
        self.trajectory_ids: list[str] = []
        self.sizes: list[int] = []
        self.left_out: dict[str, LeftOutReason] = {}
        self.tokens_without_log_prob = 0

    def collated(
        self,
        chosen: Sequence[Sequence[int]],
        make: Callable[[Sequence[int]], _BatchT],
        room: Callable[[Sequence[int]], int],
    ) -> Collated[_BatchT]:
        """The batches of the rows `chosen`, each of which has `room` for so many ids."""
        available = sum(map(room, chosen))
        return Collated(
            batches=tuple(map(make, chosen)),
            efficiency=sum(self.sizes) / available if available else 1.0,
            left_out={str(reason): count for reason, count in Counter(self.left_out.values()).items()},
            tokens_without_log_prob=self.tokens_without_log_prob,
        )

    def packed(self, chosen: Sequence[int]) -> PackedBatch:
        chosen = sorted(chosen)
        pieces = list(self._together(chosen))
        ids_T, mask_T, log_probs_T = (
            found[0] if len(found) == 1 else torch.cat(found)
            for found in ([piece[place] for piece in pieces] for place in range(len(_ARRAYS)))
        )
        cu_seqlens = torch.zeros(len(chosen) + 1, dtype=torch.int32)
        cu_seqlens[1:] = torch.tensor([self.sizes[row] for row in chosen]).cumsum(0)
        return PackedBatch(
            token_ids_T=ids_T,
            loss_mask_T=mask_T,
            log_probs_T=log_probs_T,
            cu_seqlens=cu_seqlens,
            advantage_S=self._advantages(chosen),
            trajectory_ids=tuple(self.trajectory_ids[row] for row in chosen),
        )

    def padded(self, chosen: Sequence[int], pad_id: int) -> PaddedBatch:
        pieces = [self._piece(row, row) for row in chosen]
        lengths_S = torch.tensor([piece.token_ids_N.numel() for piece in pieces])
        ids, mask, log_probs = (
            torch.nn.utils.rnn.pad_sequence([piece[place] for piece in pieces], batch_first=True, padding_value=value)
            for place, value in enumerate((pad_id, False, 0.0))
        )
        return PaddedBatch(
            token_ids_S_T=ids,
            attention_mask_S_T=torch.arange(ids.shape[1])[None] < lengths_S[:, None],
            loss_mask_S_T=mask,
            log_probs_S_T=log_probs,
            advantage_S=self._advantages(chosen),
            trajectory_ids=tuple(self.trajectory_ids[row] for row in chosen),
        )

    def _advantages(self, chosen: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self.advantages[row] for row in chosen], dtype=torch.float32)

    def _together(self, chosen: Sequence[int]) -> Iterator[_Chunk]:
        """Rows that stand together in one piece."""
        first = last = chosen[0]
        for row in itertools.islice(chosen, 1, None):
            follows = self.chunk_of[row] == self.chunk_of[last] and self.starts[row] == self._end(last)
            if not follows:
                yield self._piece(first, last)
                first = row
            last = row
        yield self._piece(first, last)

    def _piece(self, first: int, last: int) -> _Chunk:
        chunk = self.chunks[self.chunk_of[first]]
        return _Chunk(*(each[self.starts[first] : self._end(last)] for each in chunk))

    def _end(self, row: int) -> int:
        return self.starts[row] + self.sizes[row]


def _read(tables: Iterable[Batch], tokens: int) -> _Rows:
    rows = _Rows()
    batches = [conformed(batch.select(COLLATED)) for table in tables for batch in _batches(table)]
    for batch in batches:
        _note_left_out(batch, tokens, rows.left_out)
    for batch in batches:
        _add(batch, rows)
    return rows


def _batches(table: Batch) -> Sequence[pa.RecordBatch]:
    batches: Sequence[pa.RecordBatch] = table.to_batches() if isinstance(table, pa.Table) else [table]
    return batches


def _note_left_out(batch: pa.RecordBatch, tokens: int, left_out: dict[str, LeftOutReason]) -> None:
    lengths = np.diff(batch.column("token_ids").offsets.to_numpy())
    rows = zip(
        *(batch.column(name).to_pylist() for name in ("rollout_id", "masked", "advantage")), lengths, strict=True
    )
    for rollout_id, masked, advantage, length in rows:
        if masked:
            left_out[rollout_id] = LeftOutReason.MASKED
        elif length > tokens:
            left_out[rollout_id] = LeftOutReason.TOO_LONG
        elif advantage is None:
            left_out[rollout_id] = LeftOutReason.NO_ADVANTAGE


def _add(batch: pa.RecordBatch, rows: _Rows) -> None:
    columns = [batch.column(name) for name in _ARRAYS]
    offsets = [column.offsets.to_numpy() for column in columns]
    starts, *others = [each - each[0] for each in offsets]
    flat = [column.flatten() for column in columns]
    if not all(np.array_equal(starts, other) for other in others) or flat[0].null_count or flat[1].null_count:
        raise RecordError(
            "loss_mask and log_probs must align with token_ids, without gaps: build the trajectories again",
            field="token_ids",
        )
    log_probs = flat[2].fill_null(float("nan")) if flat[2].null_count else flat[2]
    chunk = _Chunk(_tensor(flat[0], torch.int32), _unpacked(flat[1]), _tensor(log_probs, torch.float32))
    unknown_N = chunk.loss_mask_N & ~torch.isfinite(chunk.log_probs_N)
    has_unknown = bool(unknown_N.any())
    if has_unknown:
        chunk = chunk._replace(loss_mask_N=chunk.loss_mask_N & ~unknown_N)
    names = (batch.column(name).to_pylist() for name in ("rollout_id", "trajectory_id", "advantage"))
    for start, end, rollout_id, trajectory_id, advantage in zip(
        starts[:-1].tolist(), starts[1:].tolist(), *names, strict=True
    ):
        if rollout_id not in rows.left_out and end > start:
            rows.chunk_of.append(len(rows.chunks))
            rows.starts.append(start)
            rows.sizes.append(end - start)
            rows.advantages.append(advantage)
            rows.trajectory_ids.append(trajectory_id)
            rows.tokens_without_log_prob += int(unknown_N[start:end].sum()) if has_unknown else 0
    rows.chunks.append(chunk)


def _tensor(values: pa.Array, dtype: torch.dtype) -> torch.Tensor:
    """Arrow's own memory."""
    return from_dlpack(values) if len(values) else torch.empty(0, dtype=dtype)


def _unpacked(values: pa.BooleanArray) -> torch.Tensor:
    return torch.from_numpy(values.to_numpy(zero_copy_only=False))
