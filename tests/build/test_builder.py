"""The builder on small rollouts: verified parents, inference, retries, chains, what rides along, and the account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest

from gym_capture.build.builder import BuildOptions, ExcludedCall, build
from gym_capture.build.side_calls import SideCallRules
from gym_capture.capture.records import (
    Continues,
    Parent,
    RecordProblem,
    Root,
    TokenEntry,
    Unresolved,
    WeightSpan,
    digest_ids,
    suffix_of,
)
from tests.calls import ALL_CHAINS, PER_REQUEST, call, excluded, only, rows, snapshot

# --- recorded parents are verified -----------------------------------------------------------------------------


def test_a_recorded_root_or_unresolved_decision_stands() -> None:
    decisions: tuple[Parent, ...] = (Root(), Unresolved("ambiguous"))
    for decision in decisions:
        built = build(
            snapshot(call("a", [1, 2], [3, 9], parent=Root()), call("b", [1, 2, 3, 9, 4], [5], parent=decision)),
            ALL_CHAINS,
        )
        assert [(row["calls"], row["loss_mask"]) for row in rows(built)] == [
            (["a"], [0, 0, 1, 1]),
            (["b"], [0, 0, 0, 0, 0, 1]),
        ]
        assert not built.masked
        assert built.counts.unresolved_parent_calls == isinstance(decision, Unresolved)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        pytest.param(
            (call("a", [1, 2], [3, 9]), call("b", [1, 2, 3, 9, 4], [5], parent=Continues("lost", 4))),
            "absent_parent:b:parent.call_id",
            id="absent",
        ),
        pytest.param(
            (call("a", [1, 2], [3, 9], rollout_id="r2"), call("b", [1, 2, 3, 9, 4], [5], parent=Continues("a", 4))),
            "foreign_parent:b:parent.call_id",
            id="foreign",
        ),
        pytest.param(
            (call("a", [1, 2], [3, 9]), call("b", [1, 2, 3, 8, 4], [5], parent=Continues("a", 4))),
            "parent_mismatch:b:prompt_token_ids",
            id="other ids",
        ),
        pytest.param(
            (call("a", [1, 2], [3, 9]), call("b", [1, 2, 3, 9, 4], [5], parent=Continues("a", 3))),
            "parent_mismatch:b:parent.cum_len",
            id="other length",
        ),
        pytest.param(
            (call("a", [1, 2], [3], parent=Continues("b", 1)), call("b", [1], [3], parent=Continues("a", 1))),
            "parent_cycle:a:parent.call_id",
            id="cycle",
        ),
        pytest.param(
            (call("a", [1, 2], [3], parent=Continues("a", 2)),),
            "parent_cycle:a:parent.call_id",
            id="own parent",
        ),
        pytest.param(
            (call("a", [1], [3]), call("a", [1], [4]), call("b", [1, 3, 4], [5], parent=Continues("a", 2))),
            "conflicting_parent:b:parent.call_id",
            id="conflicting",
        ),
        pytest.param(
            (call("a", [1, 2], [3, 9], digest="0" * 64),),
            "digest_mismatch:a:digest",
            id="digest",
        ),
    ],
)
def test_a_parent_that_does_not_hold_masks_and_names_call_and_field(
    entries: tuple[TokenEntry, ...], reason: str
) -> None:
    built = build(snapshot(*entries), ALL_CHAINS)
    assert built.masked
    assert reason in built.mask_reasons
    last = entries[-1]
    standing = {trajectory.call_ids: trajectory for trajectory in built.trajectories}[(last.model_call_id,)]
    assert standing.token_ids.tolist() == [*last.prompt_token_ids.tolist(), *last.generation_token_ids.tolist()]


def test_a_delta_whose_parent_is_lost_is_quarantined_with_what_continues_it() -> None:
    b = suffix_of(call("b", [1, 2, 3, 9, 4], [5], parent=Continues("a", 4)))
    c = call("c", [1, 2, 3, 9, 4, 5, 6], [7], parent=Continues("b", 6))
    built = build(snapshot(b, c), ALL_CHAINS)
    assert built.trajectories == ()
    assert excluded(built) == {"b": "absent_parent", "c": "unplaced_parent"}
    assert built.counts.quarantined_calls == 2
    assert "absent_parent:b:parent.call_id" in built.mask_reasons


def test_deltas_before_their_parents_give_the_same_as_whole_prompts() -> None:
    a = call("a", [1, 2], [3, 9], parent=Root())
    b = call("b", [1, 2, 3, 9, 4], [5], parent=Continues("a", 4))
    c = call("c", [1, 2, 3, 9, 4, 5], [7], parent=Continues("b", 6))
    for options in (ALL_CHAINS, PER_REQUEST):
        whole = build(snapshot(a, b, c), options)
        assert rows(build(snapshot(suffix_of(c), suffix_of(b), a), options)) == rows(whole)
        assert not whole.masked


def test_digests_are_checked_on_deltas() -> None:
    a = call("a", [1, 2], [3, 9], parent=Root(), digest=digest_ids(np.array([1, 2, 3, 9], dtype=np.int32)))
    b = call("b", [1, 2, 3, 9, 4], [5], parent=Continues("a", 4))
    good = replace(b, digest=digest_ids(np.array([1, 2, 3, 9, 4, 5], dtype=np.int32)))
    assert not build(snapshot(a, suffix_of(good))).masked
    wrong = replace(b, digest=a.digest)
    assert build(snapshot(a, suffix_of(wrong))).mask_reasons == ("digest_mismatch:b:digest",)


def test_a_foreign_record_masks_and_is_never_trained() -> None:
    built = build(snapshot(call("a", [1, 2], [3, 9]), call("z", [1, 2, 3, 9, 4], [5], rollout_id="r2")))
    assert built.mask_reasons == ("foreign_record:z:rollout_id",)
    assert only(built).call_ids == ("a",)
    assert built.excluded == (ExcludedCall("z", "foreign_record", 1),)


def test_problems_of_the_snapshot_mask_with_their_names() -> None:
    problem = RecordProblem(reason="malformed_record", call_id="c2", field="generation_log_probs", detail="...")
    built = build(snapshot(call("a", [1], [2]), problems=(problem,), incomplete=("dangling_intent:c3",)))
    assert built.mask_reasons == ("dangling_intent:c3", "malformed_record:c2:generation_log_probs")


# --- inference -------------------------------------------------------------------------------------------------


def test_identical_candidates_are_quarantined() -> None:
    built = build(
        snapshot(
            call("a", [1], [2, 3]),
            call("b", [1, 2], [3]),
            call("c", [1, 2, 3, 4], [5]),
            call("d", [1, 2, 3, 4, 5, 6], [7]),
        ),
        ALL_CHAINS,
    )
    assert "ambiguous_parent:c:prompt_token_ids" in built.mask_reasons
    assert excluded(built) == {"c": "ambiguous_parent", "d": "unplaced_parent"}
    assert [row["calls"] for row in rows(built)] == [["a"], ["b"]]


def test_an_empty_reply_is_never_taken_for_a_parent() -> None:
    built = build(snapshot(call("e", [1, 2], []), call("r", [1, 2], [3]), call("n", [1, 2, 3, 4], [5])))
    assert only(built).call_ids == ("r", "n")
    assert built.excluded == (ExcludedCall("e", "empty_generation", 0),)
    assert not built.masked


def test_a_record_without_a_decision_continues_a_delta() -> None:
    a = call("a", [1, 2], [3, 9], parent=Root())
    b = suffix_of(call("b", [1, 2, 3, 9, 4], [5, 6], parent=Continues("a", 4)))
    x = suffix_of(call("x", [1, 2, 3, 9, 8], [5, 7, 7], parent=Continues("a", 4)))
    c = call("c", [1, 2, 3, 9, 4, 5, 6, 8, 8], [7])
    built = build(snapshot(c, x, b, a), ALL_CHAINS)
    assert [row["calls"] for row in rows(built)] == [["a", "b", "c"], ["a", "x"]]
    assert not built.masked


def test_checksum_collisions_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_capture.build.inference.zlib.crc32", lambda data, value=0: 0)
    test_a_record_without_a_decision_continues_a_delta()
    built = build(
        snapshot(
            call("m1", [1, 2], [3]), call("s1", [7], [9]), call("s2", [7, 9, 8], [1]), call("m2", [1, 2, 3, 4], [5])
        ),
        ALL_CHAINS,
    )
    assert [row["calls"] for row in rows(built)] == [["m1", "m2"], ["s1", "s2"]]


def test_a_thousand_whole_prompts_are_one_chain() -> None:
    entries: list[TokenEntry] = []
    ids: list[int] = []
    for turn in range(1000):
        ids += [turn % 7, 5]
        entries.append(call(f"c{turn:04}", ids, [turn % 11]))
        ids += [turn % 11]
    built = build(snapshot(*reversed(entries)))
    assert only(built).token_ids.tolist() == ids
    assert built.counts.chains == 1
    assert not built.masked


# --- retries, side calls, chains -------------------------------------------------------------------------------


def test_two_tries_that_were_both_continued_are_two_branches() -> None:
    built = build(
        snapshot(
            call("a", [1], [2]),
            call("b", [1], [3]),
            call("o", [1], [4]),
            call("a2", [1, 2, 5], [6]),
            call("b2", [1, 3, 5], [6]),
        ),
        ALL_CHAINS,
    )
    assert [row["calls"] for row in rows(built)] == [["a", "a2"], ["b", "b2"]]
    assert excluded(built) == {"o": "retry_orphan"}


def test_a_retry_in_the_middle_is_settled_below_a_shared_parent() -> None:
    p = call("p", [1], [2], parent=Root())
    built = build(
        snapshot(
            p,
            call("a", [1, 2, 3], [4], parent=Continues("p", 2)),
            call("b", [1, 2, 3], [5], parent=Continues("p", 2)),
            call("c", [1, 2, 3, 5, 6], [7], parent=Continues("b", 4)),
        )
    )
    assert only(built).call_ids == ("p", "b", "c")
    assert excluded(built) == {"a": "retry_orphan"}


def test_an_unsettled_retry_keeps_what_came_before_it() -> None:
    built = build(
        snapshot(
            call("p", [1], [2]),
            call("a", [1, 2, 3], [4]),
            call("b", [1, 2, 3], [5]),
        )
    )
    assert only(built).call_ids == ("p",)
    assert built.mask_reasons == ("unresolved_retries",)


# What a final call's tries were, and which the agent ended with. Down: one try; across: another, which has something to
# train. `this`: the one at the left; `that`: the one at the top; `?`: not known.
PAIRS = """
                    | whole, delivered | whole, not | whole, unknown
    whole, delivered| ?                | this       | this
    whole, not      | that             | ?          | ?
    whole, unknown  | that             | ?          | ?
    empty, delivered| ?                | this       | this
    empty, not      | that             | ?          | ?
    empty, unknown  | that             | ?          | ?
    cut, delivered  | ?                | this       | this
    cut, not        | that             | that       | that
    cut, unknown    | that             | that       | that
