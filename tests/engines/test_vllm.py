"""What is read off vLLM's outputs; the engine itself runs in the end-to-end tests."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.logprobs import Logprob

from gym_capture.engines.vllm import sampled_log_probs


def test_CP_01_the_log_probability_is_that_of_the_sampled_id_not_of_the_first_alternative() -> None:
    positions = [
        {512: Logprob(-0.1, rank=1), 880: Logprob(-2.3, rank=2)},
        {7: Logprob(-0.5, rank=1)},
    ]
    found = sampled_log_probs([880, 7], positions)
    np.testing.assert_array_equal(found, np.float32([-2.3, -0.5]))


def test_a_position_too_few_is_an_error_and_not_a_shorter_array() -> None:
    with pytest.raises(ValueError, match="zip"):
        sampled_log_probs([880, 7], [{880: Logprob(-2.3)}])
