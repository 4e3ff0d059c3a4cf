"""The audit finds what is wrong: each fault that it looks for is made on purpose, one at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from gym_capture.engines.hf_template import HfChatTemplate
from tests.faults.agents import Ledger, Played
from tests.faults.audit import Log, audit
from tests.faults.bench import bench, play
from tests.faults.engine import Voice


@pytest.fixture(scope="module")
def recorded(template: HfChatTemplate, tmp_path_factory: pytest.TempPathFactory) -> tuple[Log, Played]:
    """A rollout of four calls, as the log has it and as its agent has."""

    async def run() -> tuple[Log, Played]:
        async with bench(template, tmp_path_factory.mktemp("records")) as graph:
            played = await play(graph, "r", turns=4)
            played.is_over = True
            return graph.log(), played

    return asyncio.run(run())


Faulty = Callable[[Log, Played], None]


def never_there(log: Log, played: Played) -> None:
    played.turns[-1] = replace(played.turns[-1], call_id="chatcmpl-never")


def rollout_gone(log: Log, played: Played) -> None:
    del log.snapshots["r"]


def record_gone(log: Log, played: Played) -> None:
    snapshot = log.snapshots["r"]
    kept = tuple(entry for entry in snapshot.entries if entry.model_call_id != played.turns[-1].call_id)
    log.snapshots["r"] = replace(snapshot, entries=kept)


def other_text(log: Log, played: Played) -> None:
    played.turns[1] = replace(played.turns[1], text=played.turns[2].text)


def other_ids(log: Log, played: Played) -> None:
    snapshot = log.snapshots["r"]
    first, *others = snapshot.entries
    wrong = replace(first, generation_token_ids=first.generation_token_ids[::-1])
    log.snapshots["r"] = replace(snapshot, entries=(wrong, *others))


def recorded_twice(log: Log, played: Played) -> None:
    log.committed[played.turns[0].call_id] += 1


def in_a_snapshot_twice(log: Log, played: Played) -> None:
    snapshot = log.snapshots["r"]
    log.snapshots["r"] = replace(snapshot, entries=(*snapshot.entries, snapshot.entries[0]))


def no_mark(log: Log, played: Played) -> None:
    played.cut_off.append("chatcmpl-cut")


def other_parent(log: Log, played: Played) -> None:
    played.turns[1], played.turns[2] = played.turns[2], played.turns[1]


def masked_for_nothing(log: Log, played: Played) -> None:
    log.snapshots["r"] = replace(log.snapshots["r"], incomplete=("dangling_intent:x",))


def masked_for_a_retry(log: Log, played: Played) -> None:
    played.turns[1] = replace(played.turns[1], attempts=2)
    masked_for_nothing(log, played)


def not_all_delivered(log: Log, played: Played) -> None:
    del played.turns[-1]


FAULTS: dict[str, tuple[Faulty, ...]] = {
    "lost": (never_there, rollout_gone, record_gone, other_text, other_ids, no_mark),
    "duplicated": (recorded_twice, in_a_snapshot_twice),
    "inexact": (other_parent, masked_for_nothing, masked_for_a_retry, not_all_delivered),
}


def test_a_sound_log_has_no_findings(recorded: tuple[Log, Played], template: HfChatTemplate) -> None:
    log, played = recorded
    found = audit(log, Ledger(rollouts={"r": played}), Voice(template))
    assert (found.all(), found.calls, found.rollouts, found.masked) == ([], 4, 1, {})


@pytest.mark.parametrize(
    ("kind", "make"),
    [(kind, make) for kind, faults in FAULTS.items() for make in faults],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_fault_is_found(recorded: tuple[Log, Played], template: HfChatTemplate, kind: str, make: Faulty) -> None:
    log, played = recorded
    log = Log(Counter(log.committed), dict(log.snapshots))
    played = replace(played, turns=list(played.turns), cut_off=[])
    make(log, played)
    found = audit(log, Ledger(rollouts={"r": played}), Voice(template))
    assert {"lost": found.lost, "duplicated": found.duplicated, "inexact": found.inexact}[kind]
    assert not found.is_clean
