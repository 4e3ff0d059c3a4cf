"""What a trainer takes of a group, whichever trainer it is: a sample for each trajectory, and an account of the rest.

Invariant: a sample's ids are the trajectory's, none cut; its mask is true where the trajectory trains and the log
probability is on record, and nowhere else; what is built and not in a sample is counted in the `Delivery`.

Flow: a group of rollouts, from files or from the stream -> `Delivery.samples` -> one trainer's own fields.

Masked rollouts give no samples. Trainers that compute the baseline themselves count every row that they are given, so a
masked rollout that was sent along with an empty mask would move it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gym_capture.build.trajectories import Span
from gym_capture.capture.records import IdArray, LogProbArray
from gym_capture.capture.sampling_masks import NO_ID, are_ids
from gym_capture.data.advantages import reward_problems
from gym_capture.reasons import LeftOutReason, Reason
from trainer_bridge.stream import TrainRollout, TrainSequence

__all__ = ["Delivery", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trajectory as a trainer takes it. Shapes: P prompt ids, R response ids, T = P + R."""

    rollout: TrainRollout
    sequence: TrainSequence
    chain: int
    """Which trajectory of the rollout, the main chain being 0."""
    prompt_length: int
    """P. The ids before the first one that this trajectory trains."""
    mask: npt.NDArray[np.bool_]
    """bool [T]. The ids to train on: sampled, trained here, with a log probability on record."""
    log_probs: LogProbArray
    """float32 [T]. As sampled where `mask` is true, 0 elsewhere."""

    @property
    def token_ids(self) -> IdArray:
        """int32 [T]."""
        return self.sequence.token_ids

    @property
    def prompt_ids(self) -> list[int]:
        """P ids."""
        ids: list[int] = self.token_ids[: self.prompt_length].tolist()
        return ids

    @property
    def response_ids(self) -> list[int]:
        """R ids: what the policy sampled, and what came between."""
        ids: list[int] = self.token_ids[self.prompt_length :].tolist()
        return ids

    @property
    def response_mask(self) -> list[int]:
        """R numbers: 1 on ids to train on."""
        mask: list[int] = self.mask[self.prompt_length :].astype(int).tolist()
        return mask

    @property
    def response_log_probs(self) -> list[float]:
        """R numbers."""
        log_probs: list[float] = self.log_probs[self.prompt_length :].tolist()
        return log_probs

    @property
    def advantages(self) -> LogProbArray:
        """float32 [T]. The rollout's advantage where `mask` is true, 0 elsewhere, and everywhere if it has none."""
        return np.where(self.mask, np.float32(self.rollout.advantage or 0.0), np.float32(0.0))

    @property
    def versions(self) -> tuple[int, int] | None:
        """The lowest and the highest version of the weights that sampled it; None: some version is not a number."""
        found = [span.weight_version for span in self.sequence.spans]
        numbers = [int(version) for version in found if version is not None and version.isdecimal()]
        return (min(numbers), max(numbers)) if numbers and len(numbers) == len(found) else None

    def temperatures(self, default: float = 1.0) -> LogProbArray:
        """float32 [T]. What each id was sampled at, `default` where it was not or nobody knows."""
        found = np.full(self.token_ids.size, default, dtype=np.float32)
        for span in self.sequence.spans:
            if span.sampling is not None and span.sampling.temperature is not None:
                found[span.start : span.end] = span.sampling.temperature
        return found

    def sampling_rows(self) -> npt.NDArray[np.int32] | None:
        """int32 [T, ids]. What each trained id was sampled from, -1 behind the last of them, and nothing but -1 where
        none is trained. As wide as the calls' top-k, if that is known. None: not recorded as ids."""
        recorded = self.sequence.sampling_mask
        if recorded is None or not are_ids(recorded):
            return None
        limits = [span.sampling.top_k or 0 for span in self.sequence.spans if span.sampling is not None]
        rows = np.full((self.token_ids.size, max([recorded.shape[1], *limits])), NO_ID, dtype=np.int32)
        rows[self.sequence.loss_mask, : recorded.shape[1]] = recorded
        rows[~self.mask] = NO_ID
        return rows


