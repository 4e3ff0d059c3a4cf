"""Clients that leave while their call is under way, in every way there is: is each noticed, and is the proxy idle then?

python -m tests.faults.leaving --rounds 10        (a part of: make test-faults)

Invariant: a client leaves only once the engine works for it, and is noticed when the engine does so no more. Nothing
else ends these calls: they would go on for ten seconds and more.

Flow: each of `ways()` asks on a rollout of its own, all at the same time -> it leaves -> its generation ends -> the log
says what became of the call. The last lines on standard output: through=HAProxy asked=640 missed=0 slowest_s=0.31 ...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import struct
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx
import httpx2
import openai
import psutil

from gym_capture.demo.processes import ChildProcesses
from tests.faults.apis import APIS, Api, Completions
from tests.faults.audit import read
from tests.faults.cluster import Cluster, make_home, replica_urls, scripted
from tests.faults.engine import question, running

NOTICED_WITHIN_S: Final = 2.0
_WORDS: Final = 500
"""Ten seconds and more."""
_SILENT_S: Final = 60
_PATIENCE_S: Final = 3.0
"""Of the client libraries: the engine must have their calls by then."""
_GIVEN_UP_S: Final = 10.0
_POLL_S: Final = 0.02
_READ_S: Final = 0.25
_BETWEEN_PACKETS_S: Final = 0.1
_TOKEN_S: Final = 0.004
_SHOWN: Final = 50
_IDLE_S: Final = 5.0
_IDLE_SHARE: Final = 0.05
"""Of one core, that an idle proxy may take: it asks its servers for their health."""


class Packets(StrEnum):
    """How a request is written."""

    ONE = "in one packet"
    BACK_TO_BACK = "head and body back to back"
    APART = "the body in a packet of its own"
    LIBRARY = "by the client library"


class Leaves(StrEnum):
    """When, and how."""

    BEFORE = "before the first byte"
    AFTER = "after the first byte"
    SILENT = "in a silence after the first byte"
    BREAKING = "before the first byte, breaking the connection"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask and to leave."""

    api: Api
    stream: bool
    packets: Packets
    leaves: Leaves

    def body(self, rollout_id: str) -> dict[str, Any]:
        asked = (
            question(rollout_id, words=_WORDS)
            if self.leaves is Leaves.AFTER
            else question(rollout_id, words=1, silent_s=_SILENT_S)
        )
        return self.api.body((), asked) | {"stream": self.stream}

    def __str__(self) -> str:
        return f"{self.api.path}, {'streamed' if self.stream else 'whole'}, {self.packets}, left {self.leaves}"


def ways() -> Iterator[Way]:
    """All of them. Of a reply that is not streamed, the first byte is the last."""
    for api in (*APIS, Completions()):
        for packets in Packets:
            yield Way(api, stream=False, packets=packets, leaves=Leaves.BEFORE)
            # A stream says that it lives sooner than the libraries lose patience.
            before = Leaves.SILENT if packets is Packets.LIBRARY else Leaves.BEFORE
            yield Way(api, stream=True, packets=packets, leaves=before)
            yield Way(api, stream=True, packets=packets, leaves=Leaves.AFTER)
        yield Way(api, stream=False, packets=Packets.APART, leaves=Leaves.BREAKING)


