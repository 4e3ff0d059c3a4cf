"""Calls that began and left no record: when nothing was lost with them, and what has to be known for that."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_capture.build.builder import ExcludedCall, build
from gym_capture.capture.codec import decode_intent, encode_intent
from gym_capture.capture.facts import Begun, Committed, DeliveryKnown, Event
from gym_capture.capture.lost_calls import Purpose
from gym_capture.capture.operations import Begin, Commit, MarkDelivery
from gym_capture.capture.record_fields import with_values
from gym_capture.capture.record_rows import rollout_row
from gym_capture.capture.records import CallIntent, Continues, LostCall, Root, Snapshot, TokenEntry, Unresolved
from gym_capture.capture.rollout_state import RolloutState
from gym_capture.capture.snapshot_codec import decode_snapshot, encode_snapshot
from gym_capture.data.nemo_gym import read_rollout
from gym_capture.data.record_files import open_files
from gym_capture.rollout_counts import CallCounts
from gym_capture.stores.log import LogStore
from gym_capture.stores.memory import MemoryStore
from tests.calls import ALL_CHAINS, call, excluded, rows, snapshot


def key(name: str) -> str:
    """A fingerprint."""
    return name.encode().hex().ljust(32, "0")


def intent(call_id: str, asks: str, *, after: tuple[str, str] | None = None, body: str = "") -> CallIntent:
    """`asks`: the conversation it sends. `after`: the request that its latest turn answers, and the turn."""
    asked, answer = after or ("", "")
    return CallIntent(
        rollout_id="r1",
        model_call_id=call_id,
        created_at=1.0,
        request_digest=body or f"body of {asks}",
        request_key=key(asks) if asks else "",
        asked_key=key(asked) if asked else "",
        answer_key=key(answer) if answer else "",
    )


FIRST = call("a", [1, 2], [3, 9], parent=Root(), turn_key=key("said a"))
SECOND = call("b", [1, 2, 3, 9, 4], [5, 9], parent=Continues("a", 4), turn_key=key("said b"))


def frozen(*intents: CallIntent, entries: tuple[TokenEntry, ...] = (FIRST, SECOND)) -> Snapshot:
    """What a store shows of a rollout with these intents and these records."""

    async def run() -> Snapshot:
        store = MemoryStore()
        epoch = 1
        for each in intents:
            epoch = await store.write(Begin(each))
        for entry in entries:
            await store.write(Commit(replace(entry, delivered=None), epoch=epoch))
            if entry.delivered is not None:
                mark = MarkDelivery("r1", entry.model_call_id, delivered=entry.delivered, epoch=epoch)
                await store.write(mark)
        return await store.freeze("r1")

    return asyncio.run(run())


A, B = intent("a", "hi"), intent("b", "more", after=("hi", "said a"))
LOST_FIRST = intent("lost", "hi")
LOST_SECOND = intent("lost", "more", after=("hi", "said a"))
SENT = (FIRST, replace(SECOND, delivered=True))


def test_a_lost_try_whose_retry_was_continued_is_counted_and_masks_nothing() -> None:
    for intents in itertools.permutations((A, B, LOST_FIRST)):
        built = build(frozen(*intents), ALL_CHAINS)
        assert built.mask_reasons == ()
        assert built.excluded == (ExcludedCall("lost", "lost_try", 0),)
        assert (built.counts.lost_tries, built.counts.quarantined_calls, built.counts.n_calls) == (1, 0, 2)
        assert built.counts.excluded_tokens == {"lost_try": 0}
        assert [row["calls"] for row in rows(built)] == [["a", "b"]]


def test_a_lost_try_of_a_final_call_whose_retry_was_delivered_masks_nothing() -> None:
    built = build(frozen(A, B, LOST_SECOND, entries=SENT))
    assert (built.mask_reasons, built.counts.lost_tries) == ((), 1)


def test_several_tries_may_be_lost() -> None:
    again = [replace(LOST_FIRST, model_call_id=f"lost-{number}") for number in range(3)]
    built = build(frozen(A, B, *again, LOST_SECOND, entries=SENT))
    assert (built.mask_reasons, built.counts.lost_tries) == ((), 4)


@pytest.mark.parametrize(
    ("intents", "entries"),
    [
        pytest.param((A, B, LOST_SECOND), (FIRST, SECOND), id="nobody knows whether the retry arrived"),
        pytest.param((A, B, LOST_SECOND), (FIRST, replace(SECOND, delivered=False)), id="it did not"),
        pytest.param((A, B, replace(LOST_SECOND, request_digest="other")), SENT, id="delivered, but another body"),
        pytest.param((A, B, intent("lost", "elsewhere")), SENT, id="never asked again"),
        pytest.param(
            (A, B, LOST_FIRST, intent("c", "?", after=("hi", "said by the lost call"))),
            (*SENT, call("c", [1, 8], [9], turn_key=key("c"))),
            id="its answer may have been used beside the other one",
        ),
        pytest.param(
            (A, B, LOST_SECOND, intent("d", "?", after=("more", "said by the lost call"))),
            SENT,
            id="by a call that was lost, too",
        ),
        pytest.param(
            (A, B, LOST_FIRST), (with_values(FIRST, finish_reason="abort"), SECOND), id="the answer was cut off"
        ),
        pytest.param((A, B, LOST_FIRST), (SECOND,), id="the answer's own record is lost"),
        pytest.param((A, B, replace(LOST_FIRST, request_key="")), SENT, id="an old intent: not said what for"),
        pytest.param((A, replace(B, request_key="", answer_key=""), LOST_FIRST), SENT, id="an old intent beside it"),
        pytest.param((A, LOST_FIRST), SENT, id="a record without an intent"),
        pytest.param((A, B, replace(LOST_FIRST, request_key="no fingerprint")), SENT, id="no fingerprint"),
        pytest.param((A, B, replace(LOST_FIRST, request_key="abcd")), SENT, id="a short fingerprint"),
        pytest.param(
            (A, B, replace(LOST_FIRST, request_key="", asked_key=key("x"), answer_key=key("y"))),
            SENT,
            id="it goes on from a turn of its client",
        ),
    ],
)
def test_what_is_not_proven_masks(intents: tuple[CallIntent, ...], entries: tuple[TokenEntry, ...]) -> None:
    built = build(frozen(*intents, entries=entries))
    assert any(reason.startswith("dangling_intent:") for reason in built.mask_reasons)
    assert "lost" not in excluded(built)


@pytest.mark.parametrize("origin", ["added", "no_match", "rewritten_turn", "unknown_rollout"])
def test_nothing_is_proven_where_a_request_echoes_turns_of_unknown_origin(origin: str, tmp_path: Path) -> None:
    """One of them could be what a lost call said: its request's own intent tells the latest turn only."""
    added = with_values(
        call("c", [1, 2, 3, 9, 4, 5, 9, 6], [7, 9], parent=Continues("b", 7), turn_key=key("said c")),
        normalized=("turns_added",),
    )
    elsewhere = call("c", [8, 8], [7, 9], parent=Unresolved(origin), turn_key=key("said c"))
    third = intent("c", "c", after=("own", "own turn"))
    entries = (FIRST, SECOND, added if origin == "added" else elsewhere)
    shown = frozen(A, B, LOST_FIRST, third, entries=entries)
    assert "dangling_intent:lost" in build(shown, ALL_CHAINS).mask_reasons
    with open_files("nemo-gym", tmp_path / "out") as files:
        files.add(shown)
    assert build(read_rollout(tmp_path / "out", "r1"), ALL_CHAINS).masked
    of_known = (FIRST, SECOND, with_values(added, normalized=()))
    assert build(frozen(A, B, LOST_FIRST, third, entries=of_known), ALL_CHAINS).mask_reasons == ()


