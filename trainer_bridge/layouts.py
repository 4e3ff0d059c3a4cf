"""The rows of a step as micro-batches of tensors: padded, packed, or as prefix trees.

Invariant: a layout changes what is computed, never what comes out; each trained token is predicted once, from the ids
of its own row.

    padded   rows of about one length, padded on the right to the longest: plain causal attention
    packed   rows one behind the other, each attending to itself: nothing is padded
    tree     the same, and what rows share at their beginning stands once (`prefix_tree.py`)

A packed or tree micro-batch is one sequence with a mask of T x T; `tokens` bounds T. A row that is longer is alone.

Flow: rows -> `lay_out` -> `MicroBatch`es -> `scoring.Scorer`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from trainer_bridge.batching import Row
from trainer_bridge.prefix_tree import forest, in_order, shared_lengths

Layout = Literal["padded", "packed", "tree"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass. Shapes: B sequences, T ids, N trained tokens."""

    input_ids_B_T: torch.Tensor
    position_ids_B_T: torch.Tensor | None
    """None: 0, 1, 2..., in rows padded on the right."""
    subtree_end_B_T: torch.Tensor | None
    """Id q attends to id k if and only if k <= q < subtree_end[k]; None: to every id before it."""
    row_N: torch.Tensor
    predictor_N: torch.Tensor
    """The logits at `[row_N[n], predictor_N[n]]` predict token n."""
    target_N: torch.Tensor
    token_N: torch.Tensor
    """Which of the step's tokens each is."""
    row_tokens: int
    """Ids of its rows, one by one, that are computed here; shared ones count once for each row."""


def lay_out(rows: Sequence[Row], layout: Layout, *, tokens: int, pad_id: int) -> tuple[MicroBatch, ...]:
    """The micro-batches of `rows`, of at most `tokens` ids, padding included, wherever a row is not longer."""
    sizes = [row.token_ids.size for row in rows]
    if layout == "padded":
        return tuple(_padded([rows[index] for index in some], pad_id) for some in of_one_length(sizes, tokens))
    if layout == "packed":
        return tuple(_sequence([rows[index] for index in some], [0] * len(some)) for some in best_fit(sizes, tokens))
    return tuple(_sequence(some, shared) for some, shared in _trees(rows, tokens))


def packing(micro_batches: Sequence[MicroBatch], tokens: int) -> float:
    """How much of the room that the micro-batches have is ids of rows, and not padding or left empty."""
    room = sum(max(tokens, micro_batch.input_ids_B_T.numel()) for micro_batch in micro_batches)
    return sum(min(each.row_tokens, each.input_ids_B_T.numel()) for each in micro_batches) / room if room else 1.0


def of_one_length(sizes: Sequence[int], tokens: int) -> list[list[int]]:
    """Which rows, of so many ids each, go together: longest first, so that rows of about one length are padded
    together, to at most `tokens` ids."""
    filled: list[list[int]] = []
    for row in _longest_first(sizes):
        if filled and sizes[filled[-1][0]] * (len(filled[-1]) + 1) <= tokens:
            filled[-1].append(row)
        else:
            filled.append([row])
    return filled


def best_fit(sizes: Sequence[int], tokens: int) -> list[list[int]]:
    """Which rows, of so many ids each, go together: longest first, each where it leaves least room of `tokens` ids
    (best-fit decreasing: at most 11/9 of the fewest possible)."""
    filled: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left, and of which; ascending
    for row in _longest_first(sizes):
        size = sizes[row]
        place = bisect.bisect_left(room, (size, -1))
        if place < len(room):
            left, index = room.pop(place)
        else:
            left, index = max(tokens, size), len(filled)
            filled.append([])
        filled[index].append(row)
        bisect.insort(room, (left - size, index))
    return filled


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda row: -sizes[row])


def _trees(rows: Sequence[Row], tokens: int) -> list[tuple[list[Row], list[int]]]:
    """Neighbours in lexicographic order, with what each shares with the one before; the first of a tree shares none."""
    order = [rows[index] for index in in_order([row.token_ids for row in rows])]
    filled: list[tuple[list[Row], list[int]]] = []
    size = 0
    for row, shared in zip(order, shared_lengths([row.token_ids for row in order]), strict=True):
        if not filled or size + row.token_ids.size - shared > tokens:
            filled.append(([row], [0]))
            size = row.token_ids.size
        else:
            filled[-1][0].append(row)
            filled[-1][1].append(shared)
            size += row.token_ids.size - shared
    return filled


def _padded(rows: Sequence[Row], pad_id: int) -> MicroBatch:
    longest = rows[0].token_ids.size
    ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : row.token_ids.size] = row.token_ids
    counts = [row.positions.size for row in rows]
    return MicroBatch(
        input_ids_B_T=torch.from_numpy(ids),
        position_ids_B_T=None,
        subtree_end_B_T=None,
        row_N=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        predictor_N=torch.from_numpy(np.concatenate([row.positions for row in rows]) - 1),
        target_N=_targets(rows),
        token_N=_token_numbers(rows),
        row_tokens=sum(row.token_ids.size for row in rows),
    )


def _sequence(rows: Sequence[Row], shared: Sequence[int]) -> MicroBatch:
    made = forest([row.token_ids for row in rows], shared)
    predictor_N = np.concatenate([places[row.positions - 1] for row, places in zip(rows, made.places, strict=True)])
    return MicroBatch(
        input_ids_B_T=torch.from_numpy(made.token_ids_T.astype(np.int64))[None],
        position_ids_B_T=torch.from_numpy(made.position_T)[None],
        subtree_end_B_T=None if len(rows) == 1 else torch.from_numpy(made.subtree_end_T)[None],
        row_N=torch.zeros(predictor_N.size, dtype=torch.long),
        predictor_N=torch.from_numpy(predictor_N),
        target_N=_targets(rows),
        token_N=_token_numbers(rows),
        row_tokens=sum(row.token_ids.size for row in rows),
    )


def _targets(rows: Sequence[Row]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([row.token_ids[row.positions] for row in rows]).astype(np.int64))


def _token_numbers(rows: Sequence[Row]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(row.first, row.first + row.positions.size) for row in rows]))
