"""The lineage index: which call a request continues, and that ids are kept once and come back exactly."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.capture.protocols import Resolved
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import (
    Continues,
    IdArray,
    Parent,
    RecordProblem,
    Root,
    TokenEntry,
    Unresolved,
    as_ids,
    digest_ids,
    suffix_of,
)
from gym_capture.lineage.index import LineageIndex
from tests.calls import entry_of


def call(
    call_id: str,
    prompt: npt.ArrayLike,
    generation: npt.ArrayLike,
    *,
    key: str | None = None,
    parent: TokenEntry | Parent = Root(),  # noqa: B008 - frozen
    rollout_id: str = "r",
    finish_reason: str = "stop",
    delivered: bool | None = None,
    digest: str | None = "right",
) -> TokenEntry:
    """A whole record. `key` defaults to one of the call's own."""
    generated = as_ids(generation)
    ids = as_ids(np.concatenate((as_ids(prompt), generated)))
    return entry_of(
        rollout_id=rollout_id,
        model_call_id=call_id,
        model="policy",
        requested_model="policy",
        has_tools=False,
        prompt_token_ids=as_ids(prompt),
        generation_token_ids=generated,
        generation_log_probs=np.zeros(generated.size, dtype=np.float32),
        parent=Continues(parent.model_call_id, parent.cum_len) if isinstance(parent, TokenEntry) else parent,
        turn_key=f"key of {call_id}" if key is None else key,
        digest=digest_ids(ids) if digest == "right" else digest,
        finish_reason=finish_reason,
        delivered=delivered,
    )


def following(parent: TokenEntry, call_id: str, new: Sequence[int], generation: Sequence[int]) -> TokenEntry:
    return call(call_id, [*parent.cumulative_ids(), *new], generation, parent=parent)


def indexed(*entries: TokenEntry) -> LineageIndex:
    index = LineageIndex()
    for entry in entries:
        assert index.add(suffix_of(entry)) == ()
    return index


def parent_of(index: LineageIndex, *keys: str, rollout_id: str = "r") -> str | Root | Unresolved:
    """The parent's id. Checks what comes with it."""
    resolution = index.resolve(rollout_id, keys)
    if not isinstance(resolution, Resolved):
        return resolution
    np.testing.assert_array_equal(resolution.cumulative_ids, index.cumulative_ids(rollout_id, resolution.call_id))
    return resolution.call_id


A = call("a", [1, 2, 3], [4, 9])
B = following(A, "b", [5], [6, 9])


# --- what decides ----------------------------------------------------------------------------------------------------


def test_a_request_without_assistant_turns_is_a_root() -> None:
    assert LineageIndex().resolve("r", ()) == Root()
    assert indexed(A).resolve("r", ()) == Root()


def test_the_latest_turn_that_a_call_owns_decides() -> None:
    index = indexed(A, B)
    resolution = index.resolve("r", ("key of a", "key of b"))
    assert isinstance(resolution, Resolved)
    assert (resolution.call_id, resolution.turn) == ("b", 1)
    assert resolution.cumulative_ids.tolist() == [1, 2, 3, 4, 9, 5, 6, 9]
    assert resolution.cumulative_ids.dtype == np.int32


def test_turns_that_the_harness_made_up_are_prompt_after_the_last_own_turn() -> None:
    resolution = indexed(A, B).resolve("r", ("key of a", "made up", "made up too"))
    assert isinstance(resolution, Resolved)
    assert (resolution.call_id, resolution.turn) == ("a", 0)


def test_agents_that_branch_from_one_call_all_continue_it() -> None:
    index = indexed(A)
    branches = [following(A, f"sub-{n}", [50 + n], [60 + n, 9]) for n in range(3)]
    for branch in branches:
        assert parent_of(index, "key of a") == "a"
        index.add(suffix_of(branch))
    for branch in branches:
        assert parent_of(index, "key of a", f"key of {branch.model_call_id}") == branch.model_call_id
        np.testing.assert_array_equal(index.cumulative_ids("r", branch.model_call_id), branch.cumulative_ids())


def test_no_parent_rather_than_a_guess() -> None:
    assert indexed(A).resolve("r", ("rewritten",)) == Unresolved("no_match")
    assert LineageIndex().resolve("r", ("key of a",)) == Unresolved("unknown_rollout")


def test_FP_12_two_agents_that_answer_alike_are_told_apart_by_their_keys() -> None:
    index = indexed(call("m1", [1, 2], [5, 9]), call("s1", [7, 8], [5, 9]))
    resolution = index.resolve("r", ("key of s1",))
    assert isinstance(resolution, Resolved)
    assert (resolution.call_id, resolution.cumulative_ids.tolist()) == ("s1", [7, 8, 5, 9])


