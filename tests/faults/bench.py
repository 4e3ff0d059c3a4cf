"""A replica, its state actor and its log in this process: for faults that a test must hold in hand to the byte."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.serving.admission import Admission
from gym_capture.serving.call_service import CallService
from gym_capture.serving.gateway import build_gateway
from gym_capture.serving.live import LiveCalls
from gym_capture.stores.segments import Disk
from tests.faults.agents import Agent, Ledger, Played
from tests.faults.audit import Findings, Log, audit, read
from tests.faults.engine import PacedEngine, Voice, question
from tests.serving.replica import listening
from tests.serving.shards import LocalActor, client_of, shard


@dataclass(frozen=True)
class Bench:
    """A graph of one replica and one state actor."""

    url: str
    http: httpx.AsyncClient
    actor: LocalActor
    directory: Path
    ledger: Ledger
    voice: Voice

    def agent(self, name: str) -> Agent:
        return Agent(name, self.ledger, url=lambda: self.url, http=self.http, seed=0, deadline_s=120)

    def log(self) -> Log:
        return read([self.directory / "shard-0000"])

    def audit(self) -> Findings:
        return audit(self.log(), self.ledger, self.voice)


@asynccontextmanager
async def bench(
    template: HfChatTemplate, directory: Path, *, disk: Disk | None = None, clock: Callable[[], float] = time.time
) -> AsyncIterator[Bench]:
    """Serves it for the length of the block."""
    actor = LocalActor(partial(shard, directory, store_kwargs={"disk": disk or Disk()}))
    engine = PacedEngine(template, name="policy", token_s=0.0, running_dir=None)
    service = CallService(
        engine,
        state=client_of(actor),
        fingerprinter=Fingerprinter(),
        prefix_supply=True,
        sampling_pin={},
        session_cache=16,
        clock=clock,
    )
    calls = LiveCalls(interval_s=0.02, admission=Admission(running=256, waiting=1024))
    app = build_gateway(service, model_name="policy", max_model_len=engine.model.max_model_len, calls=calls)
    async with listening(app) as http:
        yield Bench(str(http.base_url).rstrip("/"), http, actor, directory, Ledger(), Voice(template))
    await service.close()
    await actor.shard.close()


async def play(graph: Bench, rollout_id: str, *, turns: int) -> Played:
    """So many turns more of a rollout."""
    played = graph.ledger.rollouts.setdefault(rollout_id, Played(rollout_id))
    agent = graph.agent(rollout_id)
    for number in range(len(played.turns), len(played.turns) + turns):
        turn = await agent.ask(played, question(f"{rollout_id}, turn {number}", words=8))
        assert turn is not None
        played.turns.append(turn)
    return played
