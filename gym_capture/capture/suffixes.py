"""From the records of a rollout as they are stored to whole ones, and back.

Invariant: a suffix becomes whole only after the one parent that it names, which has just the length that the suffix
says; whatever lacks such a parent - absent, in several versions, of another length, or in a circle - stays a suffix.
Whole entries are never changed. Nothing depends on the order of the records.

Flow: `complete` finds, parent before child, which suffixes can be made whole -> lays out each chain of them in one
buffer, that of its longest leaf, of which every prompt and generation of the chain is a view. So a conversation costs
its ids once, however many calls it has. A branch copies what is before it, once for each branch whose prompt differs:
calls that only sampled another generation for the same prompt share that prompt. `stored_form` goes the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gym_capture.capture.records import (
    CallRecord,
    Continues,
    EntrySuffix,
    IdArray,
    Snapshot,
    TokenEntry,
    suffix_of,
    whole_entry,
)

__all__ = ["StoredRecord", "StoredRollout", "complete"]

StoredRecord: TypeAlias = TokenEntry | EntrySuffix
"""A record in either form."""
_Key: TypeAlias = tuple[str, str]


class StoredRollout(NamedTuple):
    """A frozen rollout for a reader that takes records as they are stored: lineage, which keeps ids once by itself."""

    records: Sequence[StoredRecord]
    incomplete: tuple[str, ...]
    """As `Snapshot.incomplete`."""
    went_on: tuple[str, ...] = ()
    """As `Snapshot.went_on`."""


def complete(records: Sequence[StoredRecord]) -> tuple[tuple[TokenEntry, ...], tuple[EntrySuffix, ...]]:
    """The records made whole, and the suffixes that cannot be; both in the order of `records`."""
    if not any(isinstance(record, EntrySuffix) for record in records):
        return tuple(record for record in records if isinstance(record, TokenEntry)), ()
    parents, in_order = _resolve(records)
    whole = _lay_out(records, parents, in_order)
    entries: list[TokenEntry] = []
    orphans: list[EntrySuffix] = []
    for position, record in enumerate(records):
        entry = whole.get(position)
        if entry is not None:
            entries.append(entry)
        elif isinstance(record, EntrySuffix):
            orphans.append(record)
    return tuple(entries), tuple(orphans)


def stored_form(snapshot: Snapshot) -> tuple[StoredRecord, ...]:
    """The records of a snapshot, each without the ids that its parent's record there provably has."""
    entries: dict[_Key, TokenEntry | None] = {}
    for entry in snapshot.entries:
        key = (entry.rollout_id, entry.model_call_id)
        entries[key] = None if key in entries else entry  # several: none of them is the parent
    stored: list[StoredRecord] = []
    for entry in snapshot.entries:
        parent = None
        if isinstance(entry.parent, Continues):
            parent = entries.get((entry.rollout_id, entry.parent.call_id))
            if parent is not None and (parent.cum_len != entry.parent.cum_len or not _continues(entry, parent)):
                parent = None
        stored.append(entry if parent is None or parent is entry else suffix_of(entry))
    return (*stored, *snapshot.orphans)


def prompt_part(record: CallRecord) -> tuple[int, IdArray]:
    """The prompt ids that a record has itself, and how many come before them."""
    match record:
        case TokenEntry():
            return 0, record.prompt_token_ids
        case EntrySuffix():
            return record.parent.cum_len, record.new_prompt_ids
    raise TypeError(f"neither whole nor a suffix: {type(record).__name__}")


def suffix_part(record: CallRecord) -> tuple[int, IdArray]:
    """`prompt_part` of the record's suffix, without making that."""
    offset, ids = prompt_part(record)
    if not offset and isinstance(record.parent, Continues) and record.parent.cum_len > 0:
        offset = record.parent.cum_len
        ids = ids[offset:]
    return offset, ids


def begins_alike(a: IdArray, b: IdArray) -> bool:
    """Whether the ids of two records, which are contiguous, begin at the same place in memory: then the shorter are the
    beginning of the longer."""
    if (a if a.base is None else a.base) is not (b if b.base is None else b.base):
        return False  # the cheaper look, which settles most
    return np.may_share_memory(a[:1], b[:1])  # of single ids that says neither too much nor too little


def _continues(entry: TokenEntry, parent: TokenEntry) -> bool:
    """Whether a prompt starts with all cumulative ids of another call."""
    prompt, theirs = entry.prompt_token_ids, parent.prompt_token_ids
    before = theirs.size
    if not np.array_equal(prompt[before : parent.cum_len], parent.generation_token_ids):
        return False
    return begins_alike(prompt, theirs) or np.array_equal(prompt[:before], theirs)


# --- who follows whom --------------------------------------------------------------------------------------------


