"""Calls under way, and who listens to them.

Invariant: a call runs as long as anybody listens, is aborted within one turn of the event loop when the last listener
leaves before its generation is over, and its record says if nobody got the whole reply. It runs only in a place that
`Admission` gave it.

A call that is aborted still has the engine's last word: what had been generated until then, none of which a client that
did not stream has seen. So its record tells what the engine did for nobody. Before the engine has a call there is
nothing to tell, and no record.

A client library that repeats a request - its connection broke, its patience ended - says so in a header. If the first
request is still under way, the repetition listens to the same call, from the start: nothing is generated twice, and one
record stands for both. A request that does not say that it is a repetition is a call of its own, since agents do ask
for several samples of one prompt; which of several calls a repetition repeats nobody can tell, so it joins none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from gym_capture.calls import ModelReply, ReplyEvent, TokenLogProb
from gym_capture.errors import GymCaptureError
from gym_capture.serving.admission import Admission, Place
from gym_capture.serving.call import CallInFlight

_LAST_WORD_S: Final = 0.1
"""An engine that has aborted a call says so within this time; if not, it is asked again."""
_ABORTS: Final = 10


class Piece(NamedTuple):
    """The part of a stream that one chunk of a generation gives."""

    events: Sequence[ReplyEvent]
    log_probs: tuple[TokenLogProb, ...] | None


class LiveCall:
    """One call. `join` it, listen, `leave` it."""

    def __init__(
        self, call_id: str, begin: Callable[[], Awaitable[CallInFlight]], *, interval_s: float, place: Place
    ) -> None:
        self.call_id = call_id
        self.created = int(time.time())
        self.has_twin = False
        """Another request asked for the same while this call was under way, without being a repetition."""
        self._begin = begin
        self._interval_s = interval_s
        self._pieces: list[Piece] = []
        self._bells: set[asyncio.Event] = set()
        self._listeners = 0
        self._is_delivered = False
        self._is_given_up = False
        self._ended_by: GymCaptureError | None = None
        self._place = place
        self.begun: CallInFlight | None = None
        """The call, once its prompt is rendered and its engine has taken it."""
        self.running = asyncio.ensure_future(self._run())
        """Done once the call is over and what there is of it is on record."""
        self.running.add_done_callback(lambda _: place.release())
        self.running.add_done_callback(self._ring)

    @property
    def is_live(self) -> bool:
        """Whether its reply is still to be had."""
        return not self._is_given_up and not self.running.done()

    def join(self) -> None:
        self._listeners += 1

    async def reply(self) -> ModelReply:
        """The reply, once its record is durable. Raises what ended the call."""
        try:
            return await asyncio.shield(self.running)
        except (asyncio.CancelledError, GymCaptureError):
            if self._ended_by is not None and self.running.done():
                raise self._ended_by from None
            raise

    async def end(self, error: GymCaptureError) -> bool:
        """Ends the call: who listens gets `error`. One whose generation is over is left to finish, and gives False."""
        if not self.is_live or self._is_generated:
            return False
        self._ended_by = error
        self._is_given_up = True
        await self._give_up()
        await asyncio.wait([self.running])
        return True

    async def leave(self, *, delivered: bool) -> None:
        """A listener has got the whole reply, or goes without. Returns when the call is over, if it was the last."""
        self._listeners -= 1
        self._is_delivered |= delivered
        if self._listeners:
            return
        if not self._is_generated:
            self._is_given_up = True
            await self._give_up()
        await asyncio.wait([self.running])
        is_whole = not self.running.cancelled() and self.running.exception() is None
        if is_whole and self.begun is not None and not self._listeners:
            await self.begun.settle(delivered=self._is_delivered)

    @property
    def _is_generated(self) -> bool:
        return self.begun is not None and self.begun.is_generated

    async def _give_up(self) -> None:
        """Ends the call; returns once that is certain."""
        # Asked more than once: an engine knows nothing of a call that is only on its way to it.
        for _ in range(_ABORTS):
            if self.begun is None:
                break
            await self.begun.abort()
            await asyncio.wait([self.running], timeout=_LAST_WORD_S)
            if self.running.done() or self.begun.is_generated:
                return
        self.running.cancel()

    async def wait_begun(self, timeout_s: float) -> None:
        """Returns when the call has begun or has failed to, or after that long."""
        if self.begun is None and not self.running.done():
            await self._wait(timeout_s)

    async def hear(self, position: int, timeout_s: float) -> Sequence[Piece]:
        """The pieces from `position` on. None of them, if nothing comes for that long or the call has ended."""
        if len(self._pieces) == position and not self.running.done():
            await self._wait(timeout_s)
        return self._pieces[position:]

    async def _wait(self, timeout_s: float) -> None:
        """Until something happens to the call, or that long."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await bell.wait()
        finally:
            self._bells.discard(bell)

    async def _run(self) -> ModelReply:
        await self._place.wait()
        call = await self._begin()
        self.begun = call
        self._ring()
        has_ended = False
        try:
            async for events, log_probs in call.events():
                self._pieces.append(Piece(events, log_probs))
                self._ring()
                if not call.is_generated:
                    # The engine's collector merges what it produces meanwhile: fewer, larger messages.
                    await asyncio.sleep(self._interval_s)
            reply = await call.complete()
            has_ended = True
            return reply
        finally:
            if not has_ended:
                await asyncio.shield(call.fail())

    def _ring(self, _: object = None) -> None:
        for bell in self._bells:
            bell.set()


class LiveCalls:
    """The calls that are under way in this replica; those of rollouts by what a repetition of them would look like."""

    def __init__(self, *, interval_s: float, admission: Admission) -> None:
        self._interval_s = interval_s
        self._admission = admission
        self._all: set[LiveCall] = set()
        self._calls: dict[tuple[str, str, str], LiveCall] = {}
        self._ended_by: GymCaptureError | None = None

    def join(
        self,
        call_id: str,
        begin: Callable[[], Awaitable[CallInFlight]],
        *,
        asked: tuple[str, str, str] | None,
        is_repetition: bool,
    ) -> LiveCall:
        """The call that a request asks for, joined: one under way that it repeats, or else a new one.

        `asked`: rollout id, API and body digest; None: a request without a rollout, which shares nothing.
        Raises `EngineOverloadedError` if a new one would be one too many, or what `end` was told.
        """
        under_way = None if asked is None else self._calls.get(asked)
        if under_way is not None and not under_way.is_live:
            under_way = None
        if under_way is not None and is_repetition and not under_way.has_twin:
            live = under_way
        else:
            if self._ended_by is not None:
                raise self._ended_by
            live = LiveCall(call_id, begin, interval_s=self._interval_s, place=self._admission.ask())
            self._all.add(live)
            if asked is not None:
                if under_way is not None:
                    under_way.has_twin = live.has_twin = True
                self._calls[asked] = live
            live.running.add_done_callback(partial(self._forget, asked, live))
        live.join()
        return live

    async def end(self, error: GymCaptureError) -> int:
        """Ends what is still being generated, and takes nothing new. Returns how many calls were ended, once they are
        on record.
        """
        self._ended_by = error
        return sum(await asyncio.gather(*(live.end(error) for live in self._all)))

    def _forget(self, asked: tuple[str, str, str] | None, live: LiveCall, _: object) -> None:
        self._all.discard(live)
        if asked is not None and self._calls.get(asked) is live:
            del self._calls[asked]
