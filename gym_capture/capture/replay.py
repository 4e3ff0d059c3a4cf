"""Which recorded calls of attempts that were cut may answer calls of the attempt that goes on from them.

Invariant: what is replayed is a whole turn of the policy, exactly as it was recorded, and each recorded generation
answers at most one call - also where an attempt that replayed some of it was cut in its turn: then the record of the
replay stands for the one that it replayed.

Flow: snapshots of the earlier attempts -> `replayable` -> matched by the replica, id for id (`serving.replay`) ->
`replays_of` the attempt, when it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gym_capture.capture.records import Snapshot, TokenEntry, not_a_turn

_WHOLE: Final = ("stop", "length")
"""How a generation ends that the policy brought to its end, or its limit did."""


def replayable(sources: Sequence[Snapshot]) -> list[TokenEntry]:
    """The records that may be replayed, in the order in which they were generated.

    Left out are generations that were cut off, calls that are in doubt, and those of which it is not known what was
    asked for. Replies that are known not to have been delivered come last: what followed followed another one.
    """
    doubted = {problem.call_id for source in sources for problem in source.problems}
    usable = {
        entry.model_call_id: entry
        for source in sources
        for entry in source.entries
        if _is_usable(entry) and entry.model_call_id not in doubted
    }
    replayed = {entry.policy.replayed_from for entry in usable.values()}

    def order(entry: TokenEntry) -> tuple[bool, float, str]:
        first = entry
        while (earlier := usable.get(first.policy.replayed_from or "")) is not None:
            first = earlier
        return entry.delivered is False, first.created_at, first.model_call_id

    return sorted((entry for call_id, entry in usable.items() if call_id not in replayed), key=order)


def _is_usable(entry: TokenEntry) -> bool:
    return bool(entry.request.options_key) and entry.reply.finish_reason in _WHOLE and not_a_turn(entry) is None


class Replays(NamedTuple):
    """How much of the earlier attempts an attempt repeated."""

    calls: int
    """Its calls that were answered from their records."""
    diverged_at: int | None
    """Which of its calls, from 1, was the first to be generated, although there were records left that none of its
    calls asked for; None: it repeated them all, or came to its end before."""


def replays_of(snapshot: Snapshot, sources: Sequence[Snapshot]) -> Replays:
    """Of an attempt that is over."""
    calls = sorted(snapshot.records, key=lambda entry: (entry.created_at, entry.model_call_id))
    replayed = sum(entry.policy.replayed_from is not None for entry in calls)
    if replayed == len(replayable(sources)):
        return Replays(replayed, None)
    generated = (number for number, entry in enumerate(calls, start=1) if entry.policy.replayed_from is None)
    return Replays(replayed, next(generated, None))
