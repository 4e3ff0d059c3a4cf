"""A replica without Ray: the real gateway and call service, over an engine and a state that tests hold in hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from gym_capture.capture.operations import Begin, Commit, MarkDelivery, MarkIncomplete, Operation
from gym_capture.capture.protocols import Resolution
from gym_capture.capture.records import CallIntent, Snapshot, TokenEntry, suffix_of
from gym_capture.capture.rollout_state import RolloutStatus
from gym_capture.capture.sinks import BegunCall, TokenSink
from gym_capture.engines.base import Engine
from gym_capture.engines.scripted import Script, ScriptedEngine, Scripter, Step, in_order, saying
from gym_capture.errors import StoreError
from gym_capture.lineage.fingerprint import Fingerprinter
from gym_capture.lineage.index import LineageIndex
from gym_capture.rollout_counts import RolloutCounts
from gym_capture.serving.admission import Admission
from gym_capture.serving.call_service import CallService
from gym_capture.serving.gateway import build_gateway
from gym_capture.serving.live import LiveCalls
from gym_capture.serving.outgrown import Outgrown
from gym_capture.serving.stats import ShardStats
from gym_capture.splice.template import ChatTemplate
from gym_capture.stores.base import counts_of, status_of
from gym_capture.stores.memory import MemoryStore

STOP = "<|im_end|>"
USER = {"role": "user", "content": "hi"}
PLAIN = Script(steps=[Step(token_ids=[5], log_probs=[-0.25], text="He"), Step(token_ids=[6, 7], log_probs=[-1, -2])])
"""A reply whose ids mean nothing."""


def always(script: Script) -> Scripter:
    return lambda _: script


def says(template: ChatTemplate, *texts: str) -> Scripter:
    """One reply after the other, in the ids that the tokenizer has for them."""
    return in_order(saying(template, text, stop_token=STOP) for text in texts)


def gateway_over(service: CallService) -> FastAPI:
    """A gateway that takes whatever comes."""
    calls = LiveCalls(interval_s=0.0, admission=Admission(running=64, waiting=64))
    return build_gateway(service, model_name="policy", max_model_len=4096, calls=calls)


class LocalState:
    """What a state actor does, in this process, with a gate before every put and faults on demand."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._lineage = LineageIndex()
        self._outgrown = Outgrown()
        self.gate = asyncio.Event()
        """Puts wait for it."""
        self.gate.set()
        self.put_begins = asyncio.Event()
        self.begin_fails: StoreError | None = None
        self.put_fails: StoreError | None = None
        self.mark_fails: StoreError | None = None
        self.deliveries: list[tuple[str, bool]] = []
        """What was said of deliveries: call ids, and whether their replies left whole."""

    async def begin(self, intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str]) -> BegunCall:
        if self.begin_fails is not None:
            raise self.begin_fails
        epoch = await self.store.write(Begin(intent))
        resolution = self._lineage.resolve(intent.rollout_id, turn_keys, asked_keys)
        sink = TokenSink(self, intent.rollout_id, epoch)
        went_on = (await self.store.freeze(intent.rollout_id)).went_on
        return BegunCall(sink, resolution, self._lineage.may_be_retry(intent.rollout_id, resolution), went_on)

    async def write(self, operation: Operation) -> int:
        if isinstance(operation, Commit):
            self.put_begins.set()
            await self.gate.wait()
        fails = self._fails(operation)
        if fails is not None:
            raise fails
        if isinstance(operation, Commit):
            epoch = await self.store.write(replace(operation, entry=suffix_of(operation.entry)))
            assert self._lineage.add(operation.entry) == ()
            self._outgrown.forget(operation.rollout_id)
            return epoch
        epoch = await self.store.write(operation)
        if isinstance(operation, MarkDelivery):
            self._lineage.mark_delivery(operation.rollout_id, operation.call_id, delivered=operation.delivered)
            self.deliveries.append((operation.call_id, operation.delivered))
        return epoch

    def _fails(self, operation: Operation) -> StoreError | None:
        match operation:
            case Commit():
                return self.put_fails
            case MarkIncomplete():
                return self.mark_fails
            case MarkDelivery():
                return None if operation.delivered else self.mark_fails
            case _:
                return None

    async def resolve(self, rollout_id: str, turn_keys: Sequence[str]) -> Resolution:
        return self._lineage.resolve(rollout_id, turn_keys)

    async def too_long(self, rollout_id: str) -> None:
        if self.mark_fails is not None:
            raise self.mark_fails
        self._outgrown.refused(rollout_id)

    async def is_outgrown(self, rollout_id: str) -> bool:
        return rollout_id in self._outgrown

    async def freeze(self, rollout_id: str) -> Snapshot:
        return await self.store.freeze(rollout_id)

    async def status(self, rollout_id: str) -> RolloutStatus:
        return await status_of(self.store, rollout_id)

    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]:
        return await counts_of(self.store, rollout_ids)

    async def stats(self) -> ShardStats:
        if self.begin_fails is not None:
            raise self.begin_fails
        return ShardStats(prefix_requested=4, prefix_supplied=3, resolutions={"root": 2})

    async def snapshot(self, rollout_id: str = "r1") -> Snapshot:
        """The rollout, in the order in which its calls were recorded."""
        frozen = await self.store.freeze(rollout_id)
        assert frozen.orphans == ()
        return frozen

    async def entries(self, rollout_id: str = "r1") -> tuple[TokenEntry, ...]:
        return (await self.snapshot(rollout_id)).entries


