"""Which rollout it is, and how it ended: one text for each thing that can be said, and nothing that is no number."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture.capture.outcomes import MAX_TASK_BYTES, MAX_TEXT_BYTES, Outcome, Registration
from gym_capture.capture.record_rows import rollout_row
from gym_capture.capture.records import Snapshot
from gym_capture.capture.snapshot_codec import decode_snapshot, encode_snapshot
from gym_capture.data.record_files import ROLLOUT_SCHEMA
from gym_capture.errors import RecordError

TEXTS = st.text(st.characters(), max_size=8)  # lone surrogates too
REGISTRATIONS = st.builds(
    Registration,
    group_id=TEXTS,
    sample=st.none() | st.integers(0, 2**53 - 1),
    task=st.none() | TEXTS,
    agent_completes=st.booleans(),
)
OUTCOMES = st.builds(
    Outcome,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    reward_components=st.dictionaries(
        TEXTS, st.floats(allow_nan=False, allow_infinity=False) | st.integers(), max_size=3
    ).map(lambda each: tuple(each.items())),
    failure=st.none() | TEXTS.filter(bool),
    answer=st.none() | TEXTS,
)


@given(REGISTRATIONS, OUTCOMES)
def test_one_text_stands_for_what_is_said(registration: Registration, outcome: Outcome) -> None:
    assert Registration.from_text(registration.as_text()) == registration
    assert Outcome.from_text(outcome.as_text()) == outcome
    snapshot = Snapshot(
        rollout_id="r", snapshot_id="s", version=2, entries=(), registration=registration, outcome=outcome
    )
    read = decode_snapshot(encode_snapshot(snapshot))
    assert (read.registration, read.outcome) == (registration, outcome)


def test_what_is_equal_has_one_text() -> None:
    one = Outcome(reward=1, reward_components=(("b", -0.0), ("a", 2)))
    other = Outcome(reward=1.0, reward_components=(("a", 2.0), ("b", 0.0)))
    assert one == other
    assert one.as_text() == other.as_text() == '[1.0,[["a",2.0],["b",0.0]],null,null]'
    assert Registration(group_id="g").as_text() == '["g",null,null,true]'


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reward": math.nan}, "reward"),
        ({"reward": -math.inf}, "reward"),
        ({"reward": 10**400}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": "1.0"}, "reward"),
        ({"reward_components": (("a", math.nan),)}, "a"),
        ({"reward_components": (("a", False),)}, "a"),
        ({"reward_components": ((5, 1.0),)}, "reward_components"),
        ({"failure": ""}, "failure"),
        ({"failure": 3}, "failure"),
        ({"answer": {"x": 1}}, "answer"),
        ({"answer": "x" * (MAX_TEXT_BYTES + 1)}, "answer"),
    ],
)
def test_no_outcome_is_made_of_what_cannot_be_one(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError) as caught:
        Outcome(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"group_id": None}, "group_id"),
        ({"group_id": "g", "sample": True}, "sample"),
        ({"group_id": "g", "sample": 1.0}, "sample"),
        ({"group_id": "g", "sample": -1}, "sample"),
        ({"group_id": "g", "sample": 2**70}, "sample"),
        ({"group_id": "g", "task": {"a": 1}}, "task"),
        ({"group_id": "g", "agent_completes": 1}, "agent_completes"),
        ({"group_id": "g", "task": "ü" * MAX_TASK_BYTES}, "task"),
    ],
)
def test_no_registration_is_made_of_what_cannot_be_one(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError) as caught:
        Registration(**fields)
    assert caught.value.field == named


def test_what_is_said_is_in_the_row_of_a_rollout() -> None:
    """`/token-records` and the files of an export have it."""
    registration, outcome = Registration(group_id="g", sample=1, task='{"a":1}'), Outcome(reward=0.5)
    snapshot = Snapshot(
        rollout_id="r", snapshot_id="s", version=2, entries=(), registration=registration, outcome=outcome
    )
    row = rollout_row(snapshot)
    assert (row["group_id"], row["sample"], row["task"]) == ("g", 1, '{"a":1}')
    assert json.loads(row["outcome"]) == {"reward": 0.5, "reward_components": {}, "failure": None, "answer": None}
    nothing = rollout_row(Snapshot(rollout_id="r", snapshot_id="s", version=1, entries=()))
    assert [nothing[name] for name in ("group_id", "sample", "task", "outcome")] == [None] * 4
    assert list(row) == ROLLOUT_SCHEMA.names


def test_a_snapshot_of_which_nothing_is_said_has_the_bytes_of_before() -> None:
    """Who reads with an older version reads these, and refuses by name what it does not know."""
    data = encode_snapshot(Snapshot(rollout_id="r", snapshot_id="s", version=1, entries=()))
    assert b"registration" not in data
    assert b"outcome" not in data
