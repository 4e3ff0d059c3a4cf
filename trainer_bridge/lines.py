"""Exporters of one file, in which a line is what the trainer takes as one object.

Invariant: lines are made group by group, and of the numbers of the rollouts alone: what is in the file of a build is
what the same function makes of the same groups from the stream.

Flow: groups -> `FinishedRollout.for_training` -> the trainer's `project` -> a line of JSON for each object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from gym_capture.capture.record_rows import row_json
from trainer_bridge.finished import FinishedRollout, JsonObject
from trainer_bridge.samples import Delivery
from trainer_bridge.stream import TrainRollout

Project: TypeAlias = Callable[[Sequence[TrainRollout], Delivery], Iterable[JsonObject]]
"""The objects of one group, counted in the delivery."""


@dataclass(frozen=True, slots=True)
class LinesExporter:
    """An `Exporter`: an object a line."""

    name: str
    file: str
    project: Project

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def export(
        self,
        rollouts: Iterable[tuple[FinishedRollout, ...]],
        create: Callable[[str], AbstractContextManager[BinaryIO]],
    ) -> Delivery:
        """Raises `RecordError` for what the trainer could not read."""
        delivery = Delivery()
        with create(self.file) as file:
            for group in rollouts:
                for made in self.project([rollout.for_training() for rollout in group], delivery):
                    file.write(row_json(made) + b"\n")
        return delivery
