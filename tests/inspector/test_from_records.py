"""A rollout is shown as it is built: id for id, and whatever is not trained has its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.build.builder import BuildOptions, build
from gym_capture.capture.records import Continues, Root, Snapshot, Unresolved, WeightSpan, suffix_of
from gym_capture.data.schema import rows
from gym_capture.inspector.from_records import see_records
from gym_capture.inspector.from_rows import see_rows
from gym_capture.inspector.seen import KIND_NAMES, LinkKind, Role, SeenRollout, TokenKind, with_outcome
from gym_capture.inspector.views import reason_words
from tests.calls import call, snapshot
from tests.rollout_strategies import damaged_rollouts, honest_rollouts, snapshot_of

GENERATED = (TokenKind.TRAINED, TokenKind.NOT_TRAINED)


def seen(*calls: Any, **fields: Any) -> SeenRollout:
    return see_records(snapshot(*calls), **fields)


def kinds(rollout: SeenRollout, number: int = 0) -> str:
    """`p`rompt, `t`rained, `n`ot trained, `i`nserted close."""
    return "".join(KIND_NAMES[kind][0] for kind in rollout.trajectories[number].kinds)


def roles(rollout: SeenRollout) -> dict[str, str]:
    return {each.call_id: str(each.role) for each in rollout.calls}


# --- what always holds -----------------------------------------------------------------------------------------------


def check_against_the_build(frozen: Snapshot) -> None:
    built, rollout = build(frozen), see_records(frozen)
    assert rollout.mask_reasons == built.mask_reasons
    assert rollout.generated_tokens == built.counts.generated_tokens_captured
    delivered = [each for each in rollout.trajectories if each.is_delivered]
    assert [each.trajectory_id for each in delivered] == [each.trajectory_id for each in built.trajectories]
    for shown, made in zip(delivered, built.trajectories, strict=True):
        np.testing.assert_array_equal(shown.token_ids, made.token_ids)
        has_loss = np.isin(shown.kinds, GENERATED) if built.masked else shown.kinds == TokenKind.TRAINED
        assert not (made.loss_mask & ~has_loss).any()
        np.testing.assert_array_equal(shown.log_probs[made.loss_mask], made.log_probs[made.loss_mask])
    trained = sum(each.trained_tokens for each in rollout.trajectories)
    assert trained == rollout.trained_tokens == (0 if built.masked else built.counts.generated_tokens_delivered)
    for each in rollout.trajectories:
        is_not_trained = each.kinds == TokenKind.NOT_TRAINED
        np.testing.assert_array_equal(each.whys >= 0, is_not_trained)
        assert set(each.why_names) <= reason_words().keys()
        np.testing.assert_array_equal(np.isnan(each.log_probs), ~np.isin(each.kinds, GENERATED))
    in_some = {name for each in rollout.trajectories for name in each.generated}
    apart = {each.call_id for each in rollout.calls if each.excluded is not None}
    assert {each.call_id for each in rollout.calls} == in_some | apart
    assert [each.number for each in rollout.calls] == list(range(1, len(rollout.calls) + 1))


@settings(max_examples=40)
@given(honest_rollouts())
def test_an_honest_rollout_is_shown_as_it_is_built(rollout: Any) -> None:
    check_against_the_build(snapshot_of(rollout.entries))


@settings(max_examples=60)
@given(damaged_rollouts())
def test_a_damaged_rollout_is_shown_as_it_is_built(records: Any) -> None:
    check_against_the_build(snapshot_of(records))


@settings(max_examples=40)
@given(honest_rollouts(), st.sampled_from([(), ("missing_reward",)]))
def test_rows_show_what_records_show(rollout: Any, masks: tuple[str, ...]) -> None:
    frozen = snapshot_of(rollout.entries)
    built = build(frozen)
    table = rows(built, snapshot=frozen, group_id="g", reward=1.0, advantage=0.5, extra_mask_reasons=masks)
    by_rows = see_rows(table)
    by_records = with_outcome(see_records(frozen), mask_reasons=masks, advantage=0.5)
    assert by_rows.mask_reasons == by_records.mask_reasons
    assert (by_rows.trained_tokens, by_rows.generated_tokens) == (
        by_records.trained_tokens,
        by_records.generated_tokens,
    )
    delivered = [each for each in by_records.trajectories if each.is_delivered]
    assert len(by_rows.trajectories) == len(delivered)
    for one, other in zip(by_rows.trajectories, delivered, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.kinds == TokenKind.TRAINED, other.kinds == TokenKind.TRAINED)
        for name, span in one.generated.items():
            assert other.generated[name] == span


def test_what_calls_said_counts_among_the_bytes_that_are_kept() -> None:
    """At whatever depth it stands."""
    bare = seen(FIRST).nbytes
    text = "x" * 1_000_000
    deep: Any = {"text": text}
    for _ in range(5_000):
        deep = [deep]
    for items in (({"content": [{"text": text}]},), ({"content": deep},), ({text: 1},)):
        said = call("c1", [1, 2], [3, 9], parent=Root(), output_items=items)
        assert seen(said).nbytes - bare >= len(text)
    asked = seen(FIRST, input_json=text)
    assert asked.nbytes - bare >= len(text)


# --- cases -----------------------------------------------------------------------------------------------------------

FIRST = call("c1", [1, 2], [3, 9], parent=Root(), created_at=1.0)


def test_a_lone_call() -> None:
    rollout = seen(FIRST, begun={"c1": 0.25})
    (only,) = rollout.calls
    assert (only.role, only.link.kind, only.seconds, only.number) == (Role.ONLY, LinkKind.NONE, 0.75, 1)
    assert kinds(rollout) == "pptt"
    assert rollout.new_prompts["c1"].tolist() == [1, 2]


def test_a_conversation_a_branch_and_a_side_call() -> None:
    rollout = seen(
        FIRST,
        call("c2", [1, 2, 3, 9, 5], [6, 6, 9], parent=Continues("c1", 4), prefix_supplied=True, created_at=2.0),
        call("c3", [1, 2, 3, 9, 7], [8, 9], parent=Continues("c1", 4), created_at=3.0),
        call("title", [4], [4, 9], parent=Root(), requested_model="small", created_at=4.0),
        call("agent", [2, 2], [2, 9], parent=Root(), created_at=5.0),
    )
    assert roles(rollout) == {"c1": "main", "c2": "main", "c3": "branch", "title": "side", "agent": "sub_agent"}
    links = {each.call_id: each.link.kind for each in rollout.calls}
    assert (links["c2"], links["c3"]) == (LinkKind.EXACT, LinkKind.RENDERED)
    assert [(each.is_delivered, kinds(rollout, n)) for n, each in enumerate(rollout.trajectories)] == [
        (True, "ppttpttt"),
        (False, "ppnnpnn"),
        (False, "pnn"),
        (False, "ppnn"),
    ]
    whys = {each.call_ids[-1]: [each.why_names[n] for n in each.whys if n >= 0] for each in rollout.trajectories}
    assert whys == {
        "c2": [],
        "c3": ["trained_elsewhere"] * 2 + ["not_main_chain"] * 2,
        "agent": ["not_main_chain"] * 2,
        "title": ["side_call"] * 2,
    }
    assert rollout.paths["c3"] == ("c1", "c3")


def test_a_retry_an_abort_and_a_call_under_way() -> None:
    again = call("c1b", [1, 2], [4, 9], parent=Root(), created_at=1.5)
    cut = call("cut", [1, 2, 3, 9, 5], [6], parent=Continues("c1", 4), finish_reason="abort", created_at=2.5)
    on = call("c2", [1, 2, 3, 9, 5], [7, 9], parent=Continues("c1", 4), created_at=3.0)
    frozen = snapshot(FIRST, again, cut, on, incomplete=("dangling_intent:open",))
    rollout = see_records(frozen, begun={"open": 4.0})
    assert roles(rollout) == {"c1": "main", "c1b": "retry", "cut": "aborted", "c2": "main", "open": "open"}
    assert rollout.mask_reasons == ("dangling_intent:open",)
    assert rollout.trained_tokens == 0
    (main, *_) = rollout.trajectories
    assert {main.why_names[n] for n in main.whys if n >= 0} == {"dangling_intent"}
    open_call = rollout.calls[-1]
    assert (open_call.excluded, open_call.created_at, open_call.generated_tokens) == ("dangling_intent", 4.0, None)


def test_a_close_that_the_policy_did_not_say() -> None:
    cut = call("c1", [1, 2], [3, 3], parent=Root(), finish_reason="length", created_at=1.0)
    on = call("c2", [1, 2, 3, 3, 9, 8, 5], [6, 9], parent=Continues("c1", 4), created_at=2.0)
    assert kinds(seen(cut, on)) == "ppttipptt"
    # Nobody ended a turn with 9: only a vocabulary knows what it is.
    other = call("c2", [1, 2, 3, 3, 9, 8, 5], [6, 7], parent=Continues("c1", 4), finish_reason="length", created_at=2.0)
    assert kinds(seen(cut, other)) == "ppttppptt"
    assert kinds(seen(cut, other, special=frozenset({9}))) == "ppttipptt"
    said = call("c1", [1, 2], [3, 9], parent=Root(), created_at=1.0)
    after = call("c2", [1, 2, 3, 9, 9, 5], [6, 9], parent=Continues("c1", 4), created_at=2.0)
    assert kinds(seen(said, after)) == "ppttpptt"


@pytest.mark.parametrize("reason", ["turn_lost", "no_match"])
def test_where_two_renderings_part(reason: str) -> None:
    on = call("c2", [1, 2, 3, 8, 5], [7, 9], parent=Unresolved(reason), created_at=2.0)
    rollout = seen(FIRST, on)
    (split,) = rollout.splits
    assert (split.call_id, split.before, split.at, split.reason) == ("c2", "c1", 3, reason)
    assert (split.held.ids.tolist(), split.sent.ids.tolist()) == ([9], [8, 5])
    assert split.held.source == "reply of c1"
    assert [each.link.kind for each in rollout.calls] == [LinkKind.NONE, LinkKind.SPLIT]
    assert rollout.calls[1].link.reason == reason


def test_a_split_is_from_the_call_that_has_most_in_common() -> None:
    middle = call("c2", [1, 2, 3, 9, 5], [6, 6], parent=Continues("c1", 4), created_at=2.0)
    last = call("c3", [1, 2, 3, 9, 5, 6, 7], [7, 9], parent=Unresolved("tail_differs"), created_at=3.0)
    (split,) = seen(FIRST, middle, last).splits
    assert (split.before, split.at) == ("c2", 6)
    nothing = call("c3", [5, 5], [7, 9], parent=Unresolved("no_match"), created_at=3.0)
    rollout = seen(FIRST, nothing)
    assert (rollout.splits, rollout.calls[1].link.kind, rollout.calls[1].role) == ((), LinkKind.NONE, "unresolved")


def test_a_call_without_its_parent_is_shown_with_the_reason() -> None:
    lost = suffix_of(call("c2", [1, 2, 3, 9, 5], [6], parent=Continues("gone", 4), created_at=2.0))
    rollout = seen(FIRST, lost)
    assert rollout.calls[1].parent == "gone"
    assert (rollout.calls[1].excluded, rollout.calls[1].role) == ("absent_parent", Role.UNRESOLVED)
    assert rollout.mask_reasons == ("absent_parent:c2:parent.call_id",)


def test_a_call_that_was_recorded_with_two_contents_is_named() -> None:
    rollout = seen(FIRST, call("c1", [1, 2], [4], parent=Root(), created_at=1.0))
    (only,) = rollout.calls
    assert (only.call_id, only.excluded, only.generated_tokens) == ("c1", "conflicting_call_id", 3)
    assert rollout.trajectories == ()


def test_weight_versions_are_by_token() -> None:
    spans = (WeightSpan(0, 1, "7"), WeightSpan(1, 2, "8"))
    rollout = seen(call("c1", [1], [3, 9], parent=Root(), weight_versions=spans))
    assert [call.weight_versions for call in rollout.calls] == [("7", "8")]
    (shown,) = rollout.trajectories
    assert [None if n < 0 else shown.version_names[n] for n in shown.versions] == [None, "7", "8"]


def test_rows_of_chains_that_share_a_beginning() -> None:
    frozen = snapshot(
        FIRST,
        call("c2", [1, 2, 3, 9, 5], [6, 6, 9], parent=Continues("c1", 4), created_at=2.0),
        call("c3", [1, 2, 3, 9, 7], [8, 9], parent=Continues("c1", 4), created_at=3.0),
    )
    built = build(frozen, BuildOptions(delivery="all_chains"))
    rollout = see_rows(rows(built, snapshot=frozen, group_id="g", reward=None))
    assert [kinds(rollout, n) for n in range(2)] == ["ppttpttt", "ppnnptt"]
    assert rollout.trajectories[1].why_names == ("trained_elsewhere",)
    assert roles(rollout) == {"c1": "main", "c2": "main", "c3": "branch"}
