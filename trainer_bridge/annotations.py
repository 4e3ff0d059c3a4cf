"""What a trainer finds of single tokens, beside the records: entropy, difference to the trainer, clipping.

Invariant: values stand at the very ids that were trained, by call and place in its generation, and nowhere else. That
they cannot be written ends no training: it is said once, and nothing more is written.

Flow: `GrpoTrainer.on_tokens` gives what a step found -> a line for each call and name -> `gym_capture.data.annotations`
-> the inspector shows them as overlays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gym_capture.data.annotations import CLIPPED, DIFFERENCE, ENTROPY, Annotation, Annotator
from gym_capture.errors import GymCaptureError
from trainer_bridge.batching import Row, StepBatch
from trainer_bridge.grpo import TokenValues
from trainer_bridge.stream import TrainSequence

_DIGITS = 4


class StepAnnotator:
    """Adds what each step finds to the annotations of a directory."""

    def __init__(self, directory: Path, step: Callable[[], int], *, warn: Callable[[str], None]) -> None:
        """`step` says which one it is; `warn` is told once if there is no place any more."""
        self._annotator = Annotator(directory)
        self._step = step
        self._warn = warn
        self._is_writing = True

    def __call__(self, batch: StepBatch, values: TokenValues) -> None:
        if not self._is_writing:
            return
        try:
            self._annotator.add(step_annotations(batch, values, by=f"trainer, step {self._step()}"))
        except GymCaptureError as error:
            self._is_writing = False
            self._warn(f"warning: {error.message}; nothing more is annotated")


def step_annotations(batch: StepBatch, values: TokenValues, *, by: str) -> Iterator[Annotation]:
    """What a step found, by call."""
    named: Mapping[str, npt.NDArray[np.float64]] = {
        DIFFERENCE: values.difference_N.astype(np.float64),
        ENTROPY: values.entropy_N.astype(np.float64),
        CLIPPED: values.clipped_N.astype(np.float64),
    }
    for row in batch.rows:
        rollout = batch.used[row.rollout]
        sequence = next(each for each in rollout.sequences if each.token_ids is row.token_ids)
        for call_id, begin, end in _calls(sequence):
            for name, values_N in named.items():
                found = _of_call(row, values_N, begin, end)
                if any(value is not None for value in found):
                    yield Annotation(rollout=rollout.rollout_id, call=call_id, name=name, values=found, by=by)


def _calls(sequence: TrainSequence) -> Iterator[tuple[str, int, int]]:
    """Each call whose generation is trained, and where that is: its spans, put together."""
    places: dict[str, tuple[int, int]] = {}
    for span in sequence.spans:
        begin, end = places.get(span.call_id, (span.start, span.end))
        places[span.call_id] = (min(begin, span.start), max(end, span.end))
    return ((call_id, begin, end) for call_id, (begin, end) in places.items())


def _of_call(row: Row, values_N: npt.NDArray[np.float64], begin: int, end: int) -> list[float | None]:
    """One for each id of `[begin, end)`; None where nothing was trained, or what was found is no number."""
    found: list[float | None] = [None] * (end - begin)
    first, last = np.searchsorted(row.positions, (begin, end))
    own = np.round(values_N[row.first + first : row.first + last], _DIGITS)
    for position, value in zip(row.positions[first:last].tolist(), own.tolist(), strict=True):
        if np.isfinite(value):
            found[position - begin] = value
    return found
