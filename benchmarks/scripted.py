"""The engine of `benchmarks.scale`: replies cost nothing, so that what is measured is everything around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gym_capture.engines.base import Engine, Generation
from gym_capture.engines.hf_template import HfChatTemplate
from gym_capture.engines.scripted import EngineCall, Script, ScriptedEngine, Step

IMPORT_PATH: Final = "benchmarks.scripted:start"
GENERATED: Final = 64
"""Ids of a reply: as many as its text has letters."""
_FIRST: Final = 1_000


def _reply(call: EngineCall) -> Script:
    """Says which turn it is, in one id a letter."""
    turn = len(call.request.conversation.items)
    text = f"{turn} ".ljust(GENERATED - 1, "x")
    return Script(steps=[Step(token_ids=[_FIRST + ord(letter) for letter in text] + [2], text=text)])


class _Forgetful(ScriptedEngine):
    """Does not keep what was asked of it: a benchmark asks a lot."""

    def generate(self, **asked: Any) -> Generation:
        generation = super().generate(**asked)
        self.calls.clear()
        return generation


def start(
    *,
    model: str,
    name: str,
    tool_parser: str | None,
    reasoning_parser: str | None,
    engine_args: Mapping[str, Any],
) -> Engine:
    """Takes what the graph gives every engine."""
    return _Forgetful(HfChatTemplate.from_model_dir(Path(model)), _reply, name=name, max_model_len=32_768)
