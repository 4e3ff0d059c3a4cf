"""From rollouts to what one step trains on: which rollouts, which of their tokens, and the weight of each.

Invariant: every rollout that is left out is counted under the reason, whole, and never cut; weights are shared out over
rollouts and not over rows, so a rollout weighs the same however many rows it was built into; a token whose log
probability at generation is not known is not trained.

With R rollouts, of which rollout i has n_i trained tokens, a token of it weighs, by `aggregation`:

    grpo      1 / (R n_i)       mean over a rollout's tokens, then over rollouts (GRPO, arXiv:2402.03300, eq. 3)
    dapo      1 / sum n_j       every token of the step the same (DAPO, arXiv:2503.14476, 3.3, over a whole step)
    dr_grpo   1 / (R L)         a constant L instead of its length (Dr. GRPO, arXiv:2503.20783, 3.2)

The first two add up to 1 over a step.

Flow: sort out the rollouts -> flat arrays of their trained tokens (`Tokens`) -> weights. `layouts.py` goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from gym_capture.capture.records import IdArray
from gym_capture.data.advantages import Scale, group_advantages
from gym_capture.errors import ConfigError, RecordError
from gym_capture.reasons import LeftOutReason
from trainer_bridge.stream import TrainRollout, TrainSequence

__all__ = ["Aggregation", "Selection", "StepBatch", "step_batch"]

Aggregation = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rollouts a step trains on, and how they weigh."""

    aggregation: Aggregation = "grpo"
    tokens_per_rollout: int | None = None
    """L of `dr_grpo`: what a rollout may generate at most. The other aggregations do not look at it."""
    overlong_filtering: bool = False
    """Leave out rollouts that ended at a length limit: where they were going is not known."""
    spread_filtering: bool = False
    """Leave out groups whose advantages are all 0: they teach nothing, and take up weight."""
    max_sequence_tokens: int | None = None
    """Leave out rollouts with a longer trajectory. The trainer also keeps to what its model has positions for."""
    temperature: float = 1.0
    """Of tokens of which the record does not say it. A recorded temperature is always the one that is used."""
    advantage: Scale | None = None
    """Compare the rewards again, in this way; None: the advantages as they were built."""

    def __post_init__(self) -> None:
        if self.aggregation == "dr_grpo" and self.tokens_per_rollout is None:
            raise ConfigError("aggregation dr_grpo divides by a constant: set tokens_per_rollout")
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature must be positive: got {self.temperature}; greedy sampling has no policy gradient"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory of a rollout that is trained on. Shapes: T ids, N trained tokens."""

    token_ids: IdArray
    """int32 [T]."""
    positions: npt.NDArray[np.intp]
    """[N]: of the trained tokens, ascending, none of them the first id."""
    first: int
    """Its tokens are `[first, first + N)` of the step's."""
    rollout: int
    """Number of the rollout among those trained on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The trained tokens of a step, row after row. Shapes: N."""

    generation_N: npt.NDArray[np.float32]
    """Log probabilities as sampled; finite."""
    advantage_N: npt.NDArray[np.float32]
    weight_N: npt.NDArray[np.float32]
    temperature_N: npt.NDArray[np.float32]
    sequence_N: npt.NDArray[np.int64]
    """Number of the row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """What one step trains on, and the account of what it does not."""

    rows: tuple[Row, ...]
    tokens: Tokens
    used: tuple[TrainRollout, ...]
    left_out: Mapping[str, int]
    """Rollouts by why they are not trained on: a `LeftOutReason`."""
    tokens_without_log_prob: int
    groups: int
    groups_without_spread: int
    """Groups in which nobody has an advantage: one rollout to compare, or rewards that are all the same."""
    groups_of_several_prompts: int
    """Groups whose rollouts start from different ids: a date or a session id in a prompt, or tasks mixed up."""
    temperatures: Mapping[float, int]
    """Trained tokens by the temperature that is on record."""
    tokens_of_assumed_temperature: int
    """Trained tokens of which none is on record."""
    reshaped_tokens: int
    """Trained tokens drawn from another distribution than softmax(logits / temperature): top-p, top-k, penalties, a
    grammar. Their importance weight makes up for it only in part: what was cut off has none."""

    @property
    def trained_tokens(self) -> int:
        """N."""
        return int(self.tokens.generation_N.size)


def compared(rollouts: Sequence[TrainRollout], scale: Scale) -> tuple[TrainRollout, ...]:
    """The same rollouts, whole groups, with the advantages that their rewards give in the way of `scale`."""
    outside = [rollout.masked or rollout.reward is None for rollout in rollouts]
    advantages = group_advantages(
        [0.0 if rollout.reward is None else rollout.reward for rollout in rollouts],
        groups=[rollout.group_id for rollout in rollouts],
        masked=outside,
        scale=scale,
    )
    return tuple(
        replace(rollout, advantage=None if rollout.reward is None else float(advantage))
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    )


def step_batch(
    rollouts: Iterable[TrainRollout], selection: Selection, *, mismatched: frozenset[str] = frozenset()
) -> StepBatch:
    """What to train on. `mismatched`: rollout ids whose log probabilities were too far from the trainer's."""
    rollouts = tuple(rollouts)
    if selection.advantage is not None:
        rollouts = compared(rollouts, selection.advantage)
    flat = _groups_without_spread(rollouts)
    left_out: Counter[LeftOutReason] = Counter()
    used: list[tuple[TrainRollout, list[tuple[TrainSequence, npt.NDArray[np.intp]]]]] = []
    tokens_without_log_prob = 0
    for rollout in rollouts:
        reason = _why_left_out(rollout, selection, flat, mismatched)
        trained = [] if reason is not None else [(sequence, _trained(sequence)) for sequence in rollout.sequences]
        tokens_without_log_prob += sum(int(each.loss_mask.sum()) - positions.size for each, positions in trained)
        trained = [(sequence, positions) for sequence, positions in trained if positions.size]
        if reason is not None or not trained:
            left_out[reason or LeftOutReason.NO_TRAINED_TOKENS] += 1
        else:
            used.append((rollout, trained))
    rows: list[Row] = []
    first = 0
    for number, (_, trained) in enumerate(used):
        for sequence, positions in trained:
            rows.append(Row(sequence.token_ids, positions, first, number))
            first += positions.size
    drawn = [_drawn(sequence, positions) for _, trained in used for sequence, positions in trained]
    temperature_N = _joined([temperature for temperature, _ in drawn])
    known_N = np.isfinite(temperature_N)
    values, counts = np.unique(temperature_N[known_N], return_counts=True)
    return StepBatch(
        rows=tuple(rows),
        tokens=Tokens(
            generation_N=_joined([s.log_probs[positions] for _, trained in used for s, positions in trained]),
            advantage_N=_of_rows(rows, [float(rollout.advantage or 0.0) for rollout, _ in used]),
            weight_N=_of_rows(rows, _weights(rows, len(used), selection)),
            temperature_N=np.where(known_N, temperature_N, np.float32(selection.temperature)),
            sequence_N=np.repeat(np.arange(len(rows)), [row.positions.size for row in rows]),
        ),
        used=tuple(rollout for rollout, _ in used),
        left_out={str(reason): count for reason, count in left_out.items()},
        tokens_without_log_prob=tokens_without_log_prob,
        groups=len({rollout.group_id for rollout in rollouts}),
        groups_without_spread=len(flat),
        groups_of_several_prompts=_groups_of_several_prompts(rollouts),
        temperatures={round(float(value), 6): int(count) for value, count in zip(values, counts, strict=True)},
        tokens_of_assumed_temperature=int((~known_N).sum()),
        reshaped_tokens=sum(reshaped for _, reshaped in drawn),
    )


