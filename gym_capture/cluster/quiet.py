"""Starting Ray, or joining it, without the lines that its C++ parts write past Python's stderr.

Invariant: only while the block runs is anything kept back, and nothing that is an exception: what Ray tries again every
second, and which log level it was told, is for its own logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_STDERR: Final = 2


@contextmanager
def quiet_start() -> Iterator[None]:
    """For the length of `ray.init`. What Python says is kept back, too."""
    kept = os.dup(_STDERR)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
