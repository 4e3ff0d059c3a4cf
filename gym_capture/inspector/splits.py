"""Where a call's prompt parts from the ids of the call that it looks like going on from.

Invariant: `at` ids are the same in both, and the next ones differ, or one of the two ends there.

A parent that a record names, and that is no prefix of it, is the one to compare with. A record that is unresolved does
not say which call its conversation continues: had that been provable, it would be the parent. So the call before it
that has most ids in common is shown, which is a picture and no proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gym_capture.capture.records import Continues, IdArray, TokenEntry
from gym_capture.capture.suffixes import begins_alike
from gym_capture.inspector.seen import Side, Split

SHOWN: Final = 96
"""Ids of each side."""
_CANDIDATES: Final = 64
"""Calls that are compared, the latest: each costs a look at all its ids."""
_BLOCK: Final = 4096


def split_of(entry: TokenEntry, earlier: Sequence[TokenEntry], reason: str | None) -> Split | None:
    """Where the prompt parts from the one of `earlier` that it shares most with; None: it shares nothing with any.

    From the parent that its record names, if it names one that is at hand.
    """
    named = entry.parent.call_id if isinstance(entry.parent, Continues) else None
    best = next((other for other in earlier if other.model_call_id == named), None)
    most = 0 if best is None else common_ids(entry.prompt_token_ids, best)
    for other in reversed(earlier[-_CANDIDATES:]) if best is None else ():
        common = common_ids(entry.prompt_token_ids, other)
        if common > most:
            best, most = other, common
    if best is None:
        return None
    where = "reply" if most >= best.prompt_len else "prompt"
    return Split(
        call_id=entry.model_call_id,
        before=best.model_call_id,
        reason=reason,
        at=most,
        held=Side(ids=_cumulative(best, most, most + SHOWN), source=f"{where} of {best.model_call_id}"),
        sent=Side(ids=entry.prompt_token_ids[most : most + SHOWN], source=f"prompt of {entry.model_call_id}"),
    )


def common_ids(prompt: IdArray, other: TokenEntry) -> int:
    """How many ids a prompt has in common with the beginning of another call's cumulative ids."""
    theirs = other.prompt_token_ids
    common = min(prompt.size, theirs.size) if begins_alike(prompt, theirs) else common_length(prompt, theirs)
    if common < theirs.size:
        return common
    return common + common_length(prompt[common:], other.generation_token_ids)


def common_length(a: IdArray, b: IdArray) -> int:
    """How many first ids are the same, looking no further than a block behind them."""
    size = min(a.size, b.size)
    for begin in range(0, size, _BLOCK):
        end = min(begin + _BLOCK, size)
        differs = a[begin:end] != b[begin:end]
        if differs.any():
            return begin + int(np.argmax(differs))
    return size


def _cumulative(entry: TokenEntry, begin: int, end: int) -> IdArray:
    prompt = entry.prompt_token_ids
    before = prompt.size
    ids: IdArray = np.concatenate(
        (prompt[begin:end], entry.generation_token_ids[max(begin - before, 0) : max(end - before, 0)])
    )
    return ids
