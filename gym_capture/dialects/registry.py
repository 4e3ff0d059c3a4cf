"""Every dialect that the graph speaks.

The gateway has the routes of these, and `/openapi.json` their descriptions: a dialect is a class and its place here.
"""

from __future__ import annotations

from typing import Final

from gym_capture.dialects.anthropic import MessagesDialect
from gym_capture.dialects.base import Dialect
from gym_capture.dialects.chat import ChatDialect
from gym_capture.dialects.completions import CompletionsDialect
from gym_capture.dialects.responses import ResponsesDialect

DIALECTS: Final[tuple[Dialect, ...]] = (ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect())
"""The first is the one in which errors are told where no route says which."""
