"""Of trajectories alone nothing is claimed that their records would deny: what they do not tell is said to be so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions, build, placed
from gym_capture.capture.records import Continues, RecordProblem, Root, Snapshot, TokenEntry, Unresolved, WeightSpan
from gym_capture.data.schema import rows
from gym_capture.inspector.from_records import see_records
from gym_capture.inspector.from_rows import see_rows
from gym_capture.inspector.seen import KIND_NAMES, LinkKind, SeenRollout, SeenTrajectory, TokenKind
from gym_capture.reasons import CaptureMark, ExcludedReason, MaskReason, ProblemReason, TokenReason, reason_name
from tests.calls import ALL_CHAINS, PER_REQUEST, call, snapshot
from tests.rollout_strategies import damaged_rollouts, honest_rollouts, snapshot_of

FIRST = call("c1", [1, 2], [3, 9], parent=Root(), created_at=1.0)
LAST = call("c3", [1, 2, 3, 9, 5, 6, 6, 8, 5], [7, 9], parent=Continues("c2", 7), created_at=3.0)
MAIN_CHAIN = BuildOptions()
NOT_TOLD = (TokenReason.PLACE_NOT_TOLD, TokenReason.REASON_NOT_TOLD)


def middle(**fields: Any) -> TokenEntry:
    return call("c2", [1, 2, 3, 9, 5], [6, 6], parent=Continues("c1", 4), created_at=2.0, **fields)


def by_rows(frozen: Snapshot, options: BuildOptions = MAIN_CHAIN, masks: Sequence[str] = ()) -> SeenRollout:
    built = build(frozen, options)
    return see_rows(rows(built, snapshot=frozen, group_id="g", reward=1.0, extra_mask_reasons=masks))


def shown(each: SeenTrajectory) -> str:
    """A letter for each token: `p`rompt, `t`rained, `n`ot trained, `i`nserted close, `?` not told."""
    return "".join("?" if kind == TokenKind.NOT_TOLD else KIND_NAMES[kind][0] for kind in each.kinds)


def whys(each: SeenTrajectory) -> list[str]:
    return list(dict.fromkeys(each.why_names[n] for n in each.whys if n >= 0))


# --- each reason ------------------------------------------------------------------------------------------------------

EMPTY = call("c2", [1, 2, 3, 9, 5], [], parent=Continues("c1", 4), created_at=2.0)
BEHIND_EMPTY = call("c3", [1, 2, 3, 9, 5, 8], [7, 9], parent=Continues("c2", 5), created_at=3.0)
# The calls; then the trajectory by records and by rows; the reasons of its tokens by both.
EXCLUDED: dict[str, tuple[tuple[TokenEntry, ...], str, str, list[str], list[str]]] = {
    ExcludedReason.ABORTED: (
        (FIRST, middle(finish_reason="abort"), LAST),
        "ppttpnnpptt",
        "pptt?????tt",
        ["aborted"],
        ["place_not_told"],
    ),
    ExcludedReason.FAILED: (
        (FIRST, middle(finish_reason="error"), LAST),
        "ppttpnnpptt",
        "pptt?????tt",
        ["failed"],
        ["place_not_told"],
    ),
    ExcludedReason.SIDE_CALL: (
        (FIRST, middle(requested_model="small"), LAST),
        "ppttpnnpptt",
        "pptt?????tt",
        ["side_call"],
        ["place_not_told"],
    ),
    ExcludedReason.EMPTY_GENERATION: ((FIRST, EMPTY, BEHIND_EMPTY), "ppttpptt", "ppttpptt", [], []),
    ExcludedReason.RETRY_ORPHAN: (
        (FIRST, middle(), LAST, call("c2b", [1, 2, 3, 9, 5], [8, 9], parent=Continues("c1", 4), created_at=2.5)),
        "ppttpttpptt",
        "ppttpttpptt",
        [],
        [],
    ),
    ExcludedReason.NOT_MAIN_CHAIN: (
        (FIRST, middle(), LAST, call("agent", [4], [8, 9], parent=Root(), created_at=2.5)),
        "ppttpttpptt",
        "ppttpttpptt",
        [],
        [],
    ),
}


@pytest.mark.parametrize("reason", EXCLUDED)
def test_ids_of_a_call_that_is_excluded_are_never_called_prompt(reason: str) -> None:
    calls, of_records, of_rows, reasons, told = EXCLUDED[reason]
    frozen = snapshot(*calls)
    assert reason in build(frozen).counts.excluded_tokens
    records, alone = see_records(frozen), by_rows(frozen)
    assert (shown(records.trajectories[0]), whys(records.trajectories[0])) == (of_records, reasons)
    assert (shown(alone.trajectories[0]), whys(alone.trajectories[0])) == (of_rows, told)
    of_calls = {each.call_id: each.excluded for each in records.calls}
    assert all(each.excluded == of_calls[each.call_id] for each in alone.calls)
    assert alone.generated_tokens == records.generated_tokens


def test_every_reason_is_tried() -> None:
    """The others have no ids within a chain: a place that is not proven, a record that nobody has."""
    assert set(ExcludedReason) - EXCLUDED.keys() == {ExcludedReason.UNPLACED_PARENT, ExcludedReason.LOST_TRY}


MASKS = [
    *(str(reason) for reason in MaskReason),
    *(str(reason) for reason in ProblemReason),
    *(str(reason) for reason in CaptureMark),
]


@pytest.mark.parametrize("reason", MASKS)
def test_a_reason_that_masks_is_that_of_all_that_is_generated(reason: str) -> None:
    frozen = snapshot(FIRST, middle(finish_reason="abort"), LAST)
    records, alone = see_records(frozen, extra_mask_reasons=[reason]), by_rows(frozen, masks=[reason])
    assert records.mask_reasons == alone.mask_reasons == (reason,)
    assert (records.trained_tokens, alone.trained_tokens) == (0, 0)
    assert (shown(records.trajectories[0]), shown(alone.trajectories[0])) == ("ppnnpnnppnn", "ppnn?????nn")
    assert whys(records.trajectories[0]) == [reason, "aborted"]
    assert whys(alone.trajectories[0]) == [reason, "place_not_told"]


@pytest.mark.parametrize(
    "frozen",
    [
        snapshot(FIRST, middle(), incomplete=("dangling_intent:c9",)),
        snapshot(
            FIRST, middle(), problems=(RecordProblem(reason="malformed_record", call_id="c9", field="x", detail="d"),)
        ),
        snapshot(FIRST, call("c2", [7, 7, 7, 7], [6, 6], parent=Continues("c1", 4), created_at=2.0)),
        snapshot(FIRST, call("c1b", [1, 2], [4, 9], parent=Root(), created_at=2.0)),
    ],
    ids=["incomplete", "problem", "parent_mismatch", "unresolved_retries"],
)
def test_what_the_build_masks_has_the_same_reasons(frozen: Snapshot) -> None:
    records, alone = see_records(frozen), by_rows(frozen)
    assert alone.mask_reasons == records.mask_reasons != ()
    delivered = [each for each in records.trajectories if each.is_delivered]
    assert [(shown(each), whys(each)) for each in alone.trajectories] == [
        (shown(each), whys(each)) for each in delivered
    ]


# --- what is told of the calls ----------------------------------------------------------------------------------------


def test_of_several_reasons_no_one_is_guessed() -> None:
    cut = middle(finish_reason="abort")
    title = call("title", [4], [4, 9], parent=Root(), requested_model="small", created_at=4.0)
    calls = {each.call_id: each for each in by_rows(snapshot(FIRST, cut, LAST, title)).calls}
    assert calls["c2"].excluded == TokenReason.REASON_NOT_TOLD
    assert (calls["c2"].generated_tokens, calls["c2"].prompt_tokens) == (None, None)
    assert (calls["c3"].supplied_tokens, calls["c1"].supplied_tokens) == (None, 0)


def test_a_prompt_with_ids_of_unknown_origin_is_not_shown_as_sent() -> None:
    cut = call("c0", [1], [2], parent=Root(), finish_reason="abort", created_at=0.5)
    on = call("c1", [1, 2, 5], [3, 9], parent=Continues("c0", 2), created_at=1.0)
    alone = by_rows(snapshot(cut, on))
    assert [shown(each) for each in alone.trajectories] == ["???tt"]
    assert (alone.first_prompt, dict(alone.new_prompts)) == (None, {})


def test_a_sibling_that_begins_with_the_same_ids_takes_no_loss_away() -> None:
    """Two replies to one prompt begin alike, and the weights changed behind that: each is trained for itself."""
    spans = (WeightSpan(0, 1, "4"), WeightSpan(1, 3, "5"))
    one = call("c2", [1, 2, 3, 9, 5], [6, 6, 9], parent=Continues("c1", 4), created_at=2.0, weight_versions=spans)
    other = call("c2b", [1, 2, 3, 9, 5], [6, 8], parent=Continues("c1", 4), created_at=2.5)
    last = call("c3", [1, 2, 3, 9, 5, 6, 6, 9, 4], [7, 7, 9], parent=Continues("c2", 8), created_at=3.0)
    more = call("c3b", [1, 2, 3, 9, 5, 6, 8, 4], [7, 9], parent=Continues("c2b", 7), created_at=4.0)
    alone = by_rows(snapshot(FIRST, one, other, last, more), ALL_CHAINS)
    assert [shown(each) for each in alone.trajectories] == ["ppttptttpttt", "ppnnpttptt"]


def test_a_conversation_that_was_rendered_again_is_prompt() -> None:
    """It begins with the ids of an earlier call, and no link to it is proven: records say prompt, too."""
    on = call("c2", [1, 2, 3, 9, 5], [6, 9, 9], parent=Unresolved("no_match"), created_at=2.0)
    frozen = snapshot(on, FIRST)
    assert [shown(each) for each in by_rows(frozen, ALL_CHAINS).trajectories] == ["pppppttt", "pptt"]


def test_rows_for_each_call_name_no_call_before_it() -> None:
    cut = middle(finish_reason="abort")
    alone = by_rows(snapshot(FIRST, cut, LAST), PER_REQUEST)
    assert [shown(each) for each in alone.trajectories] == ["??tt", "??nn?????tt"]
    whole = by_rows(snapshot(FIRST, middle(), LAST), PER_REQUEST)
    assert [shown(each) for each in whole.trajectories] == ["pptt", "ppnnptt", "ppnnpnnpptt"]


# --- what always holds ------------------------------------------------------------------------------------------------


def check_against_the_records(frozen: Snapshot, options: BuildOptions) -> None:
    built, forest = build(frozen, options), placed(frozen, options).forest
    alone = by_rows(frozen, options)
    positions = {entry.model_call_id: n for n, entry in enumerate(forest.entries)}
    own = [
        each for each in built.excluded if each.reason != MaskReason.FOREIGN_RECORD
    ]  # may have the name of an own call
    reasons = {each.call_id: reason_name(each.reason) for each in own}
    for each, made in zip(alone.trajectories, built.trajectories, strict=True):
        generated = np.zeros(each.token_ids.size, dtype=np.bool_)
        for position in forest.path(positions[made.call_ids[-1]]):
            entry = forest.placed(position)
            generated[entry.prompt_len : entry.cum_len] = True
        is_merged = options.strategy == "prefix_merging"
        if is_merged or len(alone.trajectories) > built.counts.chains:
            assert not (generated & (each.kinds == TokenKind.PROMPT)).any()
        has_loss = each.kinds == (TokenKind.NOT_TRAINED if built.masked else TokenKind.TRAINED)
        assert has_loss[made.loss_mask].all()
        if is_merged:
            assert generated[np.isin(each.kinds, (TokenKind.TRAINED, TokenKind.NOT_TRAINED))].all()
        np.testing.assert_array_equal(each.whys >= 0, np.isin(each.kinds, (TokenKind.NOT_TRAINED, TokenKind.NOT_TOLD)))
    for one in alone.calls:
        if one.excluded not in NOT_TOLD:
            assert one.excluded == reasons.get(one.call_id)
    assert all(one.link.kind in (LinkKind.NONE, LinkKind.EXACT) for one in alone.calls)


OPTIONS = st.sampled_from([BuildOptions(), ALL_CHAINS, PER_REQUEST])


@settings(max_examples=30)
@given(honest_rollouts(), OPTIONS)
def test_nothing_is_claimed_that_records_deny(rollout: Any, options: BuildOptions) -> None:
    check_against_the_records(snapshot_of(rollout.entries), options)


@settings(max_examples=30)
@given(damaged_rollouts(), OPTIONS)
def test_nothing_is_claimed_of_damaged_rollouts_that_records_deny(records: Any, options: BuildOptions) -> None:
    check_against_the_records(snapshot_of(records), options)
