"""OpenEnv's own model takes the traces. `make test-trainers`.

Its package starts a server's parts on import, for which others are needed; the trace wants none of them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.trainers.group import GROUP, TRAINED
from trainer_bridge.openenv import project
from trainer_bridge.samples import Delivery

_root = find_spec("openenv")
assert _root is not None
assert _root.submodule_search_locations is not None
for _name in ("core", "core/harness", "core/harness/capture"):
    _module = ModuleType("openenv." + _name.replace("/", "."))
    _module.__path__ = [str(Path(_root.submodule_search_locations[0], _name))]
    sys.modules[_module.__name__] = _module
from openenv.core.harness.training import TrainingTrace  # noqa: E402

LINES = list(project(GROUP, Delivery()))


def test_a_trace_of_each_rollout_has_every_call_once() -> None:
    traces = {line["rollout_id"]: TrainingTrace(**line["trace"]) for line in LINES}
    assert {name: [turn.node_id for turn in trace.turns] for name, trace in traces.items()} == {
        "split": ["c", "a", "b"],
        "short": ["a2"],
        "plain": ["a4"],
    }
    for name, trace in traces.items():
        trained = [
            token
            for turn in trace.turns
            for token, kept in zip(turn.prompt_token_ids + turn.completion_token_ids, turn.loss_mask, strict=True)
            if kept
        ]
        expected = {"split": TRAINED["split/c"] + TRAINED["split/b"]}.get(name, TRAINED.get(f"{name}/a"))
        assert trained == expected


def test_a_mask_that_does_not_cover_the_turn_would_be_refused() -> None:
    trace = LINES[0]["trace"]
    broken = trace | {"turns": [turn | {"loss_mask": turn["loss_mask"][1:]} for turn in trace["turns"]]}
    with pytest.raises(ValueError, match="loss_mask"):
        TrainingTrace(**broken)
