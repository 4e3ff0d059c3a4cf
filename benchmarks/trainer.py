"""The reference trainer: what a step costs by how the same tokens are laid out.

Claims, each a ratio of two things measured in turns in one process, in CPU seconds of one thread of torch, with a
random llama of 4 layers whose head is about as large beside them as SmolLM2's is beside its 30:

- `trainer.merged`: a step on merged trajectories is at least 5.4 times as fast as on one sample for each call, at 10
  turns (a prompt of 400 ids; 40 generated and 60 of a tool's result a turn). Others report 5.4.
- `trainer.tree_of_branches`: on a prefix tree at least twice as fast as on merged rows, for 4 branches of 100 ids off a
  prefix of 1,200.
- `trainer.tree_of_group`: the same for 8 samples of 100 ids on a common prompt of 800.
- in each, both sides give the same loss, and gradients of the same norm (1e-5).
- `trainer.packing`: packed rows are filled to at least 0.95, for 300 trajectories of lengths that spread as those of
  agents do, at 4,096 ids a row; beside it what padding leaves.
- `trainer.bridge`: from Parquet to micro-batches at least 5 million ids a CPU second.

Run: python -m benchmarks.trainer [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import torch

from gym_capture.build.builder import BuildCounts, BuiltRollout
from gym_capture.build.sampling import Sampling
from gym_capture.build.trajectories import Span, Trajectory
from gym_capture.data.schema import rows, to_table
from trainer_bridge.batching import Selection, step_batch
from trainer_bridge.grpo import GrpoOptions, GrpoTrainer, StepMetrics
from trainer_bridge.layouts import Layout, lay_out, packing
from trainer_bridge.stream import TrainRollout, TrainSequence, parquet_batches, read_rollouts

VOCABULARY: Final = 4096
ROW_TOKENS: Final = 4096
SAME: Final = 1e-5

_random = np.random.default_rng(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    calls, merged = turns(10, prompt=400, generated=40, tool=60)
    branches = group(4, prompt=1200, generated=100)
    samples = group(8, prompt=800, generated=100)
    good = [
        compare("trainer.merged", [calls, merged], ["padded", "padded"], target=5.4, rounds=rounds),
        compare("trainer.tree_of_branches", [branches, branches], ["padded", "tree"], target=2.0, rounds=rounds),
        compare("trainer.tree_of_group", [samples, samples], ["padded", "tree"], target=2.0, rounds=rounds),
        fill(),
        bridge(rounds),
    ]
    return int(not all(good))


def compare(
    name: str, loads: Sequence[Sequence[TrainRollout]], layouts: Sequence[Layout], *, target: float, rounds: int
) -> bool:
    """A step on the first, slower, load over one on the second."""
    trainers = [
        GrpoTrainer(model(), GrpoOptions(lr=0.0, layout=layout, tokens_per_micro_batch=ROW_TOKENS))
        for layout in layouts
    ]
    steps = [lambda i=i: trainers[i].step(loads[i]) for i in range(2)]
    for step in steps:
        step()
    seconds: list[list[float]] = [[], []]
    found: list[StepMetrics] = []
    for _ in range(rounds):
        found = []
        for index, step in enumerate(steps):
            spent, metrics = cpu_seconds(step)
            seconds[index].append(spent)
            found.append(metrics)
    times = statistics.median(seconds[0]) / statistics.median(seconds[1])
    differs = max(relative(each.loss, other.loss) for each in found for other in found)
    differs = max(differs, relative(found[0].grad_norm, found[1].grad_norm))
    ok = times >= target and differs <= SAME
    report(
        name,
        times=round(times, 2),
        target=target,
        ok=ok,
        step_s=[round(statistics.median(each), 2) for each in seconds],
        computed_tokens=[each.computed_tokens for each in found],
        trained_tokens=found[0].trained_tokens,
        differs=differs,
    )
    return ok


def fill() -> bool:
    """How full packed rows are."""
    lengths = _random.lognormal(mean=5.5, sigma=0.8, size=300).clip(16, ROW_TOKENS).astype(int)
    batch = step_batch([of(sequence(ids(length), length // 2)) for length in lengths], Selection())
    found = {
        layout: packing(lay_out(batch.rows, layout, tokens=ROW_TOKENS, pad_id=0), ROW_TOKENS)
        for layout in ("packed", "padded")
    }
    ok = found["packed"] >= 0.95
    report("trainer.packing", packed=round(found["packed"], 3), padded=round(found["padded"], 3), target=0.95, ok=ok)
    return ok


def bridge(rounds: int) -> bool:
    """From files to tensors."""
    size, count = 4000, 500
    with tempfile.TemporaryDirectory() as folder:
        made = [
            row
            for number in range(count)
            for row in rows(built(str(number), size), group_id="g", reward=1.0, advantage=1.0)
        ]
        pq.write_table(to_table(made), Path(folder) / "part-00000.parquet")

        def read() -> int:
            batch = step_batch(read_rollouts(parquet_batches(folder)), Selection())
            return sum(each.row_tokens for each in lay_out(batch.rows, "packed", tokens=32_768, pad_id=0))

        assert read() == size * count
        rate = size * count / statistics.median(cpu_seconds(read)[0] for _ in range(rounds))
    report("trainer.bridge", million_ids_a_cpu_second=round(rate / 1e6, 1), target=5.0, ok=rate >= 5e6)
    return rate >= 5e6


# --- loads ---------------------------------------------------------------------------------------------------------


def turns(count: int, *, prompt: int, generated: int, tool: int) -> tuple[list[TrainRollout], list[TrainRollout]]:
    """One conversation as a sample for each call, and merged."""
    whole = ids(prompt + count * (generated + tool))
    mask = np.zeros(whole.size, dtype=np.bool_)
    calls: list[TrainSequence] = []
    for turn in range(count):
        start = prompt + turn * (generated + tool)
        mask[start : start + generated] = True
        calls.append(sequence(whole[: start + generated], start))
    end = whole.size - tool
    merged = sequence(whole[:end], prompt, mask[:end])
    return [of(*calls)], [of(merged)]


def group(count: int, *, prompt: int, generated: int) -> list[TrainRollout]:
    """Rows that share a prompt."""
    shared = ids(prompt)
    return [
        of(sequence(np.concatenate([shared, ids(generated)]), prompt), advantage=1.0 if number % 2 else -0.5)
        for number in range(count)
    ]


def ids(count: int) -> Any:
    return _random.integers(0, VOCABULARY, count, dtype=np.int32)


def sequence(token_ids: Any, prompt: int, mask: Any = None) -> TrainSequence:
    """Trained behind its prompt."""
    mask = np.arange(token_ids.size) >= prompt if mask is None else mask
    return TrainSequence(
        trajectory_id="t",
        is_main=True,
        token_ids=token_ids,
        loss_mask=mask,
        log_probs=np.where(mask, np.float32(-8.3), np.float32(0.0)),
        finish_reason="stop",
        spans=(Span(prompt, token_ids.size, "c", "1", Sampling(temperature=1.0)),),
    )


def of(*sequences: TrainSequence, advantage: float = 1.0) -> TrainRollout:
    return TrainRollout(
        rollout_id="r",
        group_id="g",
        sequences=sequences,
        reward=1.0,
        advantage=advantage,
        masked=False,
        mask_reasons=(),
    )


def built(rollout_id: str, size: int) -> BuiltRollout:
    """A rollout of one trajectory, as a build makes it."""
    made = sequence(ids(size), size // 2)
    trajectory = Trajectory(
        rollout_id=rollout_id,
        trajectory_id=f"{rollout_id}/c",
        is_main=True,
        call_ids=("c",),
        token_ids=made.token_ids,
        loss_mask=made.loss_mask,
        log_probs=made.log_probs,
        spans=made.spans,
        finish_reason="stop",
    )
    counts = {field.name: 0 for field in fields(BuildCounts)} | {"excluded_tokens": {}}
    return BuiltRollout(
        rollout_id=rollout_id,
        trajectories=(trajectory,),
        masked=False,
        mask_reasons=(),
        counts=BuildCounts(**counts),
        excluded=(),
    )


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=8192,
        )
    )


# --- measuring -----------------------------------------------------------------------------------------------------


def cpu_seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process: others on the machine change little of them."""
    began = time.process_time()
    result = do()
    return time.process_time() - began, result


def relative(first: float, second: float) -> float:
    return abs(first - second) / max(abs(first), abs(second), math.ulp(1.0))


def report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
