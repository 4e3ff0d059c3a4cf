"""From rollouts to padded micro-batches, with the weight that each trained token has in the step.

Invariant: every rollout that is left out is counted under the reason; the weights of all tokens of a step add up to 1,
shared out over rollouts and not over rows; a token whose log probability at generation is not known is not trained.

Flow: sort out the rollouts -> weigh their tokens -> sort rows by length and fill micro-batches up to a budget of
padded tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from gym_capture.reasons import LeftOutReason
from trainer_bridge.stream import TrainRollout, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows padded on the right to one length. Shapes: B rows, T ids, N trained tokens of all rows."""

    input_ids_B_T: torch.Tensor
    attention_mask_B_T: torch.Tensor
    row_N: torch.Tensor
    position_N: torch.Tensor
    """Token n is `input_ids_B_T[row_N[n], position_N[n]]`; the logits one position earlier predict it."""
    generation_N: torch.Tensor
    """Log probabilities as sampled; finite."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The rows that one step trains on."""

    micro_batches: tuple[MicroBatch, ...]
    rollouts: int
    sequences: int
    trained_tokens: int
    left_out: Mapping[str, int]
    """Rollouts by why they are not trained on: a `LeftOutReason`."""
    tokens_without_log_prob: int


def step_batch(
    rollouts: Iterable[TrainRollout],
    *,
    tokens_per_micro_batch: int,
    weigh_by: Literal["rollout", "token"],
    overlong_filtering: bool,
    pad_id: int,
) -> StepBatch:
    """`overlong_filtering` leaves out rollouts that ended at a length limit: where they were going is not known."""
    left_out: Counter[LeftOutReason] = Counter()
    used: list[tuple[float, list[tuple[TrainSequence, npt.NDArray[np.intp]]]]] = []
    tokens_without_log_prob = 0
    for rollout in rollouts:
        reason = _why_left_out(rollout, overlong_filtering=overlong_filtering)
        rows: list[tuple[TrainSequence, npt.NDArray[np.intp]]] = []
        for sequence in rollout.sequences if reason is None else ():
            known = sequence.loss_mask & np.isfinite(sequence.log_probs)
            tokens_without_log_prob += int(sequence.loss_mask.sum() - known.sum())
            if known.any():
                rows.append((sequence, np.flatnonzero(known)))
        if reason is not None or not rows:
            left_out[reason or LeftOutReason.NO_TRAINED_TOKENS] += 1
        elif rollout.advantage is not None:
            used.append((rollout.advantage, rows))
    trained_tokens = sum(positions.size for _, rows in used for _, positions in rows)
    weighed = []
    for advantage, rows in used:
        own_tokens = sum(positions.size for _, positions in rows)
        weight = 1.0 / trained_tokens if weigh_by == "token" else 1.0 / (len(used) * own_tokens)
        weighed += [_Row(sequence, positions, advantage, weight) for sequence, positions in rows]
    return StepBatch(
        micro_batches=tuple(_padded(rows, pad_id) for rows in _fill(weighed, tokens_per_micro_batch)),
        rollouts=len(used),
        sequences=len(weighed),
        trained_tokens=trained_tokens,
        left_out={str(reason): count for reason, count in left_out.items()},
        tokens_without_log_prob=tokens_without_log_prob,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    sequence: TrainSequence
    positions: npt.NDArray[np.intp]
    """Of the trained tokens."""
    advantage: float
    weight: float
    """Of each of them."""


def _why_left_out(rollout: TrainRollout, *, overlong_filtering: bool) -> LeftOutReason | None:
    if rollout.masked:
        return LeftOutReason.MASKED
    if overlong_filtering and rollout.truncated:
        return LeftOutReason.TRUNCATED
    return LeftOutReason.NO_ADVANTAGE if rollout.advantage is None else None


def _fill(rows: Sequence[_Row], tokens_per_micro_batch: int) -> list[list[_Row]]:
    """Longest first, so that rows of about one length are padded together; a row over the budget is alone."""
    filled: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -row.sequence.token_ids.size):
        if filled and filled[-1][0].sequence.token_ids.size * (len(filled[-1]) + 1) <= tokens_per_micro_batch:
            filled[-1].append(row)
        else:
            filled.append([row])
    return filled


def _padded(rows: Sequence[_Row], pad_id: int) -> MicroBatch:
    longest = rows[0].sequence.token_ids.size
    input_ids_B_T = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    attention_mask_B_T = torch.zeros((len(rows), longest), dtype=torch.long)
    for index, row in enumerate(rows):
        length = row.sequence.token_ids.size
        input_ids_B_T[index, :length] = torch.from_numpy(row.sequence.token_ids.astype(np.int64))
        attention_mask_B_T[index, :length] = 1
    counts = [row.positions.size for row in rows]
    return MicroBatch(
        input_ids_B_T=input_ids_B_T,
        attention_mask_B_T=attention_mask_B_T,
        row_N=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        position_N=torch.from_numpy(np.concatenate([row.positions for row in rows])),
        generation_N=torch.from_numpy(np.concatenate([row.sequence.log_probs[row.positions] for row in rows])),
        advantage_N=torch.from_numpy(np.repeat([row.advantage for row in rows], counts).astype(np.float32)),
        weight_N=torch.from_numpy(np.repeat([row.weight for row in rows], counts).astype(np.float32)),
    )
