"""Recorded generations scored again by the trainer's own forward pass.

Invariant: the distribution is the one that was sampled from - the temperature on record, and what top-k, top-p and
min-p left, renormalized, in vLLM's order - and its logits are those of `scoring.Scorer`, which the trainer trains with.
Where noise decides whether a token at the edge of top-p or min-p was left in, both are given, as bounds.

Flow: sequences -> rows -> padded micro-batches -> logits -> log probabilities, shared out to the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from gym_capture.build.sampling import Sampling
from gym_capture.errors import RecordError
from trainer_bridge.batching import Row
from trainer_bridge.comparison import Bounds
from trainer_bridge.layouts import MicroBatch, lay_out
from trainer_bridge.recorded import RecordedSequence
from trainer_bridge.scoring import Scorer

_CHUNK: Final = 256
"""Tokens whose distributions are sorted at once."""
_EDGE: Final = 2e-3
"""How far from its edge, in probability or logits, a token may be left in or out by noise."""


class ForwardPass:
    """A causal language model of `transformers` that scores what was recorded."""

    def __init__(self, model: Any, *, tokens: int = 4096) -> None:
        """`tokens`: of one pass, padding included."""
        self._model = model.eval()
        self._scorer = Scorer(model)
        self._tokens = tokens

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu", tokens: int = 4096) -> ForwardPass:
        """In float32, as the trainer loads it."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        )
        return cls(model.to(device), tokens=tokens)

    @torch.inference_mode()
    def score(self, sequences: Sequence[RecordedSequence]) -> list[list[Bounds]]:
        """For each sequence, for each of its parts. Raises `RecordError` for ids that the model does not have."""
        rows: list[Row] = []
        first = 0
        for number, sequence in enumerate(sequences):
            self._check_vocabulary(sequence)
            positions = np.concatenate([np.arange(part.start, part.end) for part in sequence.parts])
            rows.append(Row(sequence.token_ids, positions, first, number))
            first += positions.size
        parts = [part for sequence in sequences for part in sequence.parts]
        temperature_N = torch.tensor(
            np.repeat([part.temperature for part in parts], _sizes(parts)), dtype=torch.float32
        )
        truncation_N_3 = torch.tensor(
            np.repeat([_truncation(part.sampling) for part in parts], _sizes(parts), axis=0), dtype=torch.float64
        )
        low_N, high_N = torch.empty(first), torch.empty(first)
        for micro_batch in lay_out(rows, "padded", tokens=self._tokens, pad_id=0):
            token_N = micro_batch.token_N
            low_N[token_N], high_N[token_N] = self._bounds(micro_batch, temperature_N[token_N], truncation_N_3[token_N])
        bounds = iter(zip(_split(low_N, _sizes(parts)), _split(high_N, _sizes(parts)), strict=True))
        return [[_as_arrays(*next(bounds)) for _ in sequence.parts] for sequence in sequences]

    def _bounds(
        self, micro_batch: MicroBatch, temperature_N: torch.Tensor, truncation_N_3: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_U_V, u_N = self._scorer.distributions(micro_batch, temperature_N)
        target_N = micro_batch.target_N.to(logits_U_V.device)
        low_N = logits_U_V[u_N, target_N] - torch.logsumexp(logits_U_V, dim=-1)[u_N]
        high_N = low_N.clone()
        for some in _split(_truncated(truncation_N_3), _CHUNK):
            here = some.to(logits_U_V.device)
            low_N[here], high_N[here] = truncated_bounds(
                logits_U_V[u_N[here]], target_N[here], truncation_N_3[some].to(logits_U_V.device)
            )
        return low_N.cpu(), high_N.cpu()

    def _check_vocabulary(self, sequence: RecordedSequence) -> None:
        vocabulary = self._model.config.get_text_config().vocab_size
        highest = int(sequence.token_ids.max())
        if highest >= vocabulary:
            raise RecordError(
                f"token id {highest} is outside of the model's vocabulary of {vocabulary}: this was sampled from "
                "another model",
                field="token_ids",
                rollout_id=sequence.parts[0].rollout_id,
            )


def truncated_bounds(
    logits_N_V: torch.Tensor, target_N: torch.Tensor, truncation_N_3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N], [N]: of the distribution that top-k, top-p and min-p (`truncation_N_3`) leave; -inf: not the target."""
    sorted_N_V = logits_N_V.sort(dim=-1, descending=True).values
    wide = _kept(sorted_N_V, truncation_N_3, _EDGE)
    narrow = _kept(sorted_N_V, truncation_N_3, -_EDGE)
    target_logit_N = logits_N_V.gather(1, target_N[:, None])[:, 0]
    lowest_N = sorted_N_V.masked_fill(~wide, torch.inf).amin(dim=-1)
    low_N = target_logit_N - sorted_N_V.masked_fill(~wide, -torch.inf).logsumexp(dim=-1)
    high_N = target_logit_N - sorted_N_V.masked_fill(~narrow, -torch.inf).logsumexp(dim=-1)
    outside = target_logit_N < lowest_N - _EDGE
    return low_N.masked_fill(outside, -torch.inf), high_N.clamp(max=0.0).masked_fill(outside, -torch.inf)


def _kept(sorted_N_V: torch.Tensor, truncation_N_3: torch.Tensor, slack: float) -> torch.Tensor:
    """bool [N, V]: which are left, min-p first, then top-k, then top-p of those; `slack` more or less of them."""
    top_k_N, top_p_N, min_p_N = truncation_N_3.unbind(dim=1)
    vocabulary = sorted_N_V.shape[1]
    kept = sorted_N_V >= (sorted_N_V[:, 0] + min_p_N.log().float() - slack)[:, None]
    kept &= torch.arange(vocabulary, device=kept.device)[None] < top_k_N[:, None]
    probability_N_V = sorted_N_V.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    kept &= (probability_N_V.cumsum(dim=-1) - probability_N_V) < (top_p_N.float() + slack)[:, None]
    kept[:, 0] = True
    return kept


def _truncation(sampling: Sampling | None) -> tuple[float, float, float]:
    """Top-k, top-p, min-p, each with a value that does nothing where it did nothing."""
    assert sampling is not None
    top_k = sampling.top_k if sampling.top_k is not None and sampling.top_k > 0 else np.inf
    return float(top_k), 1.0 if sampling.top_p is None else sampling.top_p, sampling.min_p or 0.0


def _truncated(truncation_N_3: torch.Tensor) -> torch.Tensor:
    """Numbers of the tokens of which anything was cut off."""
    top_k_N, top_p_N, min_p_N = truncation_N_3.unbind(dim=1)
    return torch.nonzero(torch.isfinite(top_k_N) | (top_p_N < 1.0) | (min_p_N > 0.0))[:, 0]


def _split(values_N: torch.Tensor, sizes: int | list[int]) -> tuple[torch.Tensor, ...]:
    split: tuple[torch.Tensor, ...] = torch.functional.split(values_N, sizes)
    return split


def _sizes(parts: Sequence[Any]) -> list[int]:
    return [part.log_probs.size for part in parts]


def _as_arrays(low_G: torch.Tensor, high_G: torch.Tensor) -> Bounds:
    return Bounds(low_G.numpy(), high_G.numpy())
