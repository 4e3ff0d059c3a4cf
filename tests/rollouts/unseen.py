"""A view of a job that nobody looks at."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from gym_capture.rollouts.progress import Snapshot


class Unseen:
    every_s = 3600.0

    def shown(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, now: Snapshot) -> None:
        """Shows nothing."""
