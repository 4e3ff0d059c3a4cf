"""Building trajectories from token files, against what else reads these files, side by side in one run.

Claims: a rollout of 50 turns with whole prompts is read, verified and built in a tenth of the processor time that NeMo
Gym's own builder takes; what a turn of deltas costs does not grow with their number, digests aside; `gym-capture build`
makes 2,000 small rollouts a CPU second, start of the process included, and its memory does not grow with how many there
are. Prints one JSON object a line; exits non-zero if a claim does not hold.

NeMo Gym's package (`nemo_gym.token_id_capture`) is measured where it imports. It builds a directory twice: as it finds
it (`fresh`: it indexes the records first) and again (`indexed`, as its own writer leaves it). Elsewhere the yardstick
is `json.loads` and a check of every id, which is where that builder begins.

    python -m benchmarks.files [--rollouts 10000]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from gym_capture.build.builder import BuildOptions, build
from gym_capture.data.collector import collector_paused
from gym_capture.data.nemo_gym import read_rollout
from gym_capture.data.schema import rows, to_table

MIN_RATIO: Final = 10.0
MIN_ROLLOUTS_PER_CPU_S: Final = 2_000
MAX_GROWTH: Final = 1.5
"""Cost of a turn among 8,000 deltas by that among 1,000, digests aside. Linear is 1; quadratic would be 8."""
MAX_MEMORY_GROWTH: Final = 1.25


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=10_000, help="small rollouts of one build")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gym-capture-files-") as folder:
        # First what measures memory: a process starts with the peak of the one that started it.
        held = [_small_rollouts(Path(folder) / "small", asked.rollouts)]
        held += [_whole_prompts(Path(folder) / "whole"), _deltas(Path(folder) / "deltas")]
    return 0 if all(held) else 1


# --- claims ----------------------------------------------------------------------------------------------------------


def _whole_prompts(directory: Path) -> bool:
    size = write_rollout(directory, "r", turns=50, root=2_000, new=300, generated=200)
    ours_ms = other_ms = fresh_ms = float("inf")
    gym = gym_builder()
    # In turns, so that whatever else the machine does falls on both.
    for _ in range(30):
        ours_ms = min(ours_ms, _cpu_ms(lambda: _to_table(directory)))
        if gym is None:
            other_ms = min(other_ms, _cpu_ms(lambda: _plainly(directory)))
            continue
        copy = directory.parent / "copy"
        shutil.copytree(directory, copy)
        fresh_ms = min(fresh_ms, _cpu_ms(lambda: gym("r", [copy])))  # noqa: B023
        other_ms = min(other_ms, _cpu_ms(lambda: gym("r", [copy])))  # noqa: B023
        shutil.rmtree(copy)
    ratio = (other_ms if gym is None else fresh_ms) / ours_ms
    _report(
        "files.whole_prompts",
        turns=50,
        mb=round(size / 1e6, 1),
        cpu_ms=round(ours_ms, 2),
        hashing_ms=round(_hashing_ms(directory), 2),
        against="json.loads and a check" if gym is None else "nemo_gym.token_id_capture",
        against_ms=round(other_ms, 1),
        **(
            {}
            if gym is None
            else {"against_fresh_ms": round(fresh_ms, 1), "ratio_indexed": round(other_ms / ours_ms, 1)}
        ),
        ratio=round(ratio, 1),
        target=MIN_RATIO,
        ok=ratio >= MIN_RATIO,
    )
    return ratio >= MIN_RATIO


def _deltas(directory: Path) -> bool:
    us_per_turn: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for digests in (True, False):
        for turns in (1_000, 8_000):
            made = directory / f"{turns}-{digests}"
            write_rollout(made, "r", turns=turns, root=2_000, new=3, generated=2, deltas=True, digests=digests)
            cpu_ms = min(_cpu_ms(lambda: _to_table(made)) for _ in range(3))  # noqa: B023
            us_per_turn[digests][turns] = 1e3 * cpu_ms / turns
            _report("files.deltas", turns=turns, digests=digests, cpu_ms=round(cpu_ms, 1), ok=True)
    growth = us_per_turn[False][8_000] / us_per_turn[False][1_000]
    _report(
        "files.deltas_growth",
        us_per_turn=round(us_per_turn[False][8_000], 1),
        us_per_turn_with_digests=round(us_per_turn[True][8_000], 1),
        growth=round(growth, 2),
        target=MAX_GROWTH,
        ok=growth <= MAX_GROWTH,
    )
    return growth <= MAX_GROWTH


def _small_rollouts(directory: Path, count: int) -> bool:
    for number in range(count):
        write_rollout(directory, f"r{number:05}", turns=4, root=200, new=50, generated=30, seed=number % 100)
    few = directory.parent / "few"
    few.mkdir()
    for number in range(count // 5):
        (few / f"r{number:05}.tokens.jsonl").hardlink_to(directory / f"r{number:05}.tokens.jsonl")
    few_cpu_s, few_mb = _build_apart(few)
    cpu_s, mb = _build_apart(directory)
    per_s = count / cpu_s
    ok = per_s >= MIN_ROLLOUTS_PER_CPU_S and mb <= MAX_MEMORY_GROWTH * few_mb
    _report(
        "files.small_rollouts",
        rollouts=count,
        cpu_s=round(cpu_s, 2),
        rollouts_per_cpu_s=round(per_s),
        target=MIN_ROLLOUTS_PER_CPU_S,
        us_per_further_rollout=round(1e6 * (cpu_s - few_cpu_s) / (count - count // 5)),
        peak_mb=round(mb),
        peak_mb_of_a_fifth=round(few_mb),
        ok=ok,
    )
    return ok


# --- the ways that are compared --------------------------------------------------------------------------------------


def _to_table(directory: Path) -> object:
    """As `gym-capture build` does it."""
    with collector_paused():
        built = build(read_rollout(directory, "r"), BuildOptions())
    return to_table(rows(built, group_id="g", reward=None))


def _plainly(directory: Path) -> object:
    """As the standard library reads the same bytes, every id looked at once."""
    found = []
    for line in (directory / "r.tokens.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        for name in ("prompt_token_ids", "generation_token_ids"):
            if not all(type(each) is int and each >= 0 for each in record[name]):
                raise AssertionError(name)
        if not all(type(each) is float for each in record["generation_log_probs"]):
            raise AssertionError("generation_log_probs")
        found.append(record)
    return found


def gym_builder() -> Callable[[str, list[Path]], Any] | None:
    try:
        module = importlib.import_module("nemo_gym.token_id_capture")
    except ImportError:
        return None
    builder: Callable[[str, list[Path]], Any] = module.trajectories_for_rollout
    return builder


def _hashing_ms(directory: Path) -> float:
    """What SHA-256 alone takes for the digests of a rollout: nobody who checks them can be faster."""
    entries = read_rollout(directory, "r").entries
    texts = [b"\0" * 8 * entry.cum_len for entry in entries]
    return min(_cpu_ms(lambda: [hashlib.sha256(text).digest() for text in texts]) for _ in range(10))


def _build_apart(directory: Path) -> tuple[float, float]:
    """Processor seconds and peak MB of `gym-capture build` with one process, from its start to its end."""
    out = directory.parent / "out"
    command = [sys.executable, "-m", "gym_capture.cli", "build", str(directory), "--out", str(out), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the build ended with {process.returncode}")
    shutil.rmtree(out)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def _report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


# --- files to read ---------------------------------------------------------------------------------------------------


def write_rollout(
    directory: Path,
    rollout_id: str,
    *,
    turns: int,
    root: int,
    new: int,
    generated: int,
    deltas: bool = False,
    digests: bool = True,
    seed: int = 0,
) -> int:
    """One chain of calls as NeMo Gym's writer leaves it; returns the size of its file."""
    rng = np.random.default_rng(seed)
    ids = np.zeros(0, dtype=np.int64)
    parent: str | None = None
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{rollout_id}.tokens.jsonl").open("wb") as file:
        for turn in range(turns):
            added = rng.integers(0, 150_000, root if turn == 0 else new)
            generation = rng.integers(0, 150_000, generated)
            prompt, ids = np.concatenate((ids, added)), np.concatenate((ids, added, generation))
            record = {
                "created_at": 1.5 + turn,
                "cum_len": ids.size,
                "digest": _digest(ids) if digests else None,
                "generation_log_probs": (-rng.random(generated)).astype(np.float32).tolist(),
                "generation_token_ids": generation.tolist(),
                "model": "policy",
                "model_call_id": f"call-{turn:05}",
                "output_items": [{"type": "message", "role": "assistant", "content": "What was said. " * 8}],
                "parent_call_id": parent,
                "parent_resolution": "resolved" if parent else "root",
                "prefix_requested": parent is not None,
                "prefix_supplied": parent is not None,
                "prompt_is_delta": deltas and parent is not None,
                "prompt_token_ids": (added if deltas and parent is not None else prompt).tolist(),
                "rollout_id": rollout_id,
                "schema_version": 1,
                "token_item_index": 0,
            }
            parent = str(record["model_call_id"])
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        return file.tell()


def _digest(ids: np.ndarray[Any, Any]) -> str:
    state = hashlib.sha256(b"nemo-gym-tokens" + struct.pack(">BQ", 1, ids.size))
    state.update(ids.astype(">u8").data)
    return state.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
