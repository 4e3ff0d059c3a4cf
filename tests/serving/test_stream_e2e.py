"""A trainer that takes groups from the graph as it runs: registered by others, over a restart of its state, and gone
once they were trained and the checkpoint is written."""

from __future__ import annotations

import httpx
import pytest

from gym_capture.data.sources import SourceSpec
from tests.serving.graph import Graph
from trainer_bridge.collate import pack
from trainer_bridge.group_sources import RecordedGroups
from trainer_bridge.groups import GroupStream

pytestmark = pytest.mark.engine


def play(http: httpx.Client, group: str, sample: int) -> None:
    rollout_id = f"{group}-{sample}"
    assert http.post("/rollouts", json={"rollout_id": rollout_id, "group_id": group}).status_code == 200
    asked = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "count"}]}
    assert http.post(f"/ng-rollout/{rollout_id}/v1/chat/completions", json=asked).status_code == 200
    assert http.post(f"/rollouts/{rollout_id}/complete", json={"reward": float(sample)}).status_code == 200


def test_groups_come_from_the_graph_and_their_records_go_when_they_are_acknowledged(graph: Graph) -> None:
    spec = SourceSpec(import_path="gym_capture.serving.state:connect", kwargs={"namespace": graph.namespace})
    source = RecordedGroups(spec, group_size=2, retire=True, poll_s=0.1)
    with httpx.Client(base_url=graph.url, trust_env=False, timeout=120) as http, GroupStream(source) as stream:
        mine = (group for group in stream if group.group_id.startswith("stream-"))  # it is not this test's graph alone
        play(http, "stream-a", 0)
        play(http, "stream-b", 0)
        play(http, "stream-b", 1)
        first = next(mine)
        assert first.group_id == "stream-b"
        assert graph.kill_state_actors()
        play(http, "stream-a", 1)
        second = next(mine)
        assert second.group_id == "stream-a"
        for group in (first, second):
            assert [rollout.reward for rollout in group] == [0.0, 1.0]
            assert not any(rollout.masked for rollout in group)
        packed = pack([first.table, second.table], tokens=4096)
        assert sum(int(batch.loss_mask_T.sum()) for batch in packed.batches) == sum(
            int(sequence.loss_mask.sum())
            for group in (first, second)
            for rollout in group
            for sequence in rollout.sequences
        )
        stream.acknowledge(stream.trained([first]))
        found = {
            f"{group}-{n}": http.get(f"/rollouts/{group}-{n}").status_code
            for group in ("stream-a", "stream-b")
            for n in (0, 1)
        }
        assert found == {"stream-a-0": 200, "stream-a-1": 200, "stream-b-0": 404, "stream-b-1": 404}