class Replica:
    """A gateway, its engine and its state. Make one inside the event loop that runs it."""

    def __init__(
        self,
        template: ChatTemplate,
        scripter: Scripter,
        *,
        capture: bool = True,
        sampling_pin: Mapping[str, Any] | None = None,
        prefix_supply: bool = True,
        max_model_len: int = 4096,
        longest_token: int | None = None,
        stream_interval_s: float = 0.0,
        running_calls: int = 256,
        waiting_calls: int = 1024,
        engine: Engine | None = None,
        **gateway: Any,
    ) -> None:
        self.state = LocalState()
        self.engine = ScriptedEngine(template, scripter, max_model_len=max_model_len, longest_token=longest_token)
        self.service = CallService(
            self.engine if engine is None else engine,
            state=self.state if capture else None,
            fingerprinter=Fingerprinter(),
            prefix_supply=prefix_supply,
            sampling_pin=sampling_pin or {},
            session_cache=16,
            clock=lambda: 1_700_000_000.0,
        )
        self.calls = LiveCalls(
            interval_s=stream_interval_s, admission=Admission(running=running_calls, waiting=waiting_calls)
        )
        self.app: FastAPI = build_gateway(
            self.service,
            model_name="policy",
            max_model_len=max_model_len,
            calls=self.calls,
            **gateway,
        )
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway", trust_env=False)

    async def chat(self, *messages: Mapping[str, Any], rollout_id: str | None = "r1", **fields: Any) -> httpx.Response:
        return await self.http.post(chat_path(rollout_id), json=chat_body(*messages, **fields))


def chat_path(rollout_id: str | None) -> str:
    return f"{'' if rollout_id is None else f'/ng-rollout/{rollout_id}'}/v1/chat/completions"


def chat_body(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": messages or [{"role": "user", "content": "hi"}], **fields}


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The application behind a real HTTP server on a free port of this machine, and a client of it."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="error"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        await serving


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must happen; what does not, fails after a minute."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def frames(response: httpx.Response) -> AsyncGenerator[str]:
    """The data of server-sent events, one at a time, as they come."""
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: ")
            yield line.removeprefix("data: ")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended with [DONE]."""
    *datas, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(data) for data in datas]


def streamed_text(response: httpx.Response) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events(response) for choice in event["choices"])
