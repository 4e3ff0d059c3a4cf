"""Groups of rollouts that nobody dispatches, built as they become complete on a graph that runs.

Invariant: a group is given once, when at least `group_size` rollouts are registered in it and every one of them was
completed, and never before. One that is registered later in a group that was given is in no group that is given, and
is told of once.

Flow: the standings of the source, which `POST /rollouts` and `POST /rollouts/{id}/complete` made -> groups that are
complete and not settled -> `BuildThread` -> `recorded_groups`; and again after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Set
from typing import TypeVar

from gym_capture.capture.outcomes import Standing
from gym_capture.data.group_stream import BuildThread, BuiltGroup, answered
from gym_capture.data.parts import RETRY_AFTER_S, WorkerSource
from gym_capture.data.requests import Request, groups_recorded
from gym_capture.errors import ConfigError, StoreUnavailableError
from gym_capture.stores.base import standings_of

_T = TypeVar("_T")


async def recorded_groups(
    thread: BuildThread,
    group_size: int,
    *,
    settled: Set[str] = frozenset(),
    on_settled: Callable[[str], None] = lambda rollout_id: None,
    on_late: Callable[[str], None] = lambda rollout_id: None,
    follow: bool = True,
    poll_s: float = 1.0,
) -> AsyncGenerator[BuiltGroup]:
    """The groups on record that are complete, but for those of the ids `settled`: what was completed of these is told
    to `on_settled`. What is registered in a group after it was given is told to `on_late`. With `follow` it asks again
    after `poll_s` and has no end.

    Raises what opening the source raises, and `StreamLostError` once it is gone for longer than a restart takes.
    """
    if group_size < 1:
        raise ConfigError(f"group_size must be at least 1: got {group_size}")
    given: dict[str, set[str]] = {}
    await thread.run(WorkerSource.opened)  # one that was never there is said in its own words
    while True:
        standings = await asked(thread, lambda source: source.run(standings_of(source.opened())))
        for each in standings:
            if each.registration is not None and each.outcome is not None and each.registration.group_id in settled:
                on_settled(each.rollout_id)
            elif each.registration is not None and each.rollout_id not in (
                known := given.get(each.registration.group_id, {each.rollout_id})
            ):
                known.add(each.rollout_id)
                on_late(each.rollout_id)
        for group in _complete(standings, group_size):
            group_id = group[0].group_id
            if group_id not in settled and group_id not in given:
                given[group_id] = {request.rollout_id for request in group}
                yield await thread.build(group)
        if not follow:
            return
        await asyncio.sleep(poll_s)


async def asked(thread: BuildThread, question: Callable[[WorkerSource], _T]) -> _T:
    """The source's answer, over a restart. Raises `StreamLostError` if there is none."""

    def ask(source: WorkerSource) -> _T:
        for wait_s in RETRY_AFTER_S:
            try:
                return question(source)
            except StoreUnavailableError:
                time.sleep(wait_s)
        return question(source)

    return await answered(thread.run(ask))


def _complete(standings: Iterable[Standing], group_size: int) -> list[tuple[Request, ...]]:
    by_group: dict[str, list[Standing]] = {}
    for each in standings:
        if each.registration is not None:
            by_group.setdefault(each.registration.group_id, []).append(each)
    whole = [
        standing
        for group in by_group.values()
        if len(group) >= group_size and all(each.outcome is not None for each in group)
        for standing in group
    ]
    return groups_recorded(whole)
