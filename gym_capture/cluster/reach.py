"""Whether a Ray cluster is there at all, asked before Ray is.

Invariant: where nobody listens, that is known at once. Ray itself tries for two minutes, in C++, where neither Ctrl-C
nor SIGTERM ends the process.
"""

from __future__ import annotations

import os
import socket
from typing import Final
from urllib.parse import urlsplit

from ray._private.services import canonicalize_bootstrap_address

_ANSWERS_WITHIN_S: Final = 10.0


def check_reachable(address: str | None) -> None:
    """Raises `ConnectionError` if nothing listens where Ray would look for the cluster at `address`."""
    if "://" in (address or "") + os.environ.get("RAY_ADDRESS", ""):
        return  # of a Ray Client, which answers for itself
    where = canonicalize_bootstrap_address(address)
    if where is None:
        return
    there = urlsplit(f"//{where}")
    try:
        socket.create_connection((there.hostname, there.port), timeout=_ANSWERS_WITHIN_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {where} ({error.strerror or error})") from None
