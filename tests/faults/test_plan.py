"""What is killed, and in which order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.faults.killer import Victim, plan


@given(st.integers(10, 400), st.integers(0, 10**6))
def test_every_kind_of_victim_has_its_share(kills: int, seed: int) -> None:
    victims = plan(kills, seed)
    assert len(victims) == kills
    counts = Counter(victims)
    assert set(counts) == set(Victim)
    assert abs(counts[Victim.STATE] - kills / 2) <= 5
    assert victims == plan(kills, seed)