def _why_left_out(
    rollout: TrainRollout, selection: Selection, flat: frozenset[str], mismatched: frozenset[str]
) -> LeftOutReason | None:
    if rollout.masked:
        return LeftOutReason.MASKED
    if selection.overlong_filtering and rollout.truncated:
        return LeftOutReason.TRUNCATED
    limit = selection.max_sequence_tokens
    if limit is not None and any(sequence.token_ids.size > limit for sequence in rollout.sequences):
        return LeftOutReason.TOO_LONG
    if rollout.advantage is None:
        return LeftOutReason.NO_ADVANTAGE
    if any(span.sampling and span.sampling.temperature == 0.0 for each in rollout.sequences for span in each.spans):
        return LeftOutReason.GREEDY
    if rollout.rollout_id in mismatched:
        return LeftOutReason.LOGPROB_MISMATCH
    return LeftOutReason.NO_SPREAD if selection.spread_filtering and rollout.group_id in flat else None


def _trained(sequence: TrainSequence) -> npt.NDArray[np.intp]:
    """Positions of the tokens that can be trained: sampled, of a known log probability, with an id before them."""
    known = sequence.loss_mask & np.isfinite(sequence.log_probs)
    known[:1] = False
    return np.flatnonzero(known)


def _drawn(sequence: TrainSequence, positions: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.float32], int]:
    """[N]: the temperature of each token, NaN where none is on record; and how many are `reshaped`."""
    temperature_N = np.full(positions.size, np.nan, dtype=np.float32)
    reshaped = 0
    for span in sequence.spans:
        if span.sampling is not None:
            start, end = np.searchsorted(positions, (span.start, span.end))
            if span.sampling.temperature is not None:
                temperature_N[start:end] = span.sampling.temperature
            reshaped += int(end - start) if span.sampling.reshaped else 0
    return temperature_N, reshaped


