"""Whether a Ray cluster is there at all, asked before Ray is.

Invariant: where nobody listens, or what listens says nothing, that is known in seconds. Ray itself tries for two
minutes, in C++, where neither Ctrl-C nor SIGTERM ends the process.

Flow: the address that Ray would take -> a connection -> the first words of HTTP/2, which what Ray listens with speaks,
and its answer to them.
"""

from __future__ import annotations

import os
import socket
from typing import Final
from urllib.parse import urlsplit

from ray._private.services import canonicalize_bootstrap_address

_ANSWERS_WITHIN_S: Final = 10.0
_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The preface of a connection and empty settings, which the other side answers with its own (RFC 9113, 3.4)."""


def check_reachable(address: str | None) -> None:
    """Raises `ConnectionError` if nothing answers where Ray would look for the cluster at `address`."""
    if "://" in (address or "") + os.environ.get("RAY_ADDRESS", ""):
        return  # of a Ray Client, which answers for itself
    try:
        where = canonicalize_bootstrap_address(address)
    except ValueError as error:
        raise ConnectionError(str(error)) from None
    if where is None:
        return
    try:
        there = urlsplit(f"//{where}")
        host, port = there.hostname, there.port
    except ValueError as error:
        raise ConnectionError(f"{where!r} is no address: {error}") from None
    try:
        with socket.create_connection((host, port), timeout=_ANSWERS_WITHIN_S) as connection:
            if not _is_encrypted():
                _greet(connection)
    except (UnicodeError, OverflowError) as error:
        raise ConnectionError(f"{where!r} is no address: {error}") from None
    except OSError as error:
        raise ConnectionError(f"nothing answers at {where} ({error.strerror or error})") from None


def _greet(connection: socket.socket) -> None:
    connection.sendall(_HELLO)
    if not connection.recv(1):
        raise ConnectionError("it hangs up")


def _is_encrypted() -> bool:
    """As Ray asks: what listens then answers a TLS handshake only, which is left to Ray."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
