"""Which ids each generated id could have been sampled from: a sampling mask as an array.

Invariant: a row for each generated id, int32, in the engine's order; rows are of one width, and behind a row's last id
stands -1. What an engine gives is never cut, nor rows made up: a mask that lacks rows is recorded as it is, and its
rollout is masked when it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NO_ID: Final = -1


def mask_of(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """int32 [G, widest row]. Raises `ValueError` or `TypeError` for what are no ids."""
    made = np.full((len(rows), max(map(len, rows), default=0)), NO_ID, dtype=np.int32)
    for place, row in zip(made, rows, strict=True):
        place[: len(row)] = row
    return made


def are_ids(mask: npt.NDArray[Any]) -> bool:
    """Whether it is in the form of this module; others, of imported records, have forms of their own."""
    return mask.dtype == np.int32 and mask.ndim == 2


def joined(masks: Iterable[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    """One behind the other, those of ids as wide as the widest; None if there is none."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    if all(map(are_ids, present)):
        width = max(mask.shape[1] for mask in present)
        present = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=NO_ID) for each in present]
    together: npt.NDArray[Any] = np.concatenate(present)
    return together
