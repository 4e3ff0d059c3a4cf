"""New weights while calls run: the graph against bare vLLM, and each against itself without updates.

Claims:
- Generation is paused for at most twice as long as bare vLLM is for the same weights (pause, load the folder, resume).
- With new weights every ten seconds, the graph generates at least 0.9 of what it does without.
- No call is lost: every stream that runs through an update ends whole.

All is measured in turns in one run. The pause: an update of the one while calls stream from it, then one of the other.
What is counted as the graph's is from the order to load until the last replica has resumed, as its coordinator measures
it; as vLLM's, from the first of its trainer's three requests to the end of the last.

Throughput: as many calls as take about ten seconds, with an update while they run and without; the ratio is the median
of those of the rounds. Folders are written and sealed before: that is the work of a trainer, not of the graph.
vLLM loads the same folders unchecked. What it loses, too, is the price of new weights as such: loading, and computing
what calls under way have so far again.

Run: python -m benchmarks.weights [--model smollm2] [--rounds 5]
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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Load:
    """Calls that take about `EVERY_S`, of each stream."""

    calls: int
    tokens: int

    async def seconds(self, server: str, update: Callable[[], object] | None) -> float:
        """For how long all of them run, with an update after a third of that or with none. Ends the benchmark if the
        update is not over by then."""

        async def talk(session: aiohttp.ClientSession) -> None:
            for _ in range(self.calls):
                await stream(session, server, lambda: None, self.tokens)

        async def push() -> None:
            if update is not None:
                await asyncio.sleep(EVERY_S / 3)
                await asyncio.to_thread(update)

        async with client_session() as session:
            pushing = asyncio.ensure_future(push())
            began = time.monotonic()
            await asyncio.gather(*(talk(session) for _ in range(STREAMS)))
            took_s = time.monotonic() - began
            was_in_time = pushing.done()
            await pushing
        if not was_in_time:
            raise SystemExit(
                f"all calls of {server} ended after {took_s:.1f} s, before the update did: nothing was measured; "
                "use a larger model, or a slower machine"
            )
        return took_s

    @classmethod
    def for_this_machine(cls, server: str) -> Load:
        """From a few calls' time."""
        few = cls(calls=1, tokens=TOKENS // 4)
        asyncio.run(few.seconds(server, None))  # the first calls of a server take longer
        tokens = int(few.tokens * EVERY_S / asyncio.run(few.seconds(server, None)))
        return cls(calls=max(1, round(tokens / TOKENS)), tokens=min(tokens, TOKENS))


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


def rates(servers: Servers, client: WeightClient, folders: Folders, rounds: int) -> bool:
    load = Load.for_this_machine(servers.graph)

    def run(server: str, update: Callable[[Payload], object] | None) -> float:
        payload = folders.next()
        return asyncio.run(load.seconds(server, None if update is None else lambda: update(payload)))

    sides = {
        "graph": lambda: run(servers.graph, None),
        "graph, updated": lambda: run(servers.graph, client.push),
        "vllm": lambda: run(servers.vllm, None),
        "vllm, updated": lambda: run(servers.vllm, lambda payload: update_vllm(servers.vllm, payload.folder)),
    }
    found = alternate(sides, rounds=rounds)
    ratios = {
        server: [still / updated for still, updated in zip(found[server], found[f"{server}, updated"], strict=True)]
        for server in ("graph", "vllm")
    }
    tokens = STREAMS * load.calls * load.tokens
    ratio = median(ratios["graph"])
    row = {
        "benchmark": f"weights: throughput with an update every {EVERY_S:g} s",
        "tokens_s": round(tokens / median(found["graph, updated"]), 1),
        "without_tokens_s": round(tokens / median(found["graph"]), 1),
        "ratio": round(ratio, 3),
        "ratios": [round(each, 3) for each in ratios["graph"]],
        "vllm_ratio": round(median(ratios["vllm"]), 3),
        "vllm_ratios": [round(each, 3) for each in ratios["vllm"]],
        "at_least": LEAST_THROUGHPUT,
        "calls_lost": 0,
        "ok": ratio >= LEAST_THROUGHPUT,
    }
    print(json.dumps(row), flush=True)
    return ratio >= LEAST_THROUGHPUT


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
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
            is_fast = rates(servers, client, folders, options.rounds)
    return 0 if is_short and is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
