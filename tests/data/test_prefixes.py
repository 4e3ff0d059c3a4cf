"""The columns that make a prefix tree of a group's rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.capture.records import Snapshot
from gym_capture.data.prefixes import GroupPrefixes
from gym_capture.data.requests import Request
from tests.calls import ALL_CHAINS, call, snapshot

from .sync_groups import build_groups

CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def common(first: list[int], second: list[int]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def added(chains: list[list[int]], **options: int) -> list[tuple[str | None, int]]:
    prefixes = GroupPrefixes(**options)
    return [prefixes.add("g", str(n), np.array(chain, dtype=np.int32)) for n, chain in enumerate(chains)]


@given(chains=CHAINS)
def test_each_row_names_an_earlier_one_that_shares_most_with_it(chains: list[list[int]]) -> None:
    for number, (name, length) in enumerate(added(chains)):
        shared = [common(chains[number], chains[earlier]) for earlier in range(number)]
        assert length == max(shared, default=0)
        assert (name is None) == (length == 0)
        assert name is None or shared[int(name)] == length


def test_ids_are_compared_as_numbers_and_not_as_bytes_of_this_machine() -> None:
    chains = [[256, 5], [1, 5], [256, 6], [1, 6], [2**31 - 1, 0], [2**31 - 1, 1]]
    assert added(chains) == [(None, 0), (None, 0), ("0", 1), ("1", 1), (None, 0), ("4", 1)]


def test_past_the_limit_rows_still_find_what_was_there_before() -> None:
    assert added([[1, 2], [1, 3], [1, 3]], max_bytes=8) == [(None, 0), ("0", 1), ("0", 1)]


def test_a_build_has_the_columns_across_rollouts_of_a_group_and_not_across_groups() -> None:
    def freeze(rollout_id: str) -> Snapshot:
        calls = [call(f"c{n}", [1, 2, n], [7, 8], rollout_id=rollout_id) for n in range(2)]
        return snapshot(*calls, rollout_id=rollout_id)

    said: dict[str, Any] = {"reward_components": None, "failure": None, "sample": 3, "attempt": 2}
    requests = [
        Request(rollout_id=name, group_id=group, reward=reward, **said)
        for name, group, reward in (("broken", "g", None), ("a", "g", 1.0), ("b", "g", 0.0), ("c", "h", 0.0))
    ]
    built = build_groups([requests[:3], requests[3:]], freeze, options=ALL_CHAINS, scale="none")
    rows = [row for _, table in built for row in table.to_pylist()]
    assert [(row["trajectory_id"], row["prefix_trajectory_id"], row["prefix_length"]) for row in rows] == [
        ("broken/c0", None, 0),  # masked: nobody's relative
        ("broken/c1", None, 0),
        ("a/c0", None, 0),
        ("a/c1", "a/c0", 2),
        ("b/c0", "a/c0", 5),
        ("b/c1", "a/c1", 5),
        ("c/c0", None, 0),
        ("c/c1", "c/c0", 2),
    ]
    assert {(row["sample"], row["attempt"]) for row in rows} == {(3, 2)}