"""
DELIVERED = {"delivered": True, "not": False, "unknown": None}
KINDS = [(kind, known) for kind in ("whole", "empty", "cut") for known in DELIVERED]


def a_try(call_id: str, kind: str, known: str, cut_off: str = "abort") -> TokenEntry:
    return call(
        call_id,
        [1, 2, 3],
        [] if kind == "empty" else [4, ord(call_id)],
        finish_reason=cut_off if kind == "cut" else "stop",
        delivered=DELIVERED[known],
    )


def settled(tries: Sequence[TokenEntry]) -> tuple[list[list[str]], bool, dict[str, str]]:
    """What is trained, whether the retries are unresolved, what is left out: the same below a parent, in any order."""
    below = [
        replace(each, prompt_token_ids=np.array([8, 9, 1, 2, 3], np.int32), parent=Continues("p", 2)) for each in tries
    ]
    found = []
    for entries in (tries, tries[::-1], [call("p", [8], [9], parent=Root()), *below]):
        for options in (BuildOptions(), ALL_CHAINS):
            built = build(snapshot(*entries), options)
            trained = [
                [call_id for call_id in row["calls"] if call_id not in {*excluded(built), "p"}] for row in rows(built)
            ]
            assert built.masked == (built.mask_reasons != ())
            found.append((sorted(filter(None, trained)), "unresolved_retries" in built.mask_reasons, excluded(built)))
            assert set(built.mask_reasons) <= {"unresolved_retries", "no_trainable_tokens"}
    assert all(each == found[0] for each in found)
    return found[0]


def test_of_two_tries_of_a_final_call_one_that_may_have_been_used_is_trained_or_none() -> None:
    head, *lines = [[cell.strip() for cell in line.split("|")] for line in PAIRS.strip().splitlines()]
    for this, *cells in lines:
        for that, cell in zip(head[1:], cells, strict=True):
            for cut_off in ("abort", "error"):
                trained, unresolved, _ = settled(
                    [a_try("a", *this.split(", "), cut_off), a_try("b", *that.split(", "))]
                )
                a_has_loss = this.startswith("whole")
                expected = {"?": [], "that": [["b"]], "this": [["a"]] if a_has_loss else []}[cell]
                assert (trained, unresolved) == (expected, cell == "?"), (this, that)


@pytest.mark.parametrize("kinds", list(combinations_with_replacement(KINDS, 3)))
def test_of_three_tries_too(kinds: Sequence[tuple[str, str]]) -> None:
    """One that was delivered; else the only one that was not cut off; else nobody knows."""
    tries = [a_try(call_id, *kind) for call_id, kind in zip("abc", kinds, strict=True)]
    delivered = [each for each, (_, known) in zip(tries, kinds, strict=True) if known == "delivered"]
    whole = [each for each, (kind, _) in zip(tries, kinds, strict=True) if kind != "cut"]
    ends = (delivered or whole) if len(delivered or whole) == 1 else []
    with_loss = {each.model_call_id for each, (kind, _) in zip(tries, kinds, strict=True) if kind == "whole"}
    trained, unresolved, left_out = settled(tries)
    assert trained == [[each.model_call_id] for each in ends if each.model_call_id in with_loss]
    assert unresolved == (bool(with_loss) and not ends)
    for call_id in with_loss - {each.model_call_id for each in ends}:
        assert left_out[call_id] == ("retry_orphan" if ends else "unresolved_retries")


def test_a_side_call_is_no_try_of_a_call_of_the_task() -> None:
    title = call("t", [1, 2, 3], [5], requested_model="small", delivered=True)
    built = build(snapshot(call("a", [1, 2, 3], [4, 9]), title), ALL_CHAINS)
    assert [row["calls"] for row in rows(built)] == [["a"]]
    assert not built.masked


def test_an_aborted_call_that_is_continued_stays_as_prompt() -> None:
    built = build(
        snapshot(
            call("a", [1], [2, 3], parent=Root(), finish_reason="abort"),
            call("b", [1, 2, 3, 4], [5], parent=Continues("a", 3)),
        )
    )
    assert rows(built) == [
        {
            "calls": ["a", "b"],
            "token_ids": [1, 2, 3, 4, 5],
            "loss_mask": [0, 0, 0, 0, 1],
            "logprobs": [0, 0, 0, 0, -0.1],
        }
    ]
    assert built.excluded == (ExcludedCall("a", "aborted", 2),)
    assert not built.masked


def test_a_rollout_of_side_calls_only_is_masked() -> None:
    built = build(snapshot(call("a", [1], [2], max_tokens=1), call("b", [1, 3], [2], max_tokens=1)))
    assert built.mask_reasons == ("all_side_calls",)
    assert built.counts.side_calls_excluded == 2
    assert built.trajectories == ()


def test_a_rollout_without_generated_ids_is_masked() -> None:
    built = build(snapshot(call("a", [1], [])))
    assert built.mask_reasons == ("no_trainable_tokens",)
    assert built.counts.delivered_fraction == 0.0


def test_side_call_rules_are_the_callers() -> None:
    entries = (call("a", [1], [2, 3]), call("t", [7], [8], requested_model="vendor-mini-1"))
    keep = BuildOptions(delivery="all_chains", side_calls=SideCallRules(self_calibrate=False))
    assert len(build(snapshot(*entries), keep).trajectories) == 2
    named = BuildOptions(
        delivery="all_chains", side_calls=SideCallRules(self_calibrate=False, model_patterns=("*-mini-*",))
    )
    assert excluded(build(snapshot(*entries), named)) == {"t": "side_call"}


def test_the_main_chain_is_the_one_that_generated_most_over_all_roots() -> None:
    built = build(
        snapshot(
            call("a-first-root", [1], [2, 3]),
            call("b", [5], [6, 7]),
            call("c", [5, 6, 7, 8], [9]),
        )
    )
    assert only(built).call_ids == ("b", "c")
    assert only(built).is_main
    assert built.counts.excluded_tokens == {"not_main_chain": 2}


def test_equal_chains_are_told_apart_by_the_id_of_their_last_call() -> None:
    entries = (call("a", [1], [2, 3]), call("b", [5], [6, 7]))
    assert only(build(snapshot(*entries))).call_ids == ("a",)
    assert only(build(snapshot(*reversed(entries)))).call_ids == ("a",)


def test_per_request_gives_one_sequence_for_each_call() -> None:
    entries = (call("a", [1, 2], [3, 9]), call("b", [1, 2, 3, 9, 4], [5]), call("z", [8], [9]))
    assert [
        (row["calls"], row["token_ids"], row["loss_mask"]) for row in rows(build(snapshot(*entries), PER_REQUEST))
    ] == [
        (["a"], [1, 2, 3, 9], [0, 0, 1, 1]),
        (["b"], [1, 2, 3, 9, 4, 5], [0, 0, 0, 0, 0, 1]),
        (["z"], [8, 9], [0, 1]),
    ]
    main = build(snapshot(*entries), BuildOptions(strategy="per_request"))
    assert [trajectory.call_ids for trajectory in main.trajectories] == [("a",), ("b",)]
    assert main.counts.excluded_tokens == {"not_main_chain": 1}


# --- what rides along ------------------------------------------------------------------------------------------


def test_spans_split_where_the_weights_changed() -> None:
    built = build(
        snapshot(
            call("a", [1, 2], [3, 4, 5], weight_versions=(WeightSpan(0, 2, "7"), WeightSpan(2, 3, "8"))),
            call("b", [1, 2, 3, 4, 5, 6], [7]),
        )
    )
    assert [(span.start, span.end, span.call_id, span.weight_version) for span in only(built).spans] == [
        (2, 4, "a", "7"),
        (4, 5, "a", "8"),
        (6, 7, "b", None),
    ]


def experts(rows: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.int16]]:
    """[rows, 2, 1], row t holding t + first."""
    return np.repeat(np.arange(first, first + rows, dtype=np.int16), 2).reshape(rows, 2, 1)


def test_routed_experts_come_from_the_call_that_first_ran_each_id() -> None:
    a = call("a", [1, 2], [3, 9], parent=Root(), routed_experts=experts(3))
    b = call("b", [1, 2, 3, 9, 4], [5, 6], parent=Continues("a", 4), routed_experts=experts(6, first=100))
    for entry in (b, suffix_of(b)):
        merged = only(build(snapshot(a, entry)))
        assert merged.routed_experts is not None
        # Ids 0 to 2 were run by a, which sampled id 3 last; b ran the rest, but not the id it sampled last.
        assert merged.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 103, 104, 105]
        of_b = build(snapshot(a, entry), PER_REQUEST).trajectories[1]
        assert of_b.routed_experts is not None
        assert of_b.routed_experts[:, 0, 0].tolist() == [100, 101, 102, 103, 104, 105]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"routed_experts": experts(2)}, "misaligned_rows:a:routed_experts"),
        ({"routed_experts": np.zeros((3, 2))}, "misaligned_rows:a:routed_experts"),
        ({"sampling_mask": np.zeros((1, 4))}, "misaligned_rows:a:sampling_mask"),
        ({"sampling_mask": np.array(True)}, "misaligned_rows:a:sampling_mask"),
        ({"routed_experts": experts(3)}, "uneven_rows:b:routed_experts"),
        ({"sampling_mask": np.zeros((2, 4))}, "uneven_rows:b:sampling_mask"),
    ],
)
def test_arrays_that_do_not_align_mask(fields: dict[str, Any], reason: str) -> None:
    built = build(snapshot(call("a", [1, 2], [3, 9], **fields), call("b", [1, 2, 3, 9, 4], [5])))
    assert reason in built.mask_reasons
    assert only(built).routed_experts is None
    assert only(built).sampling_mask is None


def test_sampling_masks_have_a_row_for_each_trained_id() -> None:
    a = call("a", [1, 2], [3, 9], sampling_mask=np.array([[1, 0], [0, 1]]))
    b = call("b", [1, 2, 3, 9, 4], [5], sampling_mask=np.array([[1, 1]]))
    trajectory = only(build(snapshot(a, b)))
    assert trajectory.sampling_mask is not None
    assert trajectory.sampling_mask.tolist() == [[1, 0], [0, 1], [1, 1]]


def test_ids_outside_the_vocabulary_mask() -> None:
    entries = (call("a", [1, 2], [3, 9]), call("b", [1, 2, 3, 9, 40], [5]))
    assert not build(snapshot(*entries), BuildOptions(vocab_size=41)).masked
    assert build(snapshot(*entries), BuildOptions(vocab_size=40)).mask_reasons == (
        "out_of_vocabulary:b:prompt_token_ids",
    )


# --- the account -----------------------------------------------------------------------------------------------


def test_links_that_were_eligible_and_that_hold_are_counted() -> None:
    built = build(
        snapshot(
            call("a", [1], [2], parent=Root()),
            call("b", [1, 2, 3], [4], parent=Continues("a", 2), prefix_requested=True, prefix_supplied=True),
            call("c", [1, 2, 8, 4, 5], [6], parent=Unresolved("render_mismatch"), prefix_requested=True),
        )
    )
    assert (built.counts.eligible_links, built.counts.contiguous_links) == (2, 1)


def test_whether_a_reply_arrived_may_be_learned_later() -> None:
    first = call("a", [1, 2, 3], [4, 9])
    other = call("b", [1, 2, 3], [5, 9], delivered=False)
    built = build(snapshot(first, replace(first, delivered=True), other))
    assert only(built).call_ids == ("a",)
    assert not built.masked


def test_what_is_said_both_to_have_arrived_and_not_did_not() -> None:
    first = call("a", [1, 2, 3], [4, 9], delivered=True)
    other = call("b", [1, 2, 3], [5, 9], delivered=True)
    for records in ((first, replace(first, delivered=False)), (replace(first, delivered=False), first)):
        assert only(build(snapshot(*records, other))).call_ids == ("b",)


def test_results_are_read_only() -> None:
    trajectory = only(build(snapshot(call("a", [1], [2]))))
    for array in (trajectory.token_ids, trajectory.loss_mask, trajectory.log_probs):
        assert not array.flags.writeable
