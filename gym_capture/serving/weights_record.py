"""Which version a graph serves, on disk.

Invariant: a version is current from the moment at which it stands here, and a crash leaves either the one before or the
new one. With copies, a version that `write` has returned for stands on another node, too, as long as there is one; when
the node of the record is lost, the record that is opened elsewhere is that copy. As with the logs
(`gym_capture.stores.mirror`), losing the copy stops nothing, and each opening is the next *generation*: the higher one
is the newer record, and what is left of an earlier owner cannot write to the copy any more.

Flow: `open` -> `write` for each version; `keep_copied` now and then, since a graph may serve one version for long, and
may be deployed again to have copies.
Blocks for as long as disks and copies take.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from gym_capture.durable_files import replace_file
from gym_capture.errors import StoreError, StoreUnavailableError
from gym_capture.serving.weights_messages import Version
from gym_capture.stores.mirror import MirrorLostError, MirrorTakenError

logger = logging.getLogger(__name__)

FILE: Final = "weights.json"
_GENERATION: Final = "generation"


class Copy(Protocol):
    """A second copy. Every method raises `MirrorLostError` if it cannot be reached."""

    def generation(self) -> int:
        """0: nothing was written to it yet."""
        ...

    def read(self) -> bytes: ...

    def write(self, generation: int, data: bytes) -> None:
        """Durable when it returns. Raises `MirrorTakenError` if a higher generation has written."""
        ...


class Copies(Protocol):
    """Where the copies are. Both raise `MirrorLostError`."""

    def newest(self) -> Copy | None: ...

    def find(self) -> Copy | None:
        """The one to write to, started if need be. None if there is no node for one."""
        ...


class RecordFile:
    """The file itself, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE

    def read(self) -> bytes | None:
        """None if there is none. Raises `StoreError`."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.path}, which says which weights are served, cannot be read: {error}") from error

    def write(self, data: bytes) -> None:
        """Durable when it returns. Raises `OSError`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, data)


class WeightsRecord:
    """A small file in the folder of the state actors."""

    def __init__(self, directory: Path, *, copies: Copies | None = None) -> None:
        """`copies`: None for a record that has none."""
        self._file = RecordFile(directory)
        self._copies = copies
        self._copy: Copy | None = None
        self._generation = 0
        self._lock = threading.Lock()

    def open(self) -> Version | None:
        """What is served, or None if that was never written down.

        Raises `StoreError` for a record that is not understood, `StoreUnavailableError` if it may stand in a copy that
        does not answer, or on a disk that is full.
        """
        with self._lock:
            try:
                self._take_newer()
            except MirrorLostError as error:
                raise StoreUnavailableError(f"the copy of {self._file.path} cannot be read: {error.message}") from error
            except OSError as error:
                raise StoreUnavailableError(f"{self._file.path} cannot be written: {error}") from error
        version = self.read()
        if version is not None and self._copies is not None:
            try:
                self.write(version)
            except OSError as error:
                raise StoreUnavailableError(f"{self._file.path} cannot be written: {error}") from error
        return version

    def read(self) -> Version | None:
        """What stands here. Raises `StoreError`."""
        data = self._file.read()
        if data is None:
            return None
        try:
            return Version(**{name: value for name, value in _content(data).items() if name != _GENERATION})
        except (ValueError, TypeError) as error:
            raise StoreError(
                f"{self._file.path} does not say which weights are served: {error}; if they are those of the model "
                "folder, remove it"
            ) from error

    def write(self, version: Version) -> None:
        """Durable when it returns, in the copy too if there is one. Raises `OSError`."""
        with self._lock:
            data = _of_generation(self._generation, asdict(version))
            self._file.write(data)
            self._send(data)

    def keep_copied(self, copies: Copies | None = None) -> None:
        """Makes another copy if the one that was there is lost. `copies`: a record that had none has them from now on.
        Raises `OSError`, as `write`; `StoreUnavailableError` if it is not known what is in the copies that are there.
        """
        with self._lock:
            if copies is not None and self._copies is None:
                self._begin_copying(copies)
            data = self._file.read()
            if self._copies is None or data is None:
                return
            try:
                is_there = self._copy is not None and self._copy.generation() == self._generation
            except MirrorLostError:
                is_there = False
            if not is_there:
                self._copy = None
                self._send(data)

    def _begin_copying(self, copies: Copies) -> None:
        """What stands here is newer than any copy that is found."""
        try:
            left = copies.find()
            there = 0 if left is None else left.generation()
        except MirrorLostError as error:
            raise StoreUnavailableError(f"no copy of {self._file.path} can be begun: {error.message}") from error
        if there >= self._generation:
            self._generation = there + 1
            if (data := self._file.read()) is not None:
                self._file.write(_of_generation(self._generation, _content(data)))
        self._copies = copies

    def _take_newer(self) -> None:
        """Begins the next generation, with the newest of what stands here and of all copies."""
        data = self._file.read()
        here = 0 if data is None else generation_of(data)
        if self._copies is not None:
            # The second may be one that was not running, in a cluster that is started anew.
            for find in (self._copies.newest, self._copies.find):
                copy = find()
                if copy is not None and (there := copy.generation()) > here:
                    self._file.write(copy.read())
                    here = there
                    logger.warning("%s was restored from its copy on another node", self._file.path)
        self._generation = here + 1

    def _send(self, data: bytes) -> None:
        if self._copies is None:
            return
        for _ in range(2):  # one that was lost, and another one
            try:
                self._copy = self._copy or self._copies.find()
                if self._copy is None:
                    break
                self._copy.write(self._generation, data)
                return
            except MirrorTakenError as error:
                raise OSError(errno.ESTALE, "this record was opened anew on another node, with its copy") from error
            except MirrorLostError as error:
                logger.warning("a copy of %s was lost: %s", self._file.path, error)
                self._copy = None
        logger.error("%s has no copy: it is on one node only", self._file.path)


def generation_of(data: bytes) -> int:
    """Of a record; 0 for one that has none, or is not understood."""
    try:
        return int(_content(data).get(_GENERATION, 0))
    except (ValueError, TypeError):
        return 0


def _of_generation(generation: int, content: Mapping[str, Any]) -> bytes:
    return json.dumps({**content, _GENERATION: generation}, indent=1).encode()


def _content(data: bytes) -> dict[str, Any]:
    content = json.loads(data)
    if not isinstance(content, dict):
        raise TypeError("it is no object")
    return content
