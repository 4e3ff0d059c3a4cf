"""Ctrl-C and SIGTERM for a command that ends in good order: the first says stop, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[list[signal.Signals]]:
    """Meanwhile the first of these signals calls `stop`, and stands in the list. For the main thread."""
    received: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        restore()
        stop()

    for number in before:
        signal.signal(number, first)
    try:
        yield received
    finally:
        restore()
