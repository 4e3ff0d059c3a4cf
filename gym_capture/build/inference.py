"""Which call a prompt continues, when the record does not say: the longest cumulative ids that the prompt starts with.

Invariant: an answer is compared id by id, checksums only choose what to compare; and the answer depends on the ids
alone, not on the order of the records.

Flow: the longest candidate that could fit is compared first - in an append-only rollout it is the parent, so that a
prompt is read once. Only where it is not (branches, interleaved sub-agents) the prompt is checksummed once, at every
length that some candidate has. The cost is linear in the ids stored, plus one look-up for each call and length.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from gym_capture.capture.records import CallRecord, IdArray, TokenEntry, id_bytes
from gym_capture.capture.suffixes import StoredRecord, begins_alike

_ID_BYTES = 4


class PrefixIndex:
    """The cumulative ids of some calls, to be found as prefixes of prompts.

    `parents` are the recorded parents, with equal lengths where they meet, and without circles. Candidates are whole.
    """

    def __init__(self, entries: Sequence[StoredRecord], *, parents: Sequence[int], candidates: Sequence[int]) -> None:
        self._entries = entries
        self._parents = parents
        self._by_length: dict[int, list[int]] = {}
        for position in candidates:
            self._by_length.setdefault(entries[position].cum_len, []).append(position)
        self._lengths = sorted(self._by_length)
        self._checksums: dict[int, int] = {}
        self._by_checksum: dict[tuple[int, int], list[int]] = {}

    def longest_prefixes(self, entry: TokenEntry) -> list[int]:
        """The call whose cumulative ids are the longest prefix of the whole prompt of `entry`.

        Empty if there is none; two if more than one call has these very ids.
        """
        fitting = self._lengths[: bisect_right(self._lengths, entry.prompt_len)]
        if not fitting:
            return []
        likeliest = self._by_length[fitting[-1]]
        if len(likeliest) == 1 and self._starts_with(entry.prompt_token_ids, likeliest[0]):
            return likeliest
        for bucket in reversed(self._buckets_along(entry.prompt_token_ids, fitting)):
            found: list[int] = []
            for position in bucket:
                if self._starts_with(entry.prompt_token_ids, position):
                    found.append(position)
                    if len(found) == 2:
                        break
            if found:
                return found
        return []

    def _buckets_along(self, prompt: IdArray, lengths: Sequence[int]) -> list[list[int]]:
        """The candidates whose length and checksum agree with the prompt's, shortest first."""
        if not self._by_checksum:
            for length in self._lengths:
                for position in self._by_length[length]:
                    self._by_checksum.setdefault((length, self._checksum(position)), []).append(position)
        raw = id_bytes(prompt)
        buckets: list[list[int]] = []
        checksum = begin = 0
        for length in lengths:
            checksum = zlib.crc32(raw[begin * _ID_BYTES : length * _ID_BYTES], checksum)
            begin = length
            bucket = self._by_checksum.get((length, checksum))
            if bucket is not None:
                buckets.append(bucket)
        return buckets

    def _checksum(self, position: int) -> int:
        """Of the cumulative ids of a call. Ids in the memory of its parent's are read once, for all calls after it."""
        known = self._checksums
        path: list[int] = []
        checksum = begin = 0
        at = position
        while True:
            if at in known:
                checksum, begin = known[at], self._entries[at].cum_len
                break
            path.append(at)
            parent = self._parents[at]
            if parent < 0 or not _shares(self._entries[at], self._entries[parent]):
                break
            at = parent
        for step in reversed(path):
            entry = self._entries[step]
            assert isinstance(entry, TokenEntry)
            checksum = zlib.crc32(id_bytes(entry.prompt_token_ids)[begin * _ID_BYTES :], checksum)
            checksum = zlib.crc32(id_bytes(entry.generation_token_ids), checksum)
            known[step], begin = checksum, entry.cum_len
        return checksum

    def _starts_with(self, prompt: IdArray, position: int) -> bool:
        """Whether the prompt starts with all cumulative ids of a call, compared from their end."""
        entry = self._entries[position]
        assert isinstance(entry, TokenEntry)
        if not np.array_equal(prompt[entry.prompt_len : entry.cum_len], entry.generation_token_ids):
            return False
        before = entry.prompt_token_ids
        return begins_alike(prompt, before) or np.array_equal(prompt[: before.size], before)


def _shares(entry: CallRecord, parent: CallRecord) -> bool:
    """Whether a call's prompt stands in the memory of its parent's, and goes on with what that generated."""
    return (
        isinstance(entry, TokenEntry)
        and isinstance(parent, TokenEntry)
        and begins_alike(entry.prompt_token_ids, parent.prompt_token_ids)
        and np.array_equal(entry.prompt_token_ids[parent.prompt_len : parent.cum_len], parent.generation_token_ids)
    )
