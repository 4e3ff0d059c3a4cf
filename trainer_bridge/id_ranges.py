"""Many group ids in little room: those that are one text before consecutive numbers are a range.

Invariant: `expanded(*compact(ids))` is `ids`, whatever they are. Tasks that are trained about in order need room for
those that are not, and ids that are no numbers need their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

Ranges: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""By what stands before the number: first and last number of each range."""

_NUMBERED: Final = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})", re.DOTALL)
_LEAST: Final = 3
"""Shorter ranges take more room than their ids."""


def compact(ids: Iterable[str]) -> tuple[list[str], dict[str, list[list[int]]]]:
    """The ids that are in no range, and the ranges; both sorted."""
    single: list[str] = []
    numbers: dict[str, list[int]] = {}
    for each in ids:
        match = _NUMBERED.fullmatch(each)
        if match is None:
            single.append(each)
        else:
            numbers.setdefault(match[1], []).append(int(match[2]))
    ranges: dict[str, list[list[int]]] = {}
    for before in sorted(numbers):
        for first, last in _runs(sorted(numbers[before])):
            if last - first + 1 < _LEAST:
                single += [f"{before}{number}" for number in range(first, last + 1)]
            else:
                ranges.setdefault(before, []).append([first, last])
    return sorted(single), ranges


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
