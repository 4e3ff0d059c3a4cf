"""New weights while calls run: the graph against bare vLLM, and the graph against itself without updates.

Claims:
- Generation is paused for at most twice as long as bare vLLM is for the same weights (pause, load the folder, resume).
- With new weights every ten seconds, the graph generates at least 0.9 of what it does without.
- No call is lost: every stream that runs through an update ends whole.

Both are measured in turns in one run: an update of the one while calls stream from it, then one of the other. What is
counted as the graph's pause is from the order to load until the last replica has resumed, as its coordinator measures
it; as vLLM's, from the first of its trainer's three requests to the end of the last.

Run: python -m benchmarks.weights [--model smollm2] [--rounds 3] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import aiohttp
import httpx

from benchmarks.serving_pair import MODEL, Servers, alternate, both_servers, chat_url, client_session, nonce
from gym_capture.serving.app import model_folder
from gym_capture.weights import Payload, seal
from trainer_bridge.weight_client import WeightClient

STREAMS = 4
TOKENS = 200
EVERY_S = 10.0
MOST_PAUSE = 2.0
LEAST_THROUGHPUT = 0.9


class Folders:
    """Versions to push, one after another: the same tensors, so that each costs the same."""

    def __init__(self, root: Path, model: Path) -> None:
        self._root = root
        self._model = model
        self._last = 0

    def next(self) -> Payload:
        self._last += 1
        folder = self._root / f"v{self._last}"
        folder.mkdir()
        for file in self._model.glob("*.safetensors"):
            os.link(file, folder / file.name)
        shutil.copy(self._model / "config.json", folder)
        return seal(folder, version=self._last)


async def stream(session: aiohttp.ClientSession, server: str, began: Callable[[], None], tokens: int) -> int:
    """One call to its end. Returns its chunks; ends the benchmark if the stream is not whole."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"{nonce()} Tell a long story."}], "stream": True}
    body |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    chunks, last = 0, ""
    async with session.post(chat_url(server, rollout_id=None), json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{server} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            text = line.decode().strip()
            if text:
                chunks, last = chunks + 1, text
                began()
    if last != "data: [DONE]":
        raise SystemExit(f"a call of {server} was lost: its stream ended with {last[:200]!r}")
    return chunks


async def update_under_load(server: str, update: Callable[[], float]) -> float:
    """The pause of one update while calls stream."""
    running: set[int] = set()
    all_run = asyncio.Event()

    def began(number: int) -> None:
        running.add(number)
        if len(running) == STREAMS:
            all_run.set()

    async with client_session() as session:
        calls = [
            asyncio.ensure_future(stream(session, server, partial(began, number), TOKENS)) for number in range(STREAMS)
        ]
        await all_run.wait()
        paused_s = await asyncio.to_thread(update)
        await asyncio.gather(*calls)
    return paused_s


def update_vllm(server: str, folder: str) -> float:
    began = time.monotonic()
    with httpx.Client(base_url=server, trust_env=False, timeout=300) as http:
        http.post("/pause", params={"mode": "keep"}).raise_for_status()
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        http.post("/collective_rpc", json=load).raise_for_status()
        http.post("/resume").raise_for_status()
    return time.monotonic() - began


async def throughput(server: str, seconds: float, update: Callable[[], object] | None) -> float:
    """Tokens a second, with an update every `EVERY_S` or with none."""
    ends = time.monotonic() + seconds
    tokens = 0

    async def talk(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        while time.monotonic() < ends:
            await stream(session, server, lambda: None, TOKENS)
            tokens += TOKENS

    async def push() -> None:
        while update is not None and time.monotonic() + EVERY_S < ends:
            await asyncio.sleep(EVERY_S)
            await asyncio.to_thread(update)

    began = time.monotonic()
    async with client_session() as session:
        await asyncio.gather(push(), *(talk(session) for _ in range(STREAMS)))
    return tokens / (time.monotonic() - began)


def pauses(servers: Servers, client: WeightClient, folders: Folders, rounds: int) -> bool:
    def graph() -> float:
        payload = folders.next()
        return asyncio.run(update_under_load(servers.graph, lambda: client.push(payload).paused_s))

    def vllm() -> float:
        folder = folders.next().folder
        return asyncio.run(update_under_load(servers.vllm, lambda: update_vllm(servers.vllm, folder)))

    found = alternate({"graph": graph, "vllm": vllm}, rounds=rounds)
    ratio = median(found["graph"]) / median(found["vllm"])
    row = {
        "benchmark": "weights: pause of an update in flight",
        "graph_s": round(median(found["graph"]), 4),
        "vllm_s": round(median(found["vllm"]), 4),
        "ratio": round(ratio, 2),
        "at_most": MOST_PAUSE,
        "calls_lost": 0,
        "ok": ratio <= MOST_PAUSE,
    }
    print(json.dumps(row), flush=True)
    return ratio <= MOST_PAUSE


def rates(servers: Servers, client: WeightClient, folders: Folders, rounds: int, seconds: float) -> bool:
    def still() -> float:
        return asyncio.run(throughput(servers.graph, seconds, None))

    def updated() -> float:
        ready = [folders.next() for _ in range(int(seconds / EVERY_S) + 1)]
        return asyncio.run(throughput(servers.graph, seconds, lambda: client.push(ready.pop(0))))

    warm_ups = {"still": lambda: asyncio.run(throughput(servers.graph, 1.0, None))}
    found = alternate({"still": still, "updated": updated}, rounds=rounds, warm_ups=warm_ups)
    ratio = median(found["updated"]) / median(found["still"])
    row = {
        "benchmark": f"weights: throughput with an update every {EVERY_S:g} s",
        "tokens_s": round(median(found["updated"]), 1),
        "without_tokens_s": round(median(found["still"]), 1),
        "ratio": round(ratio, 3),
        "at_least": LEAST_THROUGHPUT,
        "calls_lost": 0,
        "ok": ratio >= LEAST_THROUGHPUT,
    }
    print(json.dumps(row), flush=True)
    return ratio >= LEAST_THROUGHPUT


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a measurement of throughput")
    options = parser.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # vLLM's own server has these routes only then
    model = model_folder(options.model)
    # Beside the model: files are linked, not copied.
    with (
        tempfile.TemporaryDirectory(prefix="bench-weights-", dir=model.parent) as root,
        both_servers(str(model)) as servers,
    ):
        folders = Folders(Path(root), model)
        with WeightClient(servers.graph) as client:
            is_short = pauses(servers, client, folders, options.rounds)
            is_fast = rates(servers, client, folders, options.rounds, options.seconds)
    return 0 if is_short and is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