def test_a_lost_call_masks_where_a_store_does_not_say_what_it_was_for() -> None:
    assert build(replace(frozen(A, B, LOST_FIRST), lost_calls=())).mask_reasons == ("dangling_intent:lost",)


def test_other_reasons_of_the_same_call_stay() -> None:
    proven = frozen(A, B, LOST_FIRST)
    marked = replace(proven, incomplete=("capture_failed:lost", *proven.incomplete))
    assert build(marked).mask_reasons == ("capture_failed:lost",)


def test_a_reason_of_another_kind_is_not_dropped_because_of_its_end() -> None:
    lost = LostCall(model_call_id="a:b", retries=(), answers=(key("said a"),))
    made = snapshot(FIRST, SECOND, incomplete=("dangling_intent:b", "x:a:b"), lost_calls=(lost,))
    assert build(made).mask_reasons == ("dangling_intent:b", "x:a:b")


@given(st.permutations([A, B, LOST_FIRST, replace(LOST_SECOND, model_call_id="lost-2")]), st.randoms())
def test_the_order_of_events_changes_nothing(intents: list[CallIntent], random: Any) -> None:
    events: list[Event] = [Begun(1, each) for each in intents]
    none = CallCounts(0, False, False)
    events += [Committed(1, "a", b"a", none), Committed(1, "b", b"b", none), DeliveryKnown(1, "b", True)]
    random.shuffle(events)
    state = RolloutState("r1", 1)
    for event in [*events, *events]:
        state.apply(event)
    assert state.freeze().snapshot.lost_calls == (
        LostCall(model_call_id="lost", retries=("a",), answers=(key("said a"),)),
        LostCall(model_call_id="lost-2", retries=("b",), answers=()),
    )