@dataclass(slots=True)
class Delivery:
    """The account of what went to a trainer, and of what did not."""

    rows: int = 0
    trained_tokens: int = 0
    split_rollouts: int = 0
    """Rollouts in more than one row: a trainer that averages over rows weighs them more."""
    left_out: Counter[Reason] = field(default_factory=Counter)
    """Whole rollouts, by reason."""
    other_chains: int = 0
    """Trajectories that the trainer has no place for: it takes one of a rollout."""
    tokens_of_other_chains: int = 0
    unknown_log_probs: int = 0
    """Sampled ids without a log probability: kept as context, not trained."""
    temperatures: set[float] = field(default_factory=set)
    """Of the ids that are trained, where they are on record."""
    reshaped: int = 0
    """Rows in which ids came from another distribution than softmax(logits / temperature): top-p, penalties, ..."""

    def samples(
        self, rollouts: Sequence[TrainRollout], *, main_only: bool = False, advantages: bool = False
    ) -> list[Sample]:
        """The samples of one group, those of a rollout together and its main chain last.

        `main_only`: for a trainer that takes one of each rollout. `advantages`: the trainer is given them, so a rollout
        without one is left out.
        """
        return [sample for each in rollouts for sample in self._of_rollout(each, main_only, advantages)]

    def _of_rollout(self, rollout: TrainRollout, main_only: bool, advantages: bool) -> list[Sample]:
        reason = _reason(rollout, advantages)
        if reason is not None:
            self.left_out[reason] += 1
            return []
        unknown = sum(int((each.loss_mask & ~np.isfinite(each.log_probs)).sum()) for each in rollout.sequences)
        made = [_sample(rollout, chain) for chain in reversed(range(len(rollout.sequences)))]
        found = [sample for sample in made if sample.mask.any()]
        if not found or (main_only and found[-1].chain != 0):
            self.left_out[LeftOutReason.NO_TRAINED_TOKENS] += 1
            return []
        if main_only:
            *others, main = found
            self.other_chains += len(others)
            self.tokens_of_other_chains += sum(int(sample.mask.sum()) for sample in others)
            found = [main]
        self.unknown_log_probs += unknown
        self.rows += len(found)
        self.split_rollouts += len(found) > 1
        for sample in found:
            self.trained_tokens += int(sample.mask.sum())
            self.note_sampling(sample.sequence.spans)
        return found

    def note_sampling(self, spans: Sequence[Span]) -> None:
        """Of a row that is delivered."""
        known = [span.sampling for span in spans if span.sampling is not None]
        self.temperatures |= {how.temperature for how in known if how.temperature is not None}
        self.reshaped += any(how.reshaped for how in known)


def session_numbers(rollouts: Sequence[TrainRollout]) -> list[int]:
    """A number for each rollout of a group: which sample of its task it is if all say so, else its place."""
    said = [rollout.sample for rollout in rollouts if rollout.sample is not None]
    return said if len(set(said)) == len(rollouts) else list(range(len(rollouts)))


def _reason(rollout: TrainRollout, advantages: bool) -> Reason | None:
    if rollout.masked:
        return LeftOutReason.MASKED
    if advantages:
        return LeftOutReason.NO_ADVANTAGE if rollout.advantage is None else None
    return LeftOutReason.NO_REWARD if reward_problems(rollout.reward) else None


def _sample(rollout: TrainRollout, chain: int) -> Sample:
    sequence = rollout.sequences[chain]
    mask = sequence.loss_mask & np.isfinite(sequence.log_probs)
    return Sample(
        rollout=rollout,
        sequence=sequence,
        chain=chain,
        prompt_length=int(sequence.loss_mask.argmax()),
        mask=mask,
        log_probs=np.where(mask, sequence.log_probs, np.float32(0.0)),
    )
