"""Reading and writing below a folder that somebody else writes to.

Invariant: whatever is there - links, FIFOs, folders where files should be - nothing outside of the folder is read or
written, nothing waits, and nothing larger than asked for is read. What is not as it should be is an `OSError`.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

_DEEPEST: Final = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def checked_name(name: str) -> PurePosixPath:
    """The name of a file below a folder. Raises `ValueError` if it could name anything else."""
    path = PurePosixPath(name)
    if "\0" in name or name.endswith("/") or path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"{name!r} does not name a file below a folder")
    return path


def read_below(folder: Path, name: str, *, limit: int) -> bytes:
    """All of a regular file, reached without following a link. Raises `OSError`, also for more than `limit` bytes."""
    with _parent(folder, checked_name(name), make=False) as (parent, last):
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=parent)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", name)
            content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", name)
    return content


def write_below(folder: Path, name: str, content: bytes) -> None:
    """Puts a file there, in place of whatever file or link has its name. Raises `OSError`."""
    with _parent(folder, checked_name(name), make=True) as (parent, last):
        with suppress(FileNotFoundError):
            os.unlink(last, dir_fd=parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(last, flags, 0o644, dir_fd=parent), "wb") as file:
            file.write(content)


def is_larger(folder: Path, *, limit: int) -> bool:
    """Whether what is below takes more than `limit` bytes, each name counted as some of them, or is so deep that nobody
    could walk through it."""
    total = 0
    for path, folders, files, fd in os.fwalk(folder):
        if len(Path(path).relative_to(folder).parts) > _DEEPEST:
            return True
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                total += len(name) + os.lstat(name, dir_fd=fd).st_size
            if total > limit:
                return True
    return False


def remove(folder: Path) -> None:
    """Removes it with all that is below, also where somebody took the right to away, however deep. Raises `OSError`.

    A folder that is in another one is moved up first: so none is ever reached by a long way. One that is gone already,
    by whoever wrote to it, is no error.
    """
    if not folder.exists():
        return
    moved = uuid.uuid4().hex
    with _open_folder(folder) as top:
        full = _emptied(top)
        for number in itertools.count():
            if not full:
                break
            name = full.pop()
            with _open_folder(name, within=top) as fd:
                for below in _emptied(fd):
                    up = f"{moved}-{number}-{len(full)}"
                    os.rename(below, up, src_dir_fd=fd, dst_dir_fd=top)
                    full.append(up)
            os.rmdir(name, dir_fd=top)
    os.rmdir(folder)


def _emptied(fd: int) -> list[str]:
    """Removes all from a folder but the folders in it, which are opened to this user, and named."""
    with os.scandir(fd) as found:
        entries = list(found)
    folders = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.name, stat.S_IRWXU, dir_fd=fd)
            folders.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=fd)
    return folders


@contextmanager
def _open_folder(name: str | Path, *, within: int | None = None) -> Iterator[int]:
    fd = os.open(name, _FOLDER, dir_fd=within)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _parent(folder: Path, path: PurePosixPath, *, make: bool) -> Iterator[tuple[int, str]]:
    """The open folder that `path` is in, and its last part."""
    fd = os.open(folder, _FOLDER)
    try:
        for part in path.parts[:-1]:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd, path.parts[-1]
    finally:
        os.close(fd)
