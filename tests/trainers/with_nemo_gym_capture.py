"""NeMo Gym's own suite for sinks, its capture and its builder, over the stores here. `make test-trainers`."""

from __future__ import annotations

import runpy
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from nemo_gym import token_id_capture as gym
from nemo_gym.token_id_capture.conformance import run_conformance

from gym_capture.capture.protocols import RecordStore
from gym_capture.errors import RecordError
from gym_capture.reasons import CaptureMark, join_reason
from gym_capture.serving.actor_store import ActorStore
from gym_capture.stores.log import open_log
from gym_capture.stores.memory import MemoryStore
from tests.docs.pages import ROOT, blocks_of
from trainer_bridge.nemo_capture import GymLineage, GymSink, GymSource, record_of

STORES: dict[str, Callable[[Path], Awaitable[RecordStore]]] = {
    "memory": lambda _: MemoryStore.open(),
    "log": lambda path: open_log.open(directory=path),
    "state-actors": lambda path: ActorStore.open(directory=path),
}
CHECKS = [
    *("put_then_freeze_visibility", "idempotent_reput", "conflicting_reput", "mark_incomplete_durability"),
    *("freeze_idempotency", "post_freeze_write_safety", "conditional_retirement"),
    *("lineage_visibility", "fresh_client_lineage_visibility", "begin_call_custody"),
]


@pytest.fixture(scope="module", autouse=True)
def _no_cluster_stays() -> Iterator[None]:
    """That of the state actors would be in the way of other tests' own."""
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", STORES)
async def test_nvidias_conformance_suite_passes(name: str, tmp_path: Path) -> None:
    store = await STORES[name](tmp_path)
    try:
        passed = await run_conformance(
            lambda: GymSink(store), lambda: GymSource(store, gym), lambda: GymLineage(store, gym)
        )
    finally:
        await store.close()
    assert passed == CHECKS


async def test_the_page_installs_it_in_a_model_server(tmp_path: Path) -> None:
    page = ROOT / "docs" / "trainers" / "nemo-rl.md"
    (text,) = [block.text for block in blocks_of(page) if block.file == "gym_store.py"]
    (tmp_path / "gym_store.py").write_text(text, encoding="utf-8")
    try:
        runpy.run_path(str(tmp_path / "gym_store.py"))["install"](MemoryStore())
        assert isinstance(gym.installed_token_sink(), GymSink)
        assert isinstance(gym.installed_token_source(), GymSource)
        assert isinstance(gym.installed_lineage_store(), GymLineage)
    finally:
        gym.install_token_sink(None)
        gym.install_token_source(None)
        gym.install_lineage_store(None)


USER = {"role": "user", "content": "What is the weather in Paris?"}
MORE = {"role": "user", "content": "And tomorrow?"}


def served(name: str, prompt: list[int], generation: list[int], text: str) -> dict[str, Any]:
    """A response as a Gym model server has it."""
    return {
        "id": name,
        "model": "policy",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": text}],
                "prompt_token_ids": prompt,
                "generation_token_ids": generation,
                "generation_log_probs": [-0.1 * token for token in generation],
            }
        ],
    }


async def captured(store: RecordStore, call_id: str, request: list[Any], response: dict[str, Any]) -> None:
    """One call, by Gym's own capture, with deltas in the place of prompts."""
    context = gym.CaptureContext(
        rollout_id="r",
        model_call_id=call_id,
        token_sink=GymSink(store),
        lineage_store=GymLineage(store, gym),
        delta_records=True,
    )
    token = gym.set_token_sink(context)
    try:
        await gym.register_call_intent()
        await gym.resolve_parent(request)
        await gym.capture_tokens(response, request)
    finally:
        gym.reset_token_sink(token)


async def test_gyms_capture_puts_and_its_builder_reads_a_conversation() -> None:
    store = MemoryStore()
    first = served("resp-1", [1, 2], [3, 4], "It is sunny.")
    await captured(store, "c1", [USER], first)
    said = {key: first["output"][0][key] for key in ("type", "role", "content")}
    await captured(store, "c2", [USER, said, MORE], served("resp-2", [1, 2, 3, 4, 5], [6], "Rain."))
    entries = {entry.model_call_id: entry for entry in (await GymSource(store, gym).freeze("r")).entries}
    assert entries["c2"].parent_call_id == "c1"
    assert entries["c2"].prompt_token_ids == [1, 2, 3, 4, 5]
    assert entries["c2"].response_id == "resp-2"
    assert entries["c2"].digest == gym.compute_digest([1, 2, 3, 4, 5, 6])
    built = await gym.trajectories_from_source("r", GymSource(store, gym), declared_response_id="resp-2")
    assert built is not None
    assert not built.get("mask_sample")
    # ... and ours finds the same chain in what Gym's writer stored as a delta.
    (found,) = [each for each in (await store.freeze("r")).entries if each.model_call_id == "c2"]
    assert found.cumulative_ids().tolist() == [1, 2, 3, 4, 5, 6]


async def test_what_gym_could_not_capture_masks_the_rollout() -> None:
    store = MemoryStore()
    await captured(store, "c1", [USER], {"id": "resp-1", "output": [{"type": "message", "content": []}]})
    snapshot = await GymSource(store, gym).freeze("r")
    assert snapshot.incomplete
    assert join_reason(CaptureMark.CAPTURE_FAILED, "c1") in (await store.freeze("r")).incomplete
    built = await gym.trajectories_from_source("r", GymSource(store, gym))
    assert built is not None
    assert built["mask_sample"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"novelty": 1}, "novelty"), ({"cum_len": 3}, "cum_len"), ({"digest": "0" * 64}, "digest")],
)
async def test_an_entry_that_cannot_be_kept_as_it_is_is_refused(changes: dict[str, Any], field: str) -> None:
    entry = gym.stamp_lineage(
        gym.TokenEntry(
            rollout_id="r",
            model_call_id="c",
            prompt_token_ids=[1],
            generation_token_ids=[2],
            generation_log_probs=[-1.0],
        ),
        None,
        parent_resolution=gym.ParentResolutionStatus.ROOT,
    )
    record_of(entry)
    with pytest.raises(RecordError, match=field):
        record_of(gym.TokenEntry(**{**entry.model_dump(), **changes}))
