"""Recorded generations as sequences to score again, from a graph's records or from built trajectories.

Invariant: an id stands behind exactly the ids that the engine had before it, and each recorded id is in one sequence. A
call is part of another's sequence only where the other's ids begin with all of its own: a conversation of n calls is
one pass over it, and not n.

Flow: `of_snapshot` | `of_rollout` -> `RecordedSequence`s -> those `chosen` -> a scorer -> `comparison.Comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gym_capture.build.sampling import Sampling, sampling_of
from gym_capture.capture.records import Continues, IdArray, LogProbArray, Snapshot, TokenEntry
from gym_capture.reasons import NotRescoredReason
from trainer_bridge.stream import TrainRollout, TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedPart:
    """What one call generated under one version of the weights. Shapes: G ids."""

    rollout_id: str
    call_id: str
    start: int
    """Where its ids begin in the sequence."""
    position: int
    """Where they begin in what the call generated."""
    log_probs: LogProbArray
    """float32 [G], as recorded. NaN: not known."""
    weight_version: str | None
    sampling: Sampling | None
    finish_reason: str | None
    """Of the call; None: the source does not say."""

    @property
    def end(self) -> int:
        return self.start + self.log_probs.size

    @property
    def temperature(self) -> float:
        """What the logits were divided by: the log probabilities of greedy sampling are those of temperature 1."""
        assert self.sampling is not None
        return self.sampling.temperature or 1.0

    @property
    def is_constrained(self) -> bool:
        return self.sampling is not None and self.sampling.constrained

    def why_not(self) -> NotRescoredReason | None:
        """Why it cannot be scored again, by what is on record; None: it can."""
        if self.sampling is None or self.sampling.temperature is None:
            return NotRescoredReason.SAMPLING_UNKNOWN
        penalties = self.sampling.presence_penalty or self.sampling.frequency_penalty
        if penalties or self.sampling.repetition_penalty not in (None, 1.0):
            return NotRescoredReason.PENALTIES
        return None if np.isfinite(self.log_probs).all() else NotRescoredReason.NO_LOG_PROB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSequence:
    """Ids, and which of them were sampled, by which calls."""

    token_ids: IdArray
    """int32 [T]."""
    parts: tuple[RecordedPart, ...]

    def chosen(self, choose: Callable[[RecordedPart], bool]) -> RecordedSequence | None:
        """The same with only these parts, as far as the last of them; None if there are none."""
        parts = tuple(part for part in self.parts if choose(part))
        if not parts:
            return None
        return replace(self, token_ids=self.token_ids[: max(part.end for part in parts)], parts=parts)


def of_snapshot(snapshot: Snapshot) -> Iterator[RecordedSequence]:
    """Of the calls whose whole prompts are known."""
    entries = {entry.model_call_id: entry for entry in snapshot.entries}
    placed: set[str] = set()
    for entry in sorted(snapshot.entries, key=lambda entry: -entry.cum_len):
        if entry.model_call_id in placed:
            continue
        ids = entry.cumulative_ids()
        calls = [entry]
        while (parent := _parent(calls[-1], entries)) is not None and parent.model_call_id not in placed:
            if not np.array_equal(ids[: parent.cum_len], parent.cumulative_ids()):
                break
            calls.append(parent)
            placed.add(parent.model_call_id)
        placed.add(entry.model_call_id)
        yield RecordedSequence(token_ids=ids, parts=tuple(part for call in reversed(calls) for part in _parts(call)))


def _parent(entry: TokenEntry, entries: dict[str, TokenEntry]) -> TokenEntry | None:
    return entries.get(entry.parent.call_id) if isinstance(entry.parent, Continues) else None


def _parts(entry: TokenEntry) -> Iterator[RecordedPart]:
    size = entry.generation_token_ids.size
    spans: list[tuple[int, int, str | None]] = [
        (span.start, span.end, span.version) for span in entry.policy.weight_versions
    ]
    for start, end, version in spans or [(0, size, None)]:
        if end > start:
            yield RecordedPart(
                rollout_id=entry.rollout_id,
                call_id=entry.model_call_id,
                start=entry.prompt_len + start,
                position=start,
                log_probs=entry.generation_log_probs[start:end],
                weight_version=version,
                sampling=sampling_of(entry.request.sampling),
                finish_reason=entry.reply.finish_reason,
            )


def of_rollout(rollout: TrainRollout) -> Iterator[RecordedSequence]:
    """Of the trajectories of a build: their ids with loss."""
    for sequence in rollout.sequences:
        yield RecordedSequence(token_ids=sequence.token_ids, parts=tuple(_spans(rollout.rollout_id, sequence)))


def _spans(rollout_id: str, sequence: TrainSequence) -> Iterator[RecordedPart]:
    # A row knows how its last call ended, and is named after it.
    last = sequence.trajectory_id.removeprefix(f"{rollout_id}/")
    first: dict[str, int] = {}
    for span in sequence.spans:
        yield RecordedPart(
            rollout_id=rollout_id,
            call_id=span.call_id,
            start=span.start,
            position=span.start - first.setdefault(span.call_id, span.start),
            log_probs=sequence.log_probs[span.start : span.end],
            weight_version=span.weight_version,
            sampling=span.sampling,
            finish_reason=sequence.finish_reason if span.call_id == last else None,
        )
