"""The forward pass: what a model says of the trained tokens of a micro-batch.

Invariant: the log probability of a token is log_softmax(logits / its temperature) at the id before it in its own row,
whatever the layout. A model that does not keep to the mask of a tree - a sliding window, a recurrent layer - is
refused, by being asked: before the first such micro-batch, a small tree is compared with its rows one by one.

Flow: micro-batch -> mask (dense for SDPA, blocks for FlexAttention) -> logits where a token is predicted, and only
there, as they are by far the largest tensor -> log probabilities, and entropies if asked for.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from gym_capture.errors import ConfigError
from trainer_bridge.layouts import MicroBatch
from trainer_bridge.prefix_tree import forest, shared_lengths

_ENTROPY_CHUNK: Final = 512
_PROBE: Final = ((1, 2, 3, 4, 5), (1, 2, 3, 6), (1, 7, 2, 3))
_PROBE_TOLERANCE: Final = 0.05
"""Of logits, over their spread: numeric noise of bfloat16 is below, another mask is far above."""


class Scorer:
    """A causal language model of `transformers` as a function of micro-batches."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._checked = False

    def score(
        self, micro_batch: MicroBatch, temperature_N: torch.Tensor, *, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """float32 [N] and [N]: log probabilities of the trained tokens; the entropies where each was drawn, without a
        gradient, or None."""
        logits_U_V, u_N = self.distributions(micro_batch, temperature_N)
        normalizer_U = torch.logsumexp(logits_U_V, dim=-1)
        log_prob_N = logits_U_V[u_N, micro_batch.target_N.to(u_N.device)] - normalizer_U[u_N]
        return log_prob_N, _entropies(logits_U_V.detach(), normalizer_U.detach())[u_N] if entropy else None

    def distributions(self, micro_batch: MicroBatch, temperature_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [U, V] and int64 [N]: logits over their temperature, and which of them predicts each token."""
        device = self.model.device
        row_N, predictor_N = micro_batch.row_N.to(device), micro_batch.predictor_N.to(device)
        temperature_N = temperature_N.to(device)
        kept_K, k_N = torch.unique(predictor_N, return_inverse=True)
        logits_B_K_V = self._forward(micro_batch, kept_K).float()
        # One softmax for each place, row and temperature; where branches begin, it predicts several tokens.
        drawn_U_3, u_N = torch.unique(
            torch.stack([row_N.double(), k_N.double(), temperature_N.double()], dim=1), dim=0, return_inverse=True
        )
        if len(drawn_U_3) == logits_B_K_V.shape[0] * logits_B_K_V.shape[1]:
            logits_U_V = logits_B_K_V.flatten(0, 1)
        else:
            logits_U_V = logits_B_K_V[drawn_U_3[:, 0].long(), drawn_U_3[:, 1].long()]
        temperature_U = drawn_U_3[:, 2].float()
        if not bool((temperature_U == 1.0).all()):
            logits_U_V = logits_U_V / temperature_U[:, None]
        return logits_U_V, u_N

    def _forward(self, micro_batch: MicroBatch, kept_K: torch.Tensor) -> torch.Tensor:
        device = self.model.device
        arguments: dict[str, Any] = {"input_ids": micro_batch.input_ids_B_T.to(device)}
        if micro_batch.subtree_end_B_T is not None:
            if not self._checked:
                self._check_masks(int(micro_batch.input_ids_B_T.shape[1]))
                self._checked = True
            assert micro_batch.position_ids_B_T is not None
            arguments["position_ids"] = micro_batch.position_ids_B_T.to(device)
            arguments["attention_mask"] = self._mask(micro_batch.subtree_end_B_T.to(device))
        # Without a mask: attention is causal, so nothing that is trained sees the padding behind it.
        logits: torch.Tensor = self.model(**arguments, logits_to_keep=kept_K, use_cache=False).logits
        return logits

    def _mask(self, subtree_end_B_T: torch.Tensor) -> Any:
        """Of what each id attends to, in the form that the model's attention takes."""
        implementation = self.model.config._attn_implementation
        batch, length = subtree_end_B_T.shape
        if implementation == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            def attends(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                return (k <= q) & (q < subtree_end_B_T[b, k])

            return create_block_mask(attends, batch, None, length, length, device=subtree_end_B_T.device.type)
        if implementation not in ("sdpa", "eager"):
            raise ConfigError(
                f"attention {implementation!r} takes no mask of a tree: load the model with sdpa or flex_attention, or "
                "train with layout padded"
            )
        at_T = torch.arange(length, device=subtree_end_B_T.device)
        allowed_B_T_T = (at_T[None, None] <= at_T[None, :, None]) & (at_T[None, :, None] < subtree_end_B_T[:, None])
        if implementation == "sdpa":
            return allowed_B_T_T[:, None]
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(allowed_B_T_T, dtype=self.model.dtype).masked_fill(~allowed_B_T_T, lowest)[:, None]

    @torch.no_grad()
    def _check_masks(self, length: int) -> None:
        """Raises `ConfigError` if the model would not keep to a mask over `length` ids."""
        config = self.model.config.get_text_config().to_dict()
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        if window is not None and window < length:
            raise ConfigError(
                f"the model attends to a window of {window} ids, which a mask over {length} would replace: train with "
                "layout padded"
            )
        rows = [np.array(row, dtype=np.int32) for row in _PROBE]
        made = forest(rows, shared_lengths(rows))
        device = self.model.device
        together = (
            self.model(
                input_ids=torch.from_numpy(made.token_ids_T).long()[None].to(device),
                position_ids=torch.from_numpy(made.position_T)[None].to(device),
                attention_mask=self._mask(torch.from_numpy(made.subtree_end_T)[None].to(device)),
                use_cache=False,
            )
            .logits[0]
            .float()
        )
        for row, places in zip(_PROBE, made.places, strict=True):
            alone = self.model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0].float()
            if not torch.allclose(together[places.tolist()], alone, atol=_PROBE_TOLERANCE * float(alone.std()), rtol=0):
                raise ConfigError(
                    "the model does not keep to a mask of its ids (a recurrent layer, or positions of its own): train "
                    "with layout padded"
                )


def _entropies(logits_U_V: torch.Tensor, normalizer_U: torch.Tensor) -> torch.Tensor:
    """[U]: of the distributions, in nats."""
    entropy_U = torch.zeros_like(normalizer_U)
    for start in range(0, len(entropy_U), _ENTROPY_CHUNK):
        chunk = slice(start, start + _ENTROPY_CHUNK)
        logits, normalizer = logits_U_V[chunk], normalizer_U[chunk]
        entropy_U[chunk] = torch.special.entr((logits - normalizer[:, None]).exp()).sum(-1)
    return entropy_U
