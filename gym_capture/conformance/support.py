"""Parts of the checks: the store under test, sample records, and expectations that say what was found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from gym_capture.capture.codec import encode_entry
from gym_capture.capture.operations import Abandon, Begin, Commit, MarkDelivery, MarkIncomplete
from gym_capture.capture.protocols import RecordStore
from gym_capture.capture.records import (
    CallIntent,
    CallReply,
    CallRequest,
    Parent,
    PolicyTrace,
    Root,
    Snapshot,
    TokenEntry,
    TurnKeys,
    WeightSpan,
    digest_ids,
)
from gym_capture.errors import GymCaptureError, RetiredRolloutError

Store: TypeAlias = RecordStore
"""The store under test."""
Factory: TypeAlias = Callable[[], Awaitable[Store]]
"""Makes an empty store."""
Reopen: TypeAlias = Callable[[Store], Awaitable[Store]]
"""Closes a store and opens it again on the same records, as after a restart."""
Check: TypeAlias = Callable[[Store], Awaitable[None]]
DurabilityCheck: TypeAlias = Callable[[Store, Reopen], Awaitable[None]]


class ConformanceError(AssertionError):
    """A store does not do what the contract says."""


def sample_entry(
    rollout_id: str,
    call_id: str,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    generation: Sequence[int] = (4, 5),
    parent: Parent | None = None,
    text: str = "hello",
) -> TokenEntry:
    """A well-formed entry with everything set that an engine sets."""
    prompt_ids, generated_ids = np.array(prompt, dtype=np.int32), np.array(generation, dtype=np.int32)
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=prompt_ids,
        generation_token_ids=generated_ids,
        generation_log_probs=np.linspace(-0.5, -1.5, len(generation), dtype=np.float32),
        parent=Root() if parent is None else parent,
        digest=digest_ids(prompt_ids, generated_ids),
        created_at=1_700_000_000.25,
        request=CallRequest(
            requested_model="some-model",
            has_tools=True,
            sampling={"temperature": 1.0, "top_p": 1.0},
            max_tokens=100,
        ),
        reply=CallReply(
            output_items=(
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
            ),
            token_item_index=0,
            finish_reason="stop",
        ),
        keys=TurnKeys(turn_key=f"key of {call_id}"),
        policy=PolicyTrace(model="policy", weight_versions=(WeightSpan(0, len(generation), "1"),)),
    )


def sample_intent(rollout_id: str, call_id: str) -> CallIntent:
    return CallIntent(rollout_id=rollout_id, model_call_id=call_id, created_at=1_700_000_000.0, request_digest="d")


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def expect_equal(got: object, expected: object, what: str) -> None:
    expect(got == expected, f"{what}: got {got!r}, expected {expected!r}")


async def expect_error(operation: Awaitable[object], error: type[GymCaptureError], what: str) -> None:
    (outcome,) = await asyncio.gather(operation, return_exceptions=True)
    expect(isinstance(outcome, error), f"{what}: got {outcome!r}, expected {error.__name__}")


def expect_entries(snapshot: Snapshot, *expected: TokenEntry) -> None:
    """The snapshot has these entries, whole, bit for bit, in any order."""
    got = {entry.model_call_id: encode_entry(entry) for entry in snapshot.entries}
    want = {entry.model_call_id: encode_entry(entry) for entry in expected}
    expect_equal([suffix.model_call_id for suffix in snapshot.orphans], [], "calls without their whole prompts")
    expect_equal(len(snapshot.entries), len(expected), "number of entries")
    expect_equal(sorted(got), sorted(want), "recorded calls")
    for call_id, encoded in want.items():
        expect(got[call_id] == encoded, f"the record of call {call_id} came back with other content")


def expect_clean(snapshot: Snapshot) -> None:
    expect_equal((snapshot.incomplete, snapshot.problems), ((), ()), "incomplete and problems")


def expect_same(got: Snapshot, expected: Snapshot) -> None:
    expect_equal(
        (got.snapshot_id, got.version, got.incomplete, got.problems),
        (expected.snapshot_id, expected.version, expected.incomplete, expected.problems),
        "snapshot",
    )
    expect_equal((got.registration, got.outcome), (expected.registration, expected.outcome), "what was said of it")
    expect_entries(got, *expected.entries)


async def expect_late_writes_refused(store: Store, epoch: int) -> None:
    """Whatever it is that a writer of this epoch still says of rollout `r` and its call `c`."""
    for what, operation in (
        ("a late put", Commit(sample_entry("r", "late"), epoch=epoch)),
        ("a late repeat", Commit(sample_entry("r", "c"), epoch=epoch)),
        ("a late mark", MarkIncomplete("r", "late", epoch=epoch)),
        ("a late abandon", Abandon("r", "c", epoch=epoch)),
        ("a late delivery", MarkDelivery("r", "c", delivered=True, epoch=epoch)),
        ("a late loss", MarkDelivery("r", "c", delivered=False, epoch=epoch)),
    ):
        await expect_error(store.write(operation), RetiredRolloutError, what)


async def begin(store: Store, rollout_id: str, call_id: str) -> int:
    """Begins a call; its epoch."""
    return await store.write(Begin(sample_intent(rollout_id, call_id)))


async def run_call(store: Store, rollout_id: str, call_id: str) -> tuple[TokenEntry, int]:
    """One whole call; its entry and its epoch."""
    epoch = await begin(store, rollout_id, call_id)
    entry = sample_entry(rollout_id, call_id)
    await store.write(Commit(entry, epoch=epoch))
    return entry, epoch
