"""Which earlier call of the same rollout a request continues, and the exact ids of that call.

Invariant: `resolve` answers `Resolved` only with the ids of a call of this very rollout, whose conversation up to and
including its generated turn equals the request's (as `fingerprint` compares, or by a rule of `echoes`), when that is
not true of another call with other ids - except of such whose replies are known not to have been delivered. A record
that contradicts what is indexed, or itself, is not indexed.

Flow: a call's record is `add`ed once it is durable -> the keys of the next request's turns are looked up, latest turn
first -> the cumulative ids of the call that owns the first one found come back.

Ids are kept once. A *strand* is a run of ids that grows in place as long as calls continue its end; a call that
branches off elsewhere starts a strand of its own there. A call is a point on a strand, so its cumulative ids are a
view of the strand's buffer, or of a few buffers put together.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.records import (
    CallRecord,
    Continues,
    EntrySuffix,
    IdArray,
    RecordProblem,
    Root,
    Unresolved,
    delivered_by,
    id_bytes,
    new_digest,
    not_a_turn,
)
from gym_capture.capture.suffixes import StoredRecord, prompt_part
from gym_capture.reasons import ProblemReason, UnresolvedReason

_WORTH_SHARING_IDS: Final = 256
"""Keeping this many ids a second time costs about what another strand does."""


class LineageIndex:
    """The calls of rollouts. Synchronous and in memory; `lineage_cache` bounds it.

    A rollout should be indexed whole or not at all: after `forget`, `rebuild` it from the sink before it goes on.
    """

    def __init__(self) -> None:
        self._rollouts: dict[str, _Rollout] = {}
        self.total_bytes = 0
        """Sum of `nbytes` over all rollouts."""

    def add(self, entry: StoredRecord) -> tuple[RecordProblem, ...]:
        """Indexes a call, so that `resolve` finds it from now on. The same call again changes nothing.

        Returns what is wrong with the entry, if anything; it is then not indexed:
        `conflicting_call_id` (the first entry stays), `digest_mismatch`, `parent_missing` and `parent_length` (a suffix
        whose parent is not indexed, or ends elsewhere). For entries in any order there is `rebuild`.
        """
        rollout = self._rollouts.get(entry.rollout_id) or _Rollout()
        bytes_before = rollout.nbytes if entry.rollout_id in self._rollouts else 0
        problem = rollout.add(entry)
        if problem is not None:
            return (problem,)
        self._rollouts[entry.rollout_id] = rollout
        self.total_bytes += rollout.nbytes - bytes_before
        return ()

    def rebuild(self, entries: Iterable[StoredRecord]) -> tuple[RecordProblem, ...]:
        """Indexes records that stand in any order, suffixes before their parents included."""
        # A parent generated something, so its cumulative ids are longer than its own prompt and end before the child's.
        in_order = sorted(entries, key=lambda entry: (entry.cum_len, prompt_part(entry)[0]))
        return tuple(problem for entry in in_order for problem in self.add(entry))

    def resolve(self, rollout_id: str, turn_keys: Sequence[str], asked_keys: Sequence[str] = ()) -> Resolution:
        """The call that a request with these turn keys continues (`protocols.LineageStore`).

        The latest turn that a call owns decides, even if it is ambiguous: going back further would cut off a turn that
        the policy did generate. Of calls with the same cumulative ids, which are interchangeable, the smallest id
        stands for all. Of calls that differ in ids, one is told apart only if it was delivered whole and all others are
        known not to have been: then the client can have the text from nowhere else.

        A turn that a stop string ended is also that call's turn with that very string put back, which a reply leaves
        out and some clients add: the policy did sample it, and it is among the call's ids (`stop_string_put_back`).

        `asked_keys`: for each turn, the fingerprint of everything before it; only for the name of a reason.

        Unresolved reasons: `unknown_rollout` (no call of it is indexed), `ambiguous`, `rewritten_turn` (a call was
        asked for a turn right there, and generated another than the client has), `no_match`.
        """
        if not turn_keys:
            return Root()
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return Unresolved(UnresolvedReason.UNKNOWN_ROLLOUT)
        for turn in range(len(turn_keys) - 1, -1, -1):
            owners = rollout.owners.get(turn_keys[turn])
            if owners is not None:
                parent = _the_one(owners)
                if parent is None:
                    return Unresolved(UnresolvedReason.AMBIGUOUS)
                rule = None if parent.owned_key == turn_keys[turn] else parent.other_keys[turn_keys[turn]]
                return Resolved(parent.call_id, turn, parent.strand.ids(parent.end), rule)
        is_rewritten = not rollout.asked.isdisjoint(asked_keys)
        return Unresolved(UnresolvedReason.REWRITTEN_TURN if is_rewritten else UnresolvedReason.NO_MATCH)

    def may_be_retry(self, rollout_id: str, resolution: Resolution) -> bool:
        """Whether a recorded call may be an earlier try of a request that `resolve` gave this answer.

        That is, one with the same parent; or one whose parent could not be proven, which may be any.
        """
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return False
        parent = resolution.call_id if isinstance(resolution, Resolved) else None
        return parent in rollout.continued or rollout.has_unproven

    def mark_delivery(self, rollout_id: str, call_id: str, *, delivered: bool) -> None:
        """Adds what became known of a call's reply (`operations.MarkDelivery`). Unknown calls are fine."""
        rollout = self._rollouts.get(rollout_id)
        call = rollout.calls.get(call_id) if rollout is not None else None
        if call is not None:
            call.delivered = delivered_by((call.delivered, delivered))

    def cumulative_ids(self, rollout_id: str, call_id: str) -> IdArray | None:
        """int32 [cum_len], read-only; None if the call is not indexed."""
        rollout = self._rollouts.get(rollout_id)
        call = rollout.calls.get(call_id) if rollout is not None else None
        return call.strand.ids(call.end) if call is not None else None

    def forget(self, rollout_id: str) -> None:
        """Drops a rollout; unknown ones are fine."""
        self.total_bytes -= self.nbytes(rollout_id)
        self._rollouts.pop(rollout_id, None)

    def rollout_ids(self) -> tuple[str, ...]:
        """The indexed rollouts, sorted."""
        return tuple(sorted(self._rollouts))

    def nbytes(self, rollout_id: str) -> int:
        """Memory that `forget` would free, bookkeeping included."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.nbytes if rollout is not None else 0


class _Strand:
    """A run of ids that follows the first `start` ids of `base`. Only appended to, so views of it stay true."""

    __slots__ = ("_buffer", "base", "digest", "end", "start")

    def __init__(self, base: _Strand | None = None, start: int = 0) -> None:
        self.base = base
        self.start = start
        self.end = start
        self.digest = new_digest()
        """Over all ids up to `end`, those of the base included."""
        self._buffer: IdArray = np.zeros(0, dtype=np.int32)
        if base is not None:
            self.digest.update(id_bytes(base.ids(start)))

    @property
    def nbytes(self) -> int:
        return _STRAND_BYTES + self._buffer.nbytes

    def holder(self, end: int) -> _Strand:
        """The strand that holds the last of the first `end` ids."""
        strand = self
        while strand.base is not None and end <= strand.start:
            strand = strand.base
        return strand

    def ids(self, end: int) -> IdArray:
        """int32 [end], read-only: the first `end` ids."""
        pieces = []
        strand: _Strand | None = self.holder(end)
        while strand is not None:
            pieces.append(strand._buffer[: end - strand.start])
            end, strand = strand.start, strand.base
        ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces[::-1])
        ids.flags.writeable = False
        return ids

    def append(self, parts: Iterable[IdArray], digest: hashlib._Hash) -> None:
        """`digest` is over everything, `parts` included."""
        for part in parts:
            size = self.end - self.start
            if size + part.size > self._buffer.size:
                grown = np.empty(max(size + part.size, self._buffer.size * 5 // 4), dtype=np.int32)
                grown[:size] = self._buffer[:size]
                self._buffer = grown
            self._buffer[size : size + part.size] = part
            self.end += part.size
        self.digest = digest


class _Call:
    """A call: the first `end` ids of `strand`."""

    __slots__ = ("call_id", "delivered", "digest", "end", "other_keys", "owned_key", "strand")

    def __init__(self, entry: StoredRecord, strand: _Strand, digest: bytes) -> None:
        self.call_id = entry.model_call_id
        self.owned_key = _owned_key(entry)
        self.other_keys = entry.keys.other_turn_keys
        self.delivered = entry.delivered
        self.strand = strand
        self.end = entry.cum_len
        self.digest = digest
        """Of the cumulative ids: calls with the same ids have the same digest, however their ids are kept."""


class _Rollout:
    """The calls of one rollout."""

    __slots__ = ("_latest", "asked", "calls", "continued", "has_unproven", "nbytes", "owners")

    def __init__(self) -> None:
        self.calls: dict[str, _Call] = {}
        self.owners: dict[str, list[_Call]] = {}
        """By turn key: the calls that generated that turn and can be continued."""
        self.asked: set[str] = set()
        """The conversation before those turns."""
        self.continued: set[str | None] = set()
        """The calls that others continue; None: there is a call without a parent."""
        self.has_unproven = False
        """Whether there is a call of which no parent could be proven."""
        self.nbytes = _ROLLOUT_BYTES
        self._latest: _Call | None = None

    def add(self, entry: StoredRecord) -> RecordProblem | None:
        """Indexes a call, or says what is wrong with it and leaves everything as it was."""
        parent = self.calls.get(entry.parent.call_id) if isinstance(entry.parent, Continues) else None
        new: tuple[IdArray, ...]
        if not isinstance(entry, EntrySuffix):
            ids = entry.cumulative_ids()
            base, start = _shared(ids, parent or self._latest)
            new = (ids[start:],)
        elif parent is None:
            return _problem(entry, ProblemReason.PARENT_MISSING, "parent", "of a suffix must be indexed first")
        elif parent.end != entry.parent.cum_len:
            detail = f"must be the parent's cum_len: got {entry.parent.cum_len}, expected {parent.end}"
            return _problem(entry, ProblemReason.PARENT_LENGTH, "prompt_offset", detail)
        else:
            base, start = parent.strand, parent.end
            new = (entry.new_prompt_ids, entry.generation_token_ids)

        strand = base if base.end == start else _Strand(base, start)
        digest = strand.digest.copy()
        for part in new:
            digest.update(id_bytes(part))
        known = self.calls.get(entry.model_call_id)
        if known is not None:
            if (known.digest, known.owned_key) == (digest.digest(), _owned_key(entry)):
                return None
            return _problem(
                entry,
                ProblemReason.CONFLICTING_CALL_ID,
                "model_call_id",
                "is that of an indexed call with other content",
            )
        if entry.digest is not None and entry.digest != digest.hexdigest():
            return _problem(
                entry,
                ProblemReason.DIGEST_MISMATCH,
                "digest",
                f"must be that of the ids: got {entry.digest}, expected {digest.hexdigest()}",
            )

        bytes_before = strand.nbytes if strand.end > strand.start else 0
        strand.append(new, digest)
        # A retry that generated the same ids again has no ids of its own: it stands where the other call stands.
        call = _Call(entry, strand.holder(entry.cum_len), digest.digest())
        if call.strand is strand:
            self.nbytes += strand.nbytes - bytes_before
        self.nbytes += _CALL_BYTES + sys.getsizeof(call.call_id)
        self.calls[call.call_id] = self._latest = call
        self.continued.add(entry.parent.call_id if isinstance(entry.parent, Continues) else None)
        self.has_unproven = self.has_unproven or isinstance(entry.parent, Unresolved)
        if call.owned_key is not None:
            for key in dict.fromkeys((call.owned_key, *call.other_keys)):
                if key not in self.owners:
                    self.owners[key] = []
                    self.nbytes += _OWNED_KEY_BYTES + sys.getsizeof(key)
                self.owners[key].append(call)
            if entry.keys.asked_key is not None and entry.keys.asked_key not in self.asked:
                self.asked.add(entry.keys.asked_key)
                self.nbytes += _ASKED_KEY_BYTES + sys.getsizeof(entry.keys.asked_key)
        return None


def _owned_key(entry: CallRecord) -> str | None:
    """The turn key under which a call can be found as a parent; None: it cannot be continued from.

    What an aborted or failed call sampled was no turn (`not_a_turn`), so it is neither trained on nor supplied: a
    client that echoes the part it saw continues the call before, with that part as prompt.
    """
    return entry.keys.turn_key if not_a_turn(entry) is None else None


def _the_one(owners: Sequence[_Call]) -> _Call | None:
    """The call that all owners of a turn can be represented by, as `LineageIndex.resolve` says; None: ambiguous."""
    if len({call.digest for call in owners}) > 1:
        possible = {call.digest for call in owners if call.delivered is not False}
        if len(possible) != 1 or not any(call.delivered for call in owners):
            return None
        owners = [call for call in owners if call.digest in possible]
    return min(owners, key=lambda call: call.call_id)


def _shared(ids: IdArray, near: _Call | None) -> tuple[_Strand, int]:
    """A strand whose first so many ids are also the first of `ids`: from `near` if that saves memory, else a new one.

    Whatever an entry says of its parent, what it shares with it is what compares equal.
    """
    if near is not None:
        theirs = near.strand.ids(near.end)[: ids.size]
        differs = ids[: theirs.size] != theirs
        count = int(differs.argmax()) if differs.any() else theirs.size
        if count >= min(near.end, _WORTH_SHARING_IDS):
            return near.strand.holder(count), count
    return _Strand(), 0


def _problem(entry: CallRecord, reason: ProblemReason, field: str, detail: str) -> RecordProblem:
    return RecordProblem(reason=reason, call_id=entry.model_call_id, field=field, detail=f"{field} {detail}")


_ROLLOUT_BYTES: Final = 400
_STRAND_BYTES: Final = 550
_CALL_BYTES: Final = 270
_OWNED_KEY_BYTES: Final = 180
_ASKED_KEY_BYTES: Final = 60
"""Python objects and dict slots around what is counted exactly, as measured; a hash state is 280 of a strand's."""
