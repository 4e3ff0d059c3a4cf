"""A graph that runs, through its state actors.

Invariant: nothing of the graph is changed. What a look costs the actors is one question for all rollouts, however many
are looked at; a rollout is frozen only when somebody opens it.

Flow: the library's thread asks -> the question runs on the event loop of the process that knows the actors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.errors import StoreUnavailableError
from gym_capture.inspector.from_records import see_records
from gym_capture.inspector.log_source import masks_of, state_of
from gym_capture.inspector.seen import SeenRollout
from gym_capture.inspector.source import NOTHING_KNOWN, Basics, Look, Options, Shows, Source
from gym_capture.rollout_counts import RolloutCounts

_T = TypeVar("_T")

_ANSWER_WITHIN_S: Final = 60.0
_LOOK_EVERY_S: Final = 1.0


class GraphState(Protocol):
    """The part of the state actors that the inspector needs."""

    async def standings(self) -> Sequence[Standing]: ...
    async def counts(self, rollout_ids: Sequence[str]) -> Sequence[RolloutCounts]: ...
    async def freeze(self, rollout_id: str) -> Snapshot: ...


class StateSource(Source):
    """The live rollouts of a graph."""

    kind = "graph"
    is_read_whole = False
    is_live = True

    def __init__(
        self,
        state: GraphState,
        loop: asyncio.AbstractEventLoop,
        *,
        title: str,
        options: Options = NOTHING_KNOWN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`loop`: the one that `state` lives on."""
        self.title = title
        self.shows = Shows(records=True)
        self._state = state
        self._loop = loop
        self._options = options
        self._clock = clock
        self._known: dict[str, tuple[Standing, RolloutCounts]] = {}
        self._looked_at: float | None = None

    def look(self) -> Look:
        now = self._clock()
        if self._looked_at is not None and now - self._looked_at < _LOOK_EVERY_S:
            return Look()
        self._looked_at = now
        found = {each.rollout_id: (each, counts) for each, counts in self._ask(self._all())}
        changed = [_basics(*each) for name, each in found.items() if self._known.get(name) != each]
        gone = list(self._known.keys() - found.keys())
        self._known = found
        return Look(changed=changed, gone=gone)

    async def _all(self) -> list[tuple[Standing, RolloutCounts]]:
        standings = await self._state.standings()
        counts = await self._state.counts([each.rollout_id for each in standings]) if standings else ()
        return list(zip(standings, counts, strict=True))

    def read(self, rollout_id: str) -> SeenRollout | None:
        snapshot = self._ask(self._state.freeze(rollout_id))
        if snapshot.version == 0:
            return None
        registration = snapshot.registration
        return see_records(
            snapshot,
            extra_mask_reasons=masks_of(snapshot, may_grow=True),
            special=self._options.special,
            input_json=None if registration is None else registration.task,
        )

    def _ask(self, question: Coroutine[Any, Any, _T]) -> _T:
        try:
            return asyncio.run_coroutine_threadsafe(question, self._loop).result(_ANSWER_WITHIN_S)
        except TimeoutError:
            raise StoreUnavailableError("the graph's state does not answer") from None


def _basics(standing: Standing, counts: RolloutCounts) -> Basics:
    said, outcome = standing.registration, standing.outcome
    return Basics(
        rollout_id=standing.rollout_id,
        group=None if said is None else said.group_id,
        sample=None if said is None else said.sample,
        state=state_of(outcome, may_grow=True),
        reward=None if outcome is None else outcome.reward,
        calls=counts.calls,
        generated_tokens=counts.generated_tokens,
        eligible_links=counts.eligible_links,
        exact_links=counts.contiguous_links,
        put_ms=counts.put_ms,
    )
