"""One step of a reference GRPO trainer: small enough to read, right enough to compare another trainer with.

Invariant: a step's result depends on the rollouts and the options alone - not on how rows are padded, packed, merged or
put into micro-batches. What is not trained - masked rollouts, ones that are too long or too far from the trainer,
tokens without a known log probability - contributes nothing and is counted.

Flow of a step: rollouts -> `batching.step_batch` -> `layouts.lay_out` -> log probabilities of the weights as they are
(`prev`), and of the reference, where something needs them -> rollouts that are too far from the trainer go -> for each
update: forward and backward of every micro-batch, which adds up to the gradient of the whole step, clip it, AdamW ->
metrics. `loop.py` makes a training run of it.

Generation records log probabilities after its sampling parameters were applied, so the trainer divides its logits by
the temperature of each token's call, which the trajectories carry. What else shaped the distribution (top-k, top-p,
penalties, a grammar) a trainer cannot follow: `reshaped_tokens` counts it; pin it off for training.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gym_capture.durable_files import sync_directory, sync_folder
from gym_capture.errors import ConfigError, GymCaptureError
from trainer_bridge.batching import Selection, StepBatch, check_vocabulary, step_batch
from trainer_bridge.layouts import Layout, MicroBatch, lay_out, packing
from trainer_bridge.loss import LossOptions, Mismatch, clipped_loss, importance, kl, log_ratio, mismatch, outside
from trainer_bridge.scoring import Scorer
from trainer_bridge.stream import TrainRollout

__all__ = ["GrpoOptions", "GrpoTrainer", "StepMetrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions:
    """How to train."""

    lr: float = 1e-6
    weight_decay: float = 0.0
    loss: LossOptions = field(default_factory=LossOptions)
    selection: Selection = field(default_factory=Selection)
    updates_per_step: int = 1
    """Times that the weights move on the same rollouts; more than one is what clipping is for."""
    max_grad_norm: float = 1.0
    mismatch_threshold: float | None = None
    """Leave out rollouts with a trajectory whose mean |trainer's log probability - recorded one| is above this."""
    layout: Layout = "padded"
    tokens_per_micro_batch: int = 4096
    """Ids of one forward pass, padding included; a longer row is alone. Gradients add up over all of a step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The account of a step. Of several updates, `loss`, `grad_norm`, `entropy`, `kl` and `clip_fraction` are of the
    last."""

    loss: float
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    """Tokens whose ratio is outside of the clip range."""
    entropy: float | None
    """Mean over the trained tokens, in nats, of the distributions that they are drawn from; None: none was trained."""
    kl: float | None
    """Mean divergence from the reference weights; None: there are none."""
    mismatch: Mismatch | None
    """Between the trainer's log probabilities before the step and those recorded; None: no token was trained."""
    mean_importance: float
    """Mean of the importance weights, within their limits; 1 if trainer and generation agree."""
    importance_outside: float
    """Tokens whose importance weight was truncated or masked, as a fraction."""
    updates: int
    """Updates made; fewer than asked for if a gradient was not finite or there was nothing to train on."""
    mean_reward: float | None
    """Of the rollouts that are not masked, trained on or not."""
    rollouts: int
    sequences: int
    trained_tokens: int
    left_out: Mapping[str, int]
    """Rollouts that were not trained on, by reason."""
    tokens_without_log_prob: int
    groups: int
    groups_without_spread: int
    groups_of_several_prompts: int
    temperatures: Mapping[float, int]
    """Trained tokens by the temperature that they were sampled with."""
    tokens_of_assumed_temperature: int
    """Trained tokens of which no temperature is on record."""
    reshaped_tokens: int
    """Trained tokens that top-p, top-k, penalties or a grammar had a say in."""
    weight_versions: tuple[str, ...]
    """Of the weights that sampled, sorted, where known."""
    row_tokens: int
    """Ids of all rows, one by one."""
    computed_tokens: int
    """Ids of a forward pass over all micro-batches: more by padding, fewer by shared prefixes."""
    micro_batches: int
    packing: float
    """How much of the room in the micro-batches is ids of rows."""
    seconds: float


class StepGivenUpError(GymCaptureError):
    """A step was told to stop, and has changed nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """What a step found of each of its trained tokens. Shapes: N."""

    difference_N: npt.NDArray[np.float32]
    """The trainer's log probability, before the step, less the recorded one."""
    entropy_N: npt.NDArray[np.float32]
    """Of the trainer's distribution, in nats."""
    clipped_N: npt.NDArray[np.bool_]
    """Whether its ratio or its importance weight was beyond a limit."""


