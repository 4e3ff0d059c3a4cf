"""Giving back the disk space of retired rollouts.

Invariant: a segment is deleted only after every record in it that is needed is durable elsewhere, so a crash at any
moment costs nothing but a copy too many.

Flow: `trigger` after rollouts were retired -> for each closed segment that is mostly dead: read it, write what is
needed again through the group commit (which asks once more whether it is needed, in order with everything else),
delete it.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Final

from gym_capture.capture.rollout_state import Decision
from gym_capture.errors import StoreUnavailableError
from gym_capture.stores.frames import SEGMENT_HEADER_BYTES, Frame, RecordType
from gym_capture.stores.group_commit import GroupCommit, Write
from gym_capture.stores.log_index import LogIndex
from gym_capture.stores.log_records import event_of
from gym_capture.stores.replay import Segment, read_segment
from gym_capture.stores.segments import Copy, Location, ReadThread, SegmentReader, delete_segment

_LIVE_FRACTION: Final = 0.5
"""A closed segment is rewritten when at most this part of it is alive: at worst, a byte is copied per byte freed."""
_SWEPT_AT_LEAST: Final = 1_000
_COPIED_PER_TOMBSTONE: Final = 100_000
"""So many tombstones must have served their time, one for so many bytes of live records, before segments that are alive
are rewritten because they are in the way: a tombstone may go only once nothing older than itself is left.
"""
_CHUNK_BYTES: Final = 1 << 20
"""Copies are written in steps of this size, so that no call waits for a whole segment to be copied."""


class Compactor:
    """Rewrites segments, one at a time, on the store's event loop."""

    def __init__(
        self,
        *,
        directory: Path,
        index: LogIndex,
        commits: GroupCommit,
        reads: ReadThread,
        tombstone_ttl_s: float,
        copy: Copy | None,
    ) -> None:
        self._directory = directory
        self._index = index
        self._commits = commits
        self._reads = reads
        self._tombstone_ttl_s = tombstone_ttl_s
        self._copy_of_log = copy
        self._running: asyncio.Task[None] | None = None

    def trigger(self) -> None:
        """Starts a pass in the background if there is something to do and none runs."""
        if (self._running is None or self._running.done()) and self._next() is not None:
            self._running = asyncio.get_running_loop().create_task(self.run())

    async def finished(self) -> None:
        """Waits for the pass that runs, if one does."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Stops a pass between two steps."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def run(self) -> None:
        """Rewrites segments until none is worth it; gives up, until the next trigger, if the disk does not let it."""
        while (number := self._next()) is not None:
            try:
                await self._rewrite(number)
            except StoreUnavailableError:
                return

    def _next(self) -> int | None:
        """The oldest segment that is worth rewriting: because it is mostly dead, or in the way of sweeping tombstones.

        The newest stays: it is written to, and its header says which epochs were given out before it. Damaged ones
        stay for whoever looks into the damage.
        """
        sizes = self._index.sizes
        closed = sorted(sizes)[:-1]
        live_bytes = sum(map(self._index.live_bytes, closed))
        enough = max(_SWEPT_AT_LEAST, live_bytes // _COPIED_PER_TOMBSTONE)
        if self._index.overdue(enough, before=time.time() - self._tombstone_ttl_s):
            oldest = closed[0] if closed else None
            if oldest not in self._index.damaged:
                return oldest
        for number in closed:
            used = sizes[number] - SEGMENT_HEADER_BYTES
            if number not in self._index.damaged and self._index.live_bytes(number) <= _LIVE_FRACTION * used:
                return number
        return None

    async def _rewrite(self, number: int) -> None:
        if self._index.live_bytes(number):
            segment = await self._reads.run(lambda _: read_segment(self._directory, number, is_last=False))
            if segment.damage:
                self._index.damaged.add(number)
                return
            await self._copy(segment)

        def delete(reader: SegmentReader) -> None:
            reader.forget(number)
            delete_segment(self._directory, number)
            if self._copy_of_log is not None:
                self._copy_of_log.cut(number, 0)

        await self._reads.run(delete)
        self._index.forget_segment(number)

    async def _copy(self, segment: Segment) -> None:
        is_oldest = segment.number == min(self._index.sizes)
        swept_before = time.time() - self._tombstone_ttl_s
        chunk: list[Write] = []
        chunk_bytes = 0
        for frame in segment.frames:
            location = Location(segment.number, frame.offset, frame.size)
            if is_oldest and frame.type is RecordType.RETIRED:
                self._index.sweep(frame, location, before=swept_before)
            if not self._index.needs(frame, location):
                continue
            decide = partial(self._decide, frame, location)
            chunk.append(Write(frame.rollout_id, f"\0copy {location}", decide, frame.payload))
            chunk_bytes += frame.size
            if chunk_bytes >= _CHUNK_BYTES:
                await self._commits.write(chunk)
                chunk, chunk_bytes = [], 0
        await self._commits.write(chunk)

    def _decide(self, frame: Frame, location: Location) -> Decision:
        """Asked when the batch is formed: a rollout that was retired since must not be copied behind its tombstone."""
        return Decision(event_of(frame) if self._index.needs(frame, location) else None)
