"""The replicas, as the coordinator of the weight plane holds them.

Invariant: an order is answered once - by the replica's report, by its death, or by its time being up - and a replica
that loses the message with its order is given the same order again, under the same number. One that does not answer is
a member no more: should it live, it joins again, and is told what to load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from gym_capture.errors import EngineDeadError, GymCaptureError, WeightsFailedError, WeightsRefusedError
from gym_capture.serving.weights_messages import Leave, Nothing, Numbered, Order, Report, Seat

logger = logging.getLogger(__name__)

Gone: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when a replica has died."""

_ASK_AGAIN_S: Final = 20.0


class LostMemberError(WeightsFailedError):
    """A replica died, or does not answer. Whoever takes its place has the current version."""


class Member:
    """One replica that serves."""

    def __init__(self, seat: Seat, gone: Gone, *, is_current: bool) -> None:
        self.seat = seat
        self.is_current = is_current
        self.dies = asyncio.ensure_future(gone())
        """Done when it has died."""
        self._number = 0
        self._asked: Numbered | None = None
        self._has_order = asyncio.Event()
        self._answer: asyncio.Future[Report] = asyncio.get_running_loop().create_future()

    @property
    def replica(self) -> str:
        return self.seat.replica

    async def ask(self, order: Order, *, within_s: float) -> object:
        """Has the replica obey. Raises what it reports, or `LostMemberError`. One at a time."""
        self._answer = asyncio.get_running_loop().create_future()
        self.give(order)
        awaited: set[asyncio.Future[Any]] = {self._answer, self.dies}
        done, _ = await asyncio.wait(awaited, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if self._answer in done:
            report = self._answer.result()
            if report.error is not None:
                raise report.error
            return report.value
        if done:
            raise LostMemberError("it died", retryable=True)
        raise LostMemberError(f"it has not answered for {within_s:g} s", retryable=True)

    def give(self, order: Order) -> None:
        self._number += 1
        self._asked = Numbered(self._number, order)
        self._has_order.set()

    async def next_order(self, report: Report | None) -> Numbered:
        """Takes the report in, and waits for an order."""
        if report is not None and self._asked is not None and report.number == self._asked.number:
            self._asked = None
            self._has_order.clear()
            if not self._answer.done():
                self._answer.set_result(report)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_AGAIN_S):
                await self._has_order.wait()
        return self._asked or Numbered(0, Nothing())


class Answer(NamedTuple):
    """What a replica answered to an order."""

    member: Member
    value: object
    error: GymCaptureError | None


class Members:
    """All replicas that serve, in the order in which they joined."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_name.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, replica: str) -> Member | None:
        return self._by_name.get(replica)

    def add(self, member: Member) -> None:
        """It goes by itself when it dies."""
        self.remove(member.replica)
        self._by_name[member.replica] = member
        member.dies.add_done_callback(lambda _: self._forget(member))

    def remove(self, replica: str) -> None:
        member = self._by_name.pop(replica, None)
        if member is not None:
            member.dies.cancel()

    def _forget(self, member: Member) -> None:
        if self._by_name.get(member.replica) is member:
            del self._by_name[member.replica]

    def dismiss(self, member: Member, why: str, *, must_end: bool = True) -> None:
        """It serves no more."""
        logger.error("replica %s serves no more: %s", member.replica, why)
        member.give(Leave(why, must_end))
        self.remove(member.replica)

    async def ask(self, work: Iterable[tuple[Member, Order]], *, within_s: float) -> list[Answer]:
        """All at the same time. Whatever a replica raises is its answer."""

        async def one(member: Member, order: Order) -> Answer:
            try:
                return Answer(member, await member.ask(order, within_s=within_s), None)
            except LostMemberError as error:
                self.remove(member.replica)
                return Answer(member, None, error)
            except GymCaptureError as error:
                return Answer(member, None, error)

        return list(await asyncio.gather(*(one(member, order) for member, order in work)))


def failed(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.error is not None]


def named(failures: Sequence[Answer], what: str) -> str:
    """Which replica failed, and why."""
    first = failures[0]
    assert first.error is not None
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"replica {first.member.replica} {what}: {first.error.message}{more}"


def are_lost(failures: Sequence[Answer]) -> bool:
    """Whether nothing was wrong but that replicas, or engines, died or do not answer: the next try may do better."""
    return all(isinstance(answer.error, LostMemberError | EngineDeadError) for answer in failures)


def demand(answers: Sequence[Answer], what: str) -> None:
    """Raises if any has failed; what they refuse is refused."""
    failures = failed(answers)
    if not failures:
        return
    if all(isinstance(answer.error, WeightsRefusedError) for answer in failures):
        raise WeightsRefusedError(named(failures, what))
    raise WeightsFailedError(named(failures, what), retryable=are_lost(failures))
