"""Making calls durable: the log store against a JSON Lines file with one fsync for each put.

Claims: at 64 calls at once the log store makes at least 8 times as many calls durable in a second as a store that
appends each call, with its whole prompt, to a JSON Lines file of its rollout and syncs it - on the same disk, in the
same run; a new token costs at most 10 bytes of log, text aside; a log of 1,000 live rollouts of 20 calls is open in 5
seconds. A call here has 2,000 ids of history and 500 new ids, of which 200 are generated. Reported beside them: the
same file store with its syncs in threads, the latency of a put, encoding and decoding.

Run: python -m benchmarks.store [DIRECTORY]     (files are made in a temporary directory inside it; default: here)

Prints one JSON object a line; exits non-zero if a claim does not hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from gym_capture.capture.codec import decode_entry, encode_entry, encode_suffix
from gym_capture.capture.operations import Begin, Commit
from gym_capture.capture.records import (
    CallIntent,
    CallReply,
    CallRequest,
    Continues,
    PolicyTrace,
    PrefixSupply,
    TokenEntry,
    TurnKeys,
    WeightSpan,
    suffix_of,
)
from gym_capture.stores.log import LogStore

HISTORY_IDS, NEW_IDS, GENERATED_IDS = 2_000, 500, 200
CONCURRENT = 64
ROUNDS, LOG_PUTS, FILE_PUTS = 5, 2_560, 256
"""Rounds alternate between the stores, because the speed of a disk that others use changes by the second."""
MIN_TIMES_FASTER = 8.0
MAX_BYTES_PER_ID = 10.0
ROLLOUTS, CALLS = 1_000, 20
MAX_OPEN_S = 5.0


def main(parent: str = ".") -> int:
    with tempfile.TemporaryDirectory(dir=parent, prefix=".bench-store-") as directory:
        holds = [
            _codec(),
            asyncio.run(_puts(Path(directory))),
            asyncio.run(_opening(Path(directory) / "opening")),
        ]
    return 0 if all(holds) else 1


def _report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


# --- encoding ----------------------------------------------------------------------------------------------------


def _codec() -> bool:
    delta = suffix_of(_call(0, 0))
    data = encode_entry(delta)
    _report(
        "store.codec",
        ids=NEW_IDS,
        encode_us=round(_best_us(lambda: encode_entry(delta)), 1),
        decode_us=round(_best_us(lambda: decode_entry(data)), 1),
        ok=True,
    )
    return True


def _best_us(work: Callable[[], object], *, repeats: int = 500) -> float:
    durations_s = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        durations_s.append(time.perf_counter() - began)
    return 1e6 * min(durations_s) / repeats


# --- puts --------------------------------------------------------------------------------------------------------


class FileStore:
    """The straightforward store: a file for each rollout, a line with the whole prompt for each call, an fsync each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()

    def put(self, entry: TokenEntry) -> None:
        line = json.dumps(
            {
                "rollout_id": entry.rollout_id,
                "model_call_id": entry.model_call_id,
                "prompt_token_ids": entry.prompt_token_ids.tolist(),
                "generation_token_ids": entry.generation_token_ids.tolist(),
                "generation_log_probs": entry.generation_log_probs.tolist(),
                "output_items": list(entry.reply.output_items),
                "sampling": dict(entry.request.sampling),
                "digest": entry.digest,
                "turn_key": entry.keys.turn_key,
            }
        )
        with (self._directory / f"{entry.rollout_id}.tokens.jsonl").open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


async def _puts(directory: Path) -> bool:
    file_store = FileStore(directory / "files")
    log_store = await LogStore.open(directory / "log")
    epochs = {f"r{index}": await log_store.write(Begin(_intent(index, 0))) for index in range(CONCURRENT)}
    threads = ThreadPoolExecutor(CONCURRENT)

    async def put_in_file(entry: TokenEntry) -> None:
        file_store.put(entry)

    async def put_in_thread(entry: TokenEntry) -> None:
        await asyncio.get_running_loop().run_in_executor(threads, file_store.put, entry)

    async def put_in_log(entry: TokenEntry) -> None:
        await log_store.write(Commit(entry, epoch=epochs[entry.rollout_id]))

    file_rates, thread_rates, log_rates, latencies_s = [], [], [], []
    for index in range(ROUNDS):
        file_rates.append((await _rate(put_in_file, FILE_PUTS, index))[0])
        thread_rates.append((await _rate(put_in_thread, FILE_PUTS, index))[0])
        log_rate, round_latencies_s = await _rate(put_in_log, LOG_PUTS, index)
        log_rates.append(log_rate)
        latencies_s += round_latencies_s
    threads.shutdown()
    commits = log_store.stats().commits
    await log_store.close()

    times_faster = median(log / file for log, file in zip(log_rates, file_rates, strict=True))
    times_threads = median(log / file for log, file in zip(log_rates, thread_rates, strict=True))
    _report("store.file_per_rollout", puts_per_s=round(median(file_rates)), ok=True)
    _report("store.file_per_rollout_threads", threads=CONCURRENT, puts_per_s=round(median(thread_rates)), ok=True)
    _report(
        "store.log",
        concurrent=CONCURRENT,
        puts_per_s=round(median(log_rates)),
        puts_per_sync=round(commits.records / commits.batches, 1),
        p50_ms=round(1e3 * float(np.percentile(latencies_s, 50)), 2),
        p99_ms=round(1e3 * float(np.percentile(latencies_s, 99)), 2),
        times_file_per_rollout=round(times_faster, 1),
        times_file_per_rollout_threads=round(times_threads, 1),
        target_times=MIN_TIMES_FASTER,
        ok=times_faster >= MIN_TIMES_FASTER,
    )

    content_bytes = len(json.dumps(_CALL.reply.output_items, ensure_ascii=False, separators=(",", ":")).encode())
    log_bytes = sum(path.stat().st_size for path in (directory / "log").glob("*.log")) / (ROUNDS * LOG_PUTS)
    file_bytes = sum(path.stat().st_size for path in (directory / "files").iterdir()) / (2 * ROUNDS * FILE_PUTS)
    bytes_per_id = (log_bytes - content_bytes) / NEW_IDS
    _report(
        "store.size",
        bytes_per_new_id=round(bytes_per_id, 2),
        content_bytes_per_call=content_bytes,
        times_smaller_than_files=round(file_bytes / log_bytes, 1),
        target=MAX_BYTES_PER_ID,
        ok=bytes_per_id <= MAX_BYTES_PER_ID,
    )
    return times_faster >= MIN_TIMES_FASTER and bytes_per_id <= MAX_BYTES_PER_ID


