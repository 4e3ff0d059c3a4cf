"""Which user of this machine asks: the system knows whose each end of a connection is.

Invariant: where the system says it, nobody but the user who serves, and root, is answered over the loopback address -
records are files that others may not read, and a server must not read them out. Where it does not say it (no /proc), or
the other end is on another machine, everybody is.

Flow: the two ends of a connection, as the server sees them -> the line of /proc/net/tcp whose ends are these, turned
round -> the user of it. An end that its program has closed belongs to nobody.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from gym_capture.inspector.app import error_response

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _UID, _INODE = 1, 2, 7, 9
_ROOT: Final = 0
_REFUSED: Final = "this belongs to another user of this machine, who may open it to others with --any-user"


class OnlyThisUser:
    """Refuses what other users of this machine ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_admitted(scope.get("client"), scope.get("server")):
            await error_response(403, _REFUSED)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_admitted(client: tuple[str, int] | None, server: tuple[str, int] | None) -> bool:
    if client is None or server is None or not ip_address(client[0]).is_loopback:
        return True
    theirs, ours = set(_spelt(*client)), set(_spelt(*server))
    is_told = False
    for line in _connections():
        if line[_LOCAL] in theirs and line[_REMOTE] in ours:
            return line[_INODE] != "0" and int(line[_UID]) in (_ROOT, os.getuid())
        is_told = is_told or (line[_LOCAL] in ours and line[_REMOTE] in theirs)
    return not is_told


def _connections() -> Iterator[list[str]]:
    for table in _TABLES:
        try:
            _, *lines = table.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        yield from map(str.split, lines)


def _spelt(host: str, port: int) -> Iterator[str]:
    """An end as the tables have it: words of 32 bits, in the order of the machine. Programs may use IPv6 for IPv4."""
    address = ip_address(host)
    forms: list[IPv4Address | IPv6Address] = [address]
    if isinstance(address, IPv4Address):
        forms.append(IPv6Address(f"::ffff:{address}"))
    elif address.ipv4_mapped is not None:
        forms.append(address.ipv4_mapped)
    for form in forms:
        words = struct.unpack(f"={len(form.packed) // 4}I", form.packed)
        yield "".join(map("{:08X}".format, words)) + f":{port:04X}"
