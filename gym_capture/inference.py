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

from gym_capture.records import IdArray, TokenEntry, id_bytes

_ID_BYTES = 4


class PrefixIndex:
    """The cumulative ids of some calls, to be found as prefixes of prompts.

    `parents` are the recorded parents that the candidates' deltas are deltas of, with equal lengths where they meet.
    """

    def __init__(self, entries: Sequence[TokenEntry], *, parents: Sequence[int], candidates: Sequence[int]) -> None:
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
        """Of the cumulative ids of a call; each stored id is read once, however many deltas build on it."""
        known = self._checksums
        path: list[int] = []
        while position not in known:
            path.append(position)
            if not self._entries[position].is_delta:
                break
            position = self._parents[position]
        checksum = known.get(position, 0)
        for step in reversed(path):
            entry = self._entries[step]
            checksum = zlib.crc32(id_bytes(entry.prompt_token_ids), checksum)
            checksum = zlib.crc32(id_bytes(entry.generation_token_ids), checksum)
            known[step] = checksum
        return checksum

    def _starts_with(self, prompt: IdArray, position: int) -> bool:
        """Whether the prompt starts with all cumulative ids of a call, compared from their end."""
        while True:
            entry = self._entries[position]
            if not np.array_equal(prompt[entry.prompt_len : entry.cum_len], entry.generation_token_ids):
                return False
            if not np.array_equal(prompt[entry.prompt_offset : entry.prompt_len], entry.prompt_token_ids):
                return False
            if not entry.is_delta:
                return True
            position = self._parents[position]