async def _rate(put: Callable[[TokenEntry], Awaitable[None]], puts: int, round_index: int) -> tuple[float, list[float]]:
    """`put_all` of the calls of one round, by `CONCURRENT` callers."""
    turns = range(round_index * puts // CONCURRENT, (round_index + 1) * puts // CONCURRENT)
    calls = [[_call(rollout, turn) for turn in turns] for rollout in range(CONCURRENT)]
    return await put_all(put, calls)


async def put_all(
    put: Callable[[TokenEntry], Awaitable[None]], calls: Sequence[Sequence[TokenEntry]]
) -> tuple[float, list[float]]:
    """Puts a second, by one caller a rollout that waits for each of its own, and how long each put took."""
    latencies_s: list[float] = []

    async def caller(entries: Sequence[TokenEntry]) -> None:
        for entry in entries:
            began = time.perf_counter()
            await put(entry)
            latencies_s.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller(entries) for entries in calls))
    return len(latencies_s) / (time.perf_counter() - began), latencies_s


# --- opening -----------------------------------------------------------------------------------------------------


async def _opening(directory: Path) -> bool:
    store = await LogStore.open(directory, fsync=False)
    for rollout in range(ROLLOUTS):
        epoch = await store.write(Begin(_intent(rollout, 0)))
        await asyncio.gather(*(store.write(Begin(_intent(rollout, call))) for call in range(1, CALLS)))
        entries = [_call(rollout, call) for call in range(CALLS)]
        await store.write_many([Commit(entry, epoch=epoch, encoded=encode_suffix(entry)) for entry in entries])
    log_bytes = store.stats().total_bytes
    await store.close()

    began = time.perf_counter()
    store = await LogStore.open(directory)
    open_s = time.perf_counter() - began
    began = time.perf_counter()
    # Records of calls that continue one which this log has not: their prompts stay suffixes.
    entries_read = sum([len((await store.freeze(name)).records) for name in await store.rollout_ids()])
    walk_s = time.perf_counter() - began
    await store.close()
    if entries_read != ROLLOUTS * CALLS:
        raise AssertionError(f"got {entries_read} entries back, expected {ROLLOUTS * CALLS}")
    _report(
        "store.open",
        rollouts=ROLLOUTS,
        calls=ROLLOUTS * CALLS,
        log_mb=round(log_bytes / 1e6, 1),
        open_s=round(open_s, 2),
        read_all_entries_s=round(walk_s, 2),
        target_s=MAX_OPEN_S,
        ok=open_s <= MAX_OPEN_S,
    )
    return open_s <= MAX_OPEN_S


# --- a typical call ----------------------------------------------------------------------------------------------

_RNG = np.random.default_rng(0)
_GENERATION = _RNG.integers(0, 150_000, GENERATED_IDS, dtype=np.int32)
_CALL = TokenEntry(
    rollout_id="r0",
    model_call_id="call",
    prompt_token_ids=_RNG.integers(0, 150_000, HISTORY_IDS + NEW_IDS - GENERATED_IDS, dtype=np.int32),
    generation_token_ids=_GENERATION,
    generation_log_probs=-_RNG.random(GENERATED_IDS, dtype=np.float32),
    parent=Continues("call_0123456789abcdef01234567", HISTORY_IDS),
    digest="d" * 64,
    created_at=1_795_000_000.5,
    policy=PolicyTrace(model="policy", weight_versions=(WeightSpan(0, GENERATED_IDS, "17"),)),
    request=CallRequest(
        requested_model="policy",
        has_tools=True,
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        max_tokens=4_096,
    ),
    reply=CallReply(
        output_items=(
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "some words " * 70}]},
        ),
        token_item_index=0,
        finish_reason="stop",
    ),
    keys=TurnKeys(turn_key="e" * 64),
    prefix=PrefixSupply(requested=True, supplied=True),
)


def _call(rollout: int, turn: int) -> TokenEntry:
    return replace(_CALL, rollout_id=f"r{rollout}", model_call_id=f"call_{turn:024}")


def _intent(rollout: int, turn: int) -> CallIntent:
    return CallIntent(
        rollout_id=f"r{rollout}",
        model_call_id=f"call_{turn:024}",
        created_at=1_795_000_000.0,
        request_digest="f" * 64,
        request_key="a" * 32,
        asked_key="b" * 32,
        answer_key="c" * 32,
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