def _groups_without_spread(rollouts: Iterable[TrainRollout]) -> frozenset[str]:
    largest: dict[str, float] = {}
    for rollout in rollouts:
        own = 0.0 if rollout.masked else abs(rollout.advantage or 0.0)
        largest[rollout.group_id] = max(largest.get(rollout.group_id, 0.0), own)
    return frozenset(group_id for group_id, advantage in largest.items() if advantage == 0.0)


def _groups_of_several_prompts(rollouts: Iterable[TrainRollout]) -> int:
    prompts: dict[str, set[bytes]] = {}
    for rollout in rollouts:
        for sequence in rollout.sequences:
            if sequence.is_main and sequence.loss_mask.any():
                prompt = sequence.token_ids[: int(np.argmax(sequence.loss_mask))]
                prompts.setdefault(rollout.group_id, set()).add(prompt.tobytes())
    return sum(len(different) > 1 for different in prompts.values())


def _weights(rows: Sequence[Row], rollouts: int, selection: Selection) -> list[float]:
    """Of each token of each rollout."""
    tokens = np.bincount([row.rollout for row in rows], [row.positions.size for row in rows], rollouts)
    match selection.aggregation:
        case "grpo":
            weights = 1.0 / (rollouts * tokens)
        case "dapo":
            weights = np.full(rollouts, 1.0 / max(tokens.sum(), 1.0))
        case "dr_grpo":
            weights = np.full(rollouts, 1.0 / (max(rollouts, 1) * (selection.tokens_per_rollout or 1)))
    return [float(weight) for weight in weights]


def _of_rows(rows: Sequence[Row], of_rollouts: Sequence[float]) -> npt.NDArray[np.float32]:
    """[N], from values of the rollouts."""
    values = np.array([of_rollouts[row.rollout] for row in rows], dtype=np.float32)
    return np.repeat(values, [row.positions.size for row in rows])


def _joined(arrays: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate(arrays).astype(np.float32) if arrays else np.zeros(0, dtype=np.float32)


def check_vocabulary(batch: StepBatch, vocabulary: int) -> None:
    """Raises `RecordError` for an id that the model does not have: the trajectories are of another one."""
    for row in batch.rows:
        if row.token_ids.max() >= vocabulary or row.token_ids.min() < 0:
            raise RecordError(
                f"token id {int(row.token_ids.max())} is outside of the model's vocabulary of {vocabulary}: these "
                "trajectories were sampled from another model",
                field="token_ids",
                rollout_id=batch.used[row.rollout].rollout_id,
            )
