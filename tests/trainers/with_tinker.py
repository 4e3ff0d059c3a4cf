"""A datum is what tinker's cookbook makes of the same calls. `make test-trainers`."""

from __future__ import annotations

import json

import pytest
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition

from gym_capture.capture.record_rows import row_json
from tests.trainers.group import ADVANTAGE, GROUP
from trainer_bridge.samples import Delivery
from trainer_bridge.tinker import project

DATA = [json.loads(row_json(line)) for line in project(GROUP, Delivery())]
SAMPLES = Delivery().samples(GROUP, advantages=True)


def datum(line: dict[str, dict[str, dict[str, object]]]) -> tinker.Datum:
    tensors = {name: tinker.TensorData(**tensor) for name, tensor in line["loss_fn_inputs"].items()}
    return tinker.Datum(model_input=tinker.ModelInput(**line["model_input"]), loss_fn_inputs=tensors)


@pytest.mark.parametrize("number", range(len(DATA)))
def test_it_is_the_datum_of_the_cookbook(number: int) -> None:
    got, sample = datum(DATA[number]), SAMPLES[number]
    ids, log_probs = sample.token_ids.tolist(), sample.log_probs.tolist()
    # Calls in the cookbook's terms; where the log probability is unknown, an id is none that was sampled.
    trained = [i for i in range(len(ids)) if sample.mask[i]]
    starts = [i for i in trained if i - 1 not in trained]
    ends = [i + 1 for i in trained if i + 1 not in trained]
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(ids[:start]),
            ac=TokensWithLogprobs(tokens=ids[start:end], maybe_logprobs=log_probs[start:end]),
            reward=0.0,
            episode_done=end == ends[-1],
        )
        for start, end in zip(starts, ends, strict=True)
    ]
    trajectory = Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
    advantage = ADVANTAGE[sample.rollout.rollout_id]
    assert advantage is not None
    (expected,) = trajectory_to_data(trajectory, advantage, include_provenance=False)
    length = expected.model_input.length  # the cookbook ends at what was sampled last
    assert got.model_input.to_ints()[:length] == expected.model_input.to_ints()
    assert set(got.loss_fn_inputs) == set(expected.loss_fn_inputs)
    for name, tensor in expected.loss_fn_inputs.items():
        assert got.loss_fn_inputs[name].dtype == tensor.dtype
        assert got.loss_fn_inputs[name].tolist()[:length] == pytest.approx(tensor.tolist())
    assert not any(got.loss_fn_inputs["mask"].tolist()[length:])
