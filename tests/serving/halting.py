"""The tool loop, halting before a call until it may go on: its job is killed there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai

from gym_capture.rollouts.harnesses.tool_loop import ToolLoop


class HaltingLoop(ToolLoop):
    """Before its call `halts_before`, from 1, leaves a file `halted-...` in `folder` and stays, unless there is a file
    `go`."""

    def __init__(self, client: openai.AsyncOpenAI, folder: Path, halts_before: int) -> None:
        super().__init__(client)
        self._folder = folder
        self._halts_before = halts_before

    async def _complete(self, client: openai.AsyncOpenAI, messages: list[dict[str, Any]], *further: Any) -> Any:
        call = 1 + sum(message["role"] == "assistant" for message in messages)
        if call == self._halts_before and not (self._folder / "go").exists():
            (self._folder / f"halted-{uuid4().hex}").touch()
            await asyncio.Event().wait()
        return await super()._complete(client, messages, *further)


def halting_loop(*, folder: str, halts_before: int) -> HaltingLoop:
    client = openai.AsyncOpenAI(base_url="http://localhost", api_key="unused")
    return HaltingLoop(client, Path(folder), halts_before)
