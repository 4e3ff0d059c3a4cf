"""Joining the Ray cluster that a graph runs on."""

from __future__ import annotations

import os
import signal
import threading

from gym_capture.errors import ConfigError


def join_cluster(address: str, *, namespace: str) -> None:
    """Makes this process a driver of the cluster at `address`. Raises `ConfigError` if it cannot be reached.

    `auto` means what it means to Ray: the cluster that `RAY_ADDRESS` names, else the one on this machine.
    """
    import ray

    terminated = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        named = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        raise ConfigError(
            f"no Ray cluster at {named!r}: {error}. Is it the cluster that serves? One that was started with a token "
            "(Ray keeps it in ~/.ray/auth_token) takes drivers with RAY_AUTH_MODE=token only"
        ) from None
    # Ray exits at once; the command line unwinds (`cli`). Only the main thread has handlers, Ray's included.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)
