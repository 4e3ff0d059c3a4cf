"""New weights on two replicas with real engines, while calls run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gym_capture.build.builder import build
from gym_capture.capture.records import TokenEntry
from gym_capture.errors import WeightsRefusedError
from gym_capture.models import tiny_dir
from tests.faults.apis import APIS
from tests.faults.audit import read
from tests.faults.cluster import Cluster
from tests.faults.conftest import serving
from tests.serving.replica import until
from tests.weight_folders import moved
from trainer_bridge.weight_client import WeightClient
from trainer_bridge.weight_sync import WeightSync

pytestmark = pytest.mark.engine

CALLS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with serving({}) as cluster:
        yield cluster


def scored(tensors: Mapping[str, torch.Tensor] | None, ids: np.ndarray) -> np.ndarray:
    """The log probability of each id after those before it, as a trainer computes them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir(), dtype=torch.float32)
    if tensors is not None:
        model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.from_numpy(ids[None].astype(np.int64))).logits[0], dim=-1)
    return log_probs[np.arange(ids.size - 1), ids[1:]].numpy()


def check_spans(entry: TokenEntry) -> tuple[str, ...]:
    """Every token has the log probability that the version gives it which its span names."""
    ids = entry.cumulative_ids()
    for span in entry.policy.weight_versions:
        found = entry.generation_log_probs[span.start : span.end]
        tensors = None if span.version == "0" else moved(int(span.version))
        first = entry.prompt_len - 1
        expected = scored(tensors, ids)[first + span.start : first + span.end]
        np.testing.assert_allclose(found, expected, atol=1e-3)
    return tuple(span.version for span in entry.policy.weight_versions)


async def test_two_replicas_change_their_weights_under_running_calls(cluster: Cluster, tmp_path: Path) -> None:
    streaming: set[int] = set()

    async def call(http: httpx.AsyncClient, number: int, max_tokens: int) -> str:
        body = {**APIS[0].body((), "Talk."), "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        url = f"{cluster.url}/ng-rollout/r{number}/v1/chat/completions"
        text = ""
        async with http.stream("POST", url, json={**body, "min_tokens": max_tokens}) as response:
            async for line in response.aiter_lines():
                streaming.add(number)
                text = line or text
        return text

    with WeightClient(cluster.url) as client:
        sync = WeightSync(client, tmp_path)
        before = await asyncio.to_thread(client.checksums)
        async with httpx.AsyncClient(trust_env=False, timeout=300) as http:
            calls = [asyncio.ensure_future(call(http, number, 400)) for number in range(CALLS)]
            await until(lambda: len(streaming) == CALLS)
            pushed = await asyncio.to_thread(sync.push, 1, moved(1))
            assert pushed.replicas == 2
            assert await asyncio.gather(*calls) == ["data: [DONE]"] * CALLS
            assert await call(http, CALLS, 8) == "data: [DONE]"
        assert await asyncio.to_thread(client.checksums) != before  # those of both replicas agree, or it raises
        lacking = {name: tensor for name, tensor in moved(2).items() if not name.endswith("q_proj.weight")}
        with pytest.raises(WeightsRefusedError, match=r"it lacks model\.layers\.0\.self_attn\.q_proj\.weight"):
            await asyncio.to_thread(sync.push, 2, lacking)
        assert (await asyncio.to_thread(client.info))["weight_version"] == "1"
    snapshots = read(cluster.records).snapshots
    entries = [snapshots[f"r{number}"].entries[0] for number in range(CALLS + 1)]
    found = [check_spans(entry) for entry in entries]
    assert found[CALLS] == ("1",)
    # A stream says that it lives before it has a token, and then both may be of the new version.
    assert set(found[:CALLS]) <= {("0",), ("0", "1"), ("1",)}
    assert ("0", "1") in found
    # ... and so it says in what is trained on.
    mixed = found.index(("0", "1"))
    (trajectory,) = build(snapshots[f"r{mixed}"]).trajectories
    assert tuple(span.weight_version for span in trajectory.spans) == ("0", "1")
