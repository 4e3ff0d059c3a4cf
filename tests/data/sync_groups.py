"""`build_groups` for tests that have no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from gym_capture.capture.records import Snapshot
from gym_capture.data import groups
from gym_capture.data.groups import RolloutSummary
from gym_capture.data.requests import Request


def build_groups(
    asked: Iterable[Sequence[Request]], freeze: Callable[[str], Snapshot], **options: Any
) -> list[tuple[tuple[RolloutSummary, ...], pa.Table]]:
    """All that comes out, with a source that answers at once."""

    async def frozen(rollout_id: str) -> Snapshot:
        return freeze(rollout_id)

    async def gathered() -> list[tuple[tuple[RolloutSummary, ...], pa.Table]]:
        return [some async for some in groups.build_groups(asked, frozen, **options)]

    return asyncio.run(gathered())