def test_what_lost_calls_were_for_is_found_without_comparing_all_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state actor does this between calls: thousands of calls whose clients went on without an answer."""
    compared = 0

    class Counted(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return bytes.__eq__(self, other)

    state = RolloutState("r1", 1)
    for number in range(500):
        state.apply(Begun(1, intent(f"c{number}", f"{number}", after=(f"{number - 1}", "said"))))
    unpack = Purpose.unpack
    monkeypatch.setattr(Purpose, "unpack", lambda packed: Purpose(*map(Counted, unpack(packed))))
    lost = state.freeze().snapshot.lost_calls
    assert [len(each.answers) for each in lost].count(1) == 499
    assert compared < 20 * 500


@dataclass
class Sampled:
    """A call as it was, whatever became of its record."""

    intent: CallIntent
    entry: TokenEntry


@st.composite
def conversations(draw: st.DrawFn) -> list[Sampled]:
    """A rollout in which requests are tried, sampled twice and gone on from in any way. Every reply is another one."""
    calls: list[Sampled] = []
    for number in range(draw(st.integers(1, 8))):
        name = f"c{number}"
        before = draw(st.sampled_from([None, *calls]))
        again = draw(st.sampled_from([None, *calls]))
        if again is not None:
            body = draw(st.sampled_from([again.intent.request_digest, f"another body {number}"]))
            intent = replace(again.intent, model_call_id=name, request_digest=body)
            prompt, parent = again.entry.prompt_token_ids.tolist(), again.entry.parent
        elif before is not None:
            answer = before.entry.keys.turn_key or ""
            intent = replace(A, model_call_id=name, request_key=key(f"asks {number}"), request_digest=name)
            intent = replace(intent, asked_key=before.intent.request_key, answer_key=answer)
            prompt, parent = [*before.entry.cumulative_ids().tolist(), 7], Continues(*_end(before.entry))
        else:
            intent = replace(A, model_call_id=name, request_key=key(f"asks {number}"), request_digest=name)
            prompt, parent = [1, number + 2], Root()
        delivered = draw(st.sampled_from([None, True, False]))
        entry = call(
            name, prompt, [100 + number, 9], parent=parent, turn_key=key(f"said {number}"), delivered=delivered
        )
        calls.append(Sampled(intent, entry))
    return calls


def _end(entry: TokenEntry) -> tuple[str, int]:
    return entry.model_call_id, entry.cum_len


@given(conversations(), st.data())
@settings(deadline=None)
def test_a_lost_call_masks_nothing_only_where_its_record_would_have_changed_nothing(
    calls: list[Sampled], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(calls))
    name = lost.entry.model_call_id
    intents = [each.intent for each in calls]
    # What went on from the lost call is recorded as a server would: with what it said as text.
    known = [each.entry for each in calls if each is not lost]
    recorded = tuple(
        replace(entry, parent=Unresolved("no_match")) if entry.parent == Continues(*_end(lost.entry)) else entry
        for entry in known
    )
    without = build(frozen(*intents, entries=recorded), ALL_CHAINS)
    if f"dangling_intent:{name}" in without.mask_reasons:
        assert without.counts.lost_tries == 0
        return
    whole = build(frozen(*intents, entries=(*known, replace(lost.entry, delivered=None))), ALL_CHAINS)
    assert rows(without) == rows(whole)
    assert without.mask_reasons == whole.mask_reasons
    assert excluded(whole)[name] in ("retry_orphan", "unresolved_retries")


# --- as bytes and files ------------------------------------------------------------------------------------------


def test_intents_keep_what_they_say_and_old_ones_are_read() -> None:
    for each in (A, B, intent("p", "", after=("hi", "said a"))):
        assert decode_intent(encode_intent(each)) == each
    old = b'{"v":1,"rollout_id":"r1","model_call_id":"a","created_at":1.0,"request_digest":"d"}'
    read = CallIntent(rollout_id="r1", model_call_id="a", created_at=1.0, request_digest="d")
    assert decode_intent(old) == read
    assert encode_intent(read) == old


def test_snapshots_keep_what_is_known_of_lost_calls() -> None:
    made = frozen(A, B, LOST_FIRST)
    assert made.lost_calls == (LostCall(model_call_id="lost", retries=("a",), answers=(key("said a"),)),)
    assert decode_snapshot(encode_snapshot(made)).lost_calls == made.lost_calls
    without = encode_snapshot(replace(made, lost_calls=())).replace(b'"lost_calls":[],', b"                ")
    assert b"lost_calls" not in without
    assert build(decode_snapshot(without)).mask_reasons == ("dangling_intent:lost",)


async def test_a_log_that_is_opened_again_says_the_same(tmp_path: Path) -> None:
    store = await LogStore.open(tmp_path, fsync=False, segment_bytes=256)
    for each in (A, B, LOST_FIRST):
        epoch = await store.write(Begin(each))
    for entry in (FIRST, SECOND):
        await store.write(Commit(entry, epoch=epoch))
    before = await store.freeze("r1")
    await store.close()
    store = await LogStore.open(tmp_path, fsync=False)
    after = await store.freeze("r1")
    await store.close()
    before, after = before, after
    assert before.lost_calls == after.lost_calls != ()
    assert before.snapshot_id == after.snapshot_id
    assert not build(after).masked


def mixed() -> Snapshot:
    """One lost call of which it is proven, one of which it is not."""
    return frozen(A, B, LOST_FIRST, intent("lost-2", "elsewhere"))


@pytest.mark.parametrize("make", [lambda: frozen(A, B, LOST_FIRST), lambda: frozen(A, B, LOST_SECOND), mixed])
def test_what_is_exported_for_nemo_gym_builds_the_same(make: Callable[[], Snapshot], tmp_path: Path) -> None:
    made = make()
    with open_files("nemo-gym", tmp_path) as files:
        files.add(made)
    read = read_rollout(tmp_path, "r1")
    assert read.lost_calls == made.lost_calls
    assert (build(read).mask_reasons, build(read).excluded) == (build(made).mask_reasons, build(made).excluded)
    # To others, who do not know the field, a lost call is a lost call.
    assert (tmp_path / "r1.tokens.intents").read_text().split() == [lost.model_call_id for lost in made.lost_calls]


def test_a_rollout_that_lost_nothing_is_exported_as_ever(tmp_path: Path) -> None:
    with open_files("nemo-gym", tmp_path) as files:
        files.add(frozen(A, B))
    state = orjson.loads((tmp_path / "r1.tokens.state.json").read_bytes())
    line = orjson.loads((tmp_path / "r1.tokens.jsonl").read_bytes().splitlines()[0])
    assert (state.keys(), "turn_key" in line) == ({"snapshot_id", "version", "incomplete"}, False)


def test_a_wrong_list_of_lost_calls_masks(tmp_path: Path) -> None:
    with open_files("nemo-gym", tmp_path) as files:
        files.add(frozen(A, B, LOST_FIRST))
    path = tmp_path / "r1.tokens.state.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"lost_calls": [{"model_call_id": "lost"}]}))
    assert {"corrupt_state", "dangling_intent:lost"} <= set(build(read_rollout(tmp_path, "r1")).mask_reasons)


def test_the_rollouts_row_says_it() -> None:
    assert rollout_row(frozen(A, B, LOST_FIRST))["lost_calls"] == [
        {"model_call_id": "lost", "retries": ["a"], "answers": [key("said a")]}
    ]
