"""The parts of rows that a ledger is not to hold in memory: on disk, found by rollout id.

Invariant: an exchange is in the file before the rollout's line is in the ledger. Of several under one id the last
counts. A line that was cut in writing belongs to a rollout that has no line in the ledger either: it is cut off.

The file is opened with the first use: by then the job's directory is locked (`ledger`).
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from gym_capture.errors import ConfigError, RecordError
from gym_capture.rollouts.rows import Exchange

EXCHANGES_FILE: Final = "exchanges.jsonl"


class Exchanges:
    """An open file of them, which one thread writes and another may read. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EXCHANGES_FILE
        self._file: IO[bytes] | None = None
        self._opening = threading.Lock()
        self._begins: dict[str, int] = {}
        """By rollout id."""

    def add(self, rollout_id: str, exchange: Exchange) -> None:
        """Raises `ConfigError` if it cannot be written: then it is not there."""
        line = json.dumps({"rollout_id": rollout_id, **asdict(exchange)}, separators=(",", ":"), default=str).encode()
        file = self._opened()
        end = file.seek(0, os.SEEK_END)
        try:
            unwritten = memoryview(line + b"\n")
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(end)
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from None
        self._begins[rollout_id] = end

    def get(self, rollout_id: str) -> Exchange:
        """An empty one if there is none, as of a job that began before they were kept."""
        self._opened()
        if rollout_id not in self._begins:
            return Exchange(input=[], tools=[])
        with self._path.open("rb") as lines:  # of its own: the job goes on writing meanwhile
            lines.seek(self._begins[rollout_id])
            found: dict[str, Any] = json.loads(lines.readline())
        del found["rollout_id"]
        return Exchange(**found)

    def _opened(self) -> IO[bytes]:
        with self._opening:
            if self._file is None:
                try:
                    self._file = self._path.open("a+b", buffering=0)
                    self._begins = self._scanned(self._file)
                except OSError as error:
                    raise ConfigError(f"{self._path} cannot be opened: {error.strerror}") from None
            return self._file

    def _scanned(self, file: IO[bytes]) -> dict[str, int]:
        begins: dict[str, int] = {}
        begin = 0
        with self._path.open("rb") as lines:  # buffered
            for line in lines:
                if not line.endswith(b"\n"):
                    file.truncate(begin)
                    break
                try:
                    begins[json.loads(line)["rollout_id"]] = begin
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise RecordError(
                        f"{self._path}, byte {begin}: cannot be read: {error}", field=EXCHANGES_FILE
                    ) from None
                begin += len(line)
        return begins

    def __enter__(self) -> Exchanges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
