"""How a build gets to its records: each worker opens a `TokenSource` of its own.

Invariant: what a worker is given is a value - an import path and arguments - so it opens the same source in this
process, in another one and on another machine.

Flow: `SourceSpec(import_path, kwargs)` -> `open()` in the worker -> `freeze` of each of its rollouts -> `close()`.

Sources that come along: `data.directory:NemoGymDirectory` (files that NeMo Gym wrote), `data.logs:Logs` (logs, in one
process), `data.log_source:LogClient` (logs, for many workers on Ray) and `serving.state:connect` (the actors of a
running graph). One of your own is whatever is a `SourceFactory`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from gym_capture.capture.operations import Drop
from gym_capture.capture.outcomes import Standing
from gym_capture.capture.protocols import RecordStore, TokenSource
from gym_capture.errors import ConfigError, StaleSnapshotError
from gym_capture.imports import load
from gym_capture.stores.base import standings_of

__all__ = ["AheadSource", "SourceFactory", "SourceSpec"]


class AheadSource(ABC):
    """A source that can fetch several rollouts in one go. An ability: sources have it that name this as a base."""

    @abstractmethod
    def ahead(self, rollout_ids: Sequence[str]) -> None:
        """What `freeze` will be asked for next, each once and in this order. It may be asked for others as well."""


class SourceFactory(Protocol):
    """Opens a `TokenSource`: a class, a function or a coroutine function.

    A build calls only `freeze` and `close` of what it opens; to retire what was consumed takes a `RecordStore`. Raises
    `ConfigError` or `OSError` for arguments that lead nowhere, `StoreUnavailableError` for a source that is down.
    """

    def __call__(self, **kwargs: Any) -> TokenSource | Awaitable[TokenSource]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """How each worker opens its `TokenSource`: the `SourceFactory` that `import_path` names, called with `kwargs`."""

    import_path: str
    """`package.module:factory`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    async def open(self) -> TokenSource:
        """Raises `ConfigError` if there is nothing under the import path, or it cannot be opened."""
        factory: SourceFactory = load(self.import_path)
        try:
            opened = factory(**self.kwargs)
            return await opened if inspect.isawaitable(opened) else opened
        except OSError as error:
            raise ConfigError(f"the source {self.import_path} cannot be opened: {error}") from None


async def recorded(source: SourceSpec) -> Sequence[Standing]:
    """The standings of the live rollouts of a source. Raises what opening it raises."""
    opened = await source.open()
    try:
        return await standings_of(opened)
    finally:
        await opened.close()


async def retire(source: SourceSpec, consumed: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Drops snapshots that a build consumed: by rollout id, `snapshot_id` and `version`.

    `source` opens a `RecordStore`. Returns the rollouts that have changed since, which are kept.
    """
    opened = await source.open()
    try:
        return await retire_from(opened, consumed)
    finally:
        await opened.close()


async def retire_from(opened: TokenSource, consumed: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """As `retire`, of a source that is open."""
    store = cast(RecordStore, opened)  # files that are only read have no snapshots to retire
    changed: list[str] = []
    for rollout_id, (snapshot_id, version) in consumed.items():
        try:
            await store.write(Drop(rollout_id, snapshot_id, version))
        except StaleSnapshotError:
            changed.append(rollout_id)
    return tuple(changed)
