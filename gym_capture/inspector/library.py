"""A source that is open: its table, and the rollouts that were read lately.

Invariant: whoever asks waits for at most one look and one rollout, never for all of them. Memory holds the table, and
of what was read a bounded part. Nothing is looked at while nobody asks.

Flow: a question wakes the worker -> it looks until there is nothing new, then reads rollouts of which the table lacks
something -> and waits for the next question. What one rollout is at fault with stands in its row.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from gym_capture.errors import GymCaptureError
from gym_capture.inspector.seen import SeenRollout
from gym_capture.inspector.source import Source
from gym_capture.inspector.table import Row, Table
from gym_capture.reasons import ProblemReason

_KEPT_BYTES: Final = 256 * 2**20
_FIRST_LOOK_S: Final = 5.0
"""The first question waits so long for the first look."""
_LOOK_EVERY_S: Final = 0.5
_AT_A_TIME: Final = 32
_DIGITS: Final = 20
"""A cursor has fewer."""


class Library:
    """For any number of threads."""

    def __init__(self, source: Source, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self._clock = clock
        self._table = Table()
        self._lock = threading.Lock()
        """Over the table and what is kept."""
        self._at_work = threading.Lock()
        """Over looks and reads: what one thread has taken from the source is in the table before another looks."""
        self._kept: OrderedDict[str, tuple[int, SeenRollout, int]] = OrderedDict()
        """By rollout, the version of its row, and about how many bytes it takes."""
        self._kept_bytes = 0
        self._name = uuid.uuid4().hex[:8]
        """Cursors of another process, or of an earlier one, are worth nothing here."""
        self._asked = threading.Event()
        self._looked = threading.Event()
        self._is_whole = False
        self._problem: str | None = None
        self._worker: threading.Thread | None = None
        self._is_closed = False

    # asking

    def rollouts(self, since: str | None) -> dict[str, Any]:
        """The table, or what is new in it behind a cursor."""
        self.wake()
        self._looked.wait(_FIRST_LOOK_S)
        return self.table(since)

    def table(self, since: str | None = None) -> dict[str, Any]:
        """As `rollouts`, as far as it is known now."""
        with self._lock:
            number = self._number_of(since)
            columns, gone = self._table.columns(number)
            unread = self._table.unread if self.source.is_read_whole else 0
            return {
                "cursor": f"{self._name}.{self._table.number}",
                "is_all": number == 0,
                "columns": columns,
                "gone": gone if number else [],
                "complete": self._is_whole,
                "unread": unread,
                "total": len(self._table.rows),
                "problem": self._problem,
            }

    def cursor_of(self, rollout_id: str) -> str:
        """Changes when more is recorded of a rollout."""
        with self._lock:
            row = self._table.rows.get(rollout_id)
            return f"{self._name}.{0 if row is None else row.version}"

    def row(self, rollout_id: str) -> Row | None:
        with self._lock:
            return self._table.rows.get(rollout_id)

    def rows(self) -> list[Row]:
        with self._lock:
            return list(self._table.rows.values())

    def group(self, group: str) -> list[Row]:
        with self._lock:
            return list(self._table.group(group))

    def rollout(self, rollout_id: str) -> SeenRollout | None:
        """A rollout as it is shown; None: there is no such. Raises `GymCaptureError` if it cannot be read."""
        self.wake()
        with self._lock:
            row = self._table.rows.get(rollout_id)
            kept = self._kept.get(rollout_id)
            if kept is not None and row is not None and kept[0] == row.version:
                self._kept.move_to_end(rollout_id)
                return kept[1]
            version = None if row is None else row.version
        seen = self.source.read(rollout_id)
        if seen is not None:
            with self._lock:
                self._fill(seen, version)
        return seen

    def measured(self, rollout_id: str, difference: float | None) -> None:
        """See `Table.measured`."""
        with self._lock:
            self._table.measured(rollout_id, difference)

    def wake(self) -> None:
        """Somebody asks: what is new is looked for."""
        self._asked.set()
        with self._lock:  # of several that ask at once, one starts it
            if self._worker is not None or self._is_closed:
                return
            self._worker = threading.Thread(target=self._work, name="inspector", daemon=True)
            self._worker.start()

    def close(self) -> None:
        self._is_closed = True
        self._asked.set()
        if (worker := self._worker) is not None:
            worker.join()
        self.source.close()

    def settle(self) -> None:
        """Looks, and reads all that is due, in this thread: for tests and measurements."""
        while self.look():
            pass
        while self.read_some():
            pass

    # the worker

    def _work(self) -> None:
        try:
            self._work_on()
        finally:
            self._worker = None  # a defect ends this one, and is printed; the next question begins another
            self._looked.set()

    def _work_on(self) -> None:
        while not self._is_closed:
            self._asked.wait()
            self._asked.clear()
            begun = self._clock()
            while not self._is_closed and self.look():
                self._looked.set()
            self._is_whole = True
            self._looked.set()
            while not self._is_closed and self._clock() - begun < _LOOK_EVERY_S and self.read_some():
                pass
            if not self._is_closed and self._has_due():
                self._asked.set()
            elif not self._is_closed:
                time.sleep(max(_LOOK_EVERY_S - (self._clock() - begun), 0.0))

    def look(self) -> bool:
        """Takes one look. Returns whether another one is worth it at once."""
        with self._at_work:
            return self._look()

    def _look(self) -> bool:
        try:
            look = self.source.look()
        except GymCaptureError as error:
            self._problem = str(error)
            return False
        self._problem = look.problem
        with self._lock:
            for rollout_id in look.gone:
                self._table.drop(rollout_id)
                self._forget(rollout_id)
            for basics in look.changed:
                self._table.put(basics, self._clock())
        return look.is_more

    def _has_due(self) -> bool:
        with self._lock:
            return self.source.is_read_whole and bool(self._table.due(1, self._clock()))

    def read_some(self) -> bool:
        """Reads a few rollouts that are due. Returns whether there were any."""
        if not self.source.is_read_whole:
            return False
        with self._at_work:
            return self._read_some()

    def _read_some(self) -> bool:
        with self._lock:
            waiting = self._table.due(_AT_A_TIME, self._clock())
        for rollout_id in waiting:
            if self._is_closed:
                return False
            try:
                seen = self.source.read(rollout_id)
            except GymCaptureError:
                seen = None
            with self._lock:
                if seen is None:
                    self._table.unreadable(rollout_id, ProblemReason.UNREADABLE)
                else:
                    self._table.fill(seen)
        return bool(waiting)

    # what is kept

    def _fill(self, seen: SeenRollout, version: int | None) -> None:
        """`version`: of its row, before it was read. If more was found meanwhile, this is not all of it."""
        row = self._table.rows.get(seen.rollout_id)
        if row is None or row.version != version:
            return
        if not row.is_filled:
            self._table.fill(seen)
        self._forget(seen.rollout_id)
        nbytes = seen.nbytes
        self._kept[seen.rollout_id] = (row.version, seen, nbytes)
        self._kept_bytes += nbytes
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, rollout_id: str) -> None:
        kept = self._kept.pop(rollout_id, None)
        if kept is not None:
            self._kept_bytes -= kept[2]

    def _number_of(self, since: str | None) -> int:
        name, _, number = (since or "").partition(".")
        is_own = name == self._name and number.isdecimal() and len(number) < _DIGITS
        return int(number) if is_own and int(number) >= self._table.forgotten else 0
