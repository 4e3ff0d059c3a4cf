"""Which of two answers the agent got: what a shard is told of deliveries, what lineage and builds make of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gym_capture.build.builder import BuiltRollout, build
from gym_capture.capture.operations import Begin, Commit
from gym_capture.capture.protocols import Resolution, Resolved
from gym_capture.capture.records import Continues, Root, TokenEntry, Unresolved
from gym_capture.capture.sinks import BegunCall
from gym_capture.serving.state import StateClient
from tests.calls import call, excluded, only
from tests.serving.shards import LocalActor, client_of, shard
from tests.serving.test_state import intent

FIRST = call("first", [1, 2], [3], parent=Root(), turn_key="k1")
TRY_A = call("a", [1, 2, 3, 4], [5, 9], parent=Continues("first", 3), turn_key="k2")
TRY_B = call("b", [1, 2, 3, 4], [6, 9], parent=Continues("first", 3), turn_key="k2")
SAME_WORDS = ["k1", "k2"]
"""What a request echoes that goes on from either try: their ids differ, their text does not."""


@dataclass
class Graph:
    """A rollout's shard and its client, as replicas use them."""

    actor: LocalActor
    state: StateClient

    async def begin(self, entry: TokenEntry, turn_keys: list[str]) -> BegunCall:
        body = str(entry.prompt_token_ids.tolist())
        return await self.state.begin(replace(intent(entry.model_call_id), request_digest=body), turn_keys)

    async def answered(self, entry: TokenEntry, turn_keys: list[str], *, sent: bool | None) -> None:
        """A call as a replica makes it. sent: whether its reply's end left; None: the replica died in between."""
        begun = await self.begin(entry, turn_keys)
        await begun.sink.put(entry)
        if sent is False:
            await begun.sink.mark_delivery(entry.model_call_id, delivered=False)
        elif sent and begun.may_be_retry:
            await begun.sink.mark_delivery(entry.model_call_id, delivered=True)

    async def outcome(self) -> tuple[BuiltRollout, Resolution]:
        """What a build makes of the rollout, and lineage of its echo: the same live and after a restart."""
        built, resolution = build(await self.state.freeze("r1")), await self.state.resolve("r1", SAME_WORDS)
        await self.actor.restart()
        again = await self.state.resolve("r1", SAME_WORDS)
        assert repr(again) == repr(resolution)
        assert build(await self.state.freeze("r1")).mask_reasons == built.mask_reasons
        return built, resolution


def graph(directory: Path) -> Graph:
    actor = LocalActor(lambda: shard(directory, store_kwargs={"fsync": False}))
    return Graph(actor, client_of(actor))


async def retried(directory: Path, *, a_sent: bool | None, b_sent: bool | None) -> Graph:
    played = graph(directory)
    await played.answered(FIRST, [], sent=True)
    await played.answered(TRY_A, ["k1"], sent=a_sent)
    await played.answered(TRY_B, ["k1"], sent=b_sent)
    return played


async def test_BD_05_a_final_call_retried_because_its_reply_was_lost_is_settled(tmp_path: Path) -> None:
    built, resolution = await (await retried(tmp_path, a_sent=False, b_sent=True)).outcome()
    assert isinstance(resolution, Resolved)
    assert resolution.call_id == "b"
    assert only(built).call_ids == ("first", "b")
    assert excluded(built) == {"a": "retry_orphan"}
    assert not built.masked


@pytest.mark.parametrize(("a_sent", "b_sent"), [(False, False), (False, None), (None, None)])
async def test_BD_05_silence_settles_nothing(tmp_path: Path, a_sent: bool | None, b_sent: bool | None) -> None:
    """A replica that dies between record and reply says nothing, and that is no proof of a delivery."""

    built, resolution = await (await retried(tmp_path, a_sent=a_sent, b_sent=b_sent)).outcome()
    assert resolution == Unresolved("ambiguous")
    assert built.mask_reasons == ("unresolved_retries",)
    assert excluded(built) == {"a": "unresolved_retries", "b": "unresolved_retries"}


async def test_a_retry_after_a_replica_died_is_settled_by_its_own_delivery(tmp_path: Path) -> None:
    """The build needs one delivered try; lineage, which must know before it supplies a prefix, is stricter."""

    built, resolution = await (await retried(tmp_path, a_sent=None, b_sent=True)).outcome()
    assert resolution == Unresolved("ambiguous")
    assert only(built).call_ids == ("first", "b")
    assert not built.masked


async def test_a_lost_reply_that_the_agent_went_on_from_was_used(tmp_path: Path) -> None:
    """All of its text had arrived, only its end was lost: what is echoed counts more than what was sent."""

    played = graph(tmp_path)
    await played.answered(FIRST, [], sent=True)
    await played.answered(TRY_A, ["k1"], sent=False)
    resolution = await played.state.resolve("r1", SAME_WORDS)
    assert isinstance(resolution, Resolved)
    assert resolution.call_id == "a"
    after = call("after", [1, 2, 3, 4, 5, 9, 7], [8], parent=Continues("a", 6), turn_key="k3")
    await played.answered(after, SAME_WORDS, sent=True)
    built, _ = await played.outcome()
    assert only(built).call_ids == ("first", "a", "after")
    assert not built.masked


async def test_a_call_is_asked_for_its_delivery_only_if_it_may_be_a_retry(tmp_path: Path) -> None:
    played = graph(tmp_path)
    assert not (await played.begin(FIRST, [])).may_be_retry
    await played.answered(FIRST, [], sent=True)
    assert (await played.begin(call("again", [1, 2], [4]), [])).may_be_retry, "another call without a parent"
    await played.answered(TRY_A, ["k1"], sent=True)
    assert (await played.begin(TRY_B, ["k1"])).may_be_retry
    assert not (await played.begin(call("next", [1], [2]), SAME_WORDS)).may_be_retry
    assert (await played.begin(call("same", [1], [2]), SAME_WORDS)).may_be_retry, "the other has no record yet"
    unproven = call("rewritten", [1, 7], [8], parent=Unresolved("no_match"), turn_key="k9")
    await played.answered(unproven, ["k8"], sent=True)
    assert (await played.begin(call("next2", [1], [2]), SAME_WORDS)).may_be_retry, "its parent may be anything"


async def test_putting_a_marked_record_again_is_no_conflict(tmp_path: Path) -> None:
    """Ray repeats a put over a restart; by then the record has its mark."""

    played = await retried(tmp_path, a_sent=False, b_sent=True)
    before = await played.state.freeze("r1")
    await played.actor.restart()
    epoch = await played.state.write(Begin(intent("a")))
    await played.state.write(Commit(TRY_A, epoch=epoch))
    after = await played.state.freeze("r1")
    assert (after.snapshot_id, after.problems, after.incomplete) == (before.snapshot_id, (), ())
