"""Routed experts and sampling masks: from the engine into records, over turns, into tables and exports."""

from __future__ import annotations

import numpy as np
import pytest

from gym_capture.build.builder import build
from gym_capture.data.schema import read_tensor, rows, to_table
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, Step
from tests.serving.replica import STOP, USER, Replica
from trainer_bridge.finished import read_finished
from trainer_bridge.nemo_rl import project


class Moe:
    """Says a word; its experts are numbered by call and place, its masks have one id more in every call."""

    def __init__(self, template: HfChatTemplate, *, silent_in_call: int | None = None) -> None:
        self._template = template
        self._silent_in_call = silent_in_call
        self.calls = 0

    def __call__(self, call: EngineCall) -> Script:
        self.calls += 1
        ids = [*self._template.encode_plain("one two").tolist(), *self._template.encode(STOP).tolist()]
        texts = ["one two", *[""] * (len(ids) - 1)]
        others = list(range(self.calls))
        says = self.calls != self._silent_in_call
        steps = [
            Step(token_ids=[n], text=text, sampling_mask=[[n, *others]] if says else None)
            for n, text in zip(ids, texts, strict=True)
        ]
        run = np.arange(call.prompt_ids.size + len(ids) - 1, dtype=np.int16) + 1000 * self.calls
        return Script(steps=steps, routed_experts=np.repeat(run, 2).reshape(-1, 2, 1) if says else None)


async def play(replica: Replica, *, stream: bool) -> None:
    said = [USER]
    for _ in range(2):
        response = await replica.chat(*said, stream=stream)
        assert response.status_code == 200, response.text
        said = [*said, {"role": "assistant", "content": "one two"}, USER]


@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_recorded_aligned_over_turns_and_exported(template: HfChatTemplate, stream: bool) -> None:
    replica = Replica(template, Moe(template))
    await play(replica, stream=stream)
    first, second = await replica.state.entries()
    assert second.prefix.supplied
    masks = (first.policy.sampling_mask, second.policy.sampling_mask)
    ids = first.generation_token_ids.tolist()
    assert [mask.tolist() for mask in masks if mask is not None] == [[[n, 0] for n in ids], [[n, 0, 1] for n in ids]]

    snapshot = await replica.state.snapshot()
    built = build(snapshot)
    assert built.mask_reasons == ()
    table = to_table(rows(built, snapshot=snapshot, group_id="g", reward=1.0, agent_name="a"))
    (row,) = table.to_pylist()
    # A row for each trained id, as wide as the widest.
    mask = read_tensor(row["sampling_mask"])
    assert mask is not None
    assert mask.tolist() == [[n, 0, -1] for n in ids] + [[n, 0, 1] for n in ids]
    # The second call's prompt is spliced: its first ids, all but the one that was sampled last, were run by the first.
    experts = read_tensor(row["routed_experts"])
    assert experts is not None
    at = first.cum_len - 1
    assert experts[:, 0, 0].tolist() == [*range(1000, 1000 + at), *range(2000 + at, 2000 + second.cum_len - 1)]

    (finished,) = read_finished(table.to_batches())
    items = [item for item in project(finished)["response"]["output"] if "routed_experts" in item]
    assert [len(item["routed_experts"]) for item in items] == [first.cum_len, second.cum_len]


async def test_a_call_without_them_among_others_masks_its_rollout(template: HfChatTemplate) -> None:
    replica = Replica(template, Moe(template, silent_in_call=2))
    await play(replica, stream=True)
    built = build(await replica.state.snapshot())
    second = (await replica.state.entries())[1].model_call_id
    assert built.mask_reasons == (
        f"uneven_rows:{second}:routed_experts",
        f"uneven_rows:{second}:sampling_mask",
    )
