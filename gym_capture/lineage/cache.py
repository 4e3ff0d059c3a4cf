"""The lineage index of one shard in bounded memory: what has not been asked for lately is read from the store again.

Invariant: an answer is the one that an index of everything would give. A rollout is in memory whole, or it is *absent*:
then its store has everything that was acknowledged of it, and it is read back before it is asked. So whatever is
evicted, and whenever, no answer changes.

Flow: `expect` what the store held when it was opened -> `resolve`, reading the rollout back if it is absent -> a record
is `add`ed once it is durable -> the rollouts that were used least recently go, until the rest fits.

A record that becomes durable while its rollout is absent needs no index: the next reading finds it. One that becomes
durable while its rollout is being read may have come too late for that reading, so it waits and is added after it.

Beside the index stand the calls that are *open*: begun, without a record; and of an attempt that goes on from others,
which. They are few, and stay in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from gym_capture.capture.protocols import Resolution
from gym_capture.capture.records import CallIntent, RecordProblem
from gym_capture.capture.suffixes import StoredRecord, StoredRollout
from gym_capture.lineage.index import LineageIndex
from gym_capture.reasons import CaptureMark, split_reason


class LineageCache:
    """Lives on one event loop. `read` freezes a rollout in the store; `max_bytes` bounds what is kept in memory."""

    def __init__(self, read: Callable[[str], Awaitable[StoredRollout]], *, max_bytes: int) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._index = LineageIndex()
        self._recent: OrderedDict[str, None] = OrderedDict()
        """The rollouts in memory, the least recently used first."""
        self._absent: set[str] = set()
        """The rollouts that only the store has."""
        self._reading: dict[str, asyncio.Task[bool]] = {}
        self._open: dict[str, dict[str, str | None]] = {}
        """By rollout: the calls without a record yet, and what they were asked; None: not known any more."""
        self._went_on: dict[str, frozenset[str]] = {}
        """By rollout: the earlier attempts that it goes on from, as far as its store was read."""
        self._awaited = Counter[str]()
        """Who waits for an answer about a rollout."""
        self.reads = 0
        """How often a rollout was read back."""
        self.evictions = 0

    @property
    def nbytes(self) -> int:
        return self._index.total_bytes

    @property
    def in_memory(self) -> int:
        """Number of rollouts."""
        return len(self._recent)

    def expect(self, rollout_ids: Iterable[str]) -> None:
        """The store has these already."""
        self._absent.update(rollout_ids)

    async def resolve(
        self, rollout_id: str, turn_keys: Sequence[str], asked_keys: Sequence[str] = ()
    ) -> tuple[Resolution, bool]:
        """The answers of `LineageIndex.resolve` and `may_be_retry`. Raises what reading the store raises."""
        # What somebody waits for stays until he had it: two rollouts that do not fit together would evict each other.
        self._awaited[rollout_id] += 1
        try:
            while rollout_id in self._absent:
                await self._read_back(rollout_id)
        finally:
            self._awaited[rollout_id] -= 1
            if not self._awaited[rollout_id]:
                del self._awaited[rollout_id]
        if rollout_id in self._recent:
            self._recent.move_to_end(rollout_id)
        resolution = self._index.resolve(rollout_id, turn_keys, asked_keys)
        return resolution, self._index.may_be_retry(rollout_id, resolution)

    async def begin(
        self, intent: CallIntent, turn_keys: Sequence[str], asked_keys: Sequence[str] = ()
    ) -> tuple[Resolution, bool]:
        """`resolve` for a call that begins, and whether it may be a retry, also of one that has no record (yet)."""
        resolution, may_be_retry = await self.resolve(intent.rollout_id, turn_keys, asked_keys)
        others = self._open.setdefault(intent.rollout_id, {})
        others.pop(intent.model_call_id, None)
        may_be_retry |= any(asked in (None, intent.request_digest) for asked in others.values())
        others[intent.model_call_id] = intent.request_digest
        return resolution, may_be_retry

    def end(self, rollout_id: str, call_id: str) -> None:
        """A call that began has a record, or was refused."""
        calls = self._open.get(rollout_id)
        if calls is not None:
            calls.pop(call_id, None)
            if not calls:
                del self._open[rollout_id]

    def go_on(self, rollout_id: str, *sources: str) -> None:
        """The rollout goes on from earlier attempts."""
        self._went_on[rollout_id] = self._went_on.get(rollout_id, frozenset()).union(sources)

    def went_on(self, rollout_id: str) -> tuple[str, ...]:
        """The earlier attempts that a rollout goes on from, which was asked about."""
        return tuple(sorted(self._went_on.get(rollout_id, ())))

    async def add(self, entry: StoredRecord) -> tuple[RecordProblem, ...]:
        """Indexes a record that is durable by now (`LineageIndex.add`)."""
        self.end(entry.rollout_id, entry.model_call_id)
        if not await self._is_here(entry.rollout_id):
            return ()
        self.end(entry.rollout_id, entry.model_call_id)  # it may have been read back as open meanwhile
        problems = self._index.add(entry)
        self._use(entry.rollout_id)
        return problems

    async def mark_delivery(self, rollout_id: str, call_id: str, *, delivered: bool) -> None:
        """Adds what is durably known of a reply by now (`LineageIndex.mark_delivery`)."""
        if await self._is_here(rollout_id):
            self._index.mark_delivery(rollout_id, call_id, delivered=delivered)

    def forget(self, rollout_id: str) -> None:
        """The rollout was retired in the store; what is being read of it is of the attempt before."""
        self._index.forget(rollout_id)
        self._open.pop(rollout_id, None)
        self._went_on.pop(rollout_id, None)
        self._recent.pop(rollout_id, None)
        self._absent.discard(rollout_id)
        self._reading.pop(rollout_id, None)

    async def _is_here(self, rollout_id: str) -> bool:
        """Whether something that is durable by now belongs into the index, not only into the store."""
        if rollout_id not in self._absent:
            return True
        reading = self._reading.get(rollout_id)
        if reading is None:
            return False
        await asyncio.wait([reading])
        installed = reading.exception() is None and reading.result()
        return installed and rollout_id in self._recent

    async def _read_back(self, rollout_id: str) -> None:
        """One reading serves everyone who waits; one of them leaving does not stop it for the others."""
        reading = self._reading.get(rollout_id)
        if reading is None:
            reading = self._reading[rollout_id] = asyncio.ensure_future(self._install(rollout_id))
        await asyncio.shield(reading)

    async def _install(self, rollout_id: str) -> bool:
        """Reads a rollout into the index. False: it was retired meanwhile."""
        this = asyncio.current_task()
        try:
            stored = await self._read(rollout_id)
        except BaseException:
            if self._reading.get(rollout_id) is this:
                del self._reading[rollout_id]
            raise
        if self._reading.get(rollout_id) is not this:
            return False
        del self._reading[rollout_id]
        self.reads += 1
        self._absent.discard(rollout_id)
        self._index.rebuild(stored.records)
        if stored.went_on:
            self.go_on(rollout_id, *stored.went_on)
        for reason in stored.incomplete:
            name, call_id = split_reason(reason)
            if name == CaptureMark.DANGLING_INTENT:
                self._open.setdefault(rollout_id, {}).setdefault(call_id, None)
        self._use(rollout_id)
        return True

    def _use(self, rollout_id: str) -> None:
        self._recent[rollout_id] = None
        self._recent.move_to_end(rollout_id)
        while self._index.total_bytes > self._max_bytes:
            unused = (name for name in self._recent if name != rollout_id and name not in self._awaited)
            evicted = next(unused, None)
            if evicted is None:
                return
            del self._recent[evicted]
            self._index.forget(evicted)
            self._absent.add(evicted)
            self.evictions += 1
