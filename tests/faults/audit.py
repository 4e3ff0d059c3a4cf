"""What must be true of the logs, whatever was killed: each acknowledged call is there once, and as it was acknowledged.

Invariant: a finding is a fact of the log files alone, compared with what agents wrote down; no server is asked.

Flow: `audit` reads the logs -> every acknowledged call is looked for, with the text, ids, log probabilities and parent
that it must have -> every call of which an agent saw only a part is there, or makes its rollout incomplete -> every
rollout is built: what is not masked holds exactly what was sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gym_capture.build.builder import BuiltRollout, build
from gym_capture.build.trajectories import Trajectory
from gym_capture.capture.records import Continues, Root, Snapshot, TokenEntry
from gym_capture.reasons import CaptureMark, reason_name, split_reason
from gym_capture.stores.frames import RecordType
from gym_capture.stores.inspect import read_snapshots
from gym_capture.stores.replay import read_segments
from tests.faults.agents import Ledger, Played, Turn
from tests.faults.engine import Voice, answer


@dataclass(slots=True)
class Findings:
    """What is wrong, and what there was."""

    lost: list[str] = field(default_factory=list)
    """Acknowledged calls that are not there, or not as they were acknowledged; calls that left no trace at all."""
    duplicated: list[str] = field(default_factory=list)
    """Calls that are there more than once."""
    inexact: list[str] = field(default_factory=list)
    """Wrong parents, and rollouts that are neither masked nor exact."""
    calls: int = 0
    rollouts: int = 0
    lost_tries: int = 0
    """Calls without a record that a retry stood in for."""
    masked: Counter[str] = field(default_factory=Counter)
    """Masked rollouts, by the names of their reasons."""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.inexact)

    def all(self) -> list[str]:
        return (
            [f"lost: {line}" for line in self.lost] + [f"duplicated: {line}" for line in self.duplicated] + self.inexact
        )


@dataclass(frozen=True, slots=True)
class Log:
    """What the log files hold, record by record."""

    committed: Counter[str]
    """How often the record of each call stands there."""
    snapshots: dict[str, Snapshot]


def read(directories: Iterable[Path]) -> Log:
    """The logs of all state actors."""
    committed: Counter[str] = Counter()
    snapshots: dict[str, Snapshot] = {}
    for directory in directories:
        for segment in read_segments(directory):
            committed.update(frame.call_id for frame in segment.frames if frame.type is RecordType.COMMITTED)
        for snapshot in read_snapshots(directory):
            assert snapshot.rollout_id not in snapshots, f"{snapshot.rollout_id} is in two logs"
            snapshots[snapshot.rollout_id] = snapshot
    return Log(committed, snapshots)


def audit(log: Log, ledger: Ledger, voice: Voice) -> Findings:
    """Compares what agents were told with what the log holds."""
    found = Findings(calls=log.committed.total(), rollouts=len(log.snapshots))
    found.duplicated += [f"{call_id}, {count} times" for call_id, count in log.committed.items() if count > 1]
    for played in ledger.rollouts.values():
        snapshot = log.snapshots.get(played.rollout_id)
        if snapshot is None:
            found.lost += [f"{turn.call_id} of {played.rollout_id}, which is not there" for turn in played.turns]
            continue
        entries = {entry.model_call_id: entry for entry in snapshot.entries}
        found.duplicated += [f"{call_id} in one snapshot" for call_id in _repeated(snapshot)]
        found.lost += _lost(played, entries, voice)
        found.lost += _without_a_trace(played, entries, snapshot)
        found.inexact += _wrong_parents(played, entries)
        built = build(snapshot)
        found.lost_tries += built.counts.lost_tries
        found.masked.update({reason_name(reason) for reason in built.mask_reasons})
        found.inexact += _inexact(played, built, snapshot)
        if played.is_calm and built.masked:
            found.inexact.append(f"{played.rollout_id} is masked although nothing happened to it: {built.mask_reasons}")
        elif played.got_all and set(map(reason_name, built.mask_reasons)) == {CaptureMark.DANGLING_INTENT}:
            found.inexact.append(f"{played.rollout_id} is masked although nothing was lost: {built.mask_reasons}")
    return found


def _repeated(snapshot: Snapshot) -> list[str]:
    counts = Counter(entry.model_call_id for entry in snapshot.entries)
    return [call_id for call_id, count in counts.items() if count > 1]


def _lost(played: Played, entries: dict[str, TokenEntry], voice: Voice) -> Iterator[str]:
    for turn in played.turns:
        entry = entries.get(turn.call_id)
        if entry is None:
            yield f"{turn.call_id} of {played.rollout_id}"
        elif wrong := list(_differences(turn, entry, voice)):
            yield f"{turn.call_id} of {played.rollout_id}: wrong {', '.join(wrong)}"


def _differences(turn: Turn, entry: TokenEntry, voice: Voice) -> Iterator[str]:
    """What of a record is not what its engine generated, and its agent got."""
    steps = voice.steps(turn.asked, turn.call_id)
    if turn.text != answer(turn.asked, turn.call_id):
        yield "reply"
    if [item["content"][0]["text"] for item in entry.reply.output_items] != [turn.text]:
        yield "text"
    if entry.generation_token_ids.tolist() != [number for step in steps for number in step.token_ids]:
        yield "ids"
    expected = np.array([value for step in steps for value in step.log_probs or ()], np.float32)
    if not np.array_equal(entry.generation_log_probs, expected):
        yield "log probabilities"
    if entry.reply.finish_reason != "stop":
        yield f"end ({entry.reply.finish_reason})"


def _without_a_trace(played: Played, entries: dict[str, TokenEntry], snapshot: Snapshot) -> Iterator[str]:
    """Calls that began to answer, and of which the log does not say what became."""
    incomplete = {split_reason(reason)[1] for reason in snapshot.incomplete}
    for call_id in played.cut_off:
        if call_id not in entries and call_id not in incomplete:
            yield f"{call_id} of {played.rollout_id}, which began to answer and left no mark"


def _wrong_parents(played: Played, entries: dict[str, TokenEntry]) -> Iterator[str]:
    """Replies of agents are all different, so each echo has one parent: the call before."""
    before: TokenEntry | None = None
    for turn in played.turns:
        entry = entries.get(turn.call_id)
        if entry is None:
            return
        expected = Root() if before is None else Continues(before.model_call_id, before.cum_len)
        if entry.parent != expected:
            yield f"{turn.call_id} of {played.rollout_id} has parent {entry.parent}, not {expected}"
        before = entry


def _inexact(played: Played, built: BuiltRollout, snapshot: Snapshot) -> Iterator[str]:
    """What is delivered of a rollout that is not masked, and is not what was sampled."""
    if built.masked:
        return
    main = [trajectory for trajectory in built.trajectories if trajectory.is_main]
    if len(main) != 1 or list(main[0].call_ids) != [turn.call_id for turn in played.turns]:
        delivered = [list(trajectory.call_ids) for trajectory in main]
        yield f"{played.rollout_id} delivers {delivered}, its agent got {[turn.call_id for turn in played.turns]}"
        return
    entries = {entry.model_call_id: entry for entry in snapshot.entries}
    yield from (f"{played.rollout_id}: {wrong}" for wrong in _not_as_sampled(main[0], entries))


def _not_as_sampled(trajectory: Trajectory, entries: dict[str, TokenEntry]) -> Iterator[str]:
    mask = np.zeros(trajectory.token_ids.size, np.bool_)
    ids: Sequence[int] = trajectory.token_ids.tolist()
    for call_id in trajectory.call_ids:
        entry = entries[call_id]
        start, end = entry.prompt_len, entry.cum_len
        if ids[start:end] != entry.generation_token_ids.tolist():
            yield f"the ids of {call_id} are not where they were sampled"
        if ids[:start] != entry.prompt_token_ids.tolist():
            yield f"the prompt of {call_id} is not what the engine had"
        if not np.array_equal(trajectory.log_probs[start:end], entry.generation_log_probs):
            yield f"the log probabilities of {call_id} are not those of its ids"
        mask[start:end] = True
    if not np.array_equal(trajectory.loss_mask, mask):
        yield "the loss mask is not the sampled ids"
