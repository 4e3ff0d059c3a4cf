"""How long each live rollout of a shard has been left alone.

Invariant: a rollout is never said to have been idle for longer than it was. What an earlier process of the shard saw of
it is not known: its time begins when the shard is opened.

A rollout that nobody consumes stays in the log for ever, since only its consumer can say that it is of no use. The age
of the oldest one is a metric; who would rather lose what nobody fetched sets a limit (`state.max_idle_s`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable


class IdleTimes:
    """Since when nothing was written to or read from each live rollout. `clock` is monotonic, in seconds."""

    def __init__(self, rollout_ids: Iterable[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: OrderedDict[str, float] = OrderedDict.fromkeys(rollout_ids, clock())
        """The one that was left alone for the longest first."""

    def wrote(self, rollout_id: str) -> None:
        self._used[rollout_id] = self._clock()
        self._used.move_to_end(rollout_id)

    def read(self, rollout_id: str) -> None:
        """Reading makes no rollout that there is not."""
        if rollout_id in self._used:
            self.wrote(rollout_id)

    def forget(self, rollout_id: str) -> None:
        """It was dropped, cleared or closed."""
        self._used.pop(rollout_id, None)

    def longest_s(self) -> float:
        """Of the rollout that was left alone for the longest; 0 if there is none."""
        now = self._clock()
        return now - next(iter(self._used.values()), now)

    def idle(self, max_idle_s: float) -> list[str]:
        """The rollouts that were left alone for at least so long."""
        before = self._clock() - max_idle_s
        found = []
        for rollout_id, used in self._used.items():
            if used > before:
                break
            found.append(rollout_id)
        return found
