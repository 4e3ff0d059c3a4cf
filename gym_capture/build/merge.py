"""Where each call of a rollout belongs: the forest of calls, parent to child, proven id by id.

Invariant: call `c` is placed under call `p` only if the prompt of `c` starts with all cumulative ids of `p`. A recorded
parent is verified, never trusted, and never replaced by a guess: one that is absent, foreign, cyclic or contradicted
becomes a named reason, and the call stands alone if its prompt is whole. Only records without a decision are placed
by inference.

Flow: `unique_calls` folds repeated records -> `link` reads the recorded parents, infers the missing ones
(`inference`), then walks the forest once. The walk keeps the ids of the current path in one buffer, so that every
prompt is compared at memory speed, if it does not stand in the very memory of its parent's (`suffixes`), and every id
is hashed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_capture.build.inference import PrefixIndex
from gym_capture.capture.record_fields import FIELDS, Kind, reader
from gym_capture.capture.records import (
    Continues,
    EntrySuffix,
    IdArray,
    TokenEntry,
    delivered_by,
    id_bytes,
    new_digest,
)
from gym_capture.capture.suffixes import StoredRecord, begins_alike, prompt_part
from gym_capture.reasons import ExcludedReason, MaskReason, ProblemReason, Reason, join_reason

NO_PARENT = -1
_ID_BYTES = 4


# --- one record for each call ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueCalls:
    """The calls of a snapshot, each once."""

    entries: tuple[StoredRecord, ...]
    """One for each call of this rollout, sorted by call id; a suffix only where the prompt is not known whole."""
    conflicting: Mapping[str, int]
    """Call ids that came with different contents -> generated ids over all of these contents."""
    foreign: tuple[StoredRecord, ...]
    """Records of other rollouts, sorted, each once."""


def unique_calls(rollout_id: str, records: Sequence[StoredRecord]) -> UniqueCalls:
    """Folds records that say the same of the same call; sets apart what is contradictory or another rollout's."""
    calls: dict[str, list[StoredRecord]] = {}
    foreign: dict[tuple[str, str], StoredRecord] = {}
    for record in records:
        if record.rollout_id == rollout_id:
            calls.setdefault(record.model_call_id, []).append(record)
        else:
            key = (record.rollout_id, record.model_call_id)
            first = foreign.setdefault(key, record)
            if record.generation_token_ids.size > first.generation_token_ids.size:
                foreign[key] = record
    entries: list[StoredRecord] = []
    conflicting: dict[str, int] = {}
    for call_id in sorted(calls):
        distinct = _distinct(calls[call_id])
        if len(distinct) == 1:
            entries.append(distinct[0])
        else:
            conflicting[call_id] = sum(int(entry.generation_token_ids.size) for entry in distinct)
    return UniqueCalls(
        entries=tuple(entries),
        conflicting=conflicting,
        foreign=tuple(foreign[key] for key in sorted(foreign)),
    )


def _distinct(records: Sequence[StoredRecord]) -> list[StoredRecord]:
    """The records of one call that differ in content. Whole prompts stand for suffixes of the same call."""
    if len(records) == 1:
        return [records[0]]
    distinct: list[StoredRecord] = []
    alike: dict[tuple[bytes, bytes], list[StoredRecord]] = {}  # one call may come in thousands of contents
    for record in sorted(records, key=lambda record: (prompt_part(record)[0], record.created_at)):
        generated = (record.generation_token_ids.tobytes(), (record.generation_log_probs + 0.0).tobytes())
        known = alike.setdefault(generated, [])
        if not any(_same_content(each, record) for each in known):
            known.append(record)
            distinct.append(record)
    if len(distinct) == 1:
        # Whether the reply arrived is learned after the record was made.
        return [replace(distinct[0], delivered=delivered_by(record.delivered for record in records))]
    return distinct


_ARRAYS = (Kind.IDS, Kind.LOG_PROBS, Kind.TENSOR)
_read_values = reader(field for field in FIELDS if field.is_content and field.kind not in (*_ARRAYS, Kind.PROMPT))
_read_arrays = reader(field for field in FIELDS if field.is_content and field.kind in _ARRAYS)


def _same_content(a: StoredRecord, b: StoredRecord) -> bool:
    """Whether two records of one call say the same of what was asked and sampled; `b` has at least `a`'s offset."""
    if a.cum_len != b.cum_len or a.request.asked_max_tokens != b.request.asked_max_tokens:
        return False
    (a_offset, a_ids), (b_offset, b_ids) = prompt_part(a), prompt_part(b)
    return (
        _read_values(a) == _read_values(b)
        and np.array_equal(a_ids[b_offset - a_offset :], b_ids)
        and all(map(_same_rows, _read_arrays(a), _read_arrays(b)))
    )


