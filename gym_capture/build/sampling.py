"""How ids were drawn, as far as a trainer has to know it: what it repeats (temperature) and what it cannot (the rest).

Invariant: a value is what the call's record says was in force; one that the record lacks, or that is no number, is None
- never a default. `constrained` is about what a trainer would have to run again: a grammar, biases, banned or allowed
ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_CONSTRAINTS: Final = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens")
"""Sampling parameters that forbid ids, or move their probabilities, by rules of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters that one call's ids were sampled with; None: not on record."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: all ids."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    constrained: bool = False
    """A grammar, a bias, banned or allowed ids shaped the distribution."""

    @property
    def reshaped(self) -> bool:
        """Whether the ids came from another distribution than softmax(logits / temperature)."""
        return (
            self.constrained
            or (self.top_p is not None and self.top_p < 1.0)
            or (self.top_k is not None and self.top_k > 0)
            or bool(self.min_p or self.presence_penalty or self.frequency_penalty)
            or (self.repetition_penalty is not None and self.repetition_penalty != 1.0)
        )


def sampling_of(recorded: Mapping[str, Any]) -> Sampling | None:
    """From a record's `sampling`; None if it says nothing."""
    if not recorded:
        return None
    top_k = recorded.get("top_k")
    return Sampling(
        temperature=_number(recorded.get("temperature")),
        top_p=_number(recorded.get("top_p")),
        top_k=top_k if type(top_k) is int and abs(top_k) < 2**63 else None,
        min_p=_number(recorded.get("min_p")),
        presence_penalty=_number(recorded.get("presence_penalty")),
        frequency_penalty=_number(recorded.get("frequency_penalty")),
        repetition_penalty=_number(recorded.get("repetition_penalty")),
        constrained=any(recorded.get(name) for name in _CONSTRAINTS),
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
