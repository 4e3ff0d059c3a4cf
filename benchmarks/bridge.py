"""From finished groups to a trainer's tensors: Parquet files, or a job that plays, to packed batches.

Claims: on one core, a stream gives 5 M ids a second as packed batches, from files and from groups that are built as
they become complete; packed by best fit, 95 % of the room in the batches is ids. Beside it, in turns, the
straightforward way over the same files: Python lists, a tensor of each row, padded to the longest of the step. Prints
one JSON object a line; exits non-zero if a claim does not hold.

The rollouts are made: groups of 8, ten turns, 4,000 to 12,000 ids each. `live` freezes them from memory: what the way
from a state actor costs is in `benchmarks.state`. Time is processor time of the whole process, all of its threads, the
best of several turns; torch and Arrow have one thread.

    python -m benchmarks.bridge [--groups 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gym_capture.capture.records import (
    CallReply,
    CallRequest,
    Continues,
    Parent,
    PolicyTrace,
    Root,
    Snapshot,
    TokenEntry,
    WeightSpan,
    id_bytes,
    new_digest,
    suffix_of,
)
from gym_capture.capture.suffixes import complete
from gym_capture.data.group_files import write_groups
from gym_capture.data.group_stream import Tell
from gym_capture.data.sources import SourceSpec
from trainer_bridge.collate import COLLATED, pack
from trainer_bridge.group_sources import ParquetGroups, PlayedGroups
from trainer_bridge.groups import GroupSource, GroupStream

SAMPLES: Final = 8
TURNS: Final = 10
PER_STEP: Final = 256
"""Rollouts."""
PACKED_TO: Final = 65_536
MIN_IDS_PER_S: Final = 5_000_000
MIN_EFFICIENCY: Final = 0.95

_snapshots: dict[str, Snapshot] = {}


class Made:
    """A source of rollouts that are in memory."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        return _snapshots[rollout_id]

    async def rollout_ids(self) -> Sequence[str]:
        return sorted(_snapshots)

    async def close(self) -> None:
        pass


SOURCE: Final = SourceSpec(import_path="benchmarks.bridge:Made")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5, help="of each way")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    ids = _make(asked.groups)
    with tempfile.TemporaryDirectory(prefix="gym-capture-bridge-") as folder:
        out = Path(folder)
        asyncio.run(write_groups(_play, source=SOURCE, out=out, group_size=SAMPLES, job={"job_id": "bridge"}))
        columns = (*COLLATED, "group_id")
        ways: dict[str, Callable[[], float | None]] = {
            "parquet": lambda: _packed(ParquetGroups(out, columns=columns), ids),
            "parquet, all columns": lambda: _packed(ParquetGroups(out), ids),
            "live": lambda: _packed(PlayedGroups(_play, source=SOURCE, group_size=SAMPLES), ids),
            "straightforward": lambda: _straightforward(out),
        }
        best_s = dict.fromkeys(ways, float("inf"))
        efficiency: dict[str, float | None] = {}
        for _ in range(asked.turns):
            for name, way in ways.items():
                began = time.process_time()
                efficiency[name] = way()
                best_s[name] = min(best_s[name], time.process_time() - began)
    held = True
    for name, took_s in best_s.items():
        packed = efficiency[name]
        claimed = name in ("parquet", "live")
        ok = not claimed or (ids / took_s >= MIN_IDS_PER_S and packed is not None and packed >= MIN_EFFICIENCY)
        held = held and ok
        _report(
            f"bridge.{name.replace(', ', '_').replace(' ', '_')}",
            ids=ids,
            m_ids_per_cpu_s=round(ids / took_s / 1e6, 1),
            target=MIN_IDS_PER_S / 1e6 if claimed else None,
            packing=None if packed is None else round(packed, 3),
            times_straightforward=round(best_s["straightforward"] / took_s, 1),
            ok=ok,
        )
    return 0 if held else 1


def _packed(source: GroupSource, ids: int) -> float:
    """Returns the worst efficiency of a step."""
    worst = 1.0
    found = 0
    with GroupStream(source) as stream:
        for step in stream.steps(PER_STEP):
            collated = pack([group.table for group in step], tokens=PACKED_TO)
            worst = min(worst, collated.efficiency)
            found += sum(batch.token_ids_T.numel() for batch in collated.batches)
            stream.acknowledge(stream.trained(step))
    if found != ids:
        raise AssertionError(f"{found} of {ids} ids came out")
    return worst


def _straightforward(out: Path) -> None:
    """As one would: rows as Python has them."""
    waiting: list[dict[str, Any]] = []
    for path in sorted(out.glob("part-*.parquet")):
        waiting += pq.read_table(path, columns=list(COLLATED), use_threads=False).to_pylist()
        if len(waiting) >= PER_STEP:
            _pad(waiting)
            waiting = []
    if waiting:
        _pad(waiting)


def _pad(rows: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    kinds = {"token_ids": torch.int32, "loss_mask": torch.bool, "log_probs": torch.float32}
    return [
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name], dtype=kind) for row in rows], batch_first=True)
        for name, kind in kinds.items()
    ]


async def _play(tell: Tell) -> None:
    for number, rollout_id in enumerate(_snapshots):
        tell({"rollout_id": rollout_id, "group_id": rollout_id.partition(".")[0], "reward": float(number % 3)})


def _make(groups: int) -> int:
    """Returns how many ids all rollouts have."""
    rng = np.random.default_rng(0)
    ids = 0
    for group in range(groups):
        for sample in range(SAMPLES):
            rollout_id = f"g{group:05}.{sample}"
            size = int(rng.integers(4_000, 12_000))
            _snapshots[rollout_id] = _rollout(rollout_id, rng.integers(0, 50_000, size, dtype=np.int32), rng)
            ids += size
    return ids


def _rollout(rollout_id: str, sequence: np.ndarray[Any, np.dtype[np.int32]], rng: np.random.Generator) -> Snapshot:
    edges = np.linspace(0, sequence.size, 2 * TURNS + 1).astype(int)
    digest = new_digest()
    parent: Parent = Root()
    entries = []
    for turn in range(TURNS):
        begin, middle, end = edges[2 * turn : 2 * turn + 3]
        digest.update(id_bytes(sequence[begin:end]))
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=f"c{turn:05}",
            prompt_token_ids=sequence[:middle],
            generation_token_ids=sequence[middle:end],
            generation_log_probs=-rng.random(end - middle, dtype=np.float32),
            parent=parent,
            digest=digest.hexdigest(),
            policy=PolicyTrace(model="policy", weight_versions=(WeightSpan(0, int(end - middle), "3"),)),
            request=CallRequest(requested_model="policy", has_tools=True),
            reply=CallReply(finish_reason="stop"),
        )
        entries.append(suffix_of(entry))
        parent = Continues(entry.model_call_id, int(end))
    return Snapshot(rollout_id=rollout_id, snapshot_id="s", version=TURNS, entries=tuple(complete(entries)[0]))


def _report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


if __name__ == "__main__":
    from benchmarks import bridge  # the module that `SOURCE` names, which is not the one that is run

    sys.exit(bridge.main())
