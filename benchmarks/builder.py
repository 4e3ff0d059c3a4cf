"""Building a rollout: proving its chain, flattening it, and what that costs as it grows.

Claims: a 100-turn rollout of whole prompts (2.7 million ids stored) is verified, digests included, and flattened in
4 ms; stored as suffixes and made whole, a rollout costs the same for each id at 100 and at 4,000 turns. Reported
beside them: the same 100 turns without recorded parents (inference), and built call by call on lists of ids with a
digest for each prefix, which is what costs turns times tokens; and what making suffixes whole costs in time and memory.
Prints one JSON object a line; exits non-zero if a claim does not hold.

Run: python -m benchmarks.core (with the lineage benchmark), or benchmarks.builder alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gym_capture.build.builder import build
from gym_capture.capture.records import (
    CallReply,
    CallRequest,
    Continues,
    Parent,
    PolicyTrace,
    Root,
    Snapshot,
    TokenEntry,
    id_bytes,
    new_digest,
    suffix_of,
)
from gym_capture.capture.suffixes import StoredRecord, complete, prompt_part

ROOT_IDS, NEW_PROMPT_IDS, GENERATED_IDS = 2_000, 300, 200
MAX_WHOLE_PROMPTS_MS = 4.0
MAX_GROWTH = 2.5
"""Cost for each id of the longest rollout of suffixes, by that of the shortest. Linear is 1; quadratic would be 40."""


def main() -> int:
    whole = _snapshot(_calls(100))
    whole_ms = _best_ms(partial(build, whole), repeats=30)
    ids_stored = sum(entry.prompt_token_ids.size + entry.generation_token_ids.size for entry in whole.entries)
    _report(
        "builder.whole_prompts",
        turns=100,
        ids_stored=int(ids_stored),
        build_ms=round(whole_ms, 3),
        target_ms=MAX_WHOLE_PROMPTS_MS,
        ok=whole_ms <= MAX_WHOLE_PROMPTS_MS,
    )

    undecided = _snapshot([replace(entry, parent=None, digest=None) for entry in whole.entries])
    inferred_ms = _best_ms(partial(build, undecided), repeats=10)
    _report("builder.inferred_parents", turns=100, build_ms=round(inferred_ms, 3), ok=True)

    listed = _best_ms(partial(_build_on_lists, whole.entries), repeats=2)
    _report("builder.on_lists", turns=100, build_ms=round(listed, 1), times_slower=round(listed / whole_ms), ok=True)

    ns_by_turns: dict[int, float] = {}
    for turns in (100, 1_000, 4_000):
        rollout = _snapshot([suffix_of(entry) for entry in _calls(turns)])
        ids = _unique_ids(turns)
        ns_by_turns[turns] = 1e6 * _best_ms(partial(build, rollout), repeats=max(5, 3_000 // turns)) / ids
        _report("builder.suffixes", turns=turns, unique_ids=ids, ns_per_id=round(ns_by_turns[turns], 2), ok=True)
    _in_memory()
    growth = ns_by_turns[4_000] / ns_by_turns[100]
    _report("builder.growth", times=round(growth, 2), target=MAX_GROWTH, ok=growth <= MAX_GROWTH)
    return 0 if whole_ms <= MAX_WHOLE_PROMPTS_MS and growth <= MAX_GROWTH else 1


def _in_memory() -> None:
    """What making stored records whole costs: time for a chain, memory for a chain and for stars of branches."""
    for turns in (100, 1_000, 4_000):
        stored = [suffix_of(entry) for entry in _calls(turns)]
        ns = 1e6 * _best_ms(partial(complete, stored), repeats=max(5, 3_000 // turns)) / _unique_ids(turns)
        _report("builder.complete", turns=turns, ns_per_id=round(ns, 2), ok=True)
    chain = [suffix_of(entry) for entry in _calls(100)]
    _report("builder.memory", of="a chain of 100 turns", times=_times_in_memory(chain), ok=True)
    root, second = _calls(2)
    for of, apart in (("100 tries of one prompt", 0), ("100 branches off one call", 1)):
        star: list[StoredRecord] = [root]
        for number in range(100):
            prompt = second.prompt_token_ids.copy()
            prompt[-1] += apart * number
            star.append(suffix_of(replace(second, model_call_id=f"b{number}", prompt_token_ids=prompt)))
        _report("builder.memory", of=of, times=_times_in_memory(star), ok=True)


def _times_in_memory(stored: Sequence[StoredRecord]) -> float:
    """The ids that a rollout takes up when it is whole, by those that are stored."""
    buffers = {}
    for entry in complete(stored)[0]:
        for ids in (entry.prompt_token_ids, entry.generation_token_ids):
            buffer = ids if ids.base is None else ids.base
            buffers[id(buffer)] = buffer.nbytes
    ids_stored = sum(prompt_part(record)[1].nbytes + record.generation_token_ids.nbytes for record in stored)
    return round(sum(buffers.values()) / ids_stored, 2)


def _report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


def _best_ms(work: Callable[[], object], *, repeats: int) -> float:
    """The shortest of several runs: what it costs when nothing else runs."""
    durations_s = []
    for _ in range(repeats + 1):
        began = time.process_time()  # others use this machine, too
        work()
        durations_s.append(time.process_time() - began)
    return 1e3 * min(durations_s[1:])


def _unique_ids(turns: int) -> int:
    return ROOT_IDS + turns * GENERATED_IDS + (turns - 1) * NEW_PROMPT_IDS


def _snapshot(entries: Sequence[StoredRecord]) -> Snapshot:
    return Snapshot(rollout_id="r", snapshot_id="s", version=1, entries=complete(entries)[0])


def _calls(turns: int) -> list[TokenEntry]:
    """An append-only rollout. Up to 100 turns every prompt is an array of its own; longer ones share one."""
    rng = np.random.default_rng(0)
    sequence = rng.integers(0, 50_000, _unique_ids(turns), dtype=np.int32)
    log_probs = -rng.random(GENERATED_IDS, dtype=np.float32)
    digest = new_digest()
    parent: Parent = Root()
    entries: list[TokenEntry] = []
    end = 0
    for turn in range(turns):
        begin, prompt_end = end, end + (ROOT_IDS if turn == 0 else NEW_PROMPT_IDS)
        end = prompt_end + GENERATED_IDS
        digest.update(id_bytes(sequence[begin:end]))
        prompt = sequence[:prompt_end]
        entry = TokenEntry(
            rollout_id="r",
            model_call_id=f"c{turn:05}",
            prompt_token_ids=prompt.copy() if turns <= 100 else prompt,
            generation_token_ids=sequence[prompt_end:end].copy(),
            generation_log_probs=log_probs,
            parent=parent,
            digest=digest.hexdigest(),
            policy=PolicyTrace(model="policy"),
            request=CallRequest(requested_model="policy", has_tools=True),
            reply=CallReply(finish_reason="stop"),
        )
        entries.append(entry)
        parent = Continues(entry.model_call_id, end)
    return entries


def _build_on_lists(entries: Sequence[TokenEntry]) -> tuple[list[int], list[int], list[float]]:
    """The straightforward way: each prompt as a list, each parent proven by hashing the prefix anew."""
    token_ids: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    parent_digest = ""
    for entry in entries:
        prompt, generation = entry.prompt_token_ids.tolist(), entry.generation_token_ids.tolist()
        prefix = prompt[: len(token_ids)]
        if prefix and _digest(prefix) != parent_digest:
            raise AssertionError("the synthetic rollout is one chain")
        new = prompt[len(token_ids) :]
        token_ids += new + generation
        loss_mask += [0] * len(new) + [1] * len(generation)
        log_probs += [0.0] * len(new) + entry.generation_log_probs.tolist()
        parent_digest = _digest(prompt + generation)
    return token_ids, loss_mask, log_probs


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(struct.pack(f">{len(ids)}Q", *ids)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
