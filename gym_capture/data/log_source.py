"""The logs of a graph that does not run, as a source for many workers at once.

Invariant: a log has one owner. One actor opens each log directory (`one_log`) and reads records for everybody; the
actors end with `opened_logs`. A worker is never sent more than one answer of each actor at a time, and no list of all
rollouts: what a part costs does not depend on how many there are.

Flow: `opened_logs(directory)` finds the log directories and starts their actors -> the `SourceSpec` it gives opens a
`LogClient` in each worker -> each actor answers with those rollouts of a part that its log knows, several at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gym_capture.capture.operations import Clear, Drop, Operation
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.records import Snapshot
from gym_capture.capture.rollout_state import retired_error
from gym_capture.capture.snapshot_codec import decode_snapshot
from gym_capture.cluster.replies import answer, cause_of
from gym_capture.data.log_directories import log_directories
from gym_capture.data.one_log import OneLog
from gym_capture.data.sources import AheadSource, SourceSpec
from gym_capture.errors import GymCaptureError, StoreUnavailableError
from gym_capture.stores.base import ListedStore

_ANSWER_BYTES: Final = 4 * 2**20
"""Of rollouts in one answer of an actor, about: it ends with the first that goes beyond."""


@contextmanager
def opened_logs(directory: Path) -> Iterator[SourceSpec]:
    """The source of the log in `directory`, or of all logs in directories below it, one level down.

    Raises `ConfigError` if there is none or one may not be read, `StoreUnavailableError` if one of them is in use, e.g.
    by a running graph.
    """
    found = log_directories(directory)
    # On this node: the directories are paths of this machine.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class = ray.remote(_LogOwner).options(num_cpus=0, scheduling_strategy=here)
    owners = [actor_class.remote(str(path)) for path in found]
    try:
        for owner in owners:
            answer(owner.ready.remote())
        yield SourceSpec(import_path="gym_capture.data.log_source:LogClient.open", kwargs={"owners": owners})
    finally:
        for owner in owners:
            ray.kill(owner)


class LogClient(ListedStore, AheadSource):
    """A `RecordStore` over logs that other processes own."""

    def __init__(self, owners: Sequence[Any]) -> None:
        self._owners = owners
        self.ahead(())

    @classmethod
    async def open(cls, *, owners: Sequence[Any]) -> LogClient:
        """`owners`: the actors of `opened_logs`."""
        return cls(owners)

    def ahead(self, rollout_ids: Sequence[str]) -> None:
        """See `AheadSource`."""
        self._places = {rollout_id: place for place, rollout_id in enumerate(rollout_ids)}
        self._next = 0
        self._answers = [_Answers(owner, list(self._places)) for owner in self._owners]

    async def freeze(self, rollout_id: str) -> Snapshot:
        if self._places.get(rollout_id, -1) < self._next:  # nobody said that it would be asked for
            self.ahead([rollout_id])
        place = self._places[rollout_id]
        found = [await answers.to(place) for answers in self._answers]
        self._next = place + 1
        encoded = next((each for each in reversed(found) if each is not None), None)
        if encoded is None:
            return Snapshot(rollout_id=rollout_id, snapshot_id="", version=0, entries=())
        if isinstance(encoded, GymCaptureError):
            raise encoded
        return decode_snapshot(encoded)

    async def write(self, operation: Operation) -> int:
        """Of a rollout that no log knows there is nothing to drop or clear, and nothing else can be said of it."""
        for owner in reversed(self._owners):
            if await _awaited(owner.knows.remote(operation.rollout_id)):
                return int(await _awaited(owner.write.remote(operation)))
        if isinstance(operation, Drop | Clear):
            return 0
        raise retired_error(operation.rollout_id, operation.call_id)

    async def rollout_ids(self) -> Sequence[str]:
        return sorted({each for owner in self._owners for each in await _awaited(owner.rollout_ids.remote())})

    async def standings(self) -> Sequence[Standing]:
        answers = [await _awaited(owner.standings.remote()) for owner in self._owners]
        found = {each.rollout_id: each for answer in answers for each in answer}
        return [found[rollout_id] for rollout_id in sorted(found)]

    async def close(self) -> None:
        """The actors stay: they belong to `opened_logs`."""


class _Answers:
    """What one owner has of the rollouts that will be asked for, as far as it was asked."""

    def __init__(self, owner: Any, rollout_ids: Sequence[str]) -> None:
        self._owner = owner
        self._rollout_ids = rollout_ids
        self._done = 0
        self._found: Mapping[str, bytes | GymCaptureError] = {}

    async def to(self, place: int) -> bytes | GymCaptureError | None:
        """Of the rollout at a place; None: this log knows nothing of it."""
        while self._done <= place:
            looked_at, self._found = await _awaited(self._owner.some.remote(self._rollout_ids[self._done :]))
            self._done += looked_at
        return self._found.get(self._rollout_ids[place])


class _LogOwner:
    """The actor that has a log open."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._log: OneLog | None = None

    async def ready(self) -> None:
        """The first that is asked: opens the log. Not `__init__`, of whose errors Ray makes its own."""
        self._log = OneLog(self._directory)

    async def rollout_ids(self) -> Sequence[str]:
        return await self._opened.rollout_ids()

    async def knows(self, rollout_id: str) -> bool:
        return await self._opened.knows(rollout_id)

    async def standings(self) -> Sequence[Standing]:
        return await self._opened.standings()

    async def some(self, rollout_ids: Sequence[str]) -> tuple[int, Mapping[str, bytes | GymCaptureError]]:
        """How many of the rollouts were looked at, from the first, and those of them that this log knows.

        Raises `StoreUnavailableError`; what is wrong with one rollout stands in its place.
        """
        found: dict[str, bytes | GymCaptureError] = {}
        size = looked_at = 0
        for rollout_id in rollout_ids:
            looked_at += 1
            if await self._opened.knows(rollout_id):
                try:
                    encoded = found[rollout_id] = await self._opened.freeze_encoded(rollout_id)
                    size += len(encoded)
                except StoreUnavailableError:
                    raise
                except GymCaptureError as error:
                    found[rollout_id] = error
            if size >= _ANSWER_BYTES:
                break
        return looked_at, found

    async def write(self, operation: Operation) -> int:
        return await self._opened.write(operation)

    @property
    def _opened(self) -> OneLog:
        assert self._log is not None, "`opened_logs` waits for `ready` before anybody else can ask"
        return self._log


async def _awaited(reply: Any) -> Any:
    try:
        return await reply
    except RayTaskError as error:
        raise cause_of(error) from None
    except RayActorError as error:
        raise StoreUnavailableError("the actor that owns the log is gone") from error
