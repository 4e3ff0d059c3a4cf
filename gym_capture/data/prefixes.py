"""What the trajectories of a group have in common at their beginning, as two columns that any trainer may use.

Invariant: for each trajectory, `prefix_length` is how many of its first ids some earlier trajectory of its group has
too, as many as any earlier one, and `prefix_trajectory_id` names one that has them. So the rows of a group, in order,
are a prefix tree: each branches off the path of the one it names, behind that many ids. Masked rows, which nobody
trains on, are no part of it. A trainer that leaves out a row R that others name goes on to the row that R names:
they share the smaller of the two lengths.

Flow: `GroupPrefixes.add` row by row -> the ids so far stand in lexicographic order, where the nearest relative of a row
is its neighbour. Memory: the ids of one group, 4 bytes each, up to a limit; rows past it look for relatives, and become
nobody's.
"""

from __future__ import annotations

import bisect
from typing import Final

import numpy as np
import pyarrow as pa

from gym_capture.capture.records import IdArray

_BYTES: Final = 256 * 2**20


class GroupPrefixes:
    """The rows of one group after another."""

    def __init__(self, *, max_bytes: int = _BYTES) -> None:
        self._max_bytes = max_bytes
        self._begin(None)

    def _begin(self, group_id: str | None) -> None:
        self._group_id = group_id
        # Big-endian ids: the order of the bytes is that of the ids.
        self._rows: list[tuple[bytes, str]] = []
        self._nbytes = 0

    def add(self, group_id: str, trajectory_id: str, token_ids: IdArray) -> tuple[str | None, int]:
        """The earlier trajectory of the group that shares most with this one, and how many ids; None and 0: none."""
        if group_id != self._group_id:
            self._begin(group_id)
        key = token_ids.astype(">i4").tobytes()
        place = bisect.bisect_left(self._rows, (key, trajectory_id))
        neighbours = self._rows[max(place - 1, 0) : place + 1]
        found = max(((common_length(key, other), name) for other, name in neighbours), default=(0, ""))
        if self._nbytes + len(key) <= self._max_bytes:
            self._rows.insert(place, (key, trajectory_id))
            self._nbytes += len(key)
        return (found[1], found[0]) if found[0] else (None, 0)

    def columns(self, table: pa.Table) -> tuple[pa.Array, pa.Array]:
        """`prefix_trajectory_id` and `prefix_length` of the rows of `table`, which come after those before."""
        found: list[tuple[str | None, int]] = []
        token_ids = table.column("token_ids")
        for index, row in enumerate(table.select(["group_id", "trajectory_id", "masked"]).to_pylist()):
            ids = token_ids[index].values
            unrelated = row["masked"] or not len(ids)
            found.append((None, 0) if unrelated else self.add(row["group_id"], row["trajectory_id"], ids.to_numpy()))
        names, lengths = zip(*found, strict=True) if found else ((), ())
        return pa.array(names, type=pa.string()), pa.array(lengths, type=pa.int64())


def common_length(first: bytes, second: bytes) -> int:
    """Of two sequences of 4-byte ids: how many ids they have in common before they differ."""
    ids = min(len(first), len(second)) // 4
    a, b = np.frombuffer(first, dtype=np.int32, count=ids), np.frombuffer(second, dtype=np.int32, count=ids)
    differs = a != b
    return int(np.argmax(differs)) if differs.any() else ids
