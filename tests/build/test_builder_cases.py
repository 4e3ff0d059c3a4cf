"""The builder on faults that systems of this kind had in the field, reduced to a few ids each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gym_capture.build.builder import ExcludedCall, build
from gym_capture.capture.records import Continues, Root, digest_ids
from gym_capture.reasons import reason_name
from tests.calls import ALL_CHAINS, call, excluded, only, rows, snapshot


def test_BD_01_the_longest_open_chain_continues() -> None:
    entries = (
        call("c1", [11, 12], [13, 14]),
        call("c2", [11, 12, 13, 14, 15], [16]),
        call("c3", [11, 12], [13, 14, 15, 16, 17]),
        call("c4", [11, 12, 13, 14, 15, 16, 17, 18], [19]),
    )
    built = build(snapshot(*entries), ALL_CHAINS)
    assert rows(built) == [
        {
            "calls": ["c1", "c2"],
            "token_ids": [11, 12, 13, 14, 15, 16],
            "loss_mask": [0, 0, 1, 1, 0, 1],
            "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.1],
        },
        {
            "calls": ["c3", "c4"],
            "token_ids": [11, 12, 13, 14, 15, 16, 17, 18, 19],
            "loss_mask": [0, 0, 1, 1, 1, 1, 1, 0, 1],
            "logprobs": [0.0, 0.0, -0.1, -0.2, -0.3, -0.4, -0.5, 0.0, -0.1],
        },
    ]
    assert not built.masked
    assert built.trajectories[0].call_ids == ("c3", "c4"), "the chain that generated most comes first"

    beside = call("x", [91, 92, 93, 94], [95, 96, 97, 98], parent=Root())
    with_another = build(snapshot(*entries, beside), ALL_CHAINS)
    assert rows(with_another)[:2] == rows(built), "also where a conversation beside it has the likelier length"


def test_BD_03_interleaved_sub_agent_calls_stay_two_chains() -> None:
    built = build(
        snapshot(
            call("m1", [1, 2], [3]),
            call("s1", [7, 8], [9]),
            call("m2", [1, 2, 3, 4], [5]),
            call("s2", [7, 8, 9, 10], [11]),
            call("m3", [1, 2, 3, 4, 5, 6], [12]),
        ),
        ALL_CHAINS,
    )
    assert [(row["calls"], row["token_ids"], row["loss_mask"]) for row in rows(built)] == [
        (["m1", "m2", "m3"], [1, 2, 3, 4, 5, 6, 12], [0, 0, 1, 0, 1, 0, 1]),
        (["s1", "s2"], [7, 8, 9, 10, 11], [0, 0, 1, 0, 1]),
    ]
    assert not built.masked
    assert (built.counts.roots, built.counts.chains) == (2, 2)


def test_BD_04_the_try_that_a_later_call_continues_wins() -> None:
    built = build(
        snapshot(
            call("a", [1, 2, 3], [4, 9]),
            call("b", [1, 2, 3], [5, 9]),
            call("c", [1, 2, 3, 5, 9, 6], [7, 9]),
        ),
        ALL_CHAINS,
    )
    assert rows(built) == [
        {
            "calls": ["b", "c"],
            "token_ids": [1, 2, 3, 5, 9, 6, 7, 9],
            "loss_mask": [0, 0, 0, 1, 1, 0, 1, 1],
            "logprobs": [0.0, 0.0, 0.0, -0.1, -0.2, 0.0, -0.1, -0.2],
        }
    ]
    assert built.excluded == (ExcludedCall("a", "retry_orphan", 2),)
    assert not built.masked


def test_BD_05_a_retried_final_call_is_settled_by_what_was_delivered() -> None:
    built = build(
        snapshot(
            call("a", [1, 2, 3], [4, 9], delivered=False),
            call("b", [1, 2, 3], [5, 9], delivered=True),
        )
    )
    assert [(row["calls"], row["token_ids"], row["loss_mask"]) for row in rows(built)] == [
        (["b"], [1, 2, 3, 5, 9], [0, 0, 0, 1, 1])
    ]
    assert excluded(built) == {"a": "retry_orphan"}
    assert not built.masked


@pytest.mark.parametrize("delivered", [(None, None), (False, False), (True, True), (False, None)])
def test_BD_05_a_retried_final_call_that_cannot_be_settled_masks(delivered: tuple[bool | None, bool | None]) -> None:
    a = call("a", [1, 2, 3], [4, 9], delivered=delivered[0])
    b = call("b", [1, 2, 3], [5, 9], delivered=delivered[1])
    for entries in ((a, b), (b, a)):
        built = build(snapshot(*entries), ALL_CHAINS)
        assert "unresolved_retries" in built.mask_reasons
        assert built.trajectories == ()
        assert excluded(built) == {"a": "unresolved_retries", "b": "unresolved_retries"}


def test_BD_06_calls_that_ask_for_another_model_are_no_part_of_the_task() -> None:
    built = build(
        snapshot(
            call("t1", [80, 81, 2], [82, 9], requested_model="small", has_tools=False),
            call("m1", [1, 2], [3, 9]),
            call("t2", [80, 81, 2], [83, 9], requested_model="small", has_tools=False),
            call("m2", [1, 2, 3, 9, 4], [5, 9]),
        ),
        ALL_CHAINS,
    )
    assert [(row["calls"], row["loss_mask"]) for row in rows(built)] == [(["m1", "m2"], [0, 0, 1, 1, 0, 1, 1])]
    assert excluded(built) == {"t1": "side_call", "t2": "side_call"}
    assert built.counts.side_calls_excluded == 2
    assert not built.masked


def test_BD_06_a_lone_call_without_tools_is_the_task() -> None:
    built = build(snapshot(call("q1", [1, 2], [3, 9], has_tools=False)))
    assert [(row["calls"], row["loss_mask"]) for row in rows(built)] == [(["q1"], [0, 0, 1, 1])]
    assert not built.masked


def test_BD_06_calls_of_which_nobody_noted_the_requested_model_are_the_tasks() -> None:
    built = build(
        snapshot(
            call("a", [1, 2, 3], [4, 5]),
            call("b", [1, 2, 3, 4, 5, 6], [7, 8, 9], requested_model=""),
            call("c", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11], requested_model=""),
        ),
        ALL_CHAINS,
    )
    assert [(row["calls"], row["loss_mask"]) for row in rows(built)] == [
        (["a", "b", "c"], [0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1])
    ]
    assert built.counts.side_calls_excluded == 0
    assert not built.masked


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_BD_06_a_probe_is_no_part_of_the_task_wherever_its_limit_is_recorded(name: str) -> None:
    built = build(
        snapshot(
            call("a", [1, 2, 3], [4, 5]),
            call("b", [1, 2, 3, 4, 5, 6], [7, 8]),
            call("q", [9, 9], [7], has_tools=False, finish_reason="length", sampling={name: 1}),
        ),
        ALL_CHAINS,
    )
    assert [row["calls"] for row in rows(built)] == [["a", "b"]]
    assert built.excluded == (ExcludedCall("q", "side_call", 1),)
    assert not built.masked


def test_BD_08_compaction_ends_one_chain_and_starts_another() -> None:
    entries = (
        call("k1", [1, 2], [3, 9]),
        call("k2", [1, 2, 3, 9, 4], [5, 9]),
        call("sum", [1, 2, 3, 9, 4, 5, 9, 60, 61], [62, 63, 9], has_tools=False),
        call("k3", [1, 90, 62, 63, 91], [6, 9]),
        call("k4", [1, 90, 62, 63, 91, 6, 9, 7], [8, 9]),
    )
    built = build(snapshot(*entries), ALL_CHAINS)
    assert rows(built) == [
        {
            "calls": ["k1", "k2", "sum"],
            "token_ids": [1, 2, 3, 9, 4, 5, 9, 60, 61, 62, 63, 9],
            "loss_mask": [0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1],
            "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.1, -0.2, 0.0, 0.0, -0.1, -0.2, -0.3],
        },
        {
            "calls": ["k3", "k4"],
            "token_ids": [1, 90, 62, 63, 91, 6, 9, 7, 8, 9],
            "loss_mask": [0, 0, 0, 0, 0, 1, 1, 0, 1, 1],
            "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -0.2, 0.0, -0.1, -0.2],
        },
    ]
    assert {trajectory.rollout_id for trajectory in built.trajectories} == {"r1"}

    main = build(snapshot(*entries))
    assert only(main).call_ids == ("k1", "k2", "sum")
    assert excluded(main) == {"k3": "not_main_chain", "k4": "not_main_chain"}
    assert main.counts.delivered_fraction == pytest.approx(7 / 11)


def test_BD_10_a_shared_generation_is_trained_once() -> None:
    p = call("p", [1, 2], [3, 9], parent=Root())
    built = build(
        snapshot(
            p,
            call("x", [1, 2, 3, 9, 4], [5, 9], parent=Continues("p", 4)),
            call("y", [1, 2, 3, 9, 6], [7, 9], parent=Continues("p", 4)),
        ),
        ALL_CHAINS,
    )
    assert rows(built) == [
        {
            "calls": ["p", "x"],
            "token_ids": [1, 2, 3, 9, 4, 5, 9],
            "loss_mask": [0, 0, 1, 1, 0, 1, 1],
            "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.1, -0.2],
        },
        {
            "calls": ["p", "y"],
            "token_ids": [1, 2, 3, 9, 6, 7, 9],
            "loss_mask": [0, 0, 0, 0, 0, 1, 1],
            "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -0.2],
        },
    ]
    assert sum(trajectory.generated_tokens for trajectory in built.trajectories) == 6


def test_BD_11_the_same_record_twice_is_one_call() -> None:
    c1 = call("c1", [1, 2], [3, 9], digest=digest_ids(np.array([1, 2, 3, 9], dtype=np.int32)))
    built = build(snapshot(c1, replace(c1)))
    assert [(row["calls"], row["loss_mask"]) for row in rows(built)] == [(["c1"], [0, 0, 1, 1])]
    assert built.counts.n_calls == 1
    assert not built.masked


def test_BD_11_one_call_id_with_two_contents_masks() -> None:
    built = build(snapshot(call("c1", [1, 2], [3, 9]), call("c1", [1, 2], [4, 9])))
    assert built.trajectories == ()
    assert [reason_name(reason) for reason in built.mask_reasons] == ["conflicting_call_id", "no_trainable_tokens"]
    assert built.excluded == (ExcludedCall("c1", "conflicting_call_id", 4),)
    asked_otherwise = (call("c1", [1, 2], [3]), call("c1", [1, 2], [3], sampling={"max_tokens": 1}))
    assert build(snapshot(*asked_otherwise)).mask_reasons[0] == "conflicting_call_id:c1"


def test_BD_13_what_the_harness_wrote_is_prompt() -> None:
    built = build(
        snapshot(
            call("c1", [1, 2], [3, 9]),
            call("c2", [1, 2, 3, 9, 4, 50, 51, 9, 5], [6, 9]),
        )
    )
    assert rows(built) == [
        {
            "calls": ["c1", "c2"],
            "token_ids": [1, 2, 3, 9, 4, 50, 51, 9, 5, 6, 9],
            "loss_mask": [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1],
            "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -0.2],
        }
    ]


def test_BD_14_an_aborted_generation_is_not_trained() -> None:
    built = build(
        snapshot(
            call("c1", [1, 2], [3, 4], finish_reason="abort"),
            call("c1r", [1, 2], [3, 7, 9]),
            call("c2", [1, 2, 3, 7, 9, 5], [6, 9]),
        )
    )
    assert rows(built) == [
        {
            "calls": ["c1r", "c2"],
            "token_ids": [1, 2, 3, 7, 9, 5, 6, 9],
            "loss_mask": [0, 0, 1, 1, 1, 0, 1, 1],
            "logprobs": [0.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.1, -0.2],
        }
    ]
    assert built.excluded == (ExcludedCall("c1", "aborted", 2),)
    assert not built.masked


def test_BD_16_an_incomplete_rollout_is_kept_masked() -> None:
    built = build(snapshot(call("c1", [1, 2], [3, 9]), incomplete=("agent_crashed",)))
    assert built.masked
    assert built.mask_reasons == ("agent_crashed",)
    assert only(built).call_ids == ("c1",)
    missing = build(snapshot())
    assert missing.masked
    assert missing.mask_reasons == ("no_calls",)
    assert missing.trajectories == ()