def test_never_across_rollouts() -> None:
    index = indexed(A, call("a", [7, 7], [8], key="key of a", rollout_id="other"))
    for rollout_id, ids in (("r", [1, 2, 3, 4, 9]), ("other", [7, 7, 8])):
        resolution = index.resolve(rollout_id, ("key of a",))
        assert isinstance(resolution, Resolved)
        assert resolution.cumulative_ids.tolist() == ids
    assert index.rollout_ids() == ("other", "r")
    index.forget("other")
    assert index.resolve("other", ("key of a",)) == Unresolved("unknown_rollout")
    assert parent_of(index, "key of a") == "a"


def test_forgetting_is_complete_and_repeatable() -> None:
    index = indexed(A)
    index.forget("r")
    index.forget("r")
    assert (index.rollout_ids(), index.nbytes("r"), index.cumulative_ids("r", "a")) == ((), 0, None)


# --- retries ---------------------------------------------------------------------------------------------------------


def test_a_retry_with_other_ids_behind_the_same_text_is_ambiguous() -> None:
    index = indexed(A, call("x", A.cumulative_ids(), [30, 31], key="k"), call("y", A.cumulative_ids(), [35], key="k"))
    assert index.resolve("r", ("key of a", "k")) == Unresolved("ambiguous"), "and not the turn before"


def test_a_retry_with_the_same_ids_is_interchangeable() -> None:
    for order in permutations([call(name, [1, 2], [30, 31], key="k") for name in ("b", "a", "c")]):
        assert parent_of(indexed(*order), "k") == "a"


@pytest.mark.parametrize(
    ("delivered", "parent"),
    [
        ((True, False), "x"),
        ((False, True), "y"),
        ((True, None), None),
        ((None, False), None),
        ((False, False), None),
        ((True, True), None),
    ],
)
def test_the_only_retry_that_was_delivered_whole_is_the_one_echoed(
    delivered: tuple[bool | None, bool | None], parent: str | None
) -> None:
    x, y = (call(name, [1], [30 + n], key="k", delivered=delivered[n]) for n, name in enumerate("xy"))
    assert parent_of(indexed(x, y), "k") == (parent or Unresolved("ambiguous"))


def test_delivery_tells_ids_apart_not_calls() -> None:
    twins = [
        call(name, [1], [30], key="k", delivered=whole) for name, whole in (("b", True), ("a", False), ("c", None))
    ]
    assert parent_of(indexed(*twins, call("0", [1], [31], key="k", delivered=False)), "k") == "a"
    assert parent_of(indexed(call("x", [1], [30], key="k", delivered=False)), "k") == "x", (
        "nothing to tell it apart from"
    )


def test_a_turn_with_its_stop_string_put_back_is_that_calls_turn() -> None:
    stopped = with_values(A, other_turn_keys={"a and its stop string": "stop_string_put_back"})
    index = indexed(stopped, B)
    assert parent_of(index, "a and its stop string") == "a"
    resolution = index.resolve("r", ("a and its stop string",))
    assert isinstance(resolution, Resolved)
    assert resolution.rule == "stop_string_put_back"
    plain = index.resolve("r", ("key of a",))
    assert isinstance(plain, Resolved)
    assert plain.rule is None
    # Another call that said these very words, stop string included, is a rival like any other.
    rival = call("c", [1, 2, 3], [4, 8, 9], key="a and its stop string")
    assert indexed(stopped, rival).resolve("r", ("a and its stop string",)) == Unresolved("ambiguous")
    aborted = with_values(stopped, finish_reason="abort")
    assert indexed(aborted).resolve("r", ("a and its stop string",)) == Unresolved("no_match")


def test_a_rewritten_turn_is_told_from_one_of_which_nothing_is_known() -> None:
    asked = with_values(A, asked_key="what a was asked")
    for index in (indexed(asked), LineageIndex()):
        index.rebuild([asked])
        assert index.resolve("r", ("other",), ("what a was asked",)) == Unresolved("rewritten_turn")
        assert index.resolve("r", ("few-shot", "other"), ("x", "what a was asked")) == Unresolved("rewritten_turn")
        assert index.resolve("r", ("other",), ("something else",)) == Unresolved("no_match")
        assert index.resolve("r", ("other",)) == Unresolved("no_match")
        assert parent_of(index, "key of a") == "a"
    cut_off = with_values(asked, finish_reason="abort")
    assert indexed(cut_off).resolve("r", ("other",), ("what a was asked",)) == Unresolved("no_match"), (
        "a client has what it saw of a turn that was cut off, and rewrote nothing"
    )


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_BD_14_a_call_that_did_not_finish_is_no_parent(reason: str) -> None:
    aborted = call("c1", [1, 2], [3, 4], key="k", finish_reason=reason)
    assert indexed(aborted).resolve("r", ("k",)) == Unresolved("no_match")
    assert parent_of(indexed(aborted, call("c1r", [1, 2], [3, 7, 9], key="k")), "k") == "c1r", "nor a rival"
    echo_of_partial_text = ("key of a", "k")
    assert (
        parent_of(indexed(A, call("c1", A.cumulative_ids(), [3], key="k", finish_reason=reason)), *echo_of_partial_text)
        == "a"
    )
    np.testing.assert_array_equal(indexed(aborted).cumulative_ids("r", "c1"), [1, 2, 3, 4])


