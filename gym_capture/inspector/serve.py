"""The inspector as a server of its own, on this machine.

Invariant: it ends with Ctrl-C, at once, and leaves nothing. By default only this machine reaches it, only under its own
name, and only its user.

Flow: `listening` takes the port, so that it is known, and what is in the way is said, before anything is served ->
`serve` runs until it is interrupted.
"""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from gym_capture.errors import ConfigError
from gym_capture.inspector.app import OnlyThisHost
from gym_capture.inspector.peers import OnlyThisUser

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_BACKLOG: Final = 128


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any that is free. Raises `ConfigError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}; --port 0 takes one that is free"
        ) from None


def serve(app: ASGIApp, listener: socket.socket, *, host: str, any_user: bool = False) -> None:
    """Until Ctrl-C."""
    guarded: ASGIApp = OnlyThisHost(app, {host.lower(), *LOOPBACK})
    config = uvicorn.Config(
        guarded if any_user else OnlyThisUser(guarded),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
        loop="asyncio",  # uvloop prints a trace where a browser left before its answer
        proxy_headers=False,  # the other end is who it is, whatever it says
    )
    uvicorn.Server(config).run(sockets=[listener])


def url_of(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
