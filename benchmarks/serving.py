"""Throughput of the graph against plain vLLM, on the same model and load, in one run.

Claims, as ratios of medians of interleaved rounds: the graph with capture on makes at least 0.95 of the tokens per
second of vLLM's own OpenAI server with the small real model (0.80 whole and 0.75 streamed with the tiny one, where the
engine costs almost nothing and every hop shows), and, with the real model, at least 0.95 of itself with capture off.
Prints one JSON object a line; exits non-zero if a claim does not hold.

The load: 16 concurrent clients, one short prompt each, exactly 64 generated tokens, temperature 1; for the graph each
request is a rollout of its own, so each pays for an intent, a commit and an `fdatasync`. Capture off is the same
graph answering the same requests outside of any rollout. Both servers run all the time, on the machine of the load; one
at a time is under load.

Run: python -m benchmarks.serving [--model tiny|smollm2] [--rounds 5] [--requests 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import yaml

from gym_capture.demo.graph import private_ray, served_graph
from gym_capture.demo.processes import Household, free_port
from gym_capture.serving.app import model_folder

CONCURRENCY = 16
TOKENS = 64
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 32
KV_CACHE_GIB = "1"
TARGETS = {"smollm2": {False: 0.95, True: 0.95}, "tiny": {False: 0.80, True: 0.75}}
CAPTURE_TARGETS = {"smollm2": 0.95}
"""Capture on, by capture off. The tiny model's is reported: where the engine costs nothing, two commits a call show."""
PLAIN, ON, OFF = "vllm", "capture on", "capture off"


@dataclass(frozen=True, slots=True)
class Round:
    """What one server did in one round."""

    tokens_per_s: float
    first_text_s: list[float]


async def load(url: str, *, tracked: bool, stream: bool, requests: int) -> Round:
    """`requests` requests, `CONCURRENCY` at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)
    first_text_s: list[float] = []

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        path = f"/ng-rollout/bench-{random.getrandbits(60):x}" if tracked else ""
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": f"{number} " + "Tell me of the sea and of a ship on it. " * 6}],
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "temperature": 1.0,
            "stream": stream,
        }
        async with slots:
            started = time.perf_counter()
            async with session.post(f"{url}{path}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {(await response.text())[:300]}")
                if not stream:
                    usage = (await response.json())["usage"]
                    assert usage["completion_tokens"] == TOKENS, usage
                    return
                seen, done = False, False
                async for line in response.content:
                    if not seen and b'"content":"' in line and b'"content":""' not in line:
                        seen = True
                        first_text_s.append(time.perf_counter() - started)
                    done = done or line.startswith(b"data: [DONE]")
                assert done, "a stream ended without [DONE]"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(one(session, number) for number in range(requests)))
        return Round(requests * TOKENS / (time.perf_counter() - started), first_text_s)


@contextmanager
def plain_vllm(household: Household, model: Path, directory: Path) -> Iterator[str]:
    """vLLM's own OpenAI server with the same engine arguments."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    child = household.start(["env", f"VLLM_CPU_KVCACHE_SPACE={KV_CACHE_GIB}", *command], log=directory / "vllm.log")
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    while True:
        if child.ended() is not None or time.monotonic() > deadline:
            raise SystemExit(f"vLLM's server did not start; the end of its log:\n{child.log_tail()}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                break
        except httpx.HTTPError:
            pass  # not there yet
        time.sleep(0.5)
    try:
        yield url
    finally:
        child.stop()


def measure(model: str, *, rounds: int, requests: int) -> list[dict[str, Any]]:
    """One JSON object for each way of answering."""
    folder = model_folder(model)
    base = yaml.safe_load(Path("serve_configs/cpu_demo.yaml").read_text(encoding="utf-8"))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gym-capture-bench-")))
        household = stack.enter_context(Household())
        vllm = stack.enter_context(plain_vllm(household, folder, directory))
        address = stack.enter_context(private_ray(cpus=8, namespace="gym-capture-bench"))
        args = {
            "model": str(folder),
            "engine_args": {
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": MAX_NUM_SEQS,
            },
            "state": {"shards": 1, "namespace": "gym-capture-bench", "directory": str(directory / "records")},
        }
        graph = stack.enter_context(
            served_graph(household, base=base, args=args, address=address, directory=directory, on_wait=lambda _: None)
        )
        results = []
        for stream in (False, True):
            done: dict[str, list[Round]] = {PLAIN: [], ON: [], OFF: []}
            for number in range(rounds + 1):
                for name, url in ((PLAIN, vllm), (ON, graph), (OFF, graph)):
                    result = asyncio.run(load(url, tracked=name == ON, stream=stream, requests=requests))
                    if number:  # the first warms up
                        done[name].append(result)
            results.append(_summary(model, done, stream=stream))
        return results


def _summary(model: str, done: dict[str, list[Round]], *, stream: bool) -> dict[str, Any]:
    speed = {name: statistics.median(item.tokens_per_s for item in items) for name, items in done.items()}
    target = TARGETS.get(model, TARGETS["smollm2"])[stream]
    ratio, capture = speed[ON] / speed[PLAIN], speed[ON] / speed[OFF]
    row = {
        "benchmark": "serving",
        "model": model,
        "stream": stream,
        "tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "graph_over_vllm": round(ratio, 3),
        "target": target,
        "capture_on_over_off": round(capture, 3),
        "capture_target": CAPTURE_TARGETS.get(model),
        "ok": ratio >= target and capture >= CAPTURE_TARGETS.get(model, 0.0),
    }
    if stream:
        for name, items in done.items():
            waits = sorted(wait for item in items for wait in item.first_text_s)
            row[f"first_text_s p50 p99, {name}"] = [
                round(waits[len(waits) // 2], 3),
                round(waits[min(len(waits) - 1, len(waits) * 99 // 100)], 3),
            ]
    return row


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="Throughput of the graph against plain vLLM.")
    parser.add_argument("--model", action="append", help="tiny, smollm2 or a model folder; repeatable; default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="requests a round")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers end, too
    ok = True
    for model in options.model or ["tiny", "smollm2"]:
        for row in measure(model, rounds=options.rounds, requests=options.requests):
            print(json.dumps(row), flush=True)
            ok = ok and row["ok"]
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
