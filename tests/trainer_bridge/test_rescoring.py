"""What recorded log probabilities are compared with, and how far apart they are said to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gym_capture.capture.records import Continues, Root, WeightSpan
from tests.calls import call, snapshot
from trainer_bridge.comparison import Bounds, Comparison, Distribution
from trainer_bridge.loss import mismatch
from trainer_bridge.recorded import RecordedPart, of_snapshot
from trainer_bridge.rescoring import truncated_bounds

PLAIN = {"temperature": 1.0}


def test_calls_of_a_conversation_are_one_sequence_and_branches_their_own() -> None:
    a = call("a", [1, 2], [3, 4], parent=Root(), sampling=PLAIN)
    b = call("b", [1, 2, 3, 4, 5], [6], parent=Continues("a", 4), sampling=PLAIN)
    c = call("c", [1, 2, 3, 4, 7], [8, 9], parent=Continues("a", 4), sampling=PLAIN)
    made = list(of_snapshot(snapshot(a, b, c)))
    assert [each.token_ids.tolist() for each in made] == [[1, 2, 3, 4, 7, 8, 9], [1, 2, 3, 4, 5, 6]]
    assert [[(p.call_id, p.start, p.end) for p in each.parts] for each in made] == [
        [("a", 2, 4), ("c", 5, 7)],
        [("b", 5, 6)],
    ]


def test_a_call_whose_ids_are_not_its_child_s_is_a_sequence_of_its_own() -> None:
    a = call("a", [1, 2], [3, 99], parent=Root(), sampling=PLAIN)
    b = call("b", [1, 2, 3, 4, 5], [6], parent=Continues("a", 4), sampling=PLAIN)
    made = list(of_snapshot(snapshot(a, b)))
    assert [each.token_ids.tolist() for each in made] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 99]]


def test_versions_are_parts_and_a_sequence_ends_where_its_last_chosen_part_does() -> None:
    spans = (WeightSpan(0, 1, "0"), WeightSpan(1, 3, "1"))
    (made,) = of_snapshot(snapshot(call("a", [1, 2], [3, 4, 5], sampling=PLAIN, weight_versions=spans)))
    assert [(p.weight_version, p.start, p.position, p.end) for p in made.parts] == [("0", 2, 0, 3), ("1", 3, 1, 5)]
    chosen = made.chosen(lambda part: part.weight_version == "0")
    assert chosen is not None
    assert chosen.token_ids.tolist() == [1, 2, 3]
    assert made.chosen(lambda part: False) is None


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({}, "sampling_unknown"),
        ({"top_p": 0.5}, "sampling_unknown"),
        ({**PLAIN, "frequency_penalty": 0.1}, "penalties"),
        ({**PLAIN, "repetition_penalty": 1.1}, "penalties"),
        ({**PLAIN, "repetition_penalty": 1.0, "top_k": 5}, None),
    ],
)
def test_what_cannot_be_computed_again_says_why(sampling: dict[str, float], reason: str | None) -> None:
    ((part,),) = [each.parts for each in of_snapshot(snapshot(call("a", [1], [2], sampling=sampling)))]
    assert part.why_not() == reason


# --- what was left to sample from ----------------------------------------------------------------------------------


def bounds(target: int, *, top_k: float = np.inf, top_p: float = 1.0, min_p: float = 0.0) -> tuple[float, float]:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    low, high = truncated_bounds(
        probabilities.log(), torch.tensor([target]), torch.tensor([[top_k, top_p, min_p]], dtype=torch.float64)
    )
    return float(low.exp()), float(high.exp())


def test_what_is_left_is_renormalized_and_what_is_not_is_impossible() -> None:
    assert bounds(1, top_k=2) == pytest.approx((0.375, 0.375))
    assert bounds(2, top_k=2) == (0.0, 0.0)
    assert bounds(0, top_p=0.7) == pytest.approx((0.625, 0.625))
    assert bounds(2, top_p=0.7) == (0.0, 0.0)
    assert bounds(2, min_p=0.2) == pytest.approx((0.15 / 0.95, 0.15 / 0.95))
    assert bounds(3, min_p=0.2) == (0.0, 0.0)
    # Top-p is of what top-k left: 0.5 and 0.3 of 0.95 are 0.84 of it.
    assert bounds(2, top_k=3, top_p=0.83) == (0.0, 0.0)
    assert bounds(2, top_k=3, top_p=0.86) == pytest.approx((0.15 / 0.95, 0.15 / 0.95))


def test_at_the_edge_of_top_p_both_may_be() -> None:
    assert bounds(0, top_p=0.8) == pytest.approx((0.5 / 0.95, 0.5 / 0.8))
    assert bounds(2, top_p=0.8)[0] == pytest.approx(0.15 / 0.95)


# --- how far apart -------------------------------------------------------------------------------------------------


def test_a_distribution_is_that_of_numpy_and_of_the_trainer_s_metrics() -> None:
    rng = np.random.default_rng(0)
    difference = rng.normal(scale=0.02, size=20_000)
    made = Distribution()
    for some in np.array_split(difference, 7):
        made.add(some)
    said, absolute = made.as_dict(), np.abs(difference)
    assert said["mean"] == pytest.approx(absolute.mean())
    assert said["median"] == pytest.approx(np.median(absolute), rel=0.03)
    assert said["p99"] == pytest.approx(np.quantile(absolute, 0.99), rel=0.03)
    assert said["max"] == absolute.max()
    theirs = mismatch(torch.from_numpy(difference), torch.zeros(difference.size))
    assert said["token_mult_prob_error"] == pytest.approx(theirs.token_mult_prob_error)
    assert said["gen_kl_error"] == pytest.approx(theirs.gen_kl_error)


def test_findings_are_kept_up_to_a_limit_and_all_counted() -> None:
    comparison = Comparison(limit=2)
    for number in range(5):
        ((part,),) = [
            each.parts
            for each in of_snapshot(snapshot(call(f"c{number}", [1], [2, 3], sampling=PLAIN, log_probs=[-1, -2])))
        ]
        add(comparison, part, [-1.0, -np.inf if number % 2 else -2.5])
    assert (comparison.calls_beyond, [each.call_id for each in comparison.findings]) == (5, ["c0", "c1"])
    assert [(each.position, each.rescored, each.tokens_beyond) for each in comparison.findings] == [
        (1, -2.5, 1),
        (1, None, 1),
    ]
    assert (comparison.judged.tokens, comparison.judged.impossible) == (10, 2)


def add(comparison: Comparison, part: RecordedPart, values: list[float]) -> None:
    scored = np.array(values, dtype=np.float32)
    comparison.add(part, np.array([1, 2, 3], dtype=np.int32), Bounds(scored, scored), tolerance=0.1)
