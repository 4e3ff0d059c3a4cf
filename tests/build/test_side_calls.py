"""Which calls are not part of the task, judged from the records alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.build.side_calls import SideCallRules, side_calls
from gym_capture.capture.records import Root, TokenEntry
from tests.calls import entry_of


def call(requested_model: str, generated: int, **fields: Any) -> TokenEntry:
    return entry_of(
        **{
            "rollout_id": "r1",
            "model_call_id": "c",
            "model": "served",
            "requested_model": requested_model,
            "has_tools": False,
            "prompt_token_ids": np.array([1], dtype=np.int32),
            "generation_token_ids": np.ones(generated, dtype=np.int32),
            "generation_log_probs": np.zeros(generated, dtype=np.float32),
            "parent": Root(),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], set(), id="nothing"),
        pytest.param([call("m", 3)], set(), id="a lone call without tools"),
        pytest.param([call("m", 3), call("m", 1)], set(), id="one model"),
        pytest.param([call("small", 2), call("m", 3)], {0}, id="the model that generated most is the policy"),
        pytest.param([call("small", 2), call("small", 2), call("m", 3)], {2}, id="by ids, not by calls"),
        pytest.param([call("a", 3), call("b", 3, has_tools=True)], {0}, id="equal: the one that offers tools"),
        pytest.param([call("b", 3), call("a", 3)], {0}, id="equal in everything: the first name"),
        pytest.param([call("m", 3), call("m", 1, max_tokens=1)], {1}, id="probe"),
        pytest.param([call("m", 1, max_tokens=1)], {0}, id="nothing but a probe"),
        pytest.param([call("m", 3, max_tokens=2)], set(), id="short, but no probe"),
        pytest.param(
            [call("m", 3), call("m", 1, sampling={"max_tokens": 1})], {1}, id="a probe by its sampling parameters"
        ),
        pytest.param([call("m", 3, max_tokens=9, sampling={"max_tokens": 1})], set(), id="no room, but no probe"),
        pytest.param([call("m", 1), call("", 3)], set(), id="an unknown name is no other name"),
        pytest.param([call("m", 3), call("small", 2), call("", 9)], {1}, id="unknown names do not elect the policy"),
        pytest.param([call("m", 3), call("", 1, model="other")], {1}, id="unknown, but another model generated"),
        pytest.param([call("m", 3), call("", 1, model="")], set(), id="nothing known"),
        pytest.param([call("", 3), call("", 4, model="big")], {0}, id="no name at all: by what generated"),
    ],
)
def test_the_default_rules(entries: list[TokenEntry], expected: set[int]) -> None:
    assert side_calls(entries, SideCallRules()) == expected


def test_patterns_come_before_calibration() -> None:
    """What a pattern names cannot be taken for the policy, however much it generated."""
    entries = [call("vendor-small-3", 9), call("vendor-large-3", 5), call("other", 1)]
    assert side_calls(entries, SideCallRules(model_patterns=("*-small-*",))) == {0, 2}
    assert side_calls(entries, SideCallRules(model_patterns=("*-SMALL-*",), self_calibrate=False)) == set()
    unnamed = [call("", 9, model="vendor-small-3"), call("", 5)]
    assert side_calls(unnamed, SideCallRules(model_patterns=("*-small-*",))) == {0}


def test_each_rule_can_be_turned_off() -> None:
    entries = [call("m", 3), call("small", 1), call("m", 1, max_tokens=1)]
    assert side_calls(entries, SideCallRules(self_calibrate=False)) == {2}
    assert side_calls(entries, SideCallRules(probe_max_tokens=0)) == {1}


@given(
    st.lists(st.builds(call, st.sampled_from(("a", "b", "c")), st.integers(0, 3), has_tools=st.booleans())),
    st.randoms(use_true_random=False),
)
def test_the_order_changes_nothing(entries: list[TokenEntry], random: Any) -> None:
    order = list(range(len(entries)))
    random.shuffle(order)
    shuffled = side_calls([entries[position] for position in order], SideCallRules())
    assert {order[position] for position in shuffled} == side_calls(entries, SideCallRules())
