"""Which recorded calls may answer those of an attempt that goes on, and what is said of how far it repeated them."""

from __future__ import annotations

from typing import Any

from gym_capture.capture.record_fields import with_values
from gym_capture.capture.records import RecordProblem, Snapshot, TokenEntry
from gym_capture.capture.replay import Replays, replayable, replays_of
from gym_capture.conformance import sample_entry


def call(rollout_id: str, call_id: str, at: float, **values: Any) -> TokenEntry:
    entry = sample_entry(rollout_id, call_id)
    return with_values(entry, created_at=at, **{"options_key": "asked", **values})


def frozen(rollout_id: str, *entries: TokenEntry, problems: tuple[RecordProblem, ...] = ()) -> Snapshot:
    return Snapshot(rollout_id=rollout_id, snapshot_id="s", version=1, entries=entries, problems=problems)


def ids(*sources: Snapshot) -> list[str]:
    return [entry.model_call_id for entry in replayable(sources)]


def test_whole_turns_are_replayed_in_the_order_of_their_creation() -> None:
    first = frozen(
        "a1",
        call("a1", "late", 3.0),
        call("a1", "early", 1.0),
        call("a1", "cut off", 1.5, finish_reason="abort"),
        call("a1", "failed", 1.6, finish_reason="error"),
        call("a1", "imported", 1.7, finish_reason=None),
        call("a1", "of an earlier version", 1.8, options_key=""),
        call("a1", "empty", 1.9, generation_token_ids=[], generation_log_probs=[], weight_versions=()),
        call("a1", "at its limit", 2.0, finish_reason="length"),
        problems=(RecordProblem(reason="conflicting_call_id", call_id="late", field=None, detail=""),),
    )
    assert ids(first) == ["early", "at its limit"]


def test_a_reply_that_nobody_got_comes_after_those_that_somebody_may_have_got() -> None:
    first = frozen("a1", call("a1", "lost", 1.0, delivered=False), call("a1", "again", 2.0, delivered=True))
    assert ids(first) == ["again", "lost"]


def test_a_generation_that_was_replayed_answers_once_and_in_its_old_place() -> None:
    first = frozen("a1", call("a1", "c1", 1.0), call("a1", "c2", 2.0), call("a1", "c3", 3.0))
    second = frozen("a2", call("a2", "d1", 11.0, replayed_from="c1"), call("a2", "new", 12.0))
    third = frozen("a3", call("a3", "e1", 21.0, replayed_from="d1"))
    assert ids(first, second) == ["d1", "c2", "c3", "new"]
    assert ids(third, second, first) == ["e1", "c2", "c3", "new"]
    # One that was cut off while it was replayed stands for nothing.
    aborted = frozen("a2", call("a2", "d1", 11.0, replayed_from="c1", finish_reason="abort"))
    assert ids(first, aborted) == ["c1", "c2", "c3"]


def test_what_an_attempt_repeated() -> None:
    first = frozen("a1", call("a1", "c1", 1.0), call("a1", "c2", 2.0))
    d1, d2 = (call("a2", f"d{n}", 10.0 + n, replayed_from=f"c{n}") for n in (1, 2))
    live = call("a2", "live", 11.5)
    assert replays_of(frozen("a2", d2, d1, live), [first]) == Replays(2, None)
    assert replays_of(frozen("a2", d1), [first]) == Replays(1, None)
    assert replays_of(frozen("a2", live, d1), [first]) == Replays(1, 2)
    assert replays_of(frozen("a2", live), []) == Replays(0, None)
