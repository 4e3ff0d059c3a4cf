"""Throughput and time to first text of the graph against plain vLLM, on the same model and load, in one run.

Claims, as ratios over interleaved rounds: the graph with capture on makes at least 0.95 of the tokens per second of
vLLM's own OpenAI server with the small real model (0.80 whole and 0.75 streamed with the tiny one, where the engine
costs almost nothing and every hop shows), and, with the real model, at least 0.95 of itself with capture off; with the
real model its first streamed text comes within 1.15 times the time of plain vLLM's at the median, within 1.3 times at
the 99th percentile. Prints one JSON object a line; exits non-zero if a claim does not hold.

The load: 16 concurrent clients, one short prompt each, exactly 64 generated tokens, temperature 1; for the graph each
request is a rollout of its own, so each pays for an intent, a commit and an `fdatasync`. Capture off is the same
graph answering the same requests outside of any rollout. First text is the first event with content that is not empty,
as the client reads it; its quantiles are over the requests of all rounds. All servers run all the time, on the machine
of the load; one at a time is under load. Figures by round stand beside each ratio: on a busy machine either engine
stalls for a second now and then, and a round in which one did is not a comparison.

Run: python -m benchmarks.serving [--model tiny|smollm2] [--rounds 5] [--requests 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp

from benchmarks.serving_pair import (
    MODEL,
    Servers,
    alternate,
    both_servers,
    chat_url,
    client_session,
    nonce,
    quantile,
    refuse_errors,
)

CONCURRENCY: Final = 16
TOKENS: Final = 64
PLAIN, ON, OFF = "vllm", "capture on", "capture off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What must hold for a model; None is reported only."""

    whole: float
    """Graph over plain vLLM, tokens per second."""
    streamed: float
    capture: float | None
    """Capture on over off, tokens per second."""
    first_text_p50: float | None
    """Graph over plain vLLM, seconds."""
    first_text_p99: float | None


REAL: Final = Targets(whole=0.95, streamed=0.95, capture=0.95, first_text_p50=1.15, first_text_p99=1.3)
TINY: Final = Targets(whole=0.80, streamed=0.75, capture=None, first_text_p50=None, first_text_p99=None)
"""Where the engine costs nothing, two commits a call show."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one server did in one round."""

    tokens_per_s: float
    first_text_s: Sequence[float]
    """One for each request; empty if they were not streamed."""


async def load(server: str, *, tracked: bool, stream: bool, requests: int, tokens: int = TOKENS) -> Round:
    """`requests` requests, `CONCURRENCY` at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(session: aiohttp.ClientSession) -> float | None:
        head = nonce()
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{head} " + "Tell me of the sea and of a ship on it. " * 6}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 1.0,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        url = chat_url(server, rollout_id=f"bench-{head}" if tracked else None)
        async with slots:
            started = time.perf_counter()
            async with session.post(url, json=body) as response:
                await refuse_errors(response)
                first_at, usage = await read_stream(response) if stream else (None, (await response.json())["usage"])
        if usage["completion_tokens"] != tokens:
            raise SystemExit(f"{url} generated {usage['completion_tokens']} tokens instead of {tokens}")
        return None if first_at is None else first_at - started

    async with client_session() as session:
        started = time.perf_counter()
        waits = await asyncio.gather(*(one(session) for _ in range(requests)))
        took_s = time.perf_counter() - started
    return Round(requests * tokens / took_s, [wait for wait in waits if wait is not None])


async def read_stream(response: aiohttp.ClientResponse) -> tuple[float, Mapping[str, int]]:
    """When (`time.perf_counter`) the first text was there, and the usage that the last event before the end has.

    Only the first events and the last are parsed, so that the client costs little beside the servers.
    """
    first_at: float | None = None
    last, done = b"", False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            break
        last = line
        if first_at is None and has_text(line):
            first_at = time.perf_counter()
    if not done or first_at is None:
        raise SystemExit(f"{response.url} ended a stream without {'text' if done else '[DONE]'}: {last[:300]!r}")
    usage: Mapping[str, int] = json.loads(last.removeprefix(b"data: "))["usage"]
    return first_at, usage


def has_text(line: bytes) -> bool:
    """Whether a `data:` line of a streamed chat completion has content that is not empty."""
    event = json.loads(line.removeprefix(b"data: "))
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


def measure(model: str, *, rounds: int, requests: int) -> list[dict[str, Any]]:
    """One JSON object for each claim's kind: whole, streamed, first text."""
    with both_servers(model) as servers:
        whole, streamed = (
            alternate(_sides(servers, stream=stream, requests=requests), rounds=rounds) for stream in (False, True)
        )
    return summary(model, whole, streamed)


def summary(
    model: str, whole: Mapping[str, Sequence[Round]], streamed: Mapping[str, Sequence[Round]]
) -> list[dict[str, Any]]:
    """The figures of all rounds, and whether the claims hold."""
    targets = TINY if model == "tiny" else REAL
    return [
        _throughput(model, whole, stream=False, target=targets.whole, capture_target=targets.capture),
        _throughput(model, streamed, stream=True, target=targets.streamed, capture_target=targets.capture),
        _first_text(model, streamed, targets),
    ]


def _sides(servers: Servers, *, stream: bool, requests: int) -> dict[str, Callable[[], Round]]:
    def play(server: str, tracked: bool) -> Round:
        return asyncio.run(load(server, tracked=tracked, stream=stream, requests=requests))

    return {
        PLAIN: partial(play, servers.vllm, False),
        ON: partial(play, servers.graph, True),
        OFF: partial(play, servers.graph, False),
    }


def _throughput(
    model: str, done: Mapping[str, Sequence[Round]], *, stream: bool, target: float, capture_target: float | None
) -> dict[str, Any]:
    speed = {name: statistics.median(item.tokens_per_s for item in items) for name, items in done.items()}
    ratio, capture = speed[ON] / speed[PLAIN], speed[ON] / speed[OFF]
    return {
        "benchmark": "serving.throughput",
        "model": model,
        "stream": stream,
        "tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "graph_over_vllm": round(ratio, 3),
        "graph_over_vllm_by_round": [
            round(graph.tokens_per_s / plain.tokens_per_s, 3)
            for plain, graph in zip(done[PLAIN], done[ON], strict=True)
        ],
        "target": target,
        "capture_on_over_off": round(capture, 3),
        "capture_target": capture_target,
        "ok": ratio >= target and (capture_target is None or capture >= capture_target),
    }


def _first_text(model: str, done: Mapping[str, Sequence[Round]], targets: Targets) -> dict[str, Any]:
    waits = {name: [wait for item in items for wait in item.first_text_s] for name, items in done.items()}
    shares = {"p50": (0.5, targets.first_text_p50), "p99": (0.99, targets.first_text_p99)}
    row: dict[str, Any] = {"benchmark": "serving.first_text", "model": model, "requests": len(waits[ON])}
    ok = True
    for label, (share, target) in shares.items():
        seconds = {name: quantile(values, share) for name, values in waits.items()}
        ratio = seconds[ON] / seconds[PLAIN]
        row[f"{label}_s"] = {name: round(value, 4) for name, value in seconds.items()}
        row[f"{label}_graph_over_vllm"] = round(ratio, 3)
        row[f"{label}_target"] = target
        ok = ok and (target is None or ratio <= target)
    row["p50_s_by_round"] = {
        name: [round(quantile(item.first_text_s, 0.5), 4) for item in items] for name, items in done.items()
    }
    return {**row, "ok": ok}


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="Throughput and time to first text of the graph against plain vLLM.")
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
