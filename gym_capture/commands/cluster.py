"""Joining the Ray cluster that a graph runs on."""

from __future__ import annotations

import logging
import os
import signal
import threading

from gym_capture.cluster.quiet import quiet_start
from gym_capture.errors import ConfigError


def join_cluster(address: str | None, *, namespace: str | None) -> None:
    """Makes this process a driver of the cluster at `address`. Raises `ConfigError` if it cannot be reached.

    `auto` means what it means to Ray: the cluster that `RAY_ADDRESS` names, else the one on this machine. None: the
    same, and if there is none, a cluster of this process alone; where it is a driver already, it stays what it is.
    """
    import ray

    from gym_capture.cluster.reach import check_reachable

    # It warns of a token that it found by itself, and that works.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None or "RAY_ADDRESS" in os.environ:
            check_reachable(address)
        with quiet_start():
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level="warning",
                ignore_reinit_error=address is None,
            )
    except ConnectionError as error:
        named = os.environ.get("RAY_ADDRESS", address) if address in (None, "auto") else address
        raise ConfigError(
            f"no Ray cluster at {named!r}: {error}. Is it the cluster that serves? One that was started with a token "
            "(Ray keeps it in ~/.ray/auth_token) takes drivers with RAY_AUTH_MODE=token only"
        ) from None
    except SystemExit as stop:
        # Of Ray's handler, which has the signal's number for an exit code.
        if stop.code != signal.SIGTERM:
            raise
        signal.signal(signal.SIGTERM, terminated)
        signal.raise_signal(signal.SIGTERM)
        raise
    # Ray exits at once; the command line unwinds (`cli`). Only the main thread has handlers, Ray's included.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)
