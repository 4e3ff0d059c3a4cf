"""Several trajectories as one sequence of ids in which what they share stands once.

Invariant: to the model, each trajectory is what it is alone. An id attends to exactly the ids of its own trajectories
before it, at the positions that they have there; so every hidden state, and the gradient of a loss over all of them, is
that of the trajectories one by one - up to rounding.

    a: 1 2 3 4 5          ids         1 2 3 4 5 6 7 8
    b: 1 2 3 6      ->    positions   0 1 2 3 4 3 1 2      depth in the tree, for RoPE
    c: 1 7 8              subtree_end 8 6 6 5 5 6 8 8      id q attends to id k  if and only if  k <= q < subtree_end[k]

Ids stand depth first, so the ids below an id are the run behind it, and one number for each says the whole mask. Rows
that share nothing are a tree each: a packed row is a forest, too.

Flow: rows in lexicographic order -> each follows the path of the one before as long as they are the same -> `Forest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gym_capture.capture.records import IdArray
from gym_capture.data.prefixes import common_length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Rows laid out in one sequence. Shapes: T ids."""

    token_ids_T: IdArray
    position_T: npt.NDArray[np.int64]
    subtree_end_T: npt.NDArray[np.int64]
    places: tuple[npt.NDArray[np.int64], ...]
    """For each row, where each of its ids stands in T."""


def in_order(rows: Sequence[IdArray]) -> list[int]:
    """Numbers of the rows in lexicographic order of their ids: those that share most stand together."""
    return sorted(range(len(rows)), key=lambda index: rows[index].astype(">i4").tobytes())


def shared_lengths(rows: Sequence[IdArray]) -> list[int]:
    """For each row how many of its first ids the row before it has, too."""
    texts = [np.ascontiguousarray(row, dtype=np.int32).tobytes() for row in rows]
    return [0, *(common_length(texts[index], texts[index + 1]) for index in range(len(rows) - 1))][: len(rows)]


def forest(rows: Sequence[IdArray], shared: Sequence[int]) -> Forest:
    """`rows`, the first `shared` ids of each standing where the row before it has them. With all 0: packed.

    `shared` is at most what `shared_lengths` says, of rows `in_order`.
    """
    pieces: list[IdArray] = []
    positions: list[npt.NDArray[np.int64]] = []
    places: list[npt.NDArray[np.int64]] = []
    ends: list[tuple[npt.NDArray[np.int64], int]] = []
    size = 0
    for row, common in zip(rows, shared, strict=True):
        path = places[-1] if places else np.zeros(0, dtype=np.int64)
        ends.append((path[common:], size))
        pieces.append(row[common:])
        positions.append(np.arange(common, row.size, dtype=np.int64))
        places.append(np.concatenate([path[:common], np.arange(size, size + row.size - common, dtype=np.int64)]))
        size += row.size - common
    subtree_end_T = np.full(size, size, dtype=np.int64)
    for closed, end in ends:
        subtree_end_T[closed] = end
    return Forest(
        token_ids_T=np.concatenate(pieces).astype(np.int32) if pieces else np.zeros(0, dtype=np.int32),
        position_T=np.concatenate(positions) if positions else np.zeros(0, dtype=np.int64),
        subtree_end_T=subtree_end_T,
        places=tuple(places),
    )
