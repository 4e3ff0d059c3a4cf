"""Operations are values, and one that is not well-formed concerns nobody but its caller."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, cast, get_args

import pytest

from gym_capture.capture.operations import (
    Abandon,
    Begin,
    Clear,
    Close,
    Commit,
    Complete,
    Drop,
    GoOn,
    HandOn,
    MarkDelivery,
    MarkIncomplete,
    Operation,
    Register,
    Replay,
    check,
)
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.sinks import TokenSink
from gym_capture.conformance import sample_entry, sample_intent
from gym_capture.errors import InvalidRolloutIdError, RecordError, RetiredRolloutError
from gym_capture.stores.memory import MemoryStore

EVERY: list[Operation] = [
    Begin(sample_intent("r", "c")),
    Commit(sample_entry("r", "c"), epoch=1),
    Abandon("r", "c", epoch=1),
    MarkIncomplete("r", "why", epoch=1),
    MarkDelivery("r", "c", delivered=True, epoch=1),
    Drop("r", "snapshot", 1),
    Clear("r"),
    Register("r", Registration(group_id="g", sample=1, task='"count"')),
    Complete("r", Outcome(reward=0.5, reward_components=(("a", 1.0),))),
    Close("r"),
    HandOn("r"),
    GoOn("r", "earlier"),
    Replay("r", "c", "earlier call", epoch=1),
]


@pytest.mark.parametrize("operation", EVERY, ids=lambda operation: type(operation).__name__)
def test_an_operation_is_a_value_that_travels(operation: Operation) -> None:
    assert {type(each) for each in EVERY} == set(get_args(Operation))
    check(operation)
    assert operation.rollout_id == "r"
    again = pickle.loads(pickle.dumps(operation))
    assert isinstance(operation, Commit) or again == operation


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Begin(cast(Any, "intent")), "intent"),
        (Begin(replace(sample_intent("r", "c"), model_call_id=cast(str, 7))), "model_call_id"),
        (Begin(replace(sample_intent("r", "c"), created_at=cast(float, True))), "created_at"),
        (Begin(replace(sample_intent("r", "c"), answer_key=cast(str, b"key"))), "answer_key"),
        (Commit(cast(Any, b"entry"), epoch=1), "entry"),
        (Commit(sample_entry("r", "c"), epoch=cast(int, 1.0)), "epoch"),
        (Commit(sample_entry("r", "c"), epoch=cast(int, True)), "epoch"),
        (Commit(sample_entry("r", "c"), epoch=1, encoded=cast(bytes, "text")), "encoded"),
        (Abandon("r", cast(str, None), epoch=1), "call_id"),
        (MarkIncomplete("r", cast(str, 5), epoch=1), "reason"),
        (MarkDelivery("r", "c", delivered=cast(bool, 1), epoch=1), "delivered"),
        (Drop("r", cast(str, None), 1), "snapshot_id"),
        (Drop("r", "snapshot", cast(int, "1")), "version"),
        (Clear(cast(str, 5)), "rollout_id"),
        (Register("r", cast(Any, "g")), "registration"),
        (Complete("r", cast(Any, 1.0)), "outcome"),
        (Close(cast(str, 5)), "rollout_id"),
        (HandOn(cast(str, 5)), "rollout_id"),
        (GoOn("r", cast(str, None)), "source"),
        (Replay("r", "c", cast(str, b"c"), epoch=1), "recorded"),
        (Replay("r", "c", "earlier call", epoch=cast(int, "1")), "epoch"),
        (cast(Operation, ("clear", "r")), "operation"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_field(wrong: Operation, field: str) -> None:
    with pytest.raises(RecordError) as caught:
        check(wrong)
    assert caught.value.field == field


@pytest.mark.parametrize("operation", [Begin(sample_intent("..", "c")), Clear("a/b"), Abandon("", "c", epoch=1)])
def test_an_id_that_may_be_no_rollouts_is_refused(operation: Operation) -> None:
    with pytest.raises(InvalidRolloutIdError):
        check(operation)


async def test_a_sink_writes_under_its_epoch_and_not_into_the_next_attempt() -> None:
    store = MemoryStore()
    old = TokenSink(store, "r", await store.write(Begin(sample_intent("r", "lost"))))
    await store.write(Clear("r"))
    sink = TokenSink(store, "r", await store.write(Begin(sample_intent("r", "c"))))
    await store.write(Begin(sample_intent("r", "refused")))
    for late in (
        old.put(sample_entry("r", "c")),
        old.abandon("c"),
        old.mark_incomplete("late"),
        old.mark_delivery("c", delivered=True),
        old.replay("c", recorded="earlier call"),
    ):
        with pytest.raises(RetiredRolloutError):
            await late
    await sink.put(sample_entry("r", "c"))
    await sink.abandon("refused")
    await sink.mark_incomplete("why")
    await sink.mark_delivery("c", delivered=False)
    snapshot = await store.freeze("r")
    assert [(entry.model_call_id, entry.delivered) for entry in snapshot.entries] == [("c", False)]
    assert snapshot.incomplete == ("why",)
    assert snapshot.version == 6
