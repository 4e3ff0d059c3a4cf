"""Replicas come and go while replies stream. Is every stream whole, and on record?

python -m tests.faults.scaling --seconds 60      (part of: make test-faults)

Invariant: what is reported is what clients were told, beside what the log holds once they have gone.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx

from gym_capture.capture.records import Snapshot
from gym_capture.demo.processes import ChildProcesses
from tests.faults.apis import APIS, Api, NotWholeError
from tests.faults.audit import read
from tests.faults.cluster import Cluster, make_home, scripted
from tests.faults.engine import question

TOKEN_S: Final = 0.01
_WORD: Final = 6.6
"""Ids of a word, about."""
_WITHIN_S: Final = 120.0


@dataclass(slots=True)
class Stream:
    """One reply on its way to a client."""

    rollout_id: str
    api: Api
    text: str = ""
    error: str | None = None
    """Why it is not whole."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def streaming(url: str, name: str, *, count: int, seconds: float) -> AsyncIterator[list[Stream]]:
    """So many streams, over all APIs, each of them about so long. All have begun; after the block, all are over."""
    streams = [Stream(f"{name}-{number}", APIS[number % len(APIS)]) for number in range(count)]
    words = int(seconds / TOKEN_S / _WORD)
    async with httpx.AsyncClient(trust_env=False, timeout=None) as http, asyncio.TaskGroup() as reading:
        for stream in streams:
            reading.create_task(_read(http, url, stream, words=words))
        async with asyncio.timeout(_WITHIN_S):
            for stream in streams:
                await stream.begun.wait()
        yield streams


async def _read(http: httpx.AsyncClient, url: str, stream: Stream, *, words: int) -> None:
    body = {**stream.api.body((), question(stream.rollout_id, words=words)), "stream": True}
    path = f"{url}/ng-rollout/{stream.rollout_id}/v1/{stream.api.path}"
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code} {(await response.aread()).decode()}"
                return
            async for delta in stream.api.deltas(response.aiter_lines()):
                stream.text += delta
                stream.begun.set()
    except NotWholeError as error:
        stream.error = str(error)
    except httpx.TransportError as error:
        stream.error = f"cut: {error!r}"
    finally:
        stream.begun.set()


def replicas(cluster: Cluster) -> set[int]:
    """The processes of those that run, or have not ended yet."""
    return {process.pid for process in cluster.processes("ray::ServeReplica")}


async def settled(cluster: Cluster, *, count: int, without: Collection[int] = ()) -> set[int]:
    """The processes of the replicas, once there are so many and none of those that were to go."""
    async with asyncio.timeout(_WITHIN_S):
        while True:
            found = replicas(cluster)
            if len(found) == count and found.isdisjoint(without) and await _serves(cluster):
                return found
            await asyncio.sleep(0.2)


async def _serves(cluster: Cluster) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            return (await http.get(f"{cluster.url}/healthz")).status_code == 200
    except httpx.TransportError:
        return False


def not_whole(cluster: Cluster, streams: Sequence[Stream]) -> list[str]:
    """What is wrong with streams that should all have ended as if nothing had happened."""
    cut = [f"{stream.rollout_id}: {stream.error}" for stream in streams if stream.error is not None]
    return cut + recorded_otherwise(cluster, streams, "stop")


def recorded_otherwise(cluster: Cluster, streams: Sequence[Stream], finish_reason: str) -> list[str]:
    """Those of which there is not one record, with that finish reason, in a rollout of which all is known."""
    found = read(cluster.records).snapshots
    return [
        f"{stream.rollout_id} is recorded otherwise: {found.get(stream.rollout_id)}"
        for stream in streams
        if stream.rollout_id not in found or not _is_recorded(found[stream.rollout_id], finish_reason)
    ]


def _is_recorded(snapshot: Snapshot, finish_reason: str) -> bool:
    return not snapshot.incomplete and [entry.reply.finish_reason for entry in snapshot.entries] == [finish_reason]


async def scale(cluster: Cluster, *, seconds: float, count: int) -> list[str]:
    """From two replicas to one, to two again, and to a new version of both, under streams. Returns what went wrong."""
    before = replicas(cluster)
    async with streaming(cluster.url, "down", count=count, seconds=seconds) as down:
        await cluster.redeploy(options={"num_replicas": 1})
    left = await settled(cluster, count=1)
    wrong = not_whole(cluster, down)
    if not left < before:
        wrong.append(f"a scale-down replaced replicas: {before} became {left}")
    async with streaming(cluster.url, "up", count=count, seconds=seconds) as up:
        await cluster.redeploy(options={"num_replicas": 2})
        both = await settled(cluster, count=2)
    wrong += not_whole(cluster, up)
    if not left < both:
        wrong.append(f"a scale-up replaced replicas: {left} became {both}")
    async with streaming(cluster.url, "update", count=count, seconds=seconds) as update:
        await cluster.redeploy(args={"session_cache": 100 + len(both)})
    wrong += not_whole(cluster, update)
    await settled(cluster, count=2, without=both)
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the streams are")
    parser.add_argument("--streams", type=int, default=16, help="how many there are at a time")
    options = parser.parse_args(argv)
    home = make_home()
    with ChildProcesses() as children:
        cluster = Cluster(children, home, args=scripted(token_s=TOKEN_S))
        try:
            asyncio.run(cluster.start())
            wrong = asyncio.run(scale(cluster, seconds=options.seconds, count=options.streams))
            cluster.stop()
        finally:
            cluster.kill()
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"streams={3 * options.streams} seconds={options.seconds:g} wrong={len(wrong)}")
    if not wrong:
        shutil.rmtree(home)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
