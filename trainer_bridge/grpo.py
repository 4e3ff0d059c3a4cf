"""A reference GRPO trainer: small enough to read, right enough to compare another trainer with.

Invariant: a step's result depends on the rollouts and the options alone - not on how rows are padded or packed into
micro-batches. Masked rollouts, and tokens without a known log probability, contribute nothing and are counted.

Flow of a step: rollouts -> `batching.step_batch` -> log probabilities of the weights as they are (`prev`) -> for each
update: forward and backward of every micro-batch, clip the gradient, AdamW -> metrics.

Generation records log probabilities after its sampling parameters were applied, so the trainer divides its logits by
the same `temperature`. Sampling with top-k or top-p renormalizes over what it kept, which a trainer cannot follow:
pin them off for training.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gym_capture.errors import ConfigError
from trainer_bridge.batching import MicroBatch, StepBatch, step_batch
from trainer_bridge.loss import LossOptions, Mismatch, clipped_loss, importance, mismatch
from trainer_bridge.stream import TrainRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions:
    """How to train."""

    lr: float = 1e-6
    weight_decay: float = 0.0
    temperature: float = 1.0
    """That the rollouts were sampled with."""
    loss: LossOptions = field(default_factory=LossOptions)
    updates_per_step: int = 1
    """Times that the weights move on the same rollouts; more than one is what clipping is for."""
    max_grad_norm: float = 1.0
    overlong_filtering: bool = False
    """Leave out rollouts that ended at a length limit."""
    tokens_per_micro_batch: int = 4096
    """Padded tokens of one forward pass; a longer row is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The account of a step. Of several updates, `loss`, `grad_norm` and `clip_fraction` are of the last."""

    loss: float
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    """Tokens whose ratio is outside of the clip range."""
    mismatch: Mismatch | None
    """Between the trainer's log probabilities before the step and those recorded; None: no token was trained."""
    mean_importance: float
    """Mean of the importance weights, after the cap; 1 if trainer and generation agree."""
    updates: int
    """Updates made; fewer than asked for if a gradient was not finite or there was nothing to train on."""
    rollouts: int
    sequences: int
    trained_tokens: int
    left_out: Mapping[str, int]
    """Rollouts that were not trained on, by reason."""
    tokens_without_log_prob: int
    weight_versions: tuple[str, ...]
    """Of the weights that sampled, sorted, where known."""
    seconds: float


