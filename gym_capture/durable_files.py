"""Small files that a crash of the machine leaves whole.

Invariant: when `replace_file` returns, the file has the new content, whatever happens to the machine from then on;
until then it has all of the old one, or is absent if there was none.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Raises `OSError`. For one writer at a time: until it is whole, the new file is called `<name>.new`."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes the directory's list of files durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
