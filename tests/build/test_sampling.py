"""What a trainer has to know of how ids were drawn."""

from __future__ import annotations

from typing import Any

import pytest

from gym_capture.build.sampling import Sampling, sampling_of

PLAIN = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 9}


def test_what_is_not_on_record_is_not_known() -> None:
    assert sampling_of({}) is None
    found = sampling_of({"temperature": "hot", "top_k": True, "top_p": 10**400})
    assert found == Sampling()
    assert not found.reshaped


@pytest.mark.parametrize(
    ("changes", "reshaped"),
    [
        ({}, False),
        ({"top_k": -1}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"min_p": 0.1}, True),
        ({"presence_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"structured_outputs": True}, True),
        ({"logit_bias": {"5": 1.0}}, True),
        ({"seed": 4, "stop": ["x"]}, False),
    ],
)
def test_reshaped_is_whatever_a_trainer_cannot_repeat(changes: dict[str, Any], reshaped: bool) -> None:
    found = sampling_of(PLAIN | changes)
    assert found is not None
    assert found.temperature == 0.5
    assert found.reshaped == reshaped
