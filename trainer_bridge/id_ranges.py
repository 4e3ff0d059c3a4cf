"""Many group ids in little room: those that are one text before consecutive numbers are a range.

Invariant: `expanded(*IdRanges.of(ids).compact())` is `ids`, whatever they are. Tasks that are trained about in order
need room for those that are not, and ids that are no numbers need their own. Of ids that are added, only those are
looked at.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

Ranges: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""By what stands before the number: first and last number of each range."""

_NUMBERED: Final = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})", re.DOTALL)
_LEAST: Final = 3
"""Shorter ranges take more room than their ids."""


class IdRanges:
    """Ids as ranges, to which more are added."""

    def __init__(self, single: list[str], runs: dict[str, list[tuple[int, int]]]) -> None:
        self._single = single
        """Ids that end with no number, sorted."""
        self._runs = runs
        """By what stands before: first and last of consecutive numbers, ascending."""

    @classmethod
    def of(cls, ids: Iterable[str]) -> IdRanges:
        single: list[str] = []
        numbers: dict[str, list[int]] = {}
        for each in ids:
            match = _NUMBERED.fullmatch(each)
            if match is None:
                single.append(each)
            else:
                numbers.setdefault(match[1], []).append(int(match[2]))
        return cls(sorted(single), {before: list(_runs(sorted(every))) for before, every in numbers.items()})

    def including(self, ids: Iterable[str]) -> IdRanges:
        """These and those. `ids`: none that is there already."""
        new = IdRanges.of(ids)
        single, runs = self._single.copy(), self._runs.copy()
        for each in new._single:
            insort(single, each)
        for before, every in new._runs.items():
            runs[before] = there = runs.get(before, []).copy()
            for run in every:
                _insert(there, run)
        return IdRanges(single, runs)

    def compact(self) -> tuple[list[str], dict[str, list[list[int]]]]:
        """The ids that are in no range, and the ranges; of the same ids always in the same order."""
        single = self._single.copy()
        ranges: dict[str, list[list[int]]] = {}
        for before in sorted(self._runs):
            for first, last in self._runs[before]:
                if last - first + 1 < _LEAST:
                    single += [f"{before}{number}" for number in range(first, last + 1)]
                else:
                    ranges.setdefault(before, []).append([first, last])
        return single, ranges


def expanded(single: Iterable[str], ranges: Ranges) -> frozenset[str]:
    """The ids."""
    found = set(single)
    for before, every in ranges.items():
        for first, last in every:
            found.update(f"{before}{number}" for number in range(first, last + 1))
    return frozenset(found)


def _runs(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """First and last of consecutive numbers; `numbers` ascend, and none is there twice."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _insert(runs: list[tuple[int, int]], new: tuple[int, int]) -> None:
    """`new` may fill up what is between two others; it has no number of theirs."""
    first, last = new
    at = bisect_right(runs, new)
    begin = end = at
    if at > 0 and runs[at - 1][1] == first - 1:
        begin, first = at - 1, runs[at - 1][0]
    if at < len(runs) and runs[at][0] == last + 1:
        end, last = at + 1, runs[at][1]
    runs[begin:end] = [(first, last)]
