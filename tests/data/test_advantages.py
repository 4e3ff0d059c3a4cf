"""Advantages are per rollout, inside its group, without the masked ones."""

from __future__ import annotations

from itertools import permutations
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.capture.records import Snapshot
from gym_capture.data.advantages import Scale, group_advantages, reward_problems
from gym_capture.data.requests import Request
from tests.calls import ALL_CHAINS, call, snapshot

from .sync_groups import build_groups

ROLLOUTS = st.lists(
    st.tuples(st.sampled_from(["g1", "g2", "g3"]), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=12
)
SCALES = get_args(Scale)


def of(rollouts: list[tuple[str, float, bool]], scale: Scale) -> list[float]:
    groups, rewards, masked = zip(*rollouts, strict=True)
    return group_advantages(rewards, groups=groups, masked=masked, scale=scale).tolist()


@pytest.mark.parametrize(
    ("scale", "size"), [("none", 0.5), ("population_std", 1.0), ("sample_std", 0.7071), ("leave_one_out", 1.0)]
)
def test_TR_02_a_rollout_that_split_in_three_counts_once(scale: Scale, size: float) -> None:
    """From the group's rollouts to its rows: a baseline over the rows would be 0.75."""

    def freeze(rollout_id: str) -> Snapshot:
        chains = 3 if rollout_id == "r1" else 1
        calls = [call(f"c{chain}", [1, chain], [2, 3], rollout_id=rollout_id) for chain in range(chains)]
        return snapshot(*calls, rollout_id=rollout_id)

    requests = [
        Request(rollout_id=name, group_id="g", reward=reward, reward_components=None, failure=None)
        for name, reward in (("r1", 1.0), ("r2", 0.0))
    ]
    ((_, table),) = build_groups([requests], freeze, options=ALL_CHAINS, scale=scale)
    assert table.column("rollout_id").to_pylist() == ["r1"] * 3 + ["r2"]
    assert table.column("advantage").to_pylist() == pytest.approx([size] * 3 + [-size], abs=1e-4)


@pytest.mark.parametrize(("scale", "size"), [("population_std", 1.0), ("sample_std", 0.7071)])
def test_TR_04_groups_of_unequal_size_do_not_mix(scale: Scale, size: float) -> None:
    found = of([("0", 1.0, False), ("0", 3.0, False), ("1", 5.0, False)], scale)
    assert found == pytest.approx([-size, size, 0.0], abs=1e-4)


@given(rewards=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8))
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    total, others = sum(rewards), len(rewards) - 1
    expected = [reward - (total - reward) / others for reward in rewards]
    assert of([("g", reward, False) for reward in rewards], "leave_one_out") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_masked_rollouts_are_outside_of_the_baseline(scale: Scale) -> None:
    with_masked = of([("g", 0.0, False), ("g", float("nan"), True), ("g", 1.0, False), ("g", 100.0, True)], scale)
    assert [with_masked[0], with_masked[2]] == of([("g", 0.0, False), ("g", 1.0, False)], scale)
    assert [with_masked[1], with_masked[3]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1e200, 0.0, 0.0, 0.0], [1.7321, -0.5774, -0.5774, -0.5774]),
        ([1e308, 1e308, 0.0, -1e308], [0.9045, 0.9045, -0.3015, -1.5076]),
        ([1.7e308, -1.7e308], [1.0, -1.0]),
        ([1.7e308] * 3 + [-1.7e308], [0.5774, 0.5774, 0.5774, -1.7321]),
        ([1e-300, 0.0], [0.0, 0.0]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_no_reward_is_too_large_to_be_compared(rewards: list[float], expected: list[float]) -> None:
    beside = [("h", 1.0, False), ("h", 0.0, False)]
    found = of([*(("g", reward, False) for reward in rewards), *beside], "population_std")
    assert found == pytest.approx([*expected, 1.0, -1.0], abs=1e-4)
    for scale in SCALES:
        found = of([*(("g", reward, False) for reward in rewards), *beside], scale)
        assert np.isfinite(np.array(found, np.float32)).all()
        assert found[-2:] == of(beside, scale)


@pytest.mark.parametrize(
    ("reward", "reasons"),
    [
        *((reward, ()) for reward in (0.0, -1.5, 1e300)),
        (None, ("missing_reward",)),
        *((reward, ("non_finite_reward",)) for reward in (float("nan"), float("inf"), float("-inf"))),
    ],
)
def test_what_is_no_problem_can_be_compared(reward: float | None, reasons: tuple[str, ...]) -> None:
    assert reward_problems(reward) == reasons
    if not reasons:
        assert reward is not None
        assert of([("g", reward, False)], "none") == [0.0]


def test_a_group_that_is_all_masked_gives_zeros() -> None:
    assert of([("g", float("inf"), True), ("g", 1.0, True)], "population_std") == [0.0, 0.0]


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_nothing_to_learn(scale: Scale) -> None:
    assert of([("g", 0.1, False)] * 3, scale) == pytest.approx([0.0] * 3, abs=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_equal_rewards_give_nothing_to_learn_however_large_they_are(scale: Scale, size: int) -> None:
    for reward in (8.379388607443317e18, 1e12 + 0.1, -1.7e308, 5e-324):
        assert of([("g", reward, False)] * size, scale) == [0.0] * size


def test_groups_are_told_apart_to_the_character() -> None:
    names = ["g", "g\0", "g" * 2**20]
    assert of([(name, float(number), False) for number, name in enumerate(names)], "none") == [0.0, 0.0, 0.0]


@given(rollouts=ROLLOUTS, scale=st.sampled_from(SCALES))
def test_finite_and_centered_in_every_group(rollouts: list[tuple[str, float, bool]], scale: Scale) -> None:
    advantages = of(rollouts, scale)
    assert np.isfinite(advantages).all()
    for group in {group for group, _, _ in rollouts}:
        own = [value for value, rollout in zip(advantages, rollouts, strict=True) if rollout[0] == group]
        assert sum(own) == pytest.approx(0.0, abs=1e-6)


@given(rollouts=ROLLOUTS, scale=st.sampled_from(SCALES), data=st.data())
def test_independent_of_order_and_of_other_groups(
    rollouts: list[tuple[str, float, bool]], scale: Scale, data: st.DataObject
) -> None:
    advantages = of(rollouts, scale)
    order = data.draw(st.permutations(range(len(rollouts))))
    assert of([rollouts[i] for i in order], scale) == pytest.approx([advantages[i] for i in order], abs=1e-6)
    alone = [rollout for rollout in rollouts if rollout[0] == rollouts[0][0]]
    expected = [value for value, rollout in zip(advantages, rollouts, strict=True) if rollout[0] == rollouts[0][0]]
    assert of(alone, scale) == pytest.approx(expected, abs=1e-6)


def test_lengths_that_differ_are_an_error() -> None:
    with pytest.raises(ValueError, match="one element a rollout: got 1, 2 and 1"):
        group_advantages([1.0], groups=["g", "g"], masked=[False])


@pytest.mark.parametrize("values", list(permutations([0.0, float("nan")])))
def test_a_reward_that_is_not_finite_is_an_error_unless_masked(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages(values, groups=["g", "g"], masked=[False, False])