def _same_rows(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


# --- the forest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Calls by position in `entries`; parallel sequences have its length."""

    entries: tuple[StoredRecord, ...]
    parents: tuple[int, ...]
    """Position of the proven parent, or `NO_PARENT`."""
    starts: tuple[int, ...]
    """How many of the call's prompt ids are its proven parent's cumulative ids; 0 without one."""
    order: tuple[int, ...]
    """The calls that have a place, every parent before its children."""
    unplaced: Mapping[int, Reason]
    """The calls without a provable place -> why."""
    reasons: tuple[str, ...]
    """The reason that masks the rollout: `<name>:<call id>:<field>`."""

    def path(self, position: int) -> list[int]:
        """The calls from the root to `position`."""
        path: list[int] = []
        while position != NO_PARENT:
            path.append(position)
            position = self.parents[position]
        path.reverse()
        return path

    def placed(self, position: int) -> TokenEntry:
        """A call that has a place; suffixes have none."""
        return _whole(self.entries[position])


def _whole(record: StoredRecord) -> TokenEntry:
    assert isinstance(record, TokenEntry), "a suffix has no place"
    return record


def link(
    entries: tuple[StoredRecord, ...],
    *,
    no_candidates: frozenset[int],
    elsewhere: Mapping[str, MaskReason],
    vocab_size: int | None,
) -> Forest:
    """Places every call.

    `no_candidates`: positions that inference never continues (they carry no loss). `elsewhere`: call ids that exist
    but cannot be a parent -> the reason to give to a call that names one.
    """
    linker = _Linker(entries)
    linker.read_recorded_parents(elsewhere)
    linker.cut_cycles()
    linker.cut_wrong_lengths()
    linker.unplace_descendants()
    linker.unplace_suffixes()
    linker.infer_missing_parents(no_candidates)
    linker.unplace_descendants()
    return linker.walk(vocab_size)


class _Linker:
    """The state of one `link`: parents that are so far only claimed, and what was found against them."""

    def __init__(self, entries: tuple[StoredRecord, ...]) -> None:
        self.entries = entries
        self.parents = [NO_PARENT] * len(entries)
        self.unplaced: dict[int, Reason] = {}
        self.reasons: list[str] = []

    def read_recorded_parents(self, elsewhere: Mapping[str, MaskReason]) -> None:
        positions = {entry.model_call_id: position for position, entry in enumerate(self.entries)}
        for position, entry in enumerate(self.entries):
            if isinstance(entry.parent, Continues):
                named = positions.get(entry.parent.call_id)
                if named is None:
                    self._refuse(
                        position, elsewhere.get(entry.parent.call_id, MaskReason.ABSENT_PARENT), "parent.call_id"
                    )
                else:
                    self.parents[position] = named

    def cut_cycles(self) -> None:
        """Calls that, parent by parent, claim to continue themselves."""
        unseen, on_path, done = 0, 1, 2
        state = [unseen] * len(self.entries)
        for first in range(len(self.entries)):
            path: list[int] = []
            position = first
            while position != NO_PARENT and state[position] == unseen:
                state[position] = on_path
                path.append(position)
                position = self.parents[position]
            if position != NO_PARENT and state[position] == on_path:
                for member in path[path.index(position) :]:
                    self._refuse(member, MaskReason.PARENT_CYCLE, "parent.call_id")
            for seen in path:
                state[seen] = done

    def cut_wrong_lengths(self) -> None:
        for position, entry in enumerate(self.entries):
            parent = self.parents[position]
            if (
                parent != NO_PARENT
                and isinstance(entry.parent, Continues)
                and self.entries[parent].cum_len != entry.parent.cum_len
            ):
                self._refuse(position, MaskReason.PARENT_MISMATCH, "parent.cum_len")

    def unplace_suffixes(self) -> None:
        """Suffixes although their parent is here: whoever froze the rollout did not `complete` it."""
        left = [
            position
            for position, entry in enumerate(self.entries)
            if isinstance(entry, EntrySuffix) and position not in self.unplaced
        ]
        for position in left:
            self._refuse(position, MaskReason.ABSENT_PARENT, "prompt_token_ids")
        if left:
            self.unplace_descendants()

    def infer_missing_parents(self, no_candidates: frozenset[int]) -> None:
        undecided = {
            position: entry
            for position, entry in enumerate(self.entries)
            if isinstance(entry, TokenEntry) and entry.parent is None
        }
        if not undecided:
            return
        candidates = [
            position
            for position in range(len(self.entries))
            if position not in no_candidates and position not in self.unplaced
        ]
        index = PrefixIndex(self.entries, parents=tuple(self.parents), candidates=candidates)
        inferred = [(position, index.longest_prefixes(entry)) for position, entry in undecided.items()]
        for position, found in inferred:
            if len(found) == 1:
                self.parents[position] = found[0]
            elif found:
                self._refuse(position, MaskReason.AMBIGUOUS_PARENT, "prompt_token_ids")
                self.unplaced[position] = MaskReason.AMBIGUOUS_PARENT

    def unplace_descendants(self) -> None:
        """Calls that continue one without a place have none either: its own ids may be known, but not their history."""
        children = self._children()
        pending = list(self.unplaced)
        while pending:
            for child in children[pending.pop()]:
                if child not in self.unplaced:
                    self.unplaced[child] = ExcludedReason.UNPLACED_PARENT
                    pending.append(child)

    def walk(self, vocab_size: int | None) -> Forest:
        """Compares every prompt with the ids of its parent's path, depth first; places what holds."""
        entries, parents, unplaced = self.entries, self.parents, self.unplaced
        children = self._children()
        check_digests = any(entry.digest is not None for entry in entries)
        nothing_hashed = new_digest()
        starts = [0] * len(entries)
        order: list[int] = []
        path = bytearray()
        pending: list[tuple[int, hashlib._Hash]] = [
            (position, nothing_hashed)
            for position in range(len(entries))
            if parents[position] == NO_PARENT and position not in unplaced
        ]
        while pending:
            position, parent_hash = pending.pop()
            entry = entries[position]
            assert isinstance(entry, TokenEntry), "a suffix has no place"
            prompt_ids, start, own = entry.prompt_token_ids, 0, 0
            prompt = id_bytes(prompt_ids)
            parent = entries[parents[position]] if parents[position] != NO_PARENT else None
            if isinstance(parent, TokenEntry):
                before = parent.prompt_token_ids
                start = before.size + parent.generation_token_ids.size
                own = start * _ID_BYTES
                # Ids in the parent's own memory need no look.
                known = before.size * _ID_BYTES if begins_alike(prompt_ids, before) else 0
            del path[own:]
            if start:
                if not path.startswith(prompt[known:own], known):
                    self._refuse(position, MaskReason.PARENT_MISMATCH, "prompt_token_ids")
                    pending.insert(0, (position, nothing_hashed))
                    continue
                prompt = prompt[own:]
            generation = id_bytes(entry.generation_token_ids)
            path += prompt
            path += generation
            cumulative_hash = parent_hash
            if check_digests:
                cumulative_hash = parent_hash.copy()
                cumulative_hash.update(prompt)
                cumulative_hash.update(generation)
                if entry.digest is not None and entry.digest != cumulative_hash.hexdigest():
                    self._report(position, ProblemReason.DIGEST_MISMATCH, "digest")
            if vocab_size is not None:
                self._check_vocabulary(position, entry, start, vocab_size)
            starts[position] = start
            order.append(position)
            pending += [(child, cumulative_hash) for child in reversed(children[position]) if child not in unplaced]
        return Forest(
            entries=entries,
            parents=tuple(parents),
            starts=tuple(starts),
            order=tuple(order),
            unplaced=unplaced,
            reasons=tuple(self.reasons),
        )

    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.entries]
        for position, parent in enumerate(self.parents):
            if parent != NO_PARENT:
                children[parent].append(position)
        return children

    def _check_vocabulary(self, position: int, entry: TokenEntry, start: int, vocab_size: int) -> None:
        fields: tuple[tuple[str, IdArray], ...] = (
            ("prompt_token_ids", entry.prompt_token_ids[start:]),
            ("generation_token_ids", entry.generation_token_ids),
        )
        for field, ids in fields:
            if ids.size and int(ids.max()) >= vocab_size:
                self._report(position, MaskReason.OUT_OF_VOCABULARY, field)

    def _refuse(self, position: int, reason: MaskReason, field: str) -> None:
        """The claimed parent does not hold: the call stands alone, or has no place if its prompt is not whole."""
        self._report(position, reason, field)
        self.parents[position] = NO_PARENT
        if isinstance(self.entries[position], EntrySuffix):
            self.unplaced[position] = reason

    def _report(self, position: int, reason: Reason, field: str) -> None:
        self.reasons.append(join_reason(reason, self.entries[position].model_call_id, field))