def _resolve(records: Sequence[StoredRecord]) -> tuple[dict[int, int], list[int]]:
    """The parents of all suffixes that have one, by position, and those suffixes in an order, parents first."""
    by_call: dict[_Key, list[int]] = {}
    children: dict[_Key, list[int]] = {}
    for position, record in enumerate(records):
        by_call.setdefault((record.rollout_id, record.model_call_id), []).append(position)
        if isinstance(record, EntrySuffix):
            children.setdefault((record.rollout_id, record.parent.call_id), []).append(position)
    missing: dict[_Key, int] = {}
    known: list[_Key] = []
    for key in children.keys() & by_call.keys():
        # Where a call is here whole and as a suffix, the whole record says what its ids are.
        whole = [position for position in by_call[key] if isinstance(records[position], TokenEntry)]
        if whole:
            by_call[key] = whole
            known.append(key)
        else:
            missing[key] = len(by_call[key])
    parents: dict[int, int] = {}
    in_order: list[int] = []
    while known:
        key = known.pop()
        parent = by_call[key][0]
        if any(not _same_ids(records, parents, parent, other) for other in by_call[key][1:]):
            continue
        for position in children[key]:
            child = records[position]
            if isinstance(child, EntrySuffix) and child.parent.cum_len == records[parent].cum_len:
                parents[position] = parent
                in_order.append(position)
                own = (child.rollout_id, child.model_call_id)
                if own in missing:
                    missing[own] -= 1
                    if not missing[own]:
                        known.append(own)
    return parents, in_order


def _same_ids(records: Sequence[StoredRecord], parents: dict[int, int], a: int, b: int) -> bool:
    """Whether two records of one call, both whole or known to become so, have the same cumulative ids."""
    if records[a].cum_len != records[b].cum_len:
        return False
    if parents.get(a) == parents.get(b):  # of one parent, or both whole: what is before is the same
        (_, mine), (_, theirs) = prompt_part(records[a]), prompt_part(records[b])
        return np.array_equal(mine, theirs) and np.array_equal(
            records[a].generation_token_ids, records[b].generation_token_ids
        )
    return np.array_equal(_joined(records, parents, a), _joined(records, parents, b))


def _joined(records: Sequence[StoredRecord], parents: dict[int, int], position: int) -> IdArray:
    pieces: list[IdArray] = []
    at: int | None = position
    while at is not None:
        record = records[at]
        pieces += (record.generation_token_ids, prompt_part(record)[1])
        at = parents.get(at)
    joined: IdArray = np.concatenate(pieces[::-1])
    return joined


# --- where the ids stand -----------------------------------------------------------------------------------------


def _lay_out(
    records: Sequence[StoredRecord], parents: dict[int, int], in_order: Sequence[int]
) -> dict[int, TokenEntry]:
    """All whole entries, by position: those that were, and those that are made."""
    reach = {position: records[position].cum_len for position in in_order}
    for position in reversed(in_order):
        parent = parents[position]
        if parent in reach:
            reach[parent] = max(reach[parent], reach[position])
    children: dict[int, list[int]] = {}
    for position in in_order:
        children.setdefault(parents[position], []).append(position)
    whole = {position: record for position, record in enumerate(records) if isinstance(record, TokenEntry)}
    # A chain that begins a buffer; or, with another call of the same prompt, a call that shares that prompt.
    pending: list[tuple[int, int | None]] = []
    for position in whole:
        pending += _branches(records, reach, children.get(position, ()))
    while pending:
        first, twin = pending.pop()
        if twin is not None:
            suffix = records[first]
            assert isinstance(suffix, EntrySuffix)
            whole[first] = whole_entry(
                suffix, prompt=whole[twin].prompt_token_ids, generation=suffix.generation_token_ids
            )
            pending += _branches(records, reach, children.get(first, ()))
            continue
        before = whole[parents[first]]
        buffer = np.empty(reach[first], dtype=np.int32)
        shown = buffer.view()
        shown.flags.writeable = False
        buffer[: before.prompt_len] = before.prompt_token_ids
        buffer[before.prompt_len : before.cum_len] = before.generation_token_ids
        at: int | None = first
        while at is not None:
            suffix = records[at]
            assert isinstance(suffix, EntrySuffix)
            begin, end = suffix.prompt_len, suffix.cum_len
            buffer[suffix.parent.cum_len : begin] = suffix.new_prompt_ids
            buffer[begin:end] = suffix.generation_token_ids
            whole[at] = whole_entry(suffix, prompt=shown[:begin], generation=shown[begin:end])
            branches = _branches(records, reach, children.get(at, ()))
            at = None
            if branches:  # the longest goes on in this buffer
                at, _ = branches.pop()
                pending += branches
    return whole


def _branches(
    records: Sequence[StoredRecord], reach: dict[int, int], children: Iterable[int]
) -> list[tuple[int, int | None]]:
    """The calls that continue one call, the longest last; those with the prompt of a later one with that one."""
    longest_last = sorted(children, key=lambda child: reach[child])
    if len(longest_last) < 2:
        return [(child, None) for child in longest_last]
    firsts: dict[bytes, int] = {}
    branches: list[tuple[int, int | None]] = []
    for child in reversed(longest_last):
        _, new_ids = prompt_part(records[child])
        first = firsts.setdefault(new_ids.tobytes(), child)
        branches.append((child, None if first == child else first))
    return branches[::-1]