class GrpoTrainer:
    """A model, its optimizer, and `step`."""

    def __init__(self, model: Any, options: GrpoOptions, *, reference: Any = None, pad_id: int = 0) -> None:
        """`model`: a causal language model of `transformers`, on the device that is to train it. `reference`: another,
        which is never changed; a KL coefficient asks for one."""
        if options.loss.kl_coefficient and reference is None:
            raise ConfigError("kl_coefficient needs a reference model to stay close to")
        self.model = model.eval()  # dropout would make its log probabilities others than the engine's
        self.options = options
        self._scorer = Scorer(self.model)
        self._reference = None if reference is None else Scorer(reference.eval())
        self._pad_id = pad_id
        self.on_tokens: Callable[[StepBatch, TokenValues], None] | None = None
        """Gets what a step found of each of its tokens, e.g. for the inspector (`annotations`)."""
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=options.lr,
            weight_decay=options.weight_decay,
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        options: GrpoOptions,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        reference: str | Path | None = None,
    ) -> GrpoTrainer:
        """A trainer of the model folder that the engine serves. `reference`: the folder of the weights to stay close
        to; by default, if a KL coefficient asks for them, those of `folder`."""
        from transformers import AutoModelForCausalLM

        def loaded(path: str | Path) -> Any:
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=dtype, local_files_only=True, attn_implementation=attention
            )
            return model.to(device)

        kept = loaded(reference or folder).requires_grad_(False) if options.loss.kl_coefficient else None
        return cls(loaded(folder), options, reference=kept)

    def step(
        self,
        rollouts: Sequence[TrainRollout],
        *,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> StepMetrics:
        """Moves the weights on `rollouts`. `on_progress` gets the passes over micro-batches done, and of how many.

        `give_up` is asked behind each of them, until the weights have moved: if so, raises `StepGivenUpError`, with
        nothing changed.
        """
        started = time.perf_counter()
        batch = self.select(rollouts)
        micro_batches = self.lay_out(batch)
        updates_per_step = self.options.updates_per_step
        asks_prev = updates_per_step > 1 or self.options.mismatch_threshold is not None
        passes = updates_per_step + asks_prev + (self._reference is not None)
        progress = _Progress(on_progress, len(micro_batches) * passes, give_up)
        # With a single update the pass that trains also gives the log probabilities of the weights before it.
        prev: torch.Tensor | None = None
        if asks_prev:
            prev = self.log_probs(batch, micro_batches, progress.advance)
            batch, prev = self._without_mismatched(rollouts, batch, prev)
            micro_batches = self.lay_out(batch)
        reference = None
        if self._reference is not None:
            reference = self._log_probs(self._reference, batch, micro_batches, progress.advance)
        done = _Updates()
        for _ in range(updates_per_step if micro_batches else 0):
            try:
                found = self._backward(batch, micro_batches, prev, reference, progress.advance)
            except StepGivenUpError:
                self.optimizer.zero_grad(set_to_none=True)
                raise
            progress.weights_move()
            prev = found.log_probs if prev is None else prev
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm))
            if math.isfinite(norm):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            done = _Updates(found, norm, done.made + math.isfinite(norm))
        if self.on_tokens is not None and prev is not None and done.last is not None:
            self.on_tokens(batch, self._token_values(batch, prev, done.last))
        return self._metrics(rollouts, batch, micro_batches, prev, reference, done, started)

    def select(self, rollouts: Iterable[TrainRollout], *, mismatched: frozenset[str] = frozenset()) -> StepBatch:
        """What a step would train on. Raises `RecordError` for ids that the model does not have."""
        config = self.model.config.get_text_config()
        limits = (self.options.selection.max_sequence_tokens, config.to_dict().get("max_position_embeddings"))
        selection = replace(
            self.options.selection, max_sequence_tokens=min((each for each in limits if each is not None), default=None)
        )
        batch = step_batch(rollouts, selection, mismatched=mismatched)
        check_vocabulary(batch, config.vocab_size)
        return batch

    def lay_out(self, batch: StepBatch) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step."""
        return lay_out(batch.rows, self.options.layout, tokens=self.options.tokens_per_micro_batch, pad_id=self._pad_id)

    def log_probs(
        self, batch: StepBatch, micro_batches: Sequence[MicroBatch], on_progress: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """float32 [N]: what the weights as they are say of the step's trained tokens."""
        return self._log_probs(self._scorer, batch, micro_batches, on_progress)

    def save(self, folder: Path, *, tokenizer_from: Path | None = None) -> None:
        """Writes a model folder, whole and durable, or none. Raises `ConfigError` if there is something in its place.

        `tokenizer_from`: the model folder whose tokenizer and chat template go with the weights.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already: choose another place for the trained model")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            self.model.save_pretrained(partial)
            if tokenizer_from is not None:
                copy_tokenizer(tokenizer_from, partial)
            partial.chmod(0o755)
            sync_folder(partial)
            partial.replace(folder)
            sync_directory(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    @torch.no_grad()
    def _log_probs(
        self, scorer: Scorer, batch: StepBatch, micro_batches: Sequence[MicroBatch], on_progress: Callable[[], None]
    ) -> torch.Tensor:
        found_N = torch.zeros(batch.trained_tokens)
        for micro_batch in micro_batches:
            temperature_n = torch.from_numpy(batch.tokens.temperature_N)[micro_batch.token_N]
            found_N[micro_batch.token_N] = scorer.score(micro_batch, temperature_n)[0].cpu()
            on_progress()
        return found_N

    def _without_mismatched(
        self, rollouts: Sequence[TrainRollout], batch: StepBatch, prev_N: torch.Tensor
    ) -> tuple[StepBatch, torch.Tensor]:
        """The batch, and `prev`, without the rollouts of which a trajectory is too far from the trainer."""
        if self.options.mismatch_threshold is None or not batch.rows:
            return batch, prev_N
        distance_N = np.abs(prev_N.numpy() - batch.tokens.generation_N)
        counts = np.bincount(batch.tokens.sequence_N)
        distance_S = np.bincount(batch.tokens.sequence_N, weights=distance_N) / counts
        far = {row.rollout for row, distance in zip(batch.rows, distance_S, strict=True) if not distance <= self._most}
        if not far:
            return batch, prev_N
        kept_S = np.array([row.rollout not in far for row in batch.rows])
        mismatched = frozenset(batch.used[number].rollout_id for number in far)
        kept_N = torch.from_numpy(np.repeat(kept_S, counts))
        return self.select(rollouts, mismatched=mismatched), prev_N[kept_N]

    def _token_values(self, batch: StepBatch, prev_N: torch.Tensor, last: _Pass) -> TokenValues:
        loss = self.options.loss
        generation_N = torch.from_numpy(batch.tokens.generation_N)
        ratio_N = torch.exp(log_ratio(last.log_probs, prev_N, torch.from_numpy(batch.tokens.sequence_N), loss))
        clipped_N = (ratio_N < 1.0 - loss.clip_low) | (ratio_N > 1.0 + loss.clip_high)
        if loss.importance != "none":
            clipped_N |= outside(torch.exp(prev_N - generation_N), loss)
        return TokenValues(
            difference_N=(prev_N - generation_N).numpy(),
            entropy_N=last.entropies.numpy(),
            clipped_N=clipped_N.numpy(),
        )

    @property
    def _most(self) -> float:
        threshold = self.options.mismatch_threshold
        return math.inf if threshold is None else threshold

    def _backward(
        self,
        batch: StepBatch,
        micro_batches: Sequence[MicroBatch],
        prev_N: torch.Tensor | None,
        reference_N: torch.Tensor | None,
        on_progress: Callable[[], None],
    ) -> _Pass:
        """Adds up the gradient of the whole step."""
        tokens = batch.tokens
        found = _Pass(0.0, torch.zeros(batch.trained_tokens), torch.zeros(batch.trained_tokens))
        for micro_batch in micro_batches:
            own = micro_batch.token_N
            temperature_n = torch.from_numpy(tokens.temperature_N)[own]
            current_n, entropy_n = self._scorer.score(micro_batch, temperature_n, entropy=True)
            assert entropy_n is not None
            found.log_probs[own], found.entropies[own] = current_n.detach().cpu(), entropy_n.cpu()
            device = current_n.device
            part = clipped_loss(
                current_n,
                prev_N=current_n.detach() if prev_N is None else prev_N[own].to(device),
                generation_N=torch.from_numpy(tokens.generation_N)[own].to(device),
                advantage_N=torch.from_numpy(tokens.advantage_N)[own].to(device),
                weight_N=torch.from_numpy(tokens.weight_N)[own].to(device),
                options=self.options.loss,
                sequence_N=torch.from_numpy(tokens.sequence_N)[own].to(device),
                reference_N=None if reference_N is None else reference_N[own].to(device),
            )
            torch.autograd.backward(part)
            found.loss += float(part.detach())
            on_progress()
        return found

    def _metrics(
        self,
        rollouts: Sequence[TrainRollout],
        batch: StepBatch,
        micro_batches: Sequence[MicroBatch],
        prev_N: torch.Tensor | None,
        reference_N: torch.Tensor | None,
        done: _Updates,
        started: float,
    ) -> StepMetrics:
        loss = self.options.loss
        last, trained = done.last, prev_N is not None and batch.trained_tokens > 0
        generation_N, sequence_N = (
            torch.from_numpy(batch.tokens.generation_N),
            torch.from_numpy(batch.tokens.sequence_N),
        )
        clip_fraction = importance_outside = 0.0
        mean_importance = 1.0
        if trained and prev_N is not None and last is not None:
            ratio_N = torch.exp(log_ratio(last.log_probs, prev_N, sequence_N, loss))
            clip_fraction = _mean((ratio_N < 1.0 - loss.clip_low) | (ratio_N > 1.0 + loss.clip_high))
            mean_importance = _mean(importance(prev_N, generation_N, loss))
            if loss.importance != "none":
                importance_outside = _mean(outside(torch.exp(prev_N - generation_N), loss))
        rewards = [each.reward for each in rollouts if each.reward is not None and not each.masked]
        versions = {version for each in rollouts for sequence in each.sequences for version in sequence.weight_versions}
        return StepMetrics(
            loss=0.0 if last is None else last.loss,
            grad_norm=done.grad_norm,
            clip_fraction=clip_fraction,
            entropy=_mean(last.entropies) if last is not None else None,
            kl=_mean(kl(last.log_probs, reference_N)) if last is not None and reference_N is not None else None,
            mismatch=mismatch(prev_N, generation_N) if trained and prev_N is not None else None,
            mean_importance=mean_importance,
            importance_outside=importance_outside,
            updates=done.made,
            mean_reward=float(np.mean(rewards)) if rewards else None,
            rollouts=len(batch.used),
            sequences=len(batch.rows),
            trained_tokens=batch.trained_tokens,
            left_out=batch.left_out,
            tokens_without_log_prob=batch.tokens_without_log_prob,
            groups=batch.groups,
            groups_without_spread=batch.groups_without_spread,
            groups_of_several_prompts=batch.groups_of_several_prompts,
            temperatures=batch.temperatures,
            tokens_of_assumed_temperature=batch.tokens_of_assumed_temperature,
            reshaped_tokens=batch.reshaped_tokens,
            weight_versions=tuple(sorted(versions)),
            row_tokens=sum(each.row_tokens for each in micro_batches),
            computed_tokens=sum(each.input_ids_B_T.numel() for each in micro_batches),
            micro_batches=len(micro_batches),
            packing=packing(micro_batches, self.options.tokens_per_micro_batch),
            seconds=time.perf_counter() - started,
        )


@dataclass(slots=True, eq=False)
class _Pass:
    """What a pass over all micro-batches found. Shapes: N trained tokens of the step."""

    loss: float
    log_probs: torch.Tensor
    entropies: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Updates:
    """The last pass of a step, the norm of its gradient, and the updates made."""

    last: _Pass | None = None
    grad_norm: float = 0.0
    made: int = 0


class _Progress:
    """Counts passes over micro-batches, behind each of which a step may be given up, until the weights move."""

    def __init__(self, report: Callable[[int, int], None], of: int, give_up: Callable[[], bool]) -> None:
        self._report = report
        self._done = 0
        self._of = of
        self._give_up = give_up
        report(0, of)

    def advance(self) -> None:
        self._done += 1
        self._report(self._done, self._of)
        if self._give_up():
            raise StepGivenUpError("the step was told to stop before it had changed anything")

    def weights_move(self) -> None:
        """From here on the step goes to its end."""
        self._give_up = lambda: False


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Writes the tokenizer and the chat template of a model folder into another."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source), local_files_only=True).save_pretrained(folder)