def test_a_call_that_generated_nothing_is_no_parent_and_one_cut_off_is() -> None:
    assert indexed(call("x", [1, 2], [], key="k")).resolve("r", ("k",)) == Unresolved("no_match")
    assert parent_of(indexed(call("x", [1, 2], [3], key="k", finish_reason="length")), "k") == "x"


def test_imported_calls_without_a_key_own_no_turn() -> None:
    index = indexed(with_values(A, turn_key=None))
    assert index.resolve("r", ("key of a",)) == Unresolved("no_match")
    assert index.cumulative_ids("r", "a") is not None


# --- what is not indexed ---------------------------------------------------------------------------------------------


def only(problems: tuple[RecordProblem, ...]) -> tuple[str, str | None, str | None]:
    (problem,) = problems
    assert problem.detail
    return problem.reason, problem.call_id, problem.field


def test_the_same_call_again_changes_nothing() -> None:
    index = indexed(A, B)
    before = index.nbytes("r")
    assert index.add(A) == index.add(B) == index.add(suffix_of(B)) == ()
    assert index.nbytes("r") == before
    assert parent_of(index, "key of b") == "b"


def test_of_two_calls_with_one_id_the_first_stays() -> None:
    index = indexed(A, B)
    for other in (call("b", [1], [2]), following(A, "b", [5], [6, 8]), call("b", B.prompt_token_ids, [6, 9], key="k")):
        assert only(index.add(other)) == ("conflicting_call_id", "b", "model_call_id")
        assert only(index.add(suffix_of(other))) == ("conflicting_call_id", "b", "model_call_id")
    np.testing.assert_array_equal(index.cumulative_ids("r", "b"), B.cumulative_ids())
    assert index.resolve("r", ("k",)) == Unresolved("no_match")


def test_a_record_that_contradicts_its_digest_is_not_indexed() -> None:
    index = indexed(A)
    wrong = call("b", [*A.cumulative_ids(), 5], [6], parent=A, digest=digest_ids(as_ids([1])))
    assert only(index.add(wrong)) == ("digest_mismatch", "b", "digest")
    assert only(index.add(suffix_of(wrong))) == ("digest_mismatch", "b", "digest")
    assert index.resolve("r", ("key of b",)) == Unresolved("no_match")
    assert index.add(suffix_of(B)) == (), "and leaves the ids before it as they were"
    np.testing.assert_array_equal(index.cumulative_ids("r", "b"), B.cumulative_ids())
    assert only(LineageIndex().add(call("x", [1], [2], digest="no"))) == ("digest_mismatch", "x", "digest")


def test_a_delta_needs_a_parent_that_ends_where_it_begins() -> None:
    index = indexed(call("a", [1, 2], [3]))
    assert only(index.add(suffix_of(B))) == ("parent_length", "b", "prompt_offset")
    assert only(LineageIndex().add(suffix_of(B))) == ("parent_missing", "b", "parent")


def test_a_refused_record_does_not_make_its_rollout_known() -> None:
    index = LineageIndex()
    index.add(suffix_of(B))
    assert index.rollout_ids() == ()
    assert index.resolve("r", ("key of b",)) == Unresolved("unknown_rollout")


def test_a_whole_record_is_worth_its_ids_whatever_it_says_of_its_parent() -> None:
    lying = call("b", [7, 7, 7, 7, 7, 5], [6], parent=A)
    index = indexed(A)
    index.add(lying)
    resolution = index.resolve("r", ("key of b",))
    assert isinstance(resolution, Resolved)
    np.testing.assert_array_equal(resolution.cumulative_ids, lying.cumulative_ids())


# --- how ids are kept ------------------------------------------------------------------------------------------------


def test_ids_that_were_handed_out_stay_as_they_are() -> None:
    index = indexed(A)
    handed_out = index.resolve("r", ("key of a",))
    assert isinstance(handed_out, Resolved)
    last = A
    for n in range(50):
        last = following(last, f"c{n}", [n], [n, n])
        index.add(suffix_of(last))
    index.add(suffix_of(following(A, "branch", [77], [78])))
    assert handed_out.cumulative_ids.tolist() == [1, 2, 3, 4, 9]
    with pytest.raises(ValueError, match="read-only"):
        handed_out.cumulative_ids[0] = 5


