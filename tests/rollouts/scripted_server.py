"""A small HTTP server that speaks Chat Completions from a script, for the harness and the job to call."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from aiohttp import web


@dataclass
class Call:
    """One request as it arrived."""

    rollout_id: str
    body: dict[str, Any]
    token: str


Script = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    url: str
    calls: list[Call] = field(default_factory=list)
    is_well: bool = True
    asked_for_health: int = 0

    def base_url(self, rollout_id: str) -> str:
        return f"{self.url}/ng-rollout/{rollout_id}/v1"

    def calls_of(self, rollout_id: str) -> list[Call]:
        return [call for call in self.calls if call.rollout_id == rollout_id]


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Server]:
    server = Server("")

    async def handle(request: web.Request) -> web.StreamResponse:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        call = Call(request.match_info["rollout_id"], await request.json(), token)
        server.calls.append(call)
        return await script(call)

    async def stats(request: web.Request) -> web.StreamResponse:
        return web.json_response({"capture": True})

    async def healthz(request: web.Request) -> web.StreamResponse:
        server.asked_for_health += 1
        return web.json_response({}, status=200 if server.is_well else 503)

    app = web.Application()
    app.router.add_get("/stats", stats)
    app.router.add_get("/healthz", healthz)
    app.router.add_post("/ng-rollout/{rollout_id}/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def sdk(*, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url="http://unused.invalid", api_key="unused", max_retries=max_retries
    ) as client:
        yield client


def completion(message: dict[str, Any]) -> web.Response:
    finish_reason = "tool_calls" if "tool_calls" in message else "stop"
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
    return web.json_response(body)


_ids = itertools.count()


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{next(_ids)}", "type": "function", "function": {"name": name, "arguments": arguments}}


async def solve(call: Call) -> web.Response:
    """A policy that does everything right: it reads the task from the prompt and works through it."""
    question = next(message["content"] for message in call.body["messages"] if message["role"] == "user")
    start, rest = question.removeprefix("The register holds ").split(". Please ", 1)
    value = int(start)
    steps = rest.split(".")[0].split(", then ")
    done = sum(message["role"] == "tool" for message in call.body["messages"])
    if done < len(steps):
        name, number = steps[done].split()[0], steps[done].split()[-1]
        return completion({"content": None, "tool_calls": [tool_call(name, json.dumps({"number": int(number)}))]})
    for step in steps:
        number = int(step.split()[-1])
        value = value + number if step.startswith("add") else value * number
    return completion({"content": f"It holds {value}."})
