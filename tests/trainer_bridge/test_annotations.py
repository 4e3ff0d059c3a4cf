"""What a step finds of a token stands at that very token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gym_capture.build.trajectories import Span
from gym_capture.data import annotations
from gym_capture.data.annotations import AnnotationFile
from trainer_bridge.annotations import StepAnnotator
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer
from trainer_bridge.stream import TrainSequence

from .made import model, rollout, sequence


def log_probs_of(policy: Any, made: TrainSequence) -> torch.Tensor:
    ids = torch.from_numpy(made.token_ids.astype(np.int64))[None]
    return torch.log_softmax(policy(input_ids=ids).logits[0], -1)


def test_values_stand_at_their_tokens(tmp_path: Path) -> None:
    unknown = sequence(seed=1, prompt=2, generated=4)
    unknown.log_probs[3] = np.nan
    ids = 12
    two_calls = sequence(
        seed=2,
        prompt=0,
        generated=ids,
        loss_mask=np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], dtype=np.bool_),
        spans=(Span(2, 4, "a", "1"), Span(4, 5, "a", "2"), Span(7, 11, "b", "2")),
    )
    rollouts = [
        rollout(unknown, two_calls, rollout_id="one"),
        rollout(sequence(seed=3), rollout_id="two", advantage=-1.0),
        rollout(sequence(seed=4), rollout_id="left-out", advantage=None),
    ]
    policy = model()
    with torch.no_grad():
        expected = {
            name: torch.log_softmax(
                policy(input_ids=torch.from_numpy(each.token_ids.astype(np.int64))[None]).logits[0], -1
            )
            for name, each in (("c", unknown), ("a", two_calls), ("b", two_calls))
        }
    trainer = GrpoTrainer(policy, GrpoOptions(lr=1e-3))
    trainer.on_tokens = StepAnnotator(tmp_path, lambda: 7, warn=print)
    trainer.step(rollouts)
    file = AnnotationFile(tmp_path)
    found = {(each.call, each.name): each for each in file.of("one")}
    assert found.keys() == {(call, name) for call in "abc" for name in ("difference", "entropy", "clipped")}
    assert {each.by for each in found.values()} == {"trainer, step 7"}
    for call, made, begin, end in (("c", unknown, 2, 6), ("a", two_calls, 2, 5), ("b", two_calls, 7, 11)):
        differences, entropies = found[call, "difference"].values, found[call, "entropy"].values
        assert differences is not None
        assert entropies is not None
        assert len(differences) == len(entropies) == end - begin
        for n, place in enumerate(range(begin, end)):
            before = expected[call][place - 1]
            recorded = float(made.log_probs[place])
            if np.isnan(recorded):
                assert differences[n] is None
                continue
            assert differences[n] == pytest.approx(float(before[made.token_ids[place]]) - recorded, abs=1e-3)
            assert entropies[n] == pytest.approx(float(-(before.exp() * before).sum()), abs=1e-3)
    assert len(file.of("two")) == 3
    assert file.of("left-out") == []
    assert file.news()["one"] > 0


def test_a_place_that_is_full_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "MAX_FILE_BYTES", 10)
    said: list[str] = []
    trainer = GrpoTrainer(model(), GrpoOptions(lr=1e-3))
    trainer.on_tokens = StepAnnotator(tmp_path, lambda: 1, warn=said.append)
    rollouts = [rollout(sequence(seed=n), rollout_id=f"r{n}", advantage=a) for n, a in enumerate((1.0, -1.0))]
    assert trainer.step(rollouts).updates == trainer.step(rollouts).updates == 1
    (line,) = said
    assert "nothing more is annotated" in line
