"""The capture of one call: its record goes to the sink of the call's rollout, or there is none to make.

Invariant: capturing never fails a call that has generated, unless its attempt is over: dropped, cleared or closed. That
one's agent is refused, so that it does not go on. What else cannot be recorded marks its rollout incomplete; if even
that cannot be written, the intent stays open in the store, which makes the snapshot incomplete by itself.

Flow: `CallService` begins a call, and gives what is in flight a `Tracked` - or an `Untracked`, if the call belongs to
no rollout or nothing is captured -> `record` or `abandon`, once -> `settle`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gym_capture.capture.records import TokenEntry
from gym_capture.capture.sinks import TokenSink
from gym_capture.errors import RecordError, RetiredRolloutError, StoreError
from gym_capture.lineage.fingerprint import Fingerprint
from gym_capture.reasons import CaptureMark, join_reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tracked:
    """A call of a rollout: its sink, and what it carries besides its request."""

    sink: TokenSink
    call_id: str
    fingerprint: Fingerprint
    may_be_retry: bool
    rules: tuple[str, ...]
    """Names of the rules that fired on the request."""

    @property
    def rollout_id(self) -> str:
        return self.sink.rollout_id

    async def record(self, make: Callable[[Tracked], TokenEntry]) -> None:
        """Puts the record that `make` gives. Raises `RetiredRolloutError` if the attempt is over."""
        try:
            await self.sink.put(make(self))
        except RetiredRolloutError:
            raise
        except (RecordError, StoreError) as error:
            # Best effort, by design: the reply is served, the rollout is masked.
            logger.error("capture failed: %s (rollout %s, call %s)", error.message, self.rollout_id, self.call_id)
            try:
                await self.sink.mark_incomplete(join_reason(CaptureMark.CAPTURE_FAILED, self.call_id))
            except StoreError as second:
                logger.error("could not mark the rollout incomplete: %s", second)

    async def abandon(self) -> None:
        """Closes the intent without a record."""
        await abandon(self.sink, self.call_id)

    async def settle(self, *, delivered: bool) -> None:
        """Records whether the client got the whole reply, where that decides which of several replies counts."""
        if delivered and not self.may_be_retry:
            return
        try:
            await self.sink.mark_delivery(self.call_id, delivered=delivered)
        except StoreError as error:
            # Silence proves nothing: if the request was repeated, its rollout is masked.
            logger.warning("could not record whether a reply was delivered: %s", error)


@dataclass(frozen=True, slots=True)
class Untracked:
    """A call of which nothing is kept."""

    async def record(self, make: Callable[[Tracked], TokenEntry]) -> None:
        pass

    async def abandon(self) -> None:
        pass

    async def settle(self, *, delivered: bool) -> None:
        pass


Capture: TypeAlias = Tracked | Untracked


async def abandon(sink: TokenSink, call_id: str) -> None:
    """Closes the intent of a call without a record; if even that fails, the open intent masks the rollout."""
    try:
        await sink.abandon(call_id)
    except StoreError as error:
        logger.warning("could not close the intent of a call that ended without a record: %s", error)
