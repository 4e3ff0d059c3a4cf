"""HAProxy, with the settings of `cluster.env`, in front of a node that ends without a word."""

from __future__ import annotations

import asyncio
import ctypes
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from ray.serve._private.haproxy import get_haproxy_binary

from gym_capture.cluster.env import CLUSTER_ENV
from gym_capture.demo.processes import free_port

_SO_ATTACH_FILTER = 26
_BALANCE = CLUSTER_ENV["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"]
_QUICKLY = re.sub(r"(srvtcpka-\w+) \d+s", r"\1 1s", _BALANCE)
"""The same, without the patience."""


def silence(connection: socket.socket) -> None:
    """Lets nothing in any more, so that nothing is answered: what comes for it is lost, as on a node without power."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: none of the packet
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


@asynccontextmanager
async def haproxy(folder: Path, *, balance: str, server: int) -> AsyncIterator[str]:
    port = free_port()
    (folder / "haproxy.cfg").write_text(
        f"defaults\n    mode http\n    timeout connect 5s\n    timeout client 3600s\n    balance {balance}\n"
        f"frontend front\n    bind 127.0.0.1:{port}\n    default_backend back\n"
        f"backend back\n    http-reuse always\n    server engine 127.0.0.1:{server}\n"
    )
    process = await asyncio.create_subprocess_exec(
        *[get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")],
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_a_call_at_a_node_that_falls_silent_is_cut_and_one_that_takes_its_time_is_not(tmp_path: Path) -> None:
    asked = asyncio.Queue[asyncio.StreamWriter]()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.put_nowait(writer)

    assert _QUICKLY != _BALANCE
    listening = await asyncio.start_server(engine, "127.0.0.1", 0)
    async with (
        asyncio.timeout(60),
        haproxy(tmp_path, balance=_QUICKLY, server=listening.sockets[0].getsockname()[1]) as url,
        httpx.AsyncClient(trust_env=False, timeout=None, transport=httpx.AsyncHTTPTransport(retries=20)) as http,
    ):
        thinking = asyncio.create_task(http.get(f"{url}/ng-rollout/thinks/v1"))
        thinker = await asked.get()
        cut = asyncio.create_task(http.get(f"{url}/ng-rollout/lost/v1"))
        lost = await asked.get()
        silence(lost.get_extra_info("socket"))
        assert (await cut).status_code == 502
        assert not thinking.done()
        thinker.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        assert (await thinking).status_code == 200
        thinker.close()
        lost.transport.abort()
    listening.close()
