"""Files that a crash of the machine leaves whole.

Invariant: when `replace_file` returns, the file has the new content, whatever happens to the machine from then on;
until then it has all of the old one, or is absent if there was none. A folder is written under another name,
`sync_folder`, renamed, `sync_directory` of the one that it is in.
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


def sync_folder(folder: Path) -> None:
    """Makes all that is in the folder durable."""
    for path in folder.rglob("*"):
        _sync(path, os.O_RDONLY)
    sync_directory(folder)


def sync_directory(directory: Path) -> None:
    """Makes the directory's list of files durable."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
