"""Files of one result that appear together, or not at all, in a directory of this machine or behind a URI.

Invariant: a name that this gives to a file, it gives when all files of the result are whole and on their way out; what
was there under these names stays until then. Whatever ends the writing before - a full disk, Ctrl-C, an error of the
reader - leaves the directory as it was, or absent if it was made for this. Who writes to the same directory at the same
time has files of its own: the last to finish with `overwrite` is what stays, without it the first.

Flow: `staged_files(out, ...)` makes a hidden directory in `out`, and holds a lock on it -> write to `path(name)`, or
have others write by `staging` and `add` what they wrote -> leaving the context removes the files that are replaced and
gives the new ones their names, in the order in which they were asked for. Files that are each a result of their own
`appear` before that.

A hidden directory that nobody holds is what a process left that was killed: the next one removes it. Where there are no
locks, as in object stores, nobody can tell it from one that is written to: it stays, and `left` names it.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import fs

from gym_capture.errors import ConfigError

_UNFINISHED: Final = ".unfinished-"
_UNLOCKED: Final = ".parts-"
"""Begins the names that version 0.1 gave to hidden directories, on which it held no lock."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The hidden directory, as a value: from wherever it is written to."""

    out: str
    """As the user named the place that the files are for."""
    what: str
    """The files' name in messages."""
    uri: str

    @contextmanager
    def create(self, name: str) -> Iterator[pa.NativeFile]:
        """A new file to write to. What cannot be written is a `ConfigError`."""
        with _as_config_error(self.what, self.out):
            filesystem, directory = fs.FileSystem.from_uri(self.uri)
            with filesystem.open_output_stream(f"{directory}/{name}") as stream:
                yield stream


class StagedFiles:
    """The files so far, where nobody reads."""

    def __init__(self, staging: Staging, left: Sequence[str]) -> None:
        self.staging = staging
        self.left = tuple(left)
        """Hidden directories of builds that were killed, or that still run: nobody can tell."""
        self._written: dict[str, str] = {}
        """By the name that a file is to have: what it is called until then."""

    def path(self, name: str) -> Path:
        """Where to write the file that is to be called `name`, on this machine."""
        self.add(name, name)
        _, directory = fs.FileSystem.from_uri(self.staging.uri)
        return Path(directory, name)

    def add(self, written: str, name: str) -> None:
        """A file that was written by `staging` under the name `written` is to be called `name`."""
        self._written[name] = written

    def appear(self, written: str, name: str) -> None:
        """Gives a file that was written by `staging` its name at once, whatever becomes of the others."""
        with _as_config_error(self.staging.what, self.staging.out):
            filesystem, hidden = fs.FileSystem.from_uri(self.staging.uri)
            filesystem.move(f"{hidden}/{written}", f"{hidden.rpartition('/')[0]}/{name}")

    def publish(self, filesystem: fs.FileSystem, out: str, hidden: str, replaced: Sequence[str]) -> None:
        """Gives the files their names. If that cannot be done for all, it is for none."""
        for name in replaced:
            if name not in self._written:
                filesystem.delete_file(f"{out}/{name}")
        named: list[str] = []
        try:
            for name, written in self._written.items():
                named.append(f"{out}/{name}")
                filesystem.move(f"{hidden}/{written}", named[-1])
        except BaseException:
            for path in named:
                with suppress(OSError):
                    filesystem.delete_file(path)
            raise


@contextmanager
def staged_files(out: str | Path, patterns: Sequence[str], *, what: str, overwrite: bool) -> Iterator[StagedFiles]:
    """Files in `out` (a path or URI), which is made if it is not there, in place of those that `patterns` name.

    Raises `ConfigError` if there are such files and `overwrite` is false, or if `out` cannot be written to. `what`
    names the result in messages.
    """
    shown = str(out)
    uri = shown if "://" in shown else Path(shown).absolute().as_uri()
    with _as_config_error(what, shown):
        filesystem, directory = fs.FileSystem.from_uri(uri)
    place = _Place(filesystem, directory, shown, what)
    hidden = f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
        with _as_config_error(what, shown):
            made = place.make()
        try:
            with ExitStack() as stack:
                with _as_config_error(what, shown), place.locked():
                    place.present(patterns, overwrite=overwrite)
                    left = place.remove_what_was_left()
                    filesystem.create_dir(f"{directory}/{hidden}")
                    stack.callback(place.remove, hidden)
                    stack.enter_context(place.locked(hidden))
                staged = StagedFiles(Staging(shown, what, f"{uri.rstrip('/')}/{hidden}"), left)
                yield staged
                with _as_config_error(what, shown), place.locked():
                    replaced = place.present(patterns, overwrite=overwrite)
                    staged.publish(filesystem, directory, f"{directory}/{hidden}", replaced)
        except BaseException:
            if made:
                place.remove_if_empty()
            raise
    except OSError as error:  # of whoever wrote to `path`
        raise _config_error(what, shown, error) from None


class _Place:
    """The directory that the files are for."""

    def __init__(self, filesystem: fs.FileSystem, directory: str, shown: str, what: str) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._shown = shown
        self._what = what
        self._has_locks = isinstance(filesystem, fs.LocalFileSystem)

    def make(self) -> bool:
        """Whether it was not there."""
        absent: bool = self._filesystem.get_file_info(self._directory).type == fs.FileType.NotFound
        self._filesystem.create_dir(self._directory, recursive=True)
        return absent

    def present(self, patterns: Sequence[str], *, overwrite: bool) -> list[str]:
        """The names of files that an earlier result left."""
        names = sorted(each.base_name for each in self._entries() if each.type == fs.FileType.File)
        found = [name for pattern in patterns for name in names if fnmatch(name, pattern)]
        if found and not overwrite:
            raise ConfigError(
                f"{self._shown} already holds {self._what} ({found[0]}): choose another --out, or pass --overwrite"
            )
        return list(dict.fromkeys(found))

    def remove_what_was_left(self) -> list[str]:
        """Removes the hidden directories that nobody writes to; names those of which that is not known."""
        left: list[str] = []
        for entry in self._entries():
            if entry.type != fs.FileType.Directory or not entry.base_name.startswith((_UNFINISHED, _UNLOCKED)):
                continue
            if not self._has_locks or entry.base_name.startswith(_UNLOCKED):
                left.append(entry.base_name)
                continue
            try:
                with _directory(entry.path) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.remove(entry.base_name)
            except BlockingIOError:  # held
                continue
            except OSError:
                left.append(entry.base_name)
        return sorted(left)

    @contextmanager
    def locked(self, name: str = "") -> Iterator[None]:
        """Whatever ends the process lets go of it, too. Where a file system has no locks, one goes without."""
        if not self._has_locks:
            yield
            return
        with _directory(os.path.join(self._directory, name)) as fd:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self._filesystem.delete_dir(f"{self._directory}/{name}")

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            if not self._entries():
                self._filesystem.delete_dir(self._directory)

    def _entries(self) -> list[fs.FileInfo]:
        found: list[fs.FileInfo] = self._filesystem.get_file_info(fs.FileSelector(self._directory))
        return found


@contextmanager
def _directory(path: str) -> Iterator[int]:
    """A descriptor, to lock it by."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _as_config_error(what: str, out: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise _config_error(what, out, error) from None


def _config_error(what: str, out: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot write {what} to {out}: {' '.join(str(error).split())}")
