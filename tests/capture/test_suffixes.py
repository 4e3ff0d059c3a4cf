"""Records as they are stored become whole, and back: against a slow reference, and in how much memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from gym_capture.build.builder import build
from gym_capture.capture.codec import encode_entry
from gym_capture.capture.records import Continues, EntrySuffix, Root, Snapshot, TokenEntry, suffix_of
from gym_capture.capture.snapshot_codec import decode_snapshot, decode_stored, encode_snapshot
from gym_capture.capture.suffixes import StoredRecord, begins_alike, complete, stored_form
from tests.calls import call, excluded, snapshot
from tests.rollout_strategies import Rollout, damaged_rollouts, honest_rollouts, snapshot_of


def cumulative(entry: TokenEntry) -> list[int]:
    return [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]


def slowly(records: Sequence[StoredRecord]) -> list[list[int] | None]:
    """The whole prompt of each record, None where it is not known: by trying again until nothing more is found."""
    prompts: list[list[int] | None] = [
        record.prompt_token_ids.tolist() if isinstance(record, TokenEntry) else None for record in records
    ]
    for _ in records:
        for at, record in enumerate(records):
            if not isinstance(record, EntrySuffix):
                continue
            named = [
                other
                for other, each in enumerate(records)
                if (each.rollout_id, each.model_call_id) == (record.rollout_id, record.parent.call_id)
            ]
            named = [other for other in named if isinstance(records[other], TokenEntry)] or named
            found = [
                None if prompts[other] is None else [*prompts[other], *records[other].generation_token_ids.tolist()]
                for other in named
            ]
            before = found[0] if found and all(ids == found[0] for ids in found) else None
            if before is not None and len(before) == record.parent.cum_len:
                prompts[at] = before + record.new_prompt_ids.tolist()
    return prompts


@given(damaged_rollouts())
def test_a_suffix_becomes_whole_just_where_its_parent_is_known(records: list[StoredRecord]) -> None:
    entries, orphans = complete(records)
    whole = iter(entries)
    left = iter(orphans)
    for record, prompt in zip(records, slowly(records), strict=True):
        if prompt is None:
            assert next(left) is record
            continue
        entry = next(whole)
        assert entry.prompt_token_ids.tolist() == prompt
        assert not entry.prompt_token_ids.flags.writeable
        assert encode_entry(suffix_of(entry)) == encode_entry(suffix_of(record))
    assert next(whole, None) is next(left, None) is None


@given(damaged_rollouts())
def test_stored_and_read_again_a_snapshot_is_the_same(records: list[StoredRecord]) -> None:
    original = snapshot_of(records)
    for read in (decode_snapshot(encode_snapshot(original)), snapshot_of(stored_form(original))):
        assert list(map(encode_entry, read.records)) == list(map(encode_entry, original.records))


@given(damaged_rollouts())
def test_lineage_reads_records_as_they_are_stored(records: list[StoredRecord]) -> None:
    original = replace(snapshot_of(records), incomplete=("dangling_intent:x",))
    stored = decode_stored(encode_snapshot(original))
    assert list(map(encode_entry, stored.records)) == list(map(encode_entry, stored_form(original)))
    assert stored.incomplete == original.incomplete


@given(honest_rollouts(decided=True))
def test_what_was_whole_is_stored_without_its_parents_ids(rollout: Rollout) -> None:
    stored = stored_form(snapshot_of(rollout.entries))
    assert list(map(encode_entry, stored)) == [encode_entry(suffix_of(entry)) for entry in rollout.entries]


def test_a_prompt_that_contradicts_its_parent_is_stored_whole() -> None:
    a, b = call("a", [1, 2], [3], parent=Root()), call("b", [1, 9, 3, 4], [5], parent=Continues("a", 3))
    lost = call("c", [1, 2, 7], [8], parent=Continues("gone", 2))
    for entry in (b, lost):
        stored = stored_form(snapshot(a, entry))
        assert list(map(encode_entry, stored)) == [encode_entry(a), encode_entry(entry)]


def test_a_suffix_whose_parent_came_with_other_contents_stays_one() -> None:
    a, other = call("a", [1, 2], [3], parent=Root()), call("a", [1, 2], [4], parent=Root())
    b = suffix_of(call("b", [1, 2, 3, 5], [6], parent=Continues("a", 3)))
    assert complete([b, a, other]) == ((a, other), (b,))
    assert excluded(build(snapshot(a, other, b)))["b"] == "conflicting_parent"
    entries, orphans = complete([b, a, replace(a)])
    assert (len(entries), orphans) == (3, ())


@pytest.mark.parametrize("cum_len", [2, 4])
def test_a_suffix_of_another_length_than_its_parents_stays_one(cum_len: int) -> None:
    a = call("a", [1, 2], [3], parent=Root())
    b = suffix_of(call("b", [1, 2, 3, 5, 6], [7], parent=Continues("a", cum_len)))
    c = suffix_of(call("c", [1, 2, 3, 5, 6, 7, 8], [9], parent=Continues("b", 6)))
    assert complete([c, b, a]) == ((a,), (c, b))
    built = build(snapshot(c, b, a))
    assert built.mask_reasons == ("parent_mismatch:b:parent.cum_len",)
    assert excluded(built) == {"b": "parent_mismatch", "c": "unplaced_parent"}


def test_suffixes_in_a_circle_stay_suffixes() -> None:
    a = suffix_of(call("a", [1, 2, 3, 4], [5], parent=Continues("b", 3)))
    b = suffix_of(call("b", [1, 2], [3], parent=Continues("a", 1)))
    assert complete([a, b]) == ((), (a, b))
    assert excluded(build(snapshot(a, b))) == {"a": "parent_cycle", "b": "parent_cycle"}


def test_a_suffix_that_nobody_completed_masks() -> None:
    """A source that leaves one beside its parent has the rollout masked; it does not end the build."""
    a = call("a", [1, 2], [3], parent=Root())
    b = suffix_of(call("b", [1, 2, 3, 5], [6], parent=Continues("a", 3)))
    c = call("c", [1, 2, 3, 5, 6, 7], [8], parent=Continues("b", 5))
    assert isinstance(b, EntrySuffix)
    built = build(Snapshot(rollout_id="r1", snapshot_id="s", version=1, entries=(a, c), orphans=(b,)))
    assert built.mask_reasons == ("absent_parent:b:prompt_token_ids",)
    assert excluded(built) == {"b": "absent_parent", "c": "unplaced_parent"}


def test_the_same_place_in_memory_is_not_enough() -> None:
    """Every second id of a buffer begins where the buffer does, and goes on otherwise."""
    ids = np.arange(1, 9, dtype=np.int32)
    assert begins_alike(ids, ids[:3])
    assert not begins_alike(ids[1:], ids[:3])
    a = call("a", ids[:2].tolist(), [3], parent=Root())
    a, b = replace(a, prompt_token_ids=ids[:2]), call("b", [1, 3, 5, 7], [9], parent=Continues("a", 3))
    assert build(snapshot(a, replace(b, prompt_token_ids=ids[::2]))).mask_reasons == (
        "parent_mismatch:b:prompt_token_ids",
    )


# --- memory ------------------------------------------------------------------------------------------------------


def chain(calls: int, *, new: int = 100) -> list[StoredRecord]:
    """A root of 1,000 ids and calls that each add so many, as they are stored."""
    records: list[StoredRecord] = [call("c0", range(1_000), [1], parent=Root())]
    for number in range(1, calls):
        records.append(suffix(f"c{number}", new, Continues(f"c{number - 1}", records[-1].cum_len)))
    return records


def suffix(call_id: str, new: int, parent: Continues, *, first: int = 0) -> EntrySuffix:
    made = suffix_of(call(call_id, [0] * parent.cum_len + [first, *range(new - 1)], [7], parent=parent))
    assert isinstance(made, EntrySuffix)
    return replace(made, new_prompt_ids=made.new_prompt_ids.copy())


def bytes_of_ids(records: Sequence[StoredRecord]) -> int:
    """Of all the memory that prompts and generations of the whole entries stand in."""
    entries, orphans = complete(records)
    assert (len(entries), orphans) == (len(records), ())
    buffers: dict[int, int] = {}
    for entry in entries:
        for ids in (entry.prompt_token_ids, entry.generation_token_ids):
            buffer = ids if ids.base is None else ids.base
            assert isinstance(buffer, np.ndarray)
            buffers[id(buffer)] = buffer.nbytes
    return sum(buffers.values())


def test_a_conversation_is_in_memory_once() -> None:
    records = chain(300)
    assert bytes_of_ids(records) == 4 * (1_001 + records[-1].cum_len), "the root, and one buffer"
    first, *_, last = complete(records)[0][1:]
    assert np.shares_memory(first.prompt_token_ids, last.prompt_token_ids)


def test_a_branch_copies_what_is_before_it() -> None:
    root = chain(1)
    branches = [suffix(f"b{number}", 50, Continues("c0", 1_001), first=number) for number in range(100)]
    assert bytes_of_ids([*root, *branches]) == 4 * (1_001 + 100 * 1_052)


def test_calls_of_one_prompt_share_it() -> None:
    root = chain(1)
    tries = [suffix(f"t{number}", 50, Continues("c0", 1_001)) for number in range(100)]
    on = suffix("on", 10, Continues("t37", tries[37].cum_len))
    generations = 99
    assert bytes_of_ids([*root, *tries, on]) == 4 * (1_001 + on.cum_len + generations)
    other = suffix("other", 10, Continues("t38", tries[38].cum_len))
    assert bytes_of_ids([*root, *tries, on, other]) == 4 * (1_001 + on.cum_len + other.cum_len + generations)
