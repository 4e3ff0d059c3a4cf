"""Which rollouts ended, as far as a state actor knows, because their conversation outgrew the model's context.

Invariant: a rollout is among them exactly while the last thing that became of its calls is such a refusal: a call that
is recorded afterwards takes it out, and so does forgetting the rollout. Memory is bounded: the oldest are forgotten. It
is not kept on disk: an actor that restarts knows of none, and a harness goes by what its agent says.

Flow: a call is too long -> `refused` -> the harness asks when its agent has ended (`rollouts.outgrown`).
"""

from __future__ import annotations

from typing import Final

_MOST: Final = 100_000


class Outgrown:
    """The rollouts whose last call was refused as too long."""

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._refused: dict[str, None] = {}
        """In the order in which they were refused last."""

    def refused(self, rollout_id: str) -> None:
        self.forget(rollout_id)
        self._refused[rollout_id] = None
        if len(self._refused) > self._most:
            del self._refused[next(iter(self._refused))]

    def forget(self, rollout_id: str) -> None:
        """A call of it was recorded, or the rollout is gone."""
        self._refused.pop(rollout_id, None)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._refused
