"""What is recorded of a rollout, in numbers: what a job shows of those that it plays.

Invariant: counts add up - those of a rollout are the sums of its calls', those of a job the sums of its rollouts'.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CallCounts(NamedTuple):
    """What one recorded call adds to its rollout's counts."""

    generated_tokens: int
    is_eligible: bool
    """Its parent was proven when it began: it was to get its exact prefix."""
    is_supplied: bool
    """Its prompt, as the engine reports it, starts with its parent's ids."""


class RolloutCounts(NamedTuple):
    """What is recorded of one rollout, or of several together (`summed`)."""

    calls: int = 0
    """Recorded ones."""
    generated_tokens: int = 0
    eligible_links: int = 0
    """Calls whose parent was proven when they began."""
    contiguous_links: int = 0
    """Those of them that are contiguous: their prompt starts with their parent's ids."""
    flaws: int = 0
    """What its capture is known to lack, and records that are at fault: with any, a build masks the rollout."""
    timed_puts: int = 0
    """Records of which it is known how long they took to become durable: those of the state actor's present life."""
    put_s: float = 0.0
    """What they took, summed: from their arrival in the actor."""

    @property
    def put_ms(self) -> float | None:
        """The mean of a record. None: not known."""
        return 1000 * self.put_s / self.timed_puts if self.timed_puts else None

    def plus(self, call: CallCounts) -> RolloutCounts:
        """With one more call."""
        calls, generated_tokens, eligible_links, contiguous_links, flaws, timed_puts, put_s = self
        generated, is_eligible, is_supplied = call
        # By place: each put does this, and `_replace` takes four times as long.
        return RolloutCounts(
            calls + 1,
            generated_tokens + generated,
            eligible_links + is_eligible,
            contiguous_links + is_supplied,
            flaws,
            timed_puts,
            put_s,
        )


def summed(counts: Iterable[RolloutCounts]) -> RolloutCounts:
    """All of them together."""
    return RolloutCounts(*map(sum, zip(*counts, strict=True)))
