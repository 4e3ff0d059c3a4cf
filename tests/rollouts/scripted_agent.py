"""A remote agent that replies from a script, for the harness to call; and one that fails below HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

ROOT: Final = Path(__file__).parents[2]


@dataclass
class Asked:
    """One request as it arrived."""

    body: dict[str, Any]
    headers: dict[str, str]
    cookies: dict[str, str]


Script = Callable[[Asked], Awaitable[web.StreamResponse]]


@dataclass
class Agent:
    url: str
    asked: list[Asked] = field(default_factory=list)


@asynccontextmanager
async def agent(script: Script) -> AsyncIterator[Agent]:
    served = Agent("")

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Asked(await request.json(), headers, dict(request.cookies))
        served.asked.append(asked)
        return await script(asked)

    app = web.Application()
    app.router.add_post("/v1/responses", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


@dataclass
class Wire:
    url: str
    requests: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """A client closed its end."""


@asynccontextmanager
async def wire(said: Sequence[bytes], *, hangs: bool) -> AsyncIterator[Wire]:
    """Reads each request whole, says something below HTTP, and then stays silent or closes."""
    served = Wire("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            served.requests += 1
            for piece in said:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            if hangs:
                await reader.read()
                served.gone.set()
        except ConnectionError:
            served.gone.set()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()


@contextmanager
def process(command: Sequence[str], *, port: int) -> Iterator[str]:
    """An agent that is a process and listens on `port`. Yields its URL."""
    with subprocess.Popen([sys.executable, *command], cwd=ROOT) as running:
        try:
            until = time.monotonic() + 60
            while not _listens(port):
                assert running.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def response(*output: dict[str, Any], **fields: Any) -> web.Response:
    body = {"id": "resp_1", "object": "response", "created_at": 1, "model": "agent", "status": "completed"}
    return web.json_response({**body, "output": list(output), **fields})


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def call(call_id: str, name: str, arguments: str | dict[str, Any], **fields: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": text, **fields}


def output(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}
