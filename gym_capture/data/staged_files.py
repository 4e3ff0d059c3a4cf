"""Files of one result that appear together, or not at all.

Invariant: a name that this gives to a file, it gives when all files of the result are whole and on their way out; what
was there under these names stays until then. Whatever ends the writing before - a full disk, Ctrl-C, an error of the
reader - leaves the directory as it was, or absent if it was made for this. Who writes to the same directory at the same
time has files of its own: the last to finish with `overwrite` is what stays, without it the first.

Flow: `staged_files(out, ...)` makes a hidden directory in `out`, and holds a lock on it -> write to `path(name)` ->
leaving the context removes the files that are replaced and gives the new ones their names, in the order in which they
were asked for. A hidden directory that nobody holds is what a process left that was killed: the next one removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from gym_capture.errors import ConfigError

_UNFINISHED: Final = ".unfinished-"


class StagedFiles:
    """The files so far, where nobody reads."""

    def __init__(self, hidden: Path) -> None:
        self._hidden = hidden
        self._names: dict[str, None] = {}

    def path(self, name: str) -> Path:
        """Where to write the file that is to be called `name`."""
        self._names[name] = None
        return self._hidden / name

    def publish(self, out: Path, replaced: Sequence[Path]) -> None:
        for path in replaced:
            if path.name not in self._names:
                path.unlink()
        for name in self._names:
            self.path(name).replace(out / name)


@contextmanager
def staged_files(out: Path, patterns: Sequence[str], *, what: str, overwrite: bool) -> Iterator[StagedFiles]:
    """Files in `out`, which is made if it is not there, in place of those that `patterns` name.

    Raises `ConfigError` if there are such files and `overwrite` is false, or if `out` cannot be written to. `what`
    names the result in messages.
    """

    def present() -> list[Path]:
        found = [path for pattern in patterns for path in sorted(out.glob(pattern))]
        if found and not overwrite:
            raise ConfigError(
                f"{out} already holds {what} ({found[0].name}): choose another --out, or pass --overwrite"
            )
        return found

    try:
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        hidden = out / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            with ExitStack() as stack:
                with _directory(out) as out_fd:
                    _lock(out_fd)
                    present()
                    _remove_what_was_left(out)
                    hidden.mkdir()
                    stack.callback(shutil.rmtree, hidden, ignore_errors=True)
                    _lock(stack.enter_context(_directory(hidden)))
                staged = StagedFiles(hidden)
                yield staged
                with _directory(out) as out_fd:
                    _lock(out_fd)
                    staged.publish(out, present())
        except BaseException:
            if made:
                with suppress(OSError):
                    out.rmdir()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {what} to {out}: {_one_line(error)}") from None


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    """A descriptor, to lock it by: whatever ends the process lets go of it, too."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Where a file system has no locks, one goes without."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)


def _remove_what_was_left(out: Path) -> None:
    for path in out.glob(f"{_UNFINISHED}*"):
        with suppress(OSError), _directory(path) as fd:  # held, or nobody can tell
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


def _one_line(error: OSError) -> str:
    """What the system says. Arrow says it in many words."""
    return os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
