"""Replicas of a weight plane without Ray: real coordinator, real agents, scripted weights, and deaths on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from gym_capture.auth import Keyring
from gym_capture.engines.scripted_weights import ScriptedWeights
from gym_capture.errors import StoreUnavailableError
from gym_capture.models import tiny_dir
from gym_capture.serving.weights_actor import _operations
from gym_capture.serving.weights_agent import WeightAgent
from gym_capture.serving.weights_messages import Later, Load, Numbered, Report, Seat, Welcome
from gym_capture.serving.weights_plane import STEP_TIMEOUT_S, WeightPlane
from gym_capture.serving.weights_record import WeightsRecord
from gym_capture.serving.weights_routes import add_weight_routes
from gym_capture.weights import Payload
from tests.serving.replica import listening, until

MODEL = "/models/policy"


class Cluster:
    """A coordinator that can be killed, and replicas that can be."""

    def __init__(self, directory: Path, *, checks_against: Path | None = None, **timeouts: float) -> None:
        """`checks_against`: a model folder; None: whatever is whole will do."""
        self.checks_against = checks_against
        self.record = WeightsRecord(directory)
        self._timeouts = timeouts
        self.step_timeout_s = timeouts.get("step_timeout_s", STEP_TIMEOUT_S)
        self.replicas: dict[str, Replica] = {}
        self.calls: set[asyncio.Task[Any]] = set()
        self.over: list[str] = []
        """What became of updates."""
        self.plane: WeightPlane | None = None
        self.start_coordinator()

    @property
    def serving(self) -> WeightPlane:
        assert self.plane is not None
        return self.plane

    async def start(self, name: str, *, model: str = MODEL, node: str | None = None) -> Replica:
        """Returns once it takes calls. `node`: None for one of its own."""
        replica = self.add(name, model=model, node=node)
        await replica.agent.start()
        return replica

    def add(self, name: str, *, model: str = MODEL, node: str | None = None) -> Replica:
        replica = self.replicas[name] = Replica(self, name, model=model, node=node or name)
        return replica

    async def kill(self, name: str) -> None:
        """A replica, without a warning."""
        replica = self.replicas.pop(name)
        replica.cut()
        replica.died.set()
        await asyncio.sleep(0)

    def kill_coordinator(self) -> None:
        """Whoever asks it something now learns that it is gone."""
        self.plane = None
        for call in self.calls:
            call.cancel()

    def start_coordinator(self) -> None:
        self.plane = WeightPlane(self.record, on_over=self.over.append, **self._timeouts)

    async def ask(self, work: Callable[[WeightPlane], Awaitable[Any]]) -> Any:
        """A call of the coordinator, which its death cuts off."""
        if self.plane is None:
            raise StoreUnavailableError("no coordinator")
        call = asyncio.ensure_future(work(self.plane))
        self.calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            self.calls.discard(call)
            call.cancel()
        if call.cancelled():
            raise StoreUnavailableError("the coordinator died")
        return call.result()

    async def operate(self, operation: Any, **arguments: Any) -> Any:
        """As a replica's gateway asks."""
        return await self.ask(lambda plane: _operations(plane)[operation](**arguments))

    async def push(self, payload: Payload, **options: Any) -> dict[str, object]:
        """As a trainer does it: three routes, one after another."""
        await self.ask(lambda plane: plane.start())
        await self.ask(lambda plane: plane.update({"folder": payload.folder, **options}))
        found: dict[str, object] = await self.ask(lambda plane: plane.finish(payload.version))
        return found

    @property
    def versions(self) -> dict[str, str | None]:
        return {name: replica.weights.version for name, replica in self.replicas.items()}

    @property
    def paused(self) -> dict[str, bool]:
        return {name: replica.weights.is_paused for name, replica in self.replicas.items()}

    async def settled(self, version: str) -> None:
        """Until all replicas sample from this version."""
        await until(lambda: set(self.versions.values()) == {version} and not any(self.paused.values()))

    async def until_waiting(self, *names: str) -> None:
        """Until these are members that cannot have the current version."""

        async def are_waiting() -> bool:
            return (await self.serving.info())["waiting_replicas"] == list(names)

        await eventually(are_waiting)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for something that must happen; what does not, fails after a minute."""
    async with asyncio.timeout(60):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


class Replica:
    """One agent and its weights."""

    def __init__(self, cluster: Cluster, name: str, *, model: str, node: str) -> None:
        self.name = name
        self.weights = ScriptedWeights(model=cluster.checks_against, on_step=self._on_step)
        self.died = asyncio.Event()
        self.fails: dict[str, Exception] = {}
        """Steps that fail, by name, or by name and version."""
        self.gates: dict[str, asyncio.Event] = {}
        """Steps that wait, likewise."""
        self.reached: dict[str, asyncio.Event] = {}
        self._cluster = cluster
        self.agent = WeightAgent(
            self, self.weights, replica=name, model=model, node=node, step_timeout_s=cluster.step_timeout_s
        )

    async def _on_step(self, step: str, version: str) -> None:
        for key in (step, f"{step} {version}"):
            if key in self.gates:
                self.reached.setdefault(key, asyncio.Event()).set()
                await self.gates[key].wait()
            if key in self.fails:
                raise self.fails[key]

    def hold(self, step: str) -> asyncio.Event:
        """From now on the step waits; returns what is set once it does."""
        self.gates[step] = asyncio.Event()
        return self.reached.setdefault(step, asyncio.Event())

    def cut(self) -> None:
        """Its process has ended."""
        following = self.agent._following
        if following is not None:
            following.cancel()

    async def join(self, seat: Seat) -> Welcome | Load | Later:
        answer: Welcome | Load | Later = await self._cluster.ask(lambda plane: plane.join(seat, self._gone))
        return answer

    async def exchange(self, replica: str, report: Report | None) -> Numbered:
        order: Numbered = await self._cluster.ask(lambda plane: plane.exchange(replica, report))
        return order

    async def leave(self, replica: str) -> None:
        await self._cluster.ask(lambda plane: plane.leave(replica))

    async def _gone(self) -> None:
        await self.died.wait()


@asynccontextmanager
async def cluster_of(
    directory: Path, *names: str, checks_against: Path | None = None, **timeouts: float
) -> AsyncIterator[Cluster]:
    cluster = Cluster(directory, checks_against=checks_against, **timeouts)
    for name in names:
        await cluster.start(name)
    try:
        yield cluster
    finally:
        for name in list(cluster.replicas):
            await cluster.kill(name)


@asynccontextmanager
async def served(
    tmp_path: Path, *names: str, keyring: Keyring | None = None
) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    """A graph's weight routes behind a real HTTP server, over replicas that check weights against the tiny model."""

    async def well() -> None:
        for replica in cluster.replicas.values():
            replica.agent.check_health()

    async with cluster_of(tmp_path / "state", *names, checks_against=tiny_dir()) as cluster:
        app = FastAPI()
        add_weight_routes(app, cluster, check_health=well, keyring=keyring)
        async with listening(app) as http:
            yield cluster, http