def tree(shape: Sequence[tuple[int, int, int]], *, system_ids: int) -> list[TokenEntry]:
    """Calls 0, 1, ...: (which earlier call to continue, 0 for a root; new prompt ids; generated ids). Few distinct ids,
    so that calls often have ids in common by chance."""
    entries: list[TokenEntry] = []
    rng = np.random.default_rng(len(shape))
    for number, (pick, new, generated) in enumerate(shape):
        parent = entries[pick % number] if number and pick else None
        prompt: list[int] = [] if parent is None else parent.cumulative_ids().tolist()
        added = [1] * (0 if parent else system_ids) + rng.integers(0, 3, new).tolist()
        generation = rng.integers(0, 3, generated).tolist()
        entries.append(call(f"c{number}", prompt + added, generation, parent=parent or Root()))
    return entries


shapes = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=20)


@given(shapes, st.sampled_from([1, 300]), st.booleans(), st.data())
def test_any_tree_of_calls_in_any_order_gives_its_ids_back(
    shape: list[tuple[int, int, int]], system_ids: int, deltas: bool, data: st.DataObject
) -> None:
    entries = tree(shape, system_ids=system_ids)
    index = LineageIndex()
    shuffled = data.draw(st.permutations(entries))
    assert index.rebuild(suffix_of(entry) if deltas else entry for entry in shuffled) == ()
    for entry in entries:
        ids = index.cumulative_ids("r", entry.model_call_id)
        np.testing.assert_array_equal(ids, entry.cumulative_ids())
        assert parent_of(index, f"key of {entry.model_call_id}") == entry.model_call_id


def test_rebuild_names_what_it_had_to_leave_out_and_keeps_the_rest() -> None:
    lost = call("lost", [8, 8], [8])
    orphan = following(lost, "orphan", [1], [1])
    grandchild = following(orphan, "grandchild", [1], [1])
    index = LineageIndex()
    problems = index.rebuild([suffix_of(grandchild), suffix_of(orphan), suffix_of(B), A])
    assert {(problem.reason, problem.call_id) for problem in problems} == {
        ("parent_missing", "orphan"),
        ("parent_missing", "grandchild"),
    }
    assert parent_of(index, "key of b") == "b"


def ids_of(count: int, *, seed: int = 0) -> IdArray:
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.int32)


def traced_bytes_of_index(entries: Sequence[TokenEntry]) -> tuple[int, int]:
    """What an index of these takes, as measured and by its own account."""
    gc.collect()
    tracemalloc.start()
    index = LineageIndex()
    index.rebuild(entries)
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return traced, index.nbytes("r")


def conversation_of(turns: int) -> list[TokenEntry]:
    entries = [call("call-0".ljust(36, "x"), ids_of(2_000), ids_of(200, seed=1))]
    for turn in range(1, turns):
        prompt = np.concatenate((entries[-1].cumulative_ids(), ids_of(300, seed=turn)))
        entries.append(call(f"call-{turn}".ljust(36, "x"), prompt, ids_of(200, seed=-turn % 997), parent=entries[-1]))
    return entries


def test_a_conversation_takes_little_more_than_its_ids() -> None:
    entries = conversation_of(40)
    for stored in (entries, [suffix_of(entry) for entry in entries]):
        traced, own = traced_bytes_of_index(stored)
        assert traced <= 6 * entries[-1].cum_len + 1_000 * len(entries)
        assert own == pytest.approx(traced, rel=0.15)


def test_retries_and_prompts_rendered_anew_share_what_they_have_in_common() -> None:
    prompt = ids_of(10_000)
    retries = [call(f"retry-{n:03}", prompt, ids_of(50, seed=n)) for n in range(20)]
    same = [call(f"same-{n:03}", prompt, ids_of(50, seed=1)) for n in range(20)]
    shorter = np.concatenate((prompt[:9_000], ids_of(100, seed=2)))
    rendered_anew = [
        call(f"anew-{n:03}", shorter, ids_of(50, seed=n), parent=Unresolved("no_match")) for n in range(20)
    ]
    calls = [*retries, *same, *rendered_anew]
    traced, own = traced_bytes_of_index(calls)
    unique_ids = 10_000 + 20 * 50 + 100 + 20 * 50
    assert traced <= 6 * unique_ids + 1_000 * len(calls)
    # OpenSSL allocates hash states where tracemalloc does not see them: one for the prompt, one for each continuation.
    hash_states = 280 * (1 + 20 + 20)
    assert traced < own < 1.2 * (traced + hash_states)


def test_retries_that_generated_the_same_cost_no_ids() -> None:
    same = [call(f"same-{n:03}", ids_of(300), ids_of(50, seed=1), key="k") for n in range(50)]
    traced, own = traced_bytes_of_index(same)
    assert traced < 500 * len(same)
    assert traced < own < 500 * len(same)