@dataclass(slots=True)
class Seen:
    """What became of clients that left."""

    noticed_s: list[float] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Ways whose client was not noticed in time, or whose call is not on record as it should be."""
    cpu_s: float = 0.0
    """Processor time of the proxy over `idle_s`, with nothing to do."""
    idle_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        return self.cpu_s <= _IDLE_SHARE * self.idle_s

    def line(self, through: str) -> str:
        return (
            f"through={through} asked={len(self.noticed_s)} missed={len(self.missed)} "
            f"slowest_s={max(self.noticed_s):.2f} proxy_cpu_s={self.cpu_s:.2f} of={self.idle_s:g}"
        )


class Leaving:
    """Has clients leave a graph of scripted engines."""

    def __init__(self, cluster: Cluster, running_dir: Path) -> None:
        self._cluster = cluster
        self._running_dir = running_dir
        self._running: frozenset[str] = frozenset()
        """The rollouts for which an engine works, as of a moment ago."""

    async def all_leave(self, url: str, chosen: Sequence[Way]) -> Seen:
        """All at the same time, each on a rollout of its own."""
        seen = Seen()
        rollouts = {f"leaves-{uuid.uuid4().hex}": way for way in chosen}
        watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.TaskGroup() as leaving:
                for rollout_id, way in rollouts.items():
                    leaving.create_task(self._leave(url, rollout_id, way, seen))
        finally:
            watching.cancel()
        await self._check_records(rollouts, seen)
        return seen

    async def _watch(self) -> None:
        while True:
            self._running = frozenset(running(self._running_dir))
            await asyncio.sleep(_POLL_S)

    async def _leave(self, url: str, rollout_id: str, way: Way, seen: Seen) -> None:
        ask = _by_library if way.packets is Packets.LIBRARY else _by_hand
        await ask(f"{url}/ng-rollout/{rollout_id}", rollout_id, way, self._until_engine_has(rollout_id))
        left = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVEN_UP_S):
                while True:
                    if rollout_id not in self._running:
                        break
                    await asyncio.sleep(_POLL_S)
        seen.noticed_s.append(time.monotonic() - left)
        if seen.noticed_s[-1] > NOTICED_WITHIN_S:
            seen.missed.append(f"{way}: not noticed for {seen.noticed_s[-1]:.1f} s")

    def _until_engine_has(self, rollout_id: str) -> Callable[[], Awaitable[None]]:
        async def until() -> None:
            while True:
                if rollout_id in self._running:
                    return
                await asyncio.sleep(_POLL_S)

        return until

    async def _check_records(self, rollouts: dict[str, Way], seen: Seen) -> None:
        """Each call is on record as aborted, and nothing is open."""
        wrong: dict[str, str] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVEN_UP_S):
                while True:
                    wrong = self._not_on_record(rollouts)
                    if not wrong:
                        break
                    await asyncio.sleep(_READ_S)
        seen.missed += [f"{rollouts[rollout_id]}: {what}" for rollout_id, what in wrong.items()]

    def _not_on_record(self, rollouts: dict[str, Way]) -> dict[str, str]:
        snapshots, wrong = read(self._cluster.records).snapshots, {}
        for rollout_id in rollouts:
            snapshot = snapshots.get(rollout_id)
            ends = [] if snapshot is None else [entry.finish_reason for entry in snapshot.entries]
            incomplete = () if snapshot is None else snapshot.incomplete
            if ends != ["abort"] or incomplete:
                wrong[rollout_id] = f"on record as {ends}, incomplete {incomplete}"
        return wrong

    def proxies(self) -> list[psutil.Process]:
        return self._cluster.processes("haproxy")

    async def watch_idle(self, seen: Seen, *, idle_s: float) -> None:
        """Measures what the proxy does with nothing to do."""
        proxies = self.proxies()
        before, began = _cpu_s(proxies), time.monotonic()
        await asyncio.sleep(idle_s)
        seen.cpu_s, seen.idle_s = _cpu_s(proxies) - before, time.monotonic() - began
        if not seen.is_idle:
            seen.missed.append(f"the idle proxy took {seen.cpu_s:.2f} s of {seen.idle_s:.1f} s")
        waiting = [connection for proxy in proxies for connection in proxy.net_connections("tcp")]
        waiting = [connection for connection in waiting if connection.status == psutil.CONN_CLOSE_WAIT]
        if waiting:
            seen.missed.append(f"the proxy keeps {len(waiting)} connections of clients that have gone")


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        times = process.cpu_times()
        total += times.user + times.system
    return total


# --- how they ask, and leave ---------------------------------------------------------------------------------------


async def _by_hand(url: str, rollout_id: str, way: Way, engine_has_it: Callable[[], Awaitable[None]]) -> None:
    where = httpx.URL(f"{url}/v1/{way.api.path}")
    body = json.dumps(way.body(rollout_id)).encode()
    head = f"POST {where.path} HTTP/1.1\r\nhost: {where.host}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(where.host, where.port)
    if way.packets is Packets.ONE:
        writer.write(head.encode() + body)
    else:
        writer.write(head.encode())
        if way.packets is Packets.APART:
            await asyncio.sleep(_BETWEEN_PACKETS_S)
        writer.write(body)
    await engine_has_it()
    if way.leaves is Leaves.AFTER:
        await reader.readuntil(b"data: ")
    if way.leaves is Leaves.BREAKING:
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _by_library(url: str, rollout_id: str, way: Way, engine_has_it: Callable[[], Awaitable[None]]) -> None:
    """As agents have it: a time-out of the library, or the end of a loop over a stream."""
    async with _openai(url) as of_openai, _anthropic(url) as of_anthropic:
        create: Any = {
            "chat/completions": of_openai.chat.completions.create,
            "completions": of_openai.completions.create,
            "responses": of_openai.responses.create,
            "messages": of_anthropic.messages.create,
        }[way.api.path]
        with suppress(openai.APITimeoutError, anthropic.APITimeoutError, httpx2.ReadTimeout):
            reply = await create(**way.body(rollout_id))
            if way.leaves is Leaves.SILENT:
                reply = [event async for event in reply]
            assert way.leaves is Leaves.AFTER, f"{way}: there was a whole answer: {reply}"
            await anext(aiter(reply))
            await engine_has_it()
            await reply.close()


def _openai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE_S)


def _anthropic(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=_PATIENCE_S)


# --- all of it -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Through HAProxy, straight to the replicas behind it, and through Serve's own proxy."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.leaving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often clients leave in every way")
    parser.add_argument("--only", choices=("haproxy", "serve"), help="through this proxy only")
    options = parser.parse_args(argv)
    is_well = True
    for ha_proxy in {"haproxy": (True,), "serve": (False,), None: (True, False)}[options.only]:
        home = make_home()
        running_dir = home / "running"
        running_dir.mkdir()
        with ChildProcesses() as children:
            args = scripted(token_s=_TOKEN_S, running_dir=str(running_dir))
            cluster = Cluster(children, home, args=args, ha_proxy=ha_proxy)
            try:
                went_well = asyncio.run(_over(cluster, running_dir, options.rounds, ha_proxy=ha_proxy))
                cluster.stop()
            finally:
                cluster.kill()
        if went_well:
            shutil.rmtree(home)
        else:
            print(f"the records and logs are in {home}")
        is_well &= went_well
    return 0 if is_well else 1


async def _over(cluster: Cluster, running_dir: Path, rounds: int, *, ha_proxy: bool) -> bool:
    await cluster.start()
    leaving = Leaving(cluster, running_dir)
    paths = {"HAProxy" if ha_proxy else "Serve's proxy": cluster.url}
    if ha_proxy:
        paths |= {f"replica {number}": url for number, url in enumerate(replica_urls(cluster))}
    missed = 0
    for through, url in paths.items():
        total = Seen()
        for _ in range(rounds):
            seen = await leaving.all_leave(url, list(ways()))
            total.noticed_s += seen.noticed_s
            total.missed += seen.missed
        await leaving.watch_idle(total, idle_s=_IDLE_S)
        print("\n".join([*total.missed[:_SHOWN], total.line(through)]), flush=True)
        missed += len(total.missed)
    return missed == 0


if __name__ == "__main__":
    sys.exit(main())
