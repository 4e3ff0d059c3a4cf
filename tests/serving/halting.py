"""A register that halts at a tool call, until it may go on: the job is killed there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gym_capture.rollouts.environment import Register


class Halting(Register):
    """At the tool call `halts_at` of a rollout, from 1, says so by a file in `folder` and stays, unless there is a file
    `go` there."""

    def __init__(self, folder: str, halts_at: int) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._left = halts_at

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        self._left -= 1
        if self._left == 0 and not (self._folder / "go").exists():
            (self._folder / f"halted-{id(self)}").touch()
            await asyncio.Event().wait()
        return await super().call_tool(name, arguments)