class GrpoTrainer:
    """A model, its optimizer, and `step`."""

    def __init__(self, model: Any, options: GrpoOptions, *, pad_id: int = 0) -> None:
        """`model`: a causal language model of `transformers`, on the device that is to train it."""
        self.model = model.eval()  # dropout would make its log probabilities others than the engine's
        self._options = options
        self._pad_id = pad_id
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=options.lr,
            weight_decay=options.weight_decay,
        )

    @classmethod
    def load(
        cls, folder: str | Path, options: GrpoOptions, *, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> GrpoTrainer:
        """A trainer of the model folder that the engine serves."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True).to(device)
        return cls(model, options)

    def step(
        self, rollouts: Sequence[TrainRollout], *, on_progress: Callable[[int, int], None] = lambda done, of: None
    ) -> StepMetrics:
        """Moves the weights on `rollouts`. `on_progress` gets the passes over micro-batches done, and how many of."""
        started = time.perf_counter()
        batch = step_batch(
            rollouts,
            tokens_per_micro_batch=self._options.tokens_per_micro_batch,
            weigh_by=self._options.loss.weigh_by,
            overlong_filtering=self._options.overlong_filtering,
            pad_id=self._pad_id,
        )
        progress = _Progress(on_progress, batch, self._options.updates_per_step)
        # With a single update the pass that trains also gives the log probabilities of the weights before it.
        prev: list[torch.Tensor] | None = None
        if self._options.updates_per_step > 1:
            prev = self.log_probs(batch.micro_batches, progress.advance)
        loss = grad_norm = clip_fraction = 0.0
        updates = 0
        for _ in range(self._options.updates_per_step if batch.micro_batches else 0):
            loss, current = self._backward(batch.micro_batches, prev, progress.advance)
            prev = current if prev is None else prev
            clip_fraction = _clip_fraction(current, prev, self._options.loss)
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._options.max_grad_norm))
            if math.isfinite(grad_norm):
                self._optimizer.step()
                updates += 1
            self._optimizer.zero_grad(set_to_none=True)
        return self._metrics(rollouts, batch, prev, loss, grad_norm, clip_fraction, updates, started)

    @torch.no_grad()
    def log_probs(
        self, micro_batches: Iterable[MicroBatch], on_progress: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """float32 [N] for each micro-batch: what the weights as they are say of its trained tokens."""
        found = []
        for micro_batch in micro_batches:
            found.append(self._forward(micro_batch))
            on_progress()
        return found

    def save(self, folder: Path, *, tokenizer_from: Path | None = None) -> None:
        """Writes a model folder, whole or not at all. Raises `ConfigError` if there is something in its place.

        `tokenizer_from`: the model folder whose tokenizer and chat template go with the weights.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already: choose another place for the trained model")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            self.model.save_pretrained(partial)
            if tokenizer_from is not None:
                _copy_tokenizer(tokenizer_from, partial)
            partial.chmod(0o755)
            partial.replace(folder)
        except BaseException:
            shutil.rmtree(partial)
            raise

    def _backward(
        self,
        micro_batches: Sequence[MicroBatch],
        prev: Sequence[torch.Tensor] | None,
        on_progress: Callable[[], None],
    ) -> tuple[float, list[torch.Tensor]]:
        """Adds up the gradient of the whole step. Returns its loss and the log probabilities it was computed at."""
        loss = 0.0
        found: list[torch.Tensor] = []
        for index, micro_batch in enumerate(micro_batches):
            current_N = self._forward(micro_batch)
            found.append(current_N.detach())
            device = current_N.device
            part = clipped_loss(
                current_N,
                prev_N=found[-1] if prev is None else prev[index],
                generation_N=micro_batch.generation_N.to(device),
                advantage_N=micro_batch.advantage_N.to(device),
                weight_N=micro_batch.weight_N.to(device),
                options=self._options.loss,
            )
            torch.autograd.backward(part)
            loss += float(part.detach())
            on_progress()
        return loss, found

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """float32 [N]: log probabilities of the trained tokens."""
        device = self.model.device
        row_N = micro_batch.row_N.to(device)
        position_N = micro_batch.position_N.to(device)
        input_ids_B_T = micro_batch.input_ids_B_T.to(device)
        # Logits are by far the largest tensor: only those that predict a trained token of some row are computed.
        kept_K, k_N = torch.unique(position_N - 1, return_inverse=True)
        logits_B_K_V = self.model(
            input_ids=input_ids_B_T,
            attention_mask=micro_batch.attention_mask_B_T.to(device),
            logits_to_keep=kept_K,
            use_cache=False,
        ).logits.float()
        if self._options.temperature != 1.0:
            logits_B_K_V = logits_B_K_V / self._options.temperature
        chosen_N = logits_B_K_V[row_N, k_N, input_ids_B_T[row_N, position_N]]
        result: torch.Tensor = chosen_N - torch.logsumexp(logits_B_K_V, dim=-1)[row_N, k_N]
        return result

    def _metrics(
        self,
        rollouts: Sequence[TrainRollout],
        batch: StepBatch,
        prev: Sequence[torch.Tensor] | None,
        loss: float,
        grad_norm: float,
        clip_fraction: float,
        updates: int,
        started: float,
    ) -> StepMetrics:
        found: Mismatch | None = None
        mean_importance = 1.0
        if prev:
            prev_N = torch.cat(list(prev)).cpu()
            generation_N = torch.cat([micro_batch.generation_N for micro_batch in batch.micro_batches])
            found = mismatch(prev_N, generation_N)
            mean_importance = float(importance(prev_N, generation_N, self._options.loss).mean())
        versions = {
            version for rollout in rollouts for sequence in rollout.sequences for version in sequence.weight_versions
        }
        return StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            clip_fraction=clip_fraction,
            mismatch=found,
            mean_importance=mean_importance,
            updates=updates,
            rollouts=batch.rollouts,
            sequences=batch.sequences,
            trained_tokens=batch.trained_tokens,
            left_out=batch.left_out,
            tokens_without_log_prob=batch.tokens_without_log_prob,
            weight_versions=tuple(sorted(versions)),
            seconds=time.perf_counter() - started,
        )


class _Progress:
    """Counts passes over micro-batches."""

    def __init__(self, report: Callable[[int, int], None], batch: StepBatch, updates: int) -> None:
        self._report = report
        self._done = 0
        self._of = len(batch.micro_batches) * (updates + (updates > 1))

    def advance(self) -> None:
        self._done += 1
        self._report(self._done, self._of)


def _clip_fraction(current: Sequence[torch.Tensor], prev: Sequence[torch.Tensor], options: LossOptions) -> float:
    ratio_N = torch.exp(torch.cat(list(current)) - torch.cat(list(prev)))
    outside_N = (ratio_N < 1.0 - options.clip_low) | (ratio_N > 1.0 + options.clip_high)
    return float(outside_N.float().mean())


def _copy_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source), local_files_only=True).save_pretrained(folder)
