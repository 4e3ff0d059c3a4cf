"""Rollouts made from their ids: what the tests of the data job build, also inside Ray workers."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gym_capture.capture.records import Continues, Root, Snapshot, WeightSpan, digest_ids, suffix_of
from gym_capture.capture.suffixes import StoredRecord, complete
from gym_capture.errors import CorruptLogError, StoreUnavailableError
from tests.calls import entry_of

IMPORT_PATH = f"{__name__}:MadeSource"


def snapshot(rollout_id: str, *, turns: int = 2, tokens: int = 4, incomplete: Sequence[str] = ()) -> Snapshot:
    """A conversation of `turns` calls, each a delta of the one before; everything follows from the arguments."""
    rng = np.random.default_rng(zlib.crc32(rollout_id.encode()))
    entries: list[StoredRecord] = []
    so_far = np.zeros(0, dtype=np.int32)
    for turn in range(turns):
        # All rollouts of a task start from the same prompt.
        added = np.arange(10, 13, dtype=np.int32) if turn == 0 else rng.integers(0, 100, 3, dtype=np.int32)
        prompt = np.concatenate((so_far, added))
        generated = rng.integers(100, 200, tokens, dtype=np.int32)
        parent = Continues(entries[-1].model_call_id, so_far.size) if turn else Root()
        so_far = np.concatenate((prompt, generated))
        entry = entry_of(
            rollout_id=rollout_id,
            model_call_id=f"call-{turn}",
            model="policy",
            requested_model="policy",
            has_tools=True,
            prompt_token_ids=prompt,
            generation_token_ids=generated,
            generation_log_probs=-rng.random(tokens, dtype=np.float32),
            parent=parent,
            digest=digest_ids(so_far),
            finish_reason="tool_calls" if turn < turns - 1 else "stop",
            prefix_requested=turn > 0,
            prefix_supplied=turn > 0,
            weight_versions=(WeightSpan(0, tokens, str(turn)),),
        )
        entries.append(suffix_of(entry))
    return Snapshot(
        rollout_id=rollout_id,
        snapshot_id=f"snapshot-of-{rollout_id}",
        version=len(entries),
        entries=tuple(reversed(complete(entries)[0])),
        incomplete=tuple(incomplete),
    )


class MadeSource:
    """A `TokenSource` whose rollouts behave as their ids say: `missing-*`, `dangling-*`, `ending-*` (a call of it has
    its record the second time), `corrupt-*`, `denied-*`, `defect-*`, `down-*`, `fatal-*` (the process that reads it
    dies, the first time), `poison-*` and `hungry-*` (it ends each time, or is killed as for its memory); any other is a
    whole one."""

    def __init__(self, *, directory: str = "") -> None:
        self._directory = Path(directory)
        self._asked: list[str] = []

    async def freeze(self, rollout_id: str) -> Snapshot:
        kind = rollout_id.split("-")[0]
        self._asked.append(rollout_id)
        if kind == "missing":
            return snapshot(rollout_id, turns=0)
        if kind == "dangling":
            return snapshot(rollout_id, turns=1, incomplete=("dangling_intent:call-1",))
        if kind == "ending" and self._asked.count(rollout_id) == 1:
            return snapshot(rollout_id, turns=1, incomplete=("dangling_intent:call-1",))
        if kind == "corrupt":
            raise CorruptLogError("checksum", rollout_id=rollout_id)
        if kind == "denied":
            raise PermissionError(13, "Permission denied", f"{rollout_id}.jsonl")
        if kind == "defect":
            raise KeyError("no such thing")
        if kind == "poison":
            os._exit(1)
        if kind == "hungry":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "down" and self._asked.count(rollout_id) == 1:
            raise StoreUnavailableError("its actor restarts")
        if kind == "fatal":
            died = self._directory / rollout_id
            if not died.exists():
                died.touch()
                os._exit(1)
        return snapshot(rollout_id)

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        raise AssertionError("a build only freezes")

    async def clear(self, rollout_id: str) -> None:
        raise AssertionError("a build only freezes")

    async def rollout_ids(self) -> Sequence[str]:
        raise AssertionError("a build only freezes")

    async def close(self) -> None:
        pass


async def opened(*, directory: str) -> MadeSource:
    """A factory that is a coroutine function."""
    return MadeSource(directory=directory)


async def dying() -> MadeSource:
    """A factory that nobody survives."""
    os._exit(1)
