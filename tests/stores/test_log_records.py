"""Facts as records of the log, and what earlier versions wrote and read of them."""

from __future__ import annotations

import json

import pytest

from gym_capture.capture.facts import Retired
from gym_capture.stores.frames import Frame, RecordType
from gym_capture.stores.log_records import draft_of, event_of

CLEARED = Retired(3, None, "", 0, 1.5, keeps_records=False)
CLOSED = Retired(3, None, "", 0, 1.5, keeps_records=False, closed=True)


def read(payload: bytes) -> object:
    return event_of(Frame(RecordType.RETIRED, 3, "r", "", payload, offset=0, size=0, starts_batch=True))


@pytest.mark.parametrize("event", [CLEARED, CLOSED, Retired(3, 2, "s", 4, 1.5, keeps_records=True)])
def test_a_tombstone_comes_back(event: Retired) -> None:
    assert read(draft_of("r", event, b"").payload) == event


def test_a_tombstone_of_a_version_that_could_not_close_is_read_and_written_as_it_was() -> None:
    before = b'[null,"",0,1.5,false]'
    assert read(before) == CLEARED
    assert draft_of("r", CLEARED, b"").payload == before
    assert json.loads(draft_of("r", CLOSED, b"").payload) == [*json.loads(before), True]
