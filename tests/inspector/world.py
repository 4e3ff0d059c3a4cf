"""A log with a few rollouts in it, as a graph leaves one, and the inspector over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from gym_capture.capture.operations import Begin, Commit, Complete, Register
from gym_capture.capture.outcomes import Outcome, Registration
from gym_capture.capture.records import CallIntent, Continues, Root, TokenEntry, Unresolved, WeightSpan
from gym_capture.inspector.app import build_inspector
from gym_capture.inspector.library import Library
from gym_capture.inspector.pieces import Vocabulary
from gym_capture.inspector.source import Source
from gym_capture.stores.log import LogStore
from tests.calls import call

HOSTILE = "</script><img src=x onerror=alert(1)>\x00\x1b[31m\u202e"
WORDS = {
    1: b"<|im_start|>",
    2: b"user\n",
    3: b"<b>hi</b>",
    9: b"<|im_end|>",
    8: b"\n",
    5: b"assistant\n",
    6: b"\x07",
    7: b"yes",
}
VOCABULARY = Vocabulary(WORDS, frozenset({1, 9}))
PROMPT = [1, 2, 3, 9, 8, 1, 5]


def said(text: str) -> tuple[dict[str, object], ...]:
    return ({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},)


def conversation(rollout_id: str, *, split: bool = False) -> list[TokenEntry]:
    """Two calls; with `split`, the second is rendered otherwise than the first was sampled."""
    first = call(
        "c1",
        PROMPT,
        [6, 7, 9],
        parent=Root(),
        rollout_id=rollout_id,
        output_items=said(HOSTILE),
        created_at=101.0,
        weight_versions=(WeightSpan(0, 3, "4"),),
        sampling={"temperature": 1.0},
        max_tokens=8,
    )
    tail = [8, 1, 2, 3, 9, 8, 1, 5]
    prompt = [*PROMPT, 7, 9, *tail] if split else [*PROMPT, 6, 7, 9, *tail]
    second = call(
        "c2",
        prompt,
        [7, 9],
        parent=Unresolved("tail_differs") if split else Continues("c1", 10),
        rollout_id=rollout_id,
        output_items=said("yes"),
        created_at=103.0,
        prefix_requested=True,
        prefix_supplied=not split,
        weight_versions=(WeightSpan(0, 2, "5"),),
    )
    return [first, second]


async def record(store: LogStore, entries: Iterable[TokenEntry]) -> None:
    for entry in entries:
        intent = CallIntent(
            rollout_id=entry.rollout_id, model_call_id=entry.model_call_id, created_at=entry.created_at - 0.5
        )
        epoch = await store.write(Begin(intent))
        await store.write(Commit(entry, epoch=epoch))


async def write_world(directory: Path) -> LogStore:
    """Three rollouts of a group and one that nobody registered. The store stays open."""
    store = await LogStore.open(directory)
    for sample, (name, split) in enumerate((("one", False), ("two", True), ("three", False))):
        await store.write(Register(name, Registration(group_id="group/1", sample=sample, task='"ask"')))
        await record(store, conversation(name, split=split))
    await store.write(Complete("one", Outcome(reward=1.0)))
    await store.write(Complete("two", Outcome(reward=0.0, failure="agent_failed")))
    await record(store, conversation("alone")[:1])
    return store


def write_closed_world(directory: Path) -> Path:
    """As `write_world`, of a graph that has ended. Returns the directory."""

    async def write() -> None:
        await (await write_world(directory)).close()

    asyncio.run(write())
    return directory


def library_of(source: Source) -> Library:
    """Looked at and read whole, without a thread."""
    library = Library(source)
    library.settle()
    return library


def client_of(app: FastAPI, **arguments: object) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:1", **arguments)  # type: ignore[arg-type]


def inspector(source: Source, *, vocabulary: Vocabulary | None = VOCABULARY) -> TestClient:
    return client_of(build_inspector(library_of(source), vocabulary=vocabulary))
